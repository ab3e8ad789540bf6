"""The diffs between rungs, as hunks without lines of context.

The diff of a sequel is large, and difflib would then pair lines of one function with
lines of another. So it is made function by function.
"""

import ast
import difflib
import functools
import itertools
from typing import NamedTuple

from ladder.rungs import SEQUELS, InputError, read_lines


def unified(old, new, context=3):
    """The lines of `diff -u old new`.

    difflib.unified_diff would not do: in files of 200 lines it takes blank lines for
    junk, and shows some of them as changed.
    """
    before, after = read_lines(old), read_lines(new)
    lines = [f"--- {old}", f"+++ {new}"]
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for group in matcher.get_grouped_opcodes(context):
        (_, i1, _, j1, _), (_, _, i2, _, j2) = group[0], group[-1]
        lines.append(f"@@ -{span(i1, i2)} +{span(j1, j2)} @@")
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                lines += [f" {x}" for x in before[i1:i2]]
            else:
                lines += [f"-{x}" for x in before[i1:i2]]
                lines += [f"+{x}" for x in after[j1:j2]]
    return lines


def span(start, end):
    """Lines of a file as the head of a hunk has them: first line, number of lines."""
    if end == start + 1:
        return str(end)
    return f"{start + (end > start)},{end - start}"


class Hunk(NamedTuple):
    """Adjacent changed lines.

    `removed` starts at line `old_start` of the parent, `added` at line `new_start` of
    the child. Lines count from 1. `number` counts the hunks of the diff from 1. `scope`
    is the class and function that it stands in, "" outside of any.
    """

    number: int
    old_start: int
    removed: list
    new_start: int
    added: list
    scope: str

    @property
    def lines(self):
        return [f"-{x}" for x in self.removed] + [f"+{x}" for x in self.added]


@functools.cache
def scopes(name):
    """[(first line, last line, name)] of a file's classes and functions."""
    try:
        tree = ast.parse("\n".join(read_lines(name)))
    except SyntaxError as error:
        raise InputError(f"{name}:{error.lineno}: {error.msg}") from None
    kinds = ast.ClassDef, ast.FunctionDef
    nodes = [x for x in ast.walk(tree) if isinstance(x, kinds)]
    firsts = [min([x.lineno, *(y.lineno for y in x.decorator_list)]) for x in nodes]
    return sorted(
        (first, x.end_lineno, x.name) for first, x in zip(firsts, nodes, strict=True)
    )


def scope_of(line, where):
    """What of `scopes` a line stands in, as `Trainer.train`."""
    return ".".join(name for first, last, name in where if first <= line <= last)


@functools.cache
def hunks(old, new):
    """The hunks of the diff between two files, without lines of context."""
    before, after = read_lines(old), read_lines(new)
    removed_from, added_to = scopes(old), scopes(new)
    found = []
    for i1, i2, j1, j2 in changes(old, new):
        place = (j1 + 1, added_to) if j2 > j1 else (i1 + 1, removed_from)
        lines = i1 + 1, before[i1:i2], j1 + 1, after[j1:j2]
        found.append(Hunk(len(found) + 1, *lines, scope_of(*place)))
    return found


def mix(old, new, numbers):
    """The text of `old` with only some hunks of the diff to `new` in it.

    `numbers`: those of the hunks. None of them gives `old`, and all of them give `new`.
    """
    before, lines, done = read_lines(old), [], 0
    for hunk in hunks(old, new):
        start = hunk.old_start - 1
        lines += before[done:start]
        lines += hunk.added if hunk.number in numbers else hunk.removed
        done = start + len(hunk.removed)
    return "\n".join([*lines, *before[done:]]) + "\n"


def changes(old, new):
    """[(i1, i2, j1, j2)]: the lines `old[i1:i2]` have become the lines `new[j1:j2]`."""
    if new in SEQUELS:
        return by_function(old, new)
    files = read_lines(old), read_lines(new)
    matcher = difflib.SequenceMatcher(None, *files, autojunk=False)
    return [x for tag, *x in matcher.get_opcodes() if tag != "equal"]


def by_function(old, new):
    """What `changes` returns. A change ends where another function begins."""
    before, after = read_lines(old), read_lines(new)
    there = functions(old), functions(new)
    pairs = [(0, 0), *function_pairs(*there), (len(before), len(after))]
    # A class that the parent does not have is one change, with all of its methods.
    outside = {"", *there[0]}
    starts = [x for name, x in there[1].items() if name.rpartition(".")[0] in outside]
    found = []
    for (i1, j1), (i3, j3) in itertools.pairwise(pairs):
        kept = kept_lines(before[i1:i3], after[j1:j3])
        for i2, j2 in [*((i1 + i, j1 + j) for i, j in kept), (i3, j3)]:
            for start in starts:
                if j1 < start < j2 and (i2 > i1 or "".join(after[j1:start]).strip()):
                    found.append((i1, i2, j1, start))
                    i1, j1 = i2, start
            if (i1, j1) != (i2, j2):
                found.append((i1, i2, j1, j2))
            i1, j1 = i2 + 1, j2 + 1
    return found


def functions(name):
    """{name: index of its first line} of a file's functions, methods and classes."""
    where = scopes(name)
    return {scope_of(first, where): first - 1 for first, _, _ in where}


def function_pairs(old, new):
    """[(index, index)] of what `functions` has of both files, in order on both sides.

    A function that stands alone between two pairs on either side has a new name.
    """
    pairs = []
    for name in old:
        if name in new and (not pairs or new[name] > pairs[-1][1]):
            pairs.append((old[name], new[name]))
    renamed = []
    for one, other in itertools.pairwise([(-1, -1), *pairs, (10**9, 10**9)]):
        left = [x for x in old.values() if one[0] < x < other[0]]
        right = [x for x in new.values() if one[1] < x < other[1]]
        if len(left) == len(right) == 1:
            renamed += zip(left, right, strict=True)
    return sorted(pairs + renamed)


def kept_lines(before, after):
    """[(index, index)] of the equal lines in order that keep the most characters.

    difflib takes the longest stretch first, and if all are short, perhaps a bracket.
    """
    weights = [len(line.strip()) + 0.1 for line in before]
    best = [[0] * (len(after) + 1) for _ in range(len(before) + 1)]
    for i, j in itertools.product(range(len(before)), range(len(after))):
        both = best[i][j] + weights[i] if before[i] == after[j] else 0
        best[i + 1][j + 1] = max(best[i][j + 1], best[i + 1][j], both)
    kept, i, j = [], len(before), len(after)
    while i and j:
        if best[i][j] == best[i - 1][j]:
            i -= 1
        elif best[i][j] == best[i][j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            kept.append((i, j))
    return kept[::-1]


def changed_lines(old, new):
    """The changed lines, each with its sign, blank ones apart: the size of a diff."""
    return [x for hunk in hunks(old, new) for x in hunk.lines if x[1:].strip()]
