"""The Sphinx extension that makes the site from the chapters and the scripts.

It leaves the Markdown as a code host shows it, and adds what only a site can have: the
sidebar, a page for every two rungs side by side, and a page for every file of the
repository that a chapter links to.
"""

import html
import sys
from pathlib import Path

from docutils import nodes
from sphinx import addnodes

from ladder import pages
from ladder.diffs import changed_lines, hunks
from ladder.rungs import EDGES, ROOT, RUNGS, InputError, ancestry
from website.explain import Explainer, once
from website.side_by_side import (
    explain,
    page_of,
    parts,
    plain_lines,
    slug,
    strip,
)


def check_pages(app):
    """A wrong marker ends the build with one line, and not with Sphinx's fifty."""
    try:
        pages.explanations()
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def read_all(app, env, docnames):
    """Every build reads every page: what they show depends on the scripts, too."""
    docnames[:] = sorted(env.found_docs)


def add_links(app, docname, source):
    """Below each diff and table, links to its pairs; on the first page, a menu."""
    lines = source[0].splitlines()
    page = pages.parse(f"docs/{docname}.md", lines)
    blocks = [block for block in page.blocks if block.kind in ("diff", "rungs")]
    app.env.metadata[docname]["pairs"] = [
        (block.old, block.new) for block in blocks if block.old
    ]
    for block in reversed(blocks):
        links = ", ".join(f'<a href="{url}">{text}</a>' for url, text in beside(block))
        text = f'<p class="beside">Side by side: {links}</p>'
        lines[block.end + 1 : block.end + 1] = ["", text, ""]
    if docname == app.config.root_doc:
        others = sorted(app.env.found_docs - {docname}, key=reading_order)
        lines += ["", "```{toctree}", ":hidden:", "", "self", *others, "```"]
    source[0] = "\n".join(lines) + "\n"


def beside(block):
    """[(address, text)] of what shows a block's diff, or the table's, side by side."""
    pairs = EDGES if block.kind == "rungs" else [(block.old, block.new)]
    links = [
        (f"{page_of(*pair)}.html", html.escape(" and ".join(pair))) for pair in pairs
    ]
    if block.kind == "rungs":
        return [*links, ("side_by_side/index.html", "any two")]
    ((url, _),), total = links, len(hunks(block.old, block.new))
    changes = [
        (f"{url}#hunk-{hunk.number}", f"change {hunk.number} of {total}")
        for hunk in block.hunks
    ]
    return changes or links  # without hunks, the block is the whole diff


def reading_order(docname):
    """The numbered chapters by their number, then the others by their name."""
    number = docname.split("_")[0]
    return (0, int(number), "") if number.isdigit() else (1, 0, docname)


def link_files(app, doctree):
    """A link to a file of the repository leads to a page of the site that shows it."""
    shown = app.env.metadata[app.env.docname]["files"] = []
    links = list(doctree.findall(addnodes.download_reference))
    links += doctree.findall(addnodes.pending_xref)
    for node in links:
        target = node["reftarget"]
        if isinstance(node, addnodes.pending_xref):
            if node["refdomain"] != "doc" or target in app.env.found_docs:
                continue
            target += ".md"  # MyST takes README.md for a page
        path = Path(app.srcdir, target).resolve()
        name = str(path.relative_to(ROOT))
        shown.append(name)
        link = nodes.reference(
            "", "", *node.children, refuri=f"{source_page(name)}.html"
        )
        node.replace_self(link)


def source_page(name):
    return f"source/{name}"


def make_pages(app):
    """The pages that are not made from Markdown."""
    yield "index", {"start": app.config.root_doc}, "redirect.html"
    explained = pages.explanations()
    rungs = sorted(RUNGS, key=ancestry)
    common = {
        "rungs": rungs,
        "edges": EDGES,
        "slug": slug,
        "page_of": page_of,
        "source": source_page,
    }
    pairs = [(old, new) for old in rungs for new in rungs if old != new]
    metadata = app.env.metadata.values()
    in_chapters = [pair for data in metadata for pair in data["pairs"]]
    pairs = list(dict.fromkeys([*pairs, *in_chapters]))
    sizes = {pair: len(changed_lines(*pair)) for pair in pairs}
    table = {"title": "Side by side", "sizes": sizes}
    yield "side_by_side/index", common | table, "table_of_pairs.html"
    explainer = Explainer(app)
    for old, new in pairs:
        places = explain(old, new, explained)
        whys = {n: [explainer.why(*x) for x in some] for n, some in places.items()}
        if (old, new) not in explained:
            whys = once(hunks(old, new), whys)
        context = common | {
            "title": f"{old} and {new} side by side",
            "old": old,
            "new": new,
            "size": sizes[old, new],
            "count": len(hunks(old, new)),
            "parts": parts(old, new, whys),
            "strip": strip(old, new),
            "explained": any(whys.values()),
        }
        yield page_of(old, new), context, "side_by_side.html"
    linked = {name for data in metadata for name in data["files"]}
    shown = linked.union(*pairs)
    for name in sorted(shown):
        context = common | {
            "title": name,
            "parent": RUNGS.get(name),
            "lines": "".join(plain_lines(name)),
        }
        yield source_page(name), context, "source.html"


def add_assets(app, pagename, templatename, context, doctree):
    if pagename.startswith(("side_by_side/", "source/")):
        app.add_css_file("side_by_side.css", priority=900)  # after site.css
        app.add_js_file("side_by_side.js", priority=900, loading_method="defer")


def setup(app):
    app.connect("builder-inited", check_pages)
    app.connect("env-before-read-docs", read_all)
    app.connect("source-read", add_links)
    # Before Sphinx copies the files that are linked to (500).
    app.connect("doctree-read", link_files, priority=400)
    app.connect("html-collect-pages", make_pages)
    app.connect("html-page-context", add_assets)
    return {"parallel_read_safe": True}
