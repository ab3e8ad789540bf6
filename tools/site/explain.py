"""The chapters' diffs and explanations, as HTML.

A diff of a chapter gets the colours of its language, and its changed words are marked.
On the pages of two scripts side by side, an explanation is what stands under a heading
of a chapter, without the heading and its diff. A recorded output with a fault in the
script becomes a switch: the reader flips between it and the right output, which another
block of the chapter has for the same command.
"""

import functools
import re
from html import escape
from itertools import groupby, pairwise
from urllib.parse import urljoin, urlsplit

from docutils import nodes

from tools.diffs import hunks
from tools.scripts import ROOT, read_lines
from tools.site.commands import CUT, same
from tools.site.pages import parse, right_outputs
from tools.site.side_by_side import in_head, marks_of, words_html, words_of

TAGS = {"-": "del", "+": "ins", "@": "b"}  # of the lines of a diff


def shown(app, docname, page, block):
    """What stands between a block's markers on the site: its diff, or a switch."""
    rights = right_outputs(page)
    right_block = rights.get(block)
    explains = block.anchor in [other.anchor for other in page.blocks if other.hunks]
    # A block that is the right output of another switch stays as it is.
    if explains and right_block and block not in rights.values():
        right = right_block.console
        wrong = block.console
        context = {
            "id": f"flip-{docname}-{block.line}",
            "rows": losses_by_epoch(right, wrong),
            "status": block.status,
            "faults": block.faults,
            "scene": right_block.faults,
            "outputs": [marked(right, wrong, False), marked(wrong, right, True)],
        }
        return raw(app.builder.templates.render("flip.html", context))
    lines = block.lines
    if "```diff" in lines:
        start = lines.index("```diff")
        end = lines.index("```", start)
        diff = lines[start + 1 : end]
        if block.kind == "diff":
            html = diff_html(block.old, block.new, diff)
        else:  # the patch of a run; the text above it names the file
            html = diff_html(block.script, block.script, diff[2:])
            html = f'<div class="patch">{html}</div>'
        lines[start : end + 1] = raw(html)
    elif block.faults:  # the words say what changes; here it is seen
        pairs = [zip("-+", fault, strict=True) for fault in block.faults]
        diff = [sign + text for pair in pairs for sign, text in pair if text]
        html = diff_html(block.script, block.script, diff)
        html = f'<div class="patch">{html}</div>'
        lines[:1] = [f"With {block.script} changed:", "", *raw(html)]
    return lines


def raw(html):
    """A fence that Sphinx shows as this HTML."""
    return ["``````{raw} html", html, "``````"]


@functools.cache
def words_by_text(name):
    """{a line of a file: its words}; {} of one that only stands on a page"""
    if not (ROOT / name).exists():
        return {}
    return dict(zip(read_lines(name), words_of(name), strict=True))


def diff_html(old, new, lines):
    """A diff with the colours of its language, and its changed words marked."""
    text = "\n".join([*lines, ""])
    # Blank lines at the edges of a change say nothing.
    lines = re.sub(r"(?m)^(@@.*\n)(\+\n)+|^(\+\n)+(?=@@|\Z)", r"\1", text).splitlines()
    runs = []
    for sign, run in groupby(lines, lambda line: line[:1]):
        known = words_by_text(old if sign == "-" else new)
        codes = [line[1:] for line in run]
        runs.append((sign, [known.get(code, [("", f"{code}\n")]) for code in codes]))
    html = ""
    marks = {}  # {sign: {index of a line in its run: its changed words}}
    for (sign, run), (next_sign, next_run) in pairwise([*runs, ("", [])]):
        if sign == "-" and next_sign == "+":
            _, old_marks, new_marks = marks_of(run, next_run)
            marks = {"-": old_marks, "+": new_marks}
        elif sign != "+":
            marks = {}
        tag = TAGS.get(sign, "span")
        for index, words in enumerate(run):
            marked = marks.get(sign, {}).get(index, ())
            html += f"<{tag}>{sign}{words_html(words, marked)}</{tag}>"
    return f'<div class="highlight-diff highlight"><pre>{html}</pre></div>'


def losses_by_epoch(right, wrong):
    """[(epoch, held-out loss, that of the wrong output)], as far as both have it."""
    line = r"(?m)^epoch (\d+)/.* held-out loss (\S+)"
    # Of an epoch that is printed twice, the first line counts.
    of_right = dict(reversed(re.findall(line, right)))
    of_wrong = dict(reversed(re.findall(line, wrong)))
    epochs = sorted(of_right.keys() & of_wrong.keys())
    return [(epoch, of_right[epoch], of_wrong[epoch]) for epoch in epochs]


# A value that is marked where two outputs differ. The 3/5 of an epoch never is.
VALUE = r"(?<![/\d])\d+(\.\d+)?(?![/\d])|nan|inf|True|False"


def marked(text, other, is_wrong):
    """The HTML of an output, with marks at the values that the other's line has not.

    Of the wrong one, so are the lines that it adds. The right one is cut as that is.
    """
    lines, others = (escape(it, quote=False).splitlines() for it in (text, other))
    is_cut = CUT in others and CUT not in lines

    def line_html(line):
        kind = re.sub(VALUE, "#", line)
        words = [it.split() for it in others if re.sub(VALUE, "#", it) == kind]

        def word_html(word):
            is_there = any(same([word[0]], [it]) for it in sum(words, []))
            return word[0] if is_there else f"<mark>{word[0]}</mark>"

        if words:
            return re.sub(r"\S+", word_html, line)
        if line.startswith((CUT, "epoch ")):  # the other has left it out
            return line
        if is_wrong:
            return f"<mark>{line}</mark>"
        return CUT if is_cut else line

    return "\n".join(line for line, _ in groupby(map(line_html, lines)))


IMAGE = r'<img [^>]*src="(_images/(\w+)\.svg)"[^>]*>'


def size_of(name):
    """The size of a picture as attributes, so that no text jumps when it comes."""
    text = (ROOT / "docs/pictures" / name).read_text()
    return re.search(r'width="\d+" height="\d+"', text)[0]


def sized(html, up=""):
    """Each picture with its size, and for a phone its narrow form, if it has one.

    up: "../" for a page in a folder.
    """

    def tag_of(image):
        tag = image[0].replace(image[1], f"{up}{image[1]}")
        tag = tag.replace("<img ", f"<img {size_of(f'{image[2]}.svg')} ")
        name = f"{image[2]}_narrow.svg"
        if not (ROOT / "docs/pictures" / name).is_file():
            return tag
        place = f'media="screen and (max-width: 46em)" srcset="{up}_static/{name}"'
        return f"<picture><source {place} {size_of(name)}>{tag}</picture>"

    return re.sub(IMAGE, tag_of, html)


@functools.cache
def sections(app, page):
    """{anchor: the section of a chapter}"""
    doctree = app.env.get_and_resolve_doctree(page, app.builder)
    return {node.get("slug"): node for node in doctree.findall(nodes.section)}


@functools.cache
def why(app, page, anchor):
    """What a section of a chapter says, without its heading and its diff."""
    section = sections(app, page)[anchor]
    blocks = parse(f"docs/{page}.md").blocks
    (block,) = [it for it in blocks if it.hunks and it.anchor == anchor]
    html = ""
    for node in section.children:
        if isinstance(node, (nodes.title, nodes.section)):
            continue
        # The page of two scripts has the diff, and needs no link to itself.
        ours = "<!--|<p class=.beside|<div class=.highlight-diff"
        if not re.match(ours, node.astext()):
            html += html_of(app, page, node)
    what, without, rest = html.partition("<p><strong>Without it.</strong>")
    return {
        "id": f"why-{page}-{anchor}",
        "heading": section.next_node(nodes.title).astext(),
        "link": f"../{page}.html#{anchor}",
        "chapter": app.env.titles[page].astext(),
        "step": (block.old, block.new),
        "html": [part for part in (what, without + rest) if part],
        "flips": "<fieldset" in html,
    }


def html_of(app, page, node):
    """A node as it is shown on a page of another folder."""
    node = node.deepcopy()
    for link in node.findall(nodes.reference):
        uri = link.get("refuri") or f"#{link['refid']}"
        if not urlsplit(uri).scheme:
            link.attributes.pop("refid", None)
            link["refuri"] = "../" + urljoin(f"{page}.html", uri)
    fragment = app.builder.render_partial(node)["fragment"].strip()
    return sized(fragment, up="../")


def whys(app, old, new, places):
    """{hunk number: [what the chapters say of it]}. places: from `places_of`.

    Each text stands at its largest hunk below the imports; the others link to it.
    """

    def rank(hunk):
        return in_head(hunk, old, new), -len(hunk.lines)

    stands_at = {}
    found = {}
    for hunk in sorted(hunks(old, new), key=rank):
        found[hunk.number] = []
        for page, _, anchor in places[hunk.number]:
            at = stands_at.setdefault((page, anchor), hunk.number)
            where = {"at": at, "here": at == hunk.number}
            found[hunk.number].append(why(app, page, anchor) | where)
    return found
