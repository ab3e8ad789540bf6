"""The diffs between rungs, as hunks without lines of context."""

import ast
import difflib
import functools
from typing import NamedTuple

from ladder.rungs import InputError, read_lines


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
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    found = []
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag != "equal":
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


def changed_lines(old, new):
    """The changed lines, each with its sign, blank ones apart: the size of a diff."""
    return [x for hunk in hunks(old, new) for x in hunk.lines if x[1:].strip()]
