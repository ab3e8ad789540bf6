"""The diffs between scripts: hunks without lines of context, and what they weigh."""

import ast
import difflib
import functools
import re
from typing import NamedTuple

from tools.scripts import read_lines, tree

KINDS = (ast.ClassDef, ast.FunctionDef)


def matcher(before, after):
    """difflib's, without its junk: from 200 lines on it takes blank ones for that."""
    return difflib.SequenceMatcher(None, before, after, autojunk=False)


def changed_ranges(before, after):
    """Yield (i1, i2, j1, j2): before[i1:i2] has become after[j1:j2]."""
    for tag, *places in matcher(before, after).get_opcodes():
        if tag != "equal":
            yield places


SIMILAR = 0.35  # from here on, two lines are one line that was changed


@functools.cache
def likeness(one, other):
    """The share of the names and numbers of two texts that is in both; 0 if small."""
    alike = matcher(names_in(one), names_in(other)).ratio()
    return alike if alike >= SIMILAR else 0


def names_in(text):
    """The names and numbers of a text, without `self`, which most lines have."""
    return [name for name in re.findall(r"\w+", text) if name != "self"]


def align(before, after):
    """[(i, j)]: which of the lines `before` have become which of those `after`.

    The pairs are in order on both sides, and of all such pairings they are the one with
    the most in common.
    """
    # best[j]: how much the items before i and before j have in common at most, and the
    # pairs with which they do. `row` is the same for the next i.
    best = [(0, [])] * (len(after) + 1)
    for i, one in enumerate(before):
        row = [(0, [])]
        for j, other in enumerate(after):
            found = [row[j], best[j + 1]]
            alike = likeness(one, other)
            if alike:
                common, pairs = best[j]
                found.append((common + alike, [*pairs, (i, j)]))
            row.append(max(found, key=lambda pairing: pairing[0]))
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
        """As a diff shows them, each with its sign."""
        minus = [f"-{line}" for line in self.removed]
        return minus + [f"+{line}" for line in self.added]

    @property
    def old_end(self):
        """The line of the parent below `removed`."""
        return self.old_start + len(self.removed)

    @property
    def new_end(self):
        return self.new_start + len(self.added)


def first_line(node):
    """The first line of a statement, which may be that of a decorator."""
    decorators = getattr(node, "decorator_list", [])
    return min(part.lineno for part in [node, *decorators])


@functools.cache
def scopes(name):
    """[(first line, last line, name)] of a file's classes and functions."""
    found = []
    for node in ast.walk(tree(name)):
        if isinstance(node, KINDS):
            found.append((first_line(node), node.end_lineno, node.name))
    return sorted(found)


def scope_of(name, line):
    """The class and function that a line of a file stands in, as `Trainer.train`."""
    return ".".join(part for first, last, part in scopes(name) if first <= line <= last)


@functools.cache
def hunks(old, new):
    """The hunks of the diff between two files, without lines of context.

    A function or class at the top level begins a hunk of its own.
    """
    before = read_lines(old)
    after = read_lines(new)
    top_level = [node for node in tree(new).body if isinstance(node, KINDS)]
    starts = [first_line(node) - 1 for node in top_level]
    found = []
    for i1, i2, j1, j2 in changed_ranges(before, after):
        inside = [start for start in starts if j1 < start < j2]
        for stop in [*inside, j2]:
            is_blank = not "".join(after[j1:stop]).strip()
            if i1 == i2 and stop < j2 and is_blank:
                continue  # blank lines above a function belong to its hunk
            place = (new, j1 + 1) if stop > j1 else (old, i1 + 1)
            found.append(
                Hunk(
                    number=len(found) + 1,
                    old_start=i1 + 1,
                    removed=before[i1:i2],
                    new_start=j1 + 1,
                    added=after[j1:stop],
                    scope=scope_of(*place),
                )
            )
            i1 = i2
            j1 = stop
    return found


def changed_lines(old, new):
    """The changed lines, each with its sign, not counting blank ones."""
    lines = sum((hunk.lines for hunk in hunks(old, new)), [])
    return [line for line in lines if line[1:].strip()]
