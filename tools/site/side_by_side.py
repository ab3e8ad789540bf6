"""Two scripts side by side, as HTML: the changed stretches, and the others folded.

Both sides of a stretch have equally many rows: a line stands beside the one that it was
changed into, and a gap beside a line that has none.
"""

import ast
import functools
import itertools
import re
from html import escape

from pygments.lexers import TextLexer, find_lexer_class_for_filename
from pygments.token import STANDARD_TYPES

from tools.diffs import align, changes, hunks, tree_of
from tools.scripts import ROOT, ancestry

CONTEXT = 3  # unchanged lines that stay open on each side of a change


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


# The classes that need no colour: without them, the page stays light.
PLAIN = ("", "w", "n", "p", "o")
# Ids: `old-L41` is line 41 on the left, and `L41` is line 41 on the right.
OLD = "old-L"
NEW = "L"


def tokens_html(tokens, marked=()):
    """The HTML of a line; `marked` are the places of its changed characters."""

    def is_marked(place):
        return place in marked

    length = sum(len(text) for _, text in tokens)
    html = ""
    end = 0
    for css, text in tokens:
        start = end
        end += len(text)
        for has_mark, places in itertools.groupby(range(start, end), is_marked):
            piece = "".join(text[place - start] for place in places)
            kind = "mark" if has_mark and piece.strip() else "span"
            piece = escape(piece, quote=False)
            if kind == "mark" or css not in PLAIN:
                piece = f'<{kind} class="{css}">{piece}</{kind}>'
            html += piece
        if text in (".", "(") and length > 40:
            html += "<wbr>"  # a phone breaks a long line here, and not in a name
    return html


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


def changed_places(one, other):
    """The places of the characters of `one`, and of `other`, in changed words."""
    words = words_of(one)
    other_words = words_of(other)
    starts = starts_of(words)
    other_starts = starts_of(other_words)
    places = set()
    other_places = set()
    for i1, i2, j1, j2 in changes(words, other_words):
        places.update(range(starts[i1], starts[i2]))
        other_places.update(range(other_starts[j1], other_starts[j2]))
    return places, other_places


def starts_of(words):
    """Where each word of a line starts, and where the last one ends."""
    return [*itertools.accumulate(map(len, words), initial=0)]


def marks_of(removed, added):
    """(which lines were changed into which, {line: places} of each side)."""
    pairs = align(removed, added)
    old_marks = {}
    new_marks = {}
    for i, j in pairs:
        old_marks[i], new_marks[j] = changed_places(removed[i], added[j])
    return pairs, (old_marks, new_marks)


# Explanations


def path_between(old, new):
    """The edges (parent, child) on the way from one script to another in the tree."""
    edges = [*itertools.pairwise(ancestry(old)), *itertools.pairwise(ancestry(new))]
    return [edge for edge in edges if edges.count(edge) == 1]


def explain(old, new, explained):
    """{hunk number: [(page, heading, anchor)]} of the diff between any two scripts.

    Where no chapter has this diff, it is those of the hunks on the way from one script
    to the other that have a changed line in common with it, or its place.
    """
    on_the_way = []
    for edge in path_between(old, new):
        for hunk in hunks(*edge):
            place = explained.get(edge, {}).get(hunk.number)
            if place:
                on_the_way.append((hunk, place))
    own = explained.get((old, new), {})
    places = {}
    for hunk in hunks(old, new):
        near = [place for other, place in on_the_way if share_a_line(hunk, other)]
        around = [place for other, place in on_the_way if other.scope == hunk.scope]
        found = [own[hunk.number]] if hunk.number in own else near or around
        places[hunk.number] = list(dict.fromkeys(found))
    return places


def share_a_line(hunk, other):
    lines = {line for line in hunk.removed + hunk.added if line.strip()}
    return lines.intersection(other.removed + other.added)


# Parts


def changed(tag, id, name, start, places, marks):
    """The HTML of one side of a change; `places` are its rows, counted from `start`."""
    html = ""
    for place in places:
        if place is None:
            html += "<i></i>"
        else:
            number = start + place
            tokens = token_lines(name)[number - 1]
            html += line_html(tag, id, number, tokens, marks.get(place, ()))
    return html


def in_head(hunk, old, new):
    """Whether nothing changes in a hunk but the docstring and the imports."""
    return hunk.old_end <= first_code(old) and hunk.new_end <= first_code(new)


def first_code(name):
    """The line of the first statement below the docstring and the imports."""
    imports = (ast.Import, ast.ImportFrom)
    body = tree_of(name).body[1:]
    return next(node.lineno for node in body if not isinstance(node, imports))


def rows_of(pairs, sizes):
    """[(index of a removed line, index of an added one)], None for a gap.

    pairs: which of them stand beside each other. sizes: how many there are of each.
    """
    rows = []
    next_old = 0
    next_new = 0
    for i, j in [*pairs, sizes]:
        rows += [(index, None) for index in range(next_old, i)]
        rows += [(None, index) for index in range(next_new, j)]
        rows.append((i, j))
        next_old = i + 1
        next_new = j + 1
    return rows[:-1]  # without `sizes`


def parts(old, new, whys):
    """What stands below each other on the page of two scripts, in two lists.

    The first ends with the last change of the docstring and the imports.
    whys: {hunk number: [explanations]}.
    """
    found = []
    head = 0
    next_old = 1
    next_new = 1
    for hunk in hunks(old, new):
        found += unchanged(old, new, next_old, next_new, hunk.old_start - next_old)
        next_old = hunk.old_end
        next_new = hunk.new_end
        sizes = (len(hunk.removed), len(hunk.added))
        pairs, (old_marks, new_marks) = marks_of(hunk.removed, hunk.added)
        if sizes == (1, 1):  # they stand beside each other, alike or not
            pairs = [(0, 0)]
        left, right = zip(*rows_of(pairs, sizes), strict=True)
        part = {
            "kind": "hunk",
            "hunk": hunk,
            "whys": whys[hunk.number],
            "count": len(left),
            "old": changed("del", OLD, old, hunk.old_start, left, old_marks),
            "new": changed("ins", NEW, new, hunk.new_start, right, new_marks),
        }
        found.append(part)
        if in_head(hunk, old, new):
            head = len(found)
    count = len(token_lines(old)) + 1 - next_old
    found += unchanged(old, new, next_old, next_new, count)
    return found[:head], found[head:]


def unchanged(old, new, old_start, new_start, count):
    """`count` lines that are the same, folded but for the edges."""
    is_last = old_start + count > len(token_lines(old))
    top = 0 if old_start == 1 else CONTEXT
    bottom = 0 if is_last else CONTEXT
    if count <= top + bottom + 1:
        top = count
        bottom = 0
    left = plain_lines(old, OLD)[old_start - 1 :][:count]
    right = plain_lines(new)[new_start - 1 :][:count]
    found = []
    for kind, start, end in [
        ("same", 0, top),
        ("fold", top, count - bottom),
        ("same", count - bottom, count),
    ]:
        if start < end:
            part = {
                "kind": kind,
                "count": end - start,
                "old": "".join(left[start:end]),
                "new": "".join(right[start:end]),
            }
            found.append(part)
    return found
