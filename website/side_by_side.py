"""Two rungs side by side, as HTML: the changed stretches, and the others folded.

Both sides of a stretch have equally many rows: a line stands beside the one that it was
changed into, and a gap beside a line that has none.
"""

import collections
import difflib
import functools
import itertools
import keyword
import re
from html import escape

from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.token import STANDARD_TYPES
from pygments.util import ClassNotFound

from ladder.diffs import hunks, scope_of, scopes
from ladder.rungs import ROOT, RUNGS, ancestry, read_lines

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


PLAIN = ("", "w", "n", "p", "o")  # what needs no colour, so that the page stays light
LONG = 40  # columns of code that a phone shows in one line


def line_html(tag, id, number, tokens, marked=()):
    """A line in an element; `marked` are the places of its changed characters."""
    line = "".join(text for _, text in tokens)
    is_long, out, place = len(line) > LONG, [], 0
    for css, text in tokens:
        places = enumerate(text, place)
        for is_marked, group in itertools.groupby(
            places, lambda pair: pair[0] in marked
        ):
            piece = escape("".join(character for _, character in group), quote=False)
            kind = "mark" if is_marked and piece.strip() else "span"
            if kind == "mark" or css not in PLAIN:
                piece = f'<{kind} class="{css}">{piece}</{kind}>'
            out.append(piece)
        place += len(text)
        if is_long and text in (".", "(") and line[place] != ")":
            out.append("<wbr>")  # a phone breaks the line here, and not in a name
    indent = len(line) - len(line.lstrip())
    style = f' style="--i:{indent}"' if is_long and indent else ""
    start = f'<{tag} data-n="{number}" id="{id}{number}"{style}>'
    return f"{start}{''.join(out)}</{tag}>"


OLD, NEW = (
    "old-L",
    "L",
)  # ids: `old-L41` is line 41 of the left file, `L41` of the right


@functools.cache
def plain_lines(name, id=NEW):
    """The HTML of all lines of a file."""
    lines = enumerate(token_lines(name), 1)
    return [line_html("span", id, number, tokens) for number, tokens in lines]


# Words

WORD = re.compile(r"\d[\w.]*|\w+|\s+|[^\w\s]")
BRACKETS = {"(": ")", "[": "]", "{": "}"}


def weight(word):
    """How much a word says about its line: names and numbers, most of all."""
    is_name = re.match(r"\w", word) and word != "self" and not keyword.iskeyword(word)
    return 1 if is_name else 0.2


@functools.cache
def likeness(one, other):
    """From 0, nothing in common, to 1: the weight of the words that two lines share."""
    lines = [WORD.findall(line.strip()) for line in (one, other)]
    lines = [[word for word in line if not word.isspace()] for line in lines]
    total = sum(map(weight, itertools.chain(*lines)))
    matcher = difflib.SequenceMatcher(None, *lines, autojunk=False)
    blocks = matcher.get_matching_blocks()
    shared = [word for x in blocks for word in lines[0][x.a : x.a + x.size]]
    return 2 * sum(map(weight, shared)) / total if total else 0


def similar_lines(removed, added):
    """[(index in `removed`, index in `added`)] of lines that were changed into another.

    In order on both sides, and of all such pairings the one with the most in common.
    """
    if len(removed) == len(added) == 1:
        return [(0, 0)]
    # best[a, b]: (what is in common, the pairs) from index a and index b on.
    best = collections.defaultdict(lambda: (0, []))
    for a, b in itertools.product(range(len(removed))[::-1], range(len(added))[::-1]):
        alike = likeness(removed[a], added[b])
        common, pairs = best[a + 1, b + 1]
        taken = (common + alike, [(a, b), *pairs]) if alike >= SIMILAR else (0, [])
        best[a, b] = max(taken, best[a + 1, b], best[a, b + 1], key=lambda x: x[0])
    return best[0, 0][1]


def bracket_pairs(words):
    """{index of a bracket: index of the one that belongs to it}."""
    opened, found = [], {}
    for i, word in enumerate(words):
        if word in BRACKETS:
            opened.append(i)
        elif opened and word == BRACKETS[words[opened[-1]]]:
            found[i] = opened.pop()
            found[found[i]] = i
    return found


def equal_words(one, other):
    """{index in `one`: index in `other`} of the words that did not change.

    A bracket is one of them only together with its other half.
    """
    shortest = min(len(one), len(other))
    pairs = zip(one, other, strict=False), zip(one[::-1], other[::-1], strict=False)
    same = [itertools.takewhile(lambda pair: pair[0] == pair[1], x) for x in pairs]
    first = sum(1 for _ in same[0])
    last = min(sum(1 for _ in same[1]), shortest - first)
    middle = one[first : len(one) - last], other[first : len(other) - last]
    matcher = difflib.SequenceMatcher(None, *middle, autojunk=False)
    equal = {i: i for i in range(first)}
    for block in matcher.get_matching_blocks():
        for i in range(block.size):
            equal[first + block.a + i] = first + block.b + i
    for i in range(1, last + 1):
        equal[len(one) - i] = len(other) - i
    halves, other_halves = bracket_pairs(one), bracket_pairs(other)
    for i, j in sorted(equal.items()):
        if one[i] in BRACKETS and i in halves and j in other_halves:
            taken = [x for x, y in equal.items() if y == other_halves[j]]
            for x in taken:
                del equal[x]
            equal[halves[i]] = other_halves[j]
    alone = {
        i
        for i, j in equal.items()
        if one[i] in BRACKETS.values() and i in halves
        if equal.get(halves[i]) != other_halves.get(j)
    }
    alone |= {
        i
        for i, j in equal.items()
        if halves.get(i, i) not in equal or other_halves.get(j, j) not in equal.values()
    }
    between = {
        i
        for i in equal
        if one[i].isspace() and i > 0 and {i - 1, i + 1}.isdisjoint(equal)
    }
    return {i: j for i, j in equal.items() if i not in alone | between}


def changed_places(one, other):
    """The places of the characters of `one`, and of `other`, in changed words."""
    words = [WORD.findall(line) for line in (one, other)]
    equal = equal_words(*words)
    found = []
    for some, same in zip(words, (equal.keys(), equal.values()), strict=True):
        starts = [0, *itertools.accumulate(map(len, some))]
        changed = [i for i in range(len(some)) if i not in same]
        found.append({x for i in changed for x in range(starts[i], starts[i + 1])})
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


def rows(removed, added):
    """([...], [...]): of each row, its index in `removed` and in `added`, or None."""
    found, a, b = [], 0, 0
    for i, j in [*similar_lines(removed, added), (len(removed), len(added))]:
        found += [(x, None) for x in range(a, i)] + [(None, x) for x in range(b, j)]
        found.append((i, j))
        a, b = i + 1, j + 1
    return list(zip(*found[:-1], strict=True))


def changed(tag, id, name, start, places, marked, out):
    """The HTML of one side of a change; `places` are its rows, counted from `start`."""
    found = []
    for is_gap, group in itertools.groupby(places, lambda x: x is None):
        group = list(group)
        if is_gap:
            found.append(f'<i style="--n:{len(group)}"></i>')
            continue
        for number in (start + x for x in group):
            tokens = token_lines(name)[number - 1]
            line = line_html(tag, id, number, tokens, marked.get(number, ()))
            if (name, number) in out:
                inside = r'\1<span class="out">\2</span>\3'
                line = re.sub(r"(<[^>]*>\s*)(.*)(\n</)", inside, line)
            found.append(line)
    return "".join(found)


def parts(old, new, whys):
    """What stands below each other on the page of two rungs.

    whys: {hunk number: [explanations, each with the `lines` that its faults change]}.
    """
    found, i, j = [], 1, 1
    for hunk in hunks(old, new):
        found += unchanged(old, new, i, j, hunk.old_start - i)
        i, j = hunk.old_start + len(hunk.removed), hunk.new_start + len(hunk.added)
        marks = {}, {}
        for a, b in similar_lines(hunk.removed, hunk.added):
            if likeness(hunk.removed[a], hunk.added[b]) >= SIMILAR:
                places = changed_places(hunk.removed[a], hunk.added[b])
                marks[0][hunk.old_start + a], marks[1][hunk.new_start + b] = places
        left, right = rows(hunk.removed, hunk.added)
        out = set().union(*(why["lines"] for why in whys[hunk.number]))
        part = {
            "kind": "hunk",
            "hunk": hunk,
            "whys": whys[hunk.number],
            "count": len(left),
            # On a phone, which shows one side below the other and breaks long lines.
            "narrow": sum(len(x) // LONG + 1 for x in hunk.removed + hunk.added),
            "old": changed("del", OLD, old, hunk.old_start, left, marks[0], out),
            "new": changed("ins", NEW, new, hunk.new_start, right, marks[1], out),
        }
        found.append(part)
    return found + unchanged(old, new, i, j, len(token_lines(old)) + 1 - i)


def names_in(name, start, count):
    """What the functions are called that have code in `count` lines from `start`."""
    where, lines = scopes(name), read_lines(name)
    found = [
        scope_of(number, where)
        for number in range(start, start + count)
        if lines[number - 1].strip()
    ]
    names = [x for x in dict.fromkeys(found) if x]
    return names if len(names) < 4 else [names[0], "...", names[-1]]


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
            one = plain_lines(old, OLD)[i - 1 : i - 1 + length]
            other = plain_lines(new, NEW)[j - 1 : j - 1 + length]
            part = {"kind": kind, "count": length, "names": names_in(new, j, length)}
            found.append(part | {"old": "".join(one), "new": "".join(other)})
            i, j = i + length, j + length
    return found


def strip(old, new):
    """[(hunk, top, height, share)] in percent: where the changes are in the whole.

    Each stretch goes on to the next change; `share` is how much of it the change is.
    """
    there, row, last, places = hunks(old, new), 0, 1, []
    for hunk in there:
        row += hunk.old_start - last
        last = hunk.old_start + len(hunk.removed)
        length = max(len(hunk.removed), len(hunk.added))
        places.append((row, length))
        row += length
    total = row + len(token_lines(old)) + 1 - last
    ends = [*(start for start, _ in places[1:]), total]
    return [
        (
            hunk,
            100 * start / total,
            100 * (end - start) / total,
            100 * length / (end - start),
        )
        for hunk, (start, length), end in zip(there, places, ends, strict=True)
    ]
