"""The rungs, found by listing the folders, and the diffs between them."""

import ast
import difflib
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Wrong(Exception):
    """Bad input: its message is the one line to print before exit status 2."""


def docstring(path):
    return ast.get_docstring(ast.parse(Path(path).read_text())) or ""


def find_rungs():
    """{name: parent name or None} of every script that names its parent."""
    rungs = {}
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("variants/*.py")]):
        parent = re.search(r"Parent: (\S+)", docstring(path))
        if parent:
            name = str(path.relative_to(ROOT))
            rungs[name] = None if parent[1] == "none" else parent[1]
    return rungs


RUNGS = find_rungs()
EDGES = [(parent, child) for child, parent in RUNGS.items() if parent]


def read_lines(name):
    """The lines of a file of this repository, or Wrong."""
    path = ROOT / name
    if not path.is_file():
        raise Wrong(f"there is no file {name}")
    return path.read_text().splitlines()


def unified(old, new, context=3):
    """The lines of `diff -u old new`."""
    lines = read_lines(old), read_lines(new)
    return list(difflib.unified_diff(*lines, old, new, n=context, lineterm=""))


class Hunk(NamedTuple):
    """Adjacent changed lines: `gone` from line `old_start`, `come` from `new_start`.

    Lines count from 1. `number` counts the hunks of the diff from 1. `scope` is the
    class and function that it stands in, "" outside of any.
    """

    number: int
    old_start: int
    gone: list
    new_start: int
    come: list
    scope: str

    @property
    def lines(self):
        return [f"-{x}" for x in self.gone] + [f"+{x}" for x in self.come]


def scope_of(lines, line):
    """The names of the class and functions around a line, as `Trainer.train`."""
    found = []
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
            if first <= line <= node.end_lineno:
                found.append((first, node.name))
    return ".".join(name for _, name in sorted(found))


def hunks(old, new):
    """The hunks of the diff between two files, without lines of context."""
    before, after = read_lines(old), read_lines(new)
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    found = []
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag != "equal":
            scope = scope_of(after, j1 + 1) if j2 > j1 else scope_of(before, i1 + 1)
            hunk = Hunk(
                len(found) + 1, i1 + 1, before[i1:i2], j1 + 1, after[j1:j2], scope
            )
            found.append(hunk)
    return found


def changed_lines(old, new):
    """The changed lines, each with its sign, blank ones apart: the size of a diff."""
    return [x for hunk in hunks(old, new) for x in hunk.lines if x[1:].strip()]
