"""The diffs between scripts: hunks without lines of context, and what they weigh."""

import ast
import difflib
import functools
from typing import NamedTuple

from tools.scripts import InputError, read_lines

KINDS = (ast.ClassDef, ast.FunctionDef)


def matcher(before, after):
    """difflib's, without its junk: from 200 lines on it takes blank ones for that."""
    return difflib.SequenceMatcher(None, before, after, autojunk=False)


def align(before, after, likeness):
    """[(i, j)]: which of the items `before` have become which of those `after`.

    likeness(one, other): how much two items have in common, 0 if one cannot have become
    the other. The pairs are in order on both sides, and of all such pairings they are
    the one with the most in common.
    """
    best = [(0, [])] * (len(after) + 1)  # of what stands before i and j
    for i, one in enumerate(before):
        row = [(0, [])]
        for j, other in enumerate(after):
            common, pairs = best[j]
            alike = likeness(one, other)
            both = (common + alike, [*pairs, (i, j)]) if alike else (0, [])
            row.append(max(row[j], best[j + 1], both, key=lambda x: x[0]))
        best = row
    return best[-1][1]


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


def first_line(node):
    """The first line of a statement, which may be that of a decorator."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(x.lineno for x in decorators)])


@functools.cache
def tree_of(name):
    try:
        return ast.parse("\n".join(read_lines(name)))
    except SyntaxError as error:
        raise InputError(f"{name}:{error.lineno}: {error.msg}") from None


@functools.cache
def scopes(name):
    """[(first line, last line, name)] of a file's classes and functions."""
    nodes = [x for x in ast.walk(tree_of(name)) if isinstance(x, KINDS)]
    return sorted((first_line(x), x.end_lineno, x.name) for x in nodes)


def scope_of(line, where):
    """What of `scopes` a line stands in, as `Trainer.train`."""
    return ".".join(name for first, last, name in where if first <= line <= last)


@functools.cache
def hunks(old, new):
    """The hunks of the diff between two files, without lines of context.

    A function or class at the top level begins a hunk of its own.
    """
    before, after = read_lines(old), read_lines(new)
    starts = [first_line(x) - 1 for x in tree_of(new).body if isinstance(x, KINDS)]
    found = []
    for tag, i1, i2, j1, j2 in matcher(before, after).get_opcodes():
        if tag == "equal":
            continue
        for stop in [*(x for x in starts if j1 < x < j2), j2]:
            if i2 == i1 and stop < j2 and not "".join(after[j1:stop]).strip():
                continue
            place = (j1 + 1, scopes(new)) if stop > j1 else (i1 + 1, scopes(old))
            lines = i1 + 1, before[i1:i2], j1 + 1, after[j1:stop]
            found.append(Hunk(len(found) + 1, *lines, scope_of(*place)))
            i1, j1 = i2, stop
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


def changed_lines(old, new):
    """The changed lines, each with its sign, not counting blank ones."""
    return [x for hunk in hunks(old, new) for x in hunk.lines if x[1:].strip()]


def inside_and_own(old, new):
    """What the budget counts: (changed lines inside what `old` has, lines of its own).

    Its own are the functions and classes at the top level of `new` that `old` does not
    have. The other lines are those of the diff to `new` without them. Both are without
    blank lines.
    """
    names = {getattr(x, "name", None) for x in tree_of(old).body}
    top = [x for x in tree_of(new).body if isinstance(x, KINDS)]
    new_ones = [x for x in top if x.name not in names]
    places = {i for x in new_ones for i in range(first_line(x), x.end_lineno + 1)}
    lines = [*enumerate(read_lines(new), 1)]
    own = [x for number, x in lines if number in places and x.strip()]
    rest = [x for number, x in lines if number not in places]
    before, changed = read_lines(old), []
    for tag, i1, i2, j1, j2 in matcher(before, rest).get_opcodes():
        if tag != "equal":
            changed += [f"-{x}" for x in before[i1:i2] if x.strip()]
            changed += [f"+{x}" for x in rest[j1:j2] if x.strip()]
    return changed, own
