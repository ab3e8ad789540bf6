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

from tools.diffs import align, changed_ranges, hunks
from tools.scripts import ROOT, ancestry, tree

CONTEXT = 3  # unchanged lines that stay open on each side of a change


def id_of(name):
    return name.removesuffix(".py").replace("/", "-")


def page_of(old, new):
    return f"side_by_side/{id_of(old)}--{id_of(new)}"


# Lines and their words


@functools.cache
def words_of(name):
    """The lines of a file, each as a list of (CSS class, word), with line ends."""
    text = (ROOT / name).read_text()
    lexer = find_lexer_class_for_filename(name) or TextLexer
    lines = [[]]
    for token, value in lexer(stripnl=False, ensurenl=False).get_tokens(text):
        while token not in STANDARD_TYPES:
            token = token.parent
        for word in re.findall(r"\n|\d[\w.]*|\w+|[^\S\n]+|[^\w\s]", value):
            lines[-1].append((STANDARD_TYPES[token], word))
            if word == "\n":
                lines.append([])
    return lines if lines[-1] else lines[:-1]


def texts_of(words):
    return [text for _, text in words]


# The classes that need no colour: without them, the page stays light.
PLAIN = ("", "w", "n", "p", "o")
# Ids: `old-L41` is line 41 on the left, and `L41` is line 41 on the right.
OLD = "old-L"
NEW = "L"


def words_html(words, marked):
    """The HTML of a line; `marked` are the indices of its changed words."""
    is_long = len("".join(texts_of(words))) > 40

    def look(numbered):
        index, (css, text) = numbered
        near = {index - 1, index + 1}  # a blank is marked between marked words
        return css, index in marked and (not text.isspace() or near <= marked)

    html = ""
    for (css, has_mark), alike in itertools.groupby(enumerate(words), look):
        piece = escape("".join(text for _, (_, text) in alike), quote=False)
        if is_long and css in ("o", "p"):
            piece = re.sub("[.(]", r"\g<0><wbr>", piece)  # a phone breaks a line here
        kind = "mark" if has_mark else "span"
        if has_mark or css not in PLAIN:
            piece = f'<{kind} class="{css}">{piece}</{kind}>'
        html += piece
    return html


@functools.cache
def line_html(name, number, tag, id, marked):
    """A line of a file in an element with its number."""
    words = words_of(name)[number - 1]
    line = "".join(texts_of(words))
    indent = len(line) - len(line.lstrip())  # a long line goes on to the right of it
    style = f' style="--i:{indent}"' if indent else ""
    html = words_html(words, marked)
    return f'<{tag} data-n="{number}" id="{id}{number}"{style}>{html}</{tag}>'


def whole(name):
    """The HTML of a file."""
    return side(name, 1, range(len(words_of(name))))


def marks_of(removed, added):
    """(which lines became which, {removed line: its changed words}, {added line: ...}).

    removed, added: lines as `words_of` has them.
    """
    texts = [["".join(texts_of(line)) for line in lines] for lines in (removed, added)]
    pairs = align(*texts)
    old_marks = {}
    new_marks = {}
    for i, j in pairs:
        places = [*changed_ranges(texts_of(removed[i]), texts_of(added[j]))]
        old_marks[i] = frozenset(k for place in places for k in range(*place[:2]))
        new_marks[j] = frozenset(k for place in places for k in range(*place[2:]))
    return pairs, old_marks, new_marks


# Explanations


def path_between(old, new):
    """The edges (parent, child) on the way from one script to another in the tree."""
    edges = [*itertools.pairwise(ancestry(old)), *itertools.pairwise(ancestry(new))]
    return [edge for edge in edges if edges.count(edge) == 1]


def places_of(old, new, explained):
    """{hunk number: [(page, heading, anchor)]} of the diff between any two scripts.

    Where no chapter has this diff, it is those of the hunks on the way from one script
    to the other that have a changed line in common with it, or its place.
    """
    on_the_way = []
    for edge in path_between(old, new):
        on_the_way += [(hunk, explained[edge][hunk.number]) for hunk in hunks(*edge)]
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


def in_head(hunk, old, new):
    """Whether nothing changes in a hunk but the docstring and the imports."""
    return hunk.old_end <= first_code(old) and hunk.new_end <= first_code(new)


@functools.cache
def first_code(name):
    """The line of the first statement below the docstring and the imports."""
    imports = (ast.Import, ast.ImportFrom)
    body = tree(name).body[1:]
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


def side(name, start, places, tag="span", id=NEW, marks=None):
    """The HTML of one side of a part; `places` are its rows, counted from `start`."""
    html = ""
    for place in places:
        if place is None:
            html += "<i></i>"
        else:
            marked = marks.get(place, ()) if marks else ()
            html += line_html(name, start + place, tag, id, marked)
    return html


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
        removed = words_of(old)[hunk.old_start - 1 : hunk.old_end - 1]
        added = words_of(new)[hunk.new_start - 1 : hunk.new_end - 1]
        sizes = (len(removed), len(added))
        pairs, old_marks, new_marks = marks_of(removed, added)
        if sizes == (1, 1):  # they stand beside each other, alike or not
            pairs = [(0, 0)]
        left, right = zip(*rows_of(pairs, sizes), strict=True)
        part = {
            "kind": "hunk",
            "hunk": hunk,
            "whys": whys[hunk.number],
            "count": len(left),
            "old": side(old, hunk.old_start, left, "del", OLD, old_marks),
            "new": side(new, hunk.new_start, right, "ins", NEW, new_marks),
        }
        found.append(part)
        if in_head(hunk, old, new):
            head = len(found)
    count = len(words_of(old)) + 1 - next_old
    found += unchanged(old, new, next_old, next_new, count)
    return found[:head], found[head:]


def unchanged(old, new, old_start, new_start, count):
    """`count` lines that are the same, folded but for the edges."""
    is_last = old_start + count > len(words_of(old))
    fold = 0 if old_start == 1 else CONTEXT
    fold_end = count if is_last else count - CONTEXT
    if fold_end - fold < 2:  # too few lines to fold
        fold = fold_end = count
    places = range(count)
    found = []
    for kind, some in [
        ("same", places[:fold]),
        ("fold", places[fold:fold_end]),
        ("same", places[fold_end:]),
    ]:
        if some:
            part = {
                "kind": kind,
                "count": len(some),
                "old": side(old, old_start, some, id=OLD),
                "new": side(new, new_start, some),
            }
            found.append(part)
    return found
