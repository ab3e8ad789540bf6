"""The index of the site's search, which Pagefind makes from the finished pages.

A result leads to a section: to a heading of a chapter, to a change of a diff, or to a
function of a file. All is on the site itself, and nothing is loaded before it is used.
"""

import ast
import asyncio
import re
from html import escape
from pathlib import Path

from bs4 import BeautifulSoup, NavigableString
from pagefind.index import PagefindIndex

from ladder.diffs import hunks, scopes
from ladder.rungs import read_lines

CUT = "\u2063 "  # search.js takes these out of what it shows

# Of a switch, one output: the right one stands elsewhere on the page, too.
WASTE = ".headerlink, .beside, img, .flip > :not(.outputs), .flip .right"


def words(text):
    """The text with its code cut into words: `dist.barrier()` is two for the index."""
    return re.sub(r"(?<=\w)[.(\[=/]+(?=\w)", lambda found: found[0] + CUT, text)


def page(kind, title, body):
    return (
        f'<!doctype html><html lang="en"><title>{escape(title)}</title><body>'
        f'<main data-pagefind-body data-pagefind-meta="kind:{kind}" '
        f'data-pagefind-filter="kind:{kind}">{body}</main>'
    )


def document(kind, title, sections, weight=0.5):
    """A page for the index; sections: [(anchor, heading, text)].

    Its words weigh less than those of a chapter.
    """
    body = "".join(
        f'<h2 id="{anchor}">{escape(heading)}</h2><pre>{escape(words(text))}</pre>'
        for anchor, heading, text in sections
    )
    heading = f'<h1 data-pagefind-weight="{7 * weight}">{escape(title)}</h1>'
    body = f'{heading}<div data-pagefind-weight="{weight}">{body}</div>'
    return page(kind, title, body)


def chapter(path):
    """The page of a chapter: Sphinx gives the anchors to sections, not to headings."""
    soup = BeautifulSoup(Path(path).read_text(), "html.parser")
    article = soup.find("article")
    for waste in article.select(WASTE):
        waste.decompose()
    for section in article.select("section[id]"):
        heading = section.find(["h1", "h2", "h3", "h4"], recursive=False)
        if heading:
            heading["id"] = section["id"]
    title = article.find("h1").get_text()
    for text in article.find_all(string=True):
        if type(text) is NavigableString:  # and no comment
            text.replace_with(words(text))
    return page("Page", title, article)


def pair(old, new, whole):
    """The page of two files side by side, with its changes or by its name alone."""
    changes = [
        (
            f"hunk-{hunk.number}",
            f"Change {hunk.number}" + (f" in {hunk.scope}" if hunk.scope else ""),
            "\n".join(hunk.lines),
        )
        for hunk in hunks(old, new)
    ]
    title = f"{old} and {new} side by side"
    return document("Diff", title, changes if whole else [], 0.5 if whole else 0.1)


def file(name):
    """The page of a file, with a section for each of its functions."""
    lines, kind = read_lines(name), "Test" if name.startswith("tests/") else "File"
    if not name.endswith(".py"):
        return document(kind, name, [("L1", name, "\n".join(lines))])
    about = ast.get_docstring(ast.parse("\n".join(lines))) or name
    found = scopes(name)
    starts = {first: label for first, _, label in found}
    cuts = sorted({1, *starts, len(lines) + 1})
    sections = []
    for first, stop in zip(cuts, cuts[1:], strict=False):
        within = [x for a, b, x in found if a <= first <= b]
        heading = ".".join(within) or about.split("\n")[0]
        sections.append((f"L{first}", heading, "\n".join(lines[first - 1 : stop - 1])))
    return document(kind, name, sections)


def write_index(folder, documents):
    """documents: {address: HTML}. The files go to the folder `pagefind` in `folder`."""

    async def work():
        config = {
            "keep_index_url": True,
            "include_characters": "_",
            "output_path": str(Path(folder, "pagefind")),  # written to at the end
        }
        async with PagefindIndex(config=config) as index:
            for address, text in documents.items():
                await index.add_html_file(content=text, url=f"/{address}")

    asyncio.run(work())
