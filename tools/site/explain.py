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
from tools.site.commands import CUT, VARIES, same
from tools.site.pages import parse, right_output
from tools.site.side_by_side import in_head, marks_of, token_lines, tokens_html

BELOW = {"siblings": True, "descend": False}


def dress(app, doctree):
    """In a chapter: diffs in colour, switches between outputs, quiet lists of tests."""
    docname = app.env.docname
    page = parse(f"docs/{docname}.md")
    for paragraph in doctree.findall(nodes.paragraph):
        paragraph["classes"] += ["tests"] * paragraph.astext().startswith("Tests: ")
    raws = {x.astext().strip(): x for x in doctree.findall(nodes.raw)}
    runs = [x for x in page.blocks if x.kind in ("diff", "run")]
    at = {x.line: raws[page.lines[x.line - 1]] for x in runs}
    fences = {x.line: output_of(x, at[x.line]) for x in runs}
    explaining = {x.anchor for x in page.blocks if x.hunks}
    rights = {x.line: right_output(page, x) for x in runs if x.faults}
    shown_as_right = [x.line for x in rights.values() if x]
    for block in runs:
        right, fence = rights.get(block.line), fences[block.line]
        if block.kind == "diff":
            html = diff_html(block.old, block.new, fence.astext().splitlines())
            fence.replace_self(nodes.raw("", html, format="html"))
        elif right and block.anchor in explaining and block.line not in shown_as_right:
            outputs = fences[right.line].astext(), fence.astext()
            shown = {"id": f"flip-{docname}-{block.line}", "rows": losses(*outputs)}
            shown |= {"faults": block.faults, "scene": right.faults}
            shown["outputs"] = [marked(*outputs), marked(*outputs[::-1])]
            html = app.builder.templates.render("flip.html", shown)
            fence.replace_self(nodes.raw(html, html, format="html"))
            while (above := at[block.line].next_node(**BELOW)).rawsource != html:
                above.parent.remove(above)


def output_of(block, marker):
    """The fence of a marker: below that of a patch if a run has one."""
    kind = "diff" if block.kind == "diff" else "console"
    return marker.next_node(lambda x: x.get("language") == kind, **BELOW)


@functools.cache
def tokens_by_text(name):
    lines = token_lines(name)
    return {"".join(text for _, text in line).rstrip("\n"): line for line in lines}


def diff_html(old, new, lines):
    """A diff with the colours of its language, and its changed words marked."""
    runs = [(sign, [*x]) for sign, x in groupby(lines, lambda line: line[:1])]
    html, marks = "", ({}, {})
    for (sign, run), (next_sign, after) in pairwise([*runs, ("", [])]):
        if sign != "+":
            run_after = after if (sign, next_sign) == ("-", "+") else []
            marks = marks_of(*([x[1:] for x in some] for some in (run, run_after)))[1]
        tag = {"-": "del", "+": "ins", "@": "b"}.get(sign, "span")
        for i, line in enumerate(run):
            tokens = tokens_by_text(old if sign == "-" else new)
            tokens = tokens.get(line[1:], [("", f"{line[1:]}\n")])
            code = tokens_html(tokens, marks[sign == "+"].get(i, ()))
            html += f"<{tag}>{sign}{code}</{tag}>"
    return f'<div class="highlight-diff highlight"><pre>{html}</pre></div>'


def losses(*outputs):
    """[(epoch, the held-out loss of each output)], as far as all of them have it."""
    pattern = r"(?m)^epoch (\d+)/.* held-out loss (\S+)"
    found = [dict(reversed(re.findall(pattern, x))) for x in outputs]
    return [
        (x, *(y[x] for y in found)) for x in sorted(set(found[0]).intersection(*found))
    ]


def masked(text):
    """A text with a ~ for each character that varies or is not shown."""
    for pattern in [*VARIES, re.escape(CUT)]:
        text = re.sub(pattern, lambda x: "~" * len(x[0]), text)
    return text


def marked(text, other):
    """The HTML of an output, with marks where it has words that the other has not."""
    html, done, words = "", 0, masked(other).split()
    for word in re.finditer(r"[^\s~]+", masked(text)):
        if not any(same([word[0]], [x]) for x in words):
            html += escape(text[done : word.start()], False)
            html += f"<mark>{escape(text[slice(*word.span())], False)}</mark>"
            done = word.end()
    return html + escape(text[done:], False)


class Explainer:
    """`whys(old, new, places)`: what the chapters say about each change."""

    def __init__(self, app):
        self.app = app
        self.doctree = functools.cache(self.doctree)
        self.why = functools.cache(self.why)

    def doctree(self, page):
        return self.app.env.get_and_resolve_doctree(page, self.app.builder)

    def why(self, page, anchor):
        sections = self.doctree(page).findall(nodes.section)
        section = next(x for x in sections if x.get("slug") == anchor)
        blocks = parse(f"docs/{page}.md").blocks
        (block,) = [x for x in blocks if x.hunks and x.anchor == anchor]
        ours = "<!--|<p class=.beside|<div class=.highlight-diff"
        skipped = nodes.title, nodes.section
        said = [x for x in section.children if not isinstance(x, skipped)]
        said = [self.html(page, x) for x in said if not re.match(ours, x.astext())]
        html = "".join(said)
        what, without, rest = html.partition("<p><strong>Without it.</strong>")
        return {
            "id": f"why-{page}-{anchor}",
            "heading": section.next_node(nodes.title).astext(),
            "link": f"../{page}.html#{anchor}",
            "chapter": self.app.env.titles[page].astext(),
            "step": (block.old, block.new),
            "html": [x for x in (what, without + rest) if x],
            "flips": "<fieldset" in html,
        }

    def html(self, page, node):
        """A node as it is shown on a page of another folder, without ids."""
        node = node.deepcopy()
        for element in node.findall(nodes.Element):
            element["ids"] = []
            uri = element.get("refuri") or "#" + element.get("refid", "")
            if isinstance(element, nodes.reference) and not urlsplit(uri).scheme:
                element.attributes.pop("refid", None)
                element["refuri"] = "../" + urljoin(f"{page}.html", uri)
        return self.app.builder.render_partial(node)["fragment"].strip()

    def whys(self, old, new, places):
        """{hunk number: [texts]}, of `places`, which `explain` has found.

        Each text stands at its largest hunk below the imports; the others link to it.
        """
        at, found = {}, {}
        largest_first = sorted(hunks(old, new), key=lambda x: -len(x.lines))
        order = sorted(largest_first, key=lambda x: in_head(x, old, new))
        for n in (x.number for x in order):
            whys = [self.why(page, anchor) for page, _, anchor in places[n]]
            where = [at.setdefault(x["id"], n) for x in whys]
            pairs = zip(whys, where, strict=True)
            found[n] = [x | {"at": y, "here": y == n} for x, y in pairs]
        return found
