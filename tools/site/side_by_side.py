"""Two scripts side by side, as HTML: the changed stretches, and the others folded.

Both sides of a stretch have equally many rows: a line stands beside the one that it was
changed into, and a gap beside a line that has none.
"""

import functools
import itertools
import re
from html import escape
from os.path import commonprefix

from pygments.lexers import TextLexer, find_lexer_class_for_filename
from pygments.token import STANDARD_TYPES

from tools.diffs import align, hunks, matcher, tree_of
from tools.scripts import ROOT, ancestry

CONTEXT = 3  # unchanged lines that stay open on each side of a change
SIMILAR = 0.35  # from here on, two lines are one line that was changed


def slug(name):
    return name.removesuffix(".py").replace("/", "-")


def page_of(old, new):
    return f"side_by_side/{slug(old)}--{slug(new)}"


# Lines


@functools.cache
def token_lines(name):
    """The lines of a file, each as a list of (CSS class, text), with line ends."""
    text = (ROOT / name).read_text()
    lexer = find_lexer_class_for_filename(name) or TextLexer
    lines = [[]]
    for token, value in lexer(stripnl=False, ensurenl=False).get_tokens(text):
        while token not in STANDARD_TYPES:
            token = token.parent
        for piece in re.findall(r"[^\n]*\n|[^\n]+", value):
            lines[-1].append((STANDARD_TYPES[token], piece))
            if piece.endswith("\n"):
                lines.append([])
    return lines if lines[-1] else lines[:-1]


PLAIN = ("", "w", "n", "p", "o")  # what needs no colour, so that the page stays light
OLD, NEW = "old-L", "L"  # ids: `old-L41` is line 41 on the left, `L41` on the right


def tokens_html(tokens, marked=()):
    """The HTML of a line; `marked` are the places of its changed characters."""
    length = sum(len(text) for _, text in tokens)
    out, place = [], 0
    for css, text in tokens:
        places = enumerate(text, place)
        for is_marked, group in itertools.groupby(places, lambda x: x[0] in marked):
            piece = escape("".join(character for _, character in group), quote=False)
            kind = "mark" if is_marked and piece.strip() else "span"
            if kind == "mark" or css not in PLAIN:
                piece = f'<{kind} class="{css}">{piece}</{kind}>'
            out.append(piece)
        place += len(text)
        if text in (".", "(") and length > 40:
            out.append("<wbr>")  # a phone breaks a long line here, and not in a name
    return "".join(out)


def line_html(tag, id, number, tokens, marked=()):
    """A line in an element with a number."""
    line = "".join(text for _, text in tokens)
    indent = len(line) - len(line.lstrip())  # a long line goes on to the right of it
    style = f' style="--i:{indent}"' if indent else ""
    html = tokens_html(tokens, marked)
    return f'<{tag} data-n="{number}" id="{id}{number}"{style}>{html}</{tag}>'


@functools.cache
def plain_lines(name, id=NEW):
    """The HTML of all lines of a file."""
    lines = enumerate(token_lines(name), 1)
    return [line_html("span", id, number, tokens) for number, tokens in lines]


# Words


def words_of(line):
    return re.findall(r"\d[\w.]*|\w+|\s+|[^\w\s]", line)


@functools.cache
def likeness(one, other):
    """The share of the names and numbers of two lines that is in both; 0 if small."""
    names = [[x for x in re.findall(r"\w+", y) if x != "self"] for y in (one, other)]
    alike = matcher(*names).ratio()
    return alike if alike >= SIMILAR else 0


def changed_places(one, other):
    """The places of the characters of `one`, and of `other`, in changed words."""
    words = words_of(one), words_of(other)
    # Equal words at both ends: what was put between them is marked.
    first = len(commonprefix(words))
    last = len(commonprefix([x[first:][::-1] for x in words]))
    starts = [[0, *itertools.accumulate(map(len, x))] for x in words]
    found = [set(range(x[first], x[-1 - last])) for x in starts]
    middles = [x[first : len(x) - last] for x in words]
    for *places, size in matcher(*middles).get_matching_blocks():
        for x, start, place in zip(found, starts, places, strict=True):
            x -= set(range(start[first + place], start[first + place + size]))
    return found


def marks_of(removed, added):
    """(which lines were changed into which, {line: places} of each side)."""
    pairs, marks = align(removed, added, likeness), ({}, {})
    for a, b in pairs:
        marks[0][a], marks[1][b] = changed_places(removed[a], added[b])
    return pairs, marks


# Explanations


def path_between(old, new):
    """The edges (parent, child) on the way from one script to another in the tree."""
    to_old, to_new = (set(itertools.pairwise(ancestry(name))) for name in (old, new))
    return sorted(to_old ^ to_new, key=lambda edge: len(ancestry(edge[1])))


def explain(old, new, explained):
    """{hunk number: [(page, heading, anchor)]} of the diff between any two scripts.

    Where no chapter has this diff, it is those of the hunks on the way from one script
    to the other that have a changed line in common with it, or its place.
    """
    places, own = {}, explained.get((old, new), {})
    on_the_way = [
        (hunk, explained[edge][hunk.number])
        for edge in path_between(old, new)
        for hunk in hunks(*edge)
        if hunk.number in explained.get(edge, {})
    ]
    for hunk in hunks(old, new):
        texts = {line for line in hunk.removed + hunk.added if line.strip()}
        if hunk.number in own:
            found = [own[hunk.number]]
        else:
            found = [
                place
                for other, place in on_the_way
                if texts.intersection(other.removed + other.added)
            ] or [place for other, place in on_the_way if other.scope == hunk.scope]
        places[hunk.number] = list(dict.fromkeys(found))
    return places


# Parts


def changed(tag, id, name, start, places, marked):
    """The HTML of one side of a change; `places` are its rows, counted from `start`."""
    found = []
    for place in places:
        if place is None:
            found.append("<i></i>")
        else:
            tokens = token_lines(name)[start + place - 1]
            marks = marked.get(place, ())
            found.append(line_html(tag, id, start + place, tokens, marks))
    return "".join(found)


def in_head(hunk, old, new):
    """Whether nothing changes in a hunk but the docstring and the imports."""
    ends = {old: hunk.old_start + len(hunk.removed)}
    ends[new] = hunk.new_start + len(hunk.added)
    code = {x: [y for y in tree_of(x).body[1:] if "Import" not in str(y)] for x in ends}
    return all(end <= code[name][0].lineno for name, end in ends.items())


def parts(old, new, whys):
    """What stands below each other on the page of two scripts, in two lists.

    The first ends with the last change of the docstring and the imports.
    whys: {hunk number: [explanations]}.
    """
    found, i, j, head = [], 1, 1, 0
    for hunk in hunks(old, new):
        found += unchanged(old, new, i, j, hunk.old_start - i)
        i, j = hunk.old_start + len(hunk.removed), hunk.new_start + len(hunk.added)
        sizes = len(hunk.removed), len(hunk.added)
        pairs, marks = marks_of(hunk.removed, hunk.added)
        if sizes == (1, 1):  # they stand beside each other, alike or not
            pairs = [(0, 0)]
        rows, a, b = [], 0, 0
        for x, y in [*pairs, sizes]:
            rows += [(z, None) for z in range(a, x)] + [(None, z) for z in range(b, y)]
            rows.append((x, y))
            a, b = x + 1, y + 1
        left, right = zip(*rows[:-1], strict=True)
        part = {
            "kind": "hunk",
            "hunk": hunk,
            "whys": whys[hunk.number],
            "count": len(left),
            "old": changed("del", OLD, old, hunk.old_start, left, marks[0]),
            "new": changed("ins", NEW, new, hunk.new_start, right, marks[1]),
        }
        found.append(part)
        if in_head(hunk, old, new):
            head = len(found)
    found += unchanged(old, new, i, j, len(token_lines(old)) + 1 - i)
    return found[:head], found[head:]


def unchanged(old, new, i, j, count):
    """`count` lines from `i` and `j` that are the same, folded but for the edges."""
    last = i + count > len(token_lines(old))
    top = 0 if i == 1 else CONTEXT
    bottom = 0 if last else CONTEXT
    if count <= top + bottom + 1:
        top, bottom = count, 0
    found, middle = [], count - top - bottom
    for kind, length in ("same", top), ("fold", middle), ("same", bottom):
        if length:
            one = plain_lines(old, OLD)[i - 1 : i - 1 + length]
            other = plain_lines(new, NEW)[j - 1 : j - 1 + length]
            part = {"kind": kind, "count": length}
            found.append(part | {"old": "".join(one), "new": "".join(other)})
            i, j = i + length, j + length
    return found
