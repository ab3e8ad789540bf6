"""Two rungs side by side, as HTML: the changed stretches, and the others folded."""

import difflib
import functools
import itertools
import re
from html import escape

from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.token import STANDARD_TYPES
from pygments.util import ClassNotFound

from ladder.diffs import hunks
from ladder.rungs import ROOT, RUNGS, ancestry

CONTEXT = 3  # unchanged lines that stay open on each side of a change
SIMILAR = 0.5  # from here on, two lines are one line that was changed


def slug(name):
    return name.removesuffix(".py").replace("/", "-")


def page_of(old, new):
    return f"side_by_side/{slug(old)}--{slug(new)}"


# Lines


@functools.cache
def token_lines(name):
    """The lines of a file, each as a list of (CSS class, text), with line ends."""
    text = (ROOT / name).read_text()
    try:
        lexer = get_lexer_for_filename(name, stripnl=False, ensurenl=False)
    except ClassNotFound:
        lexer = TextLexer(stripnl=False, ensurenl=False)
    lines = [[]]
    for token, value in lexer.get_tokens(text):
        while token not in STANDARD_TYPES:
            token = token.parent
        for piece in re.findall(r"[^\n]*\n|[^\n]+", value):
            lines[-1].append((STANDARD_TYPES[token], piece))
            if piece.endswith("\n"):
                lines.append([])
    return lines if lines[-1] else lines[:-1]


def line_html(tag, number, tokens, marked=()):
    """A line in an element; `marked` are the places of its changed characters."""
    out, place = [], 0
    for css, text in tokens:
        places = enumerate(text, place)
        for is_marked, group in itertools.groupby(
            places, lambda pair: pair[0] in marked
        ):
            piece = escape("".join(character for _, character in group), quote=False)
            kind = "mark" if is_marked and piece.strip() else "span"
            if kind == "mark" or css not in ("", "w", "n", "p"):
                piece = f'<{kind} class="{css}">{piece}</{kind}>'
            out.append(piece)
        place += len(text)
    return f'<{tag} data-n="{number}">{"".join(out)}</{tag}>'


@functools.cache
def plain_lines(name):
    """The HTML of all lines of a file."""
    lines = enumerate(token_lines(name), 1)
    return [line_html("span", number, tokens) for number, tokens in lines]


def changed(tag, name, start, stop, marked):
    """The HTML of the lines `start` to before `stop`, counted from 1."""
    lines = enumerate(token_lines(name)[start - 1 : stop - 1], start)
    return "".join(
        line_html(tag, number, tokens, marked.get(number, ()))
        for number, tokens in lines
    )


# Words


@functools.cache
def likeness(one, other):
    if not one or not other:
        return 0
    matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
    return matcher.ratio() if matcher.quick_ratio() >= SIMILAR else 0


def similar_lines(removed, added, i=0, j=0):
    """[(index in `removed`, index in `added`)] of lines that were changed into another.

    The two that are most alike, then the same on both sides of them. i, j: what to add
    to the indices, where these are parts of longer lists.
    """
    likenesses = {
        (a, b): likeness(old_line.strip(), new_line.strip())
        for a, old_line in enumerate(removed)
        for b, new_line in enumerate(added)
    }
    a, b = max(likenesses, key=likenesses.get, default=(0, 0))
    if likenesses.get((a, b), 0) < SIMILAR:
        return []
    before = similar_lines(removed[:a], added[:b], i, j)
    after = similar_lines(removed[a + 1 :], added[b + 1 :], i + a + 1, j + b + 1)
    return [*before, (i + a, j + b), *after]


def changed_places(one, other):
    """The places of the characters of `one`, and of `other`, in changed words."""
    words = [re.findall(r"\w+|\s+|[^\w\s]", line) for line in (one, other)]
    # starts[0][i] is where word i of `one` begins; starts[1] the same for `other`.
    starts = [[0, *itertools.accumulate(map(len, some))] for some in words]
    found = set(), set()
    matcher = difflib.SequenceMatcher(None, *words, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag != "equal":
            found[0].update(range(starts[0][i1], starts[0][i2]))
            found[1].update(range(starts[1][j1], starts[1][j2]))
    return found


# Explanations


def path_between(old, new):
    """The edges (parent, child) on the way from one rung to another in the tree."""
    if old not in RUNGS or new not in RUNGS:  # a chapter's own scripts
        return []
    to_old, to_new = (set(itertools.pairwise(ancestry(name))) for name in (old, new))
    return sorted(to_old ^ to_new, key=lambda edge: len(ancestry(edge[1])))


def explain(old, new, explained):
    """{hunk number: [(page, heading, anchor)]} of the diff between any two rungs.

    Where no chapter has this diff, it is those of the hunks on the way from one rung to
    the other that have a changed line in common with it, or its place.
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


def parts(old, new, places):
    """What stands below each other on the page of two rungs."""
    found, i, j = [], 1, 1
    for hunk in hunks(old, new):
        found += unchanged(old, new, i, j, hunk.old_start - i)
        i, j = hunk.old_start + len(hunk.removed), hunk.new_start + len(hunk.added)
        marks = {}, {}
        for a, b in similar_lines(hunk.removed, hunk.added):
            in_old, in_new = changed_places(hunk.removed[a], hunk.added[b])
            marks[0][hunk.old_start + a] = in_old
            marks[1][hunk.new_start + b] = in_new
        removed = changed("del", old, hunk.old_start, i, marks[0])
        added = changed("ins", new, hunk.new_start, j, marks[1])
        part = {"kind": "hunk", "hunk": hunk, "places": places[hunk.number]}
        found.append(part | {"old": removed, "new": added})
    return found + unchanged(old, new, i, j, len(token_lines(old)) + 1 - i)


def unchanged(old, new, i, j, count):
    """`count` lines from `i` and `j` that are the same, folded but for the edges."""
    last = i + count > len(token_lines(old))
    top = 0 if i == 1 else CONTEXT
    bottom = 0 if last else CONTEXT
    if count <= top + bottom + 1:
        top, bottom = count, 0
    found = []
    for kind, length in [
        ("same", top),
        ("fold", count - top - bottom),
        ("same", bottom),
    ]:
        if length:
            one = plain_lines(old)[i - 1 : i - 1 + length]
            other = plain_lines(new)[j - 1 : j - 1 + length]
            part = {"kind": kind, "count": length}
            found.append(part | {"old": "".join(one), "new": "".join(other)})
            i, j = i + length, j + length
    return found
