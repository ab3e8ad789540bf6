"""The chapters' explanations, as HTML for the pages of two scripts side by side.

What stands under a heading in a chapter, without the heading and its diff. A recorded
output with a fault in the script becomes a switch: the reader flips between it and the
right output, which another block of the chapter has for the same command.
"""

import difflib
import functools
import re
from html import escape
from itertools import groupby
from urllib.parse import urljoin, urlsplit

from docutils import nodes

from ladder.diffs import hunks
from ladder.pages import parse, right_output
from ladder.rungs import InputError, read_lines
from website.commands import VARIES
from website.side_by_side import changed_places, similar_lines

PARTS = {"What.": "what", "Why.": "reason", "Without it.": "without"}
NUMBER = rf"(?P<varies>{'|'.join(VARIES)})|\d+(?:\.\d+)?"


class Explainer:
    """`why(page, anchor)`: what a chapter says under a heading.

    "parts" are [(class, HTML)], "lines" {(script, number)} of what its faults change.
    """

    def __init__(self, app):
        self.app = app
        self.chapter = functools.cache(self.chapter)
        self.why = functools.cache(self.why)

    def chapter(self, page):
        """The page's doctree, its blocks by their marker, and what these show.

        That is {line of the marker: (HTML above the output, output)}; and another
        {line of a marker: the block with the right output}.
        """
        doctree = self.app.env.get_and_resolve_doctree(page, self.app.builder)
        parsed = parse(f"docs/{page}.md")
        blocks = {parsed.lines[x.line - 1].strip(): x for x in parsed.blocks}
        shown = {}
        for raw in doctree.findall(nodes.raw):
            block = blocks.get(raw.astext().strip())
            if block and block.kind == "run":
                *above, output = until_code(raw)
                html = "".join(self.html(page, x) for x in above)
                shown[block.line] = html, output.astext()
        right = {x.line: right_output(parsed, x) for x in parsed.blocks}
        return doctree, blocks, shown, {x: y for x, y in right.items() if y}

    def why(self, page, anchor):
        doctree, blocks, shown, right = self.chapter(page)
        section = next(
            x for x in doctree.findall(nodes.section) if x.get("slug") == anchor
        )
        parts, lines, block, step = [("motivation", [])], set(), None, None
        markers = [x.astext().strip() for x in section.children if x.tagname == "raw"]
        here = [blocks[x] for x in markers if x in blocks]
        # A right output that the section shows before the wrong one: the switch has it.
        both = {
            x.line: right[x.line].line
            for x in here
            if is_wrong(x, right) and x.line in right and right[x.line] in here
        }
        for node in section.children:
            if isinstance(node, (nodes.title, nodes.section)):
                continue
            text = node.astext().strip()
            if isinstance(node, nodes.raw) and text.startswith("<!--"):
                block = blocks.get(text)
                if block and block.kind == "diff":
                    step = block.old, block.new
                if block and block.line in {*both, *both.values()}:
                    parts[-1][1][-1:] = without_lead(parts[-1][1][-1:])
                if block and is_wrong(block, right):
                    other = right.get(block.line)
                    lines |= faulty_lines(block, other.faults if other else [])
                    outputs = [shown[x.line] if x else None for x in (other, block)]
                    parts[-1][1].append(flip(block, *outputs))
            elif isinstance(node, nodes.raw) and 'class="beside"' in text:
                continue  # it leads to the page that this is for
            elif block and (
                block.kind == "diff"
                or is_wrong(block, right)
                or block.line in both.values()
            ):
                continue
            else:
                part = PARTS.get(first_words(node))
                part = "tests" if text.startswith("Tests: ") else part
                if part:
                    parts.append((part, []))
                parts[-1][1].append(self.html(page, node))
        return {
            "heading": section.next_node(nodes.title).astext(),
            "link": f"../{page}.html#{anchor}",
            "chapter": self.app.env.titles[page].astext(),
            "parts": [(part, "".join(html)) for part, html in parts if html],
            "lines": lines,
            "step": step,
            "flips": any("<fieldset" in x for _, html in parts for x in html),
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
        html = self.app.builder.render_partial(node)["fragment"].strip()
        html = re.sub('<span class="pre">(.*?)</span>', r"\1", html)
        html = re.sub(' class="reference (internal|external)"', "", html)
        return html.replace(' class="docutils literal notranslate"', ' class="literal"')


def once(old, new, whys):
    """`whys` with each text at one of its hunks of two scripts, and links to it.

    At the one with a line that its switch strikes through, or else at the largest.
    """
    home = {}
    for hunk in hunks(old, new):
        sides = (old, hunk.old_start, hunk.removed), (new, hunk.new_start, hunk.added)
        lines = {(name, start + i) for name, start, x in sides for i in range(len(x))}
        for why in whys[hunk.number]:
            rank = bool(lines & why["lines"]), len(hunk.lines), -hunk.number
            home[why["link"]] = max(rank, home.get(why["link"], rank))
    at = {link: -rank[2] for link, rank in home.items()}
    return {
        number: [
            why if at[why["link"]] == number else why | {"at": at[why["link"]]}
            for why in some
        ]
        for number, some in whys.items()
    }


def without_lead(html):
    """[HTML of a paragraph] without its last sentence, if that leads to an output."""
    lead = r"(^<p>|(?<=[.!?])\s)[^.!?]*:</p>$"
    return [y for x in html if (y := re.sub(lead, "</p>", x)) != "</p>"]


def first_words(node):
    """What a paragraph begins with in bold, or ""."""
    first = next((x for x in node.children if x.astext()), None)
    bold = isinstance(node, nodes.paragraph) and isinstance(first, nodes.strong)
    return first.astext() if bold else ""


def until_code(marker):
    """What stands below a marker, up to the output."""
    for node in marker.findall(siblings=True, descend=False, include_self=False):
        yield node
        if isinstance(node, nodes.literal_block):
            return


def is_wrong(block, right):
    """Whether it shows what a fault does, and is not what another is compared with."""
    return bool(block.faults) and block not in right.values()


def faulty_lines(block, scene):
    """{(script, number)} of the lines that the block's faults change.

    scene: faults that only set the scene, and do not count.
    """
    try:
        text = "\n".join(read_lines(block.script))
    except InputError:  # a file that the page itself holds
        return set()
    places = [text.index(x[0]) for x in block.faults if x not in scene]
    return {(block.script, text.count("\n", 0, place) + 1) for place in places}


# Outputs


def words_of(line):
    """(the line without its numbers, [(start, end, number)]); what varies is none."""
    shape, numbers, last = "", [], 0
    for found in re.finditer(NUMBER, line):
        varies = found["varies"] is not None
        shape += line[last : found.start()] + ("~" if varies else "#")
        last = found.end()
        if not varies:
            numbers.append((*found.span(), found[0]))
    return shape + line[last:], numbers


def differ(one, other):
    """Whether two numbers do: fractions by more than 0.1 %, as in website.commands."""
    if "." not in one or "." not in other:
        return one != other
    a, b = float(one), float(other)
    return abs(a - b) > 1e-3 * max(abs(a), abs(b))


def compare(right, wrong):
    """The places that differ, as {line: {places}} of each of two outputs' lines."""
    found = {}, {}
    shapes = [[words_of(line)[0] for line in lines] for lines in (right, wrong)]
    matcher = difflib.SequenceMatcher(None, *shapes, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            for i, j in zip(range(i1, i2), range(j1, j2), strict=True):
                numbers = words_of(right[i])[1], words_of(wrong[j])[1]
                for one, other in zip(*numbers, strict=True):
                    if differ(one[2], other[2]):
                        found[0].setdefault(i, set()).update(range(*one[:2]))
                        found[1].setdefault(j, set()).update(range(*other[:2]))
            continue
        found[0].update({i: set(range(len(right[i]))) for i in range(i1, i2)})
        found[1].update({j: set(range(len(wrong[j]))) for j in range(j1, j2)})
        for i, j in similar_lines(right[i1:i2], wrong[j1:j2]):
            places = changed_places(right[i1 + i], wrong[j1 + j])
            found[0][i1 + i], found[1][j1 + j] = places
    return found


def output_html(text, marks):
    """The `pre` of a command and its output, with the marked places of each line."""
    lines = []
    for i, line in enumerate(text.split("\n")):
        places, html = marks.get(i, set()), ""
        for marked, group in groupby(range(len(line)), places.__contains__):
            piece = escape("".join(line[x] for x in group), quote=False)
            html += f"<mark>{piece}</mark>" if marked and piece.strip() else piece
        lines.append(html)
    return f"<pre>{chr(10).join(lines)}</pre>"


# The switch needs no script. Its ids are made unique where it is put into a page.
FLIP = """<fieldset class="flip"><legend>What it prints</legend>
<input type="radio" id="FLIP-{n}-as-it-is" name="FLIP-{n}" class="as-it-is">
<label for="FLIP-{n}-as-it-is">with it</label>
<input type="radio" id="FLIP-{n}-without" name="FLIP-{n}" class="without-it" checked>
<label for="FLIP-{n}-without">without it</label>
<div class="outputs"><div class="right">{above_right}
{right}</div><div class="wrong">{above_wrong}
{wrong}</div></div></fieldset>"""


def flip(block, right, wrong):
    """Two outputs to choose from, or the wrong one alone if there is no right one.

    right, wrong: (HTML above the output, output)
    """
    above, output = wrong
    if right is None:
        return f'{above}<div class="wrong">{output_html(output, {})}</div>'
    marks = compare(right[1].split("\n"), output.split("\n"))
    return FLIP.format(
        n=block.line,
        above_right=right[0] or f"<p>{escape(block.script)} as it is.</p>",
        above_wrong=above,
        right=output_html(right[1], marks[0]),
        wrong=output_html(output, marks[1]),
    )
