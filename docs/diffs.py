"""The rungs, found by listing the folders, and the diffs between them."""

import ast
import difflib
import functools
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Wrong(Exception):
    """Bad input: its message is the one line to print before exit status 2."""


def read_lines(name):
    """The lines of a text file of this repository, without their ends, or Wrong."""
    try:
        text = (ROOT / name).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise Wrong(f"{name}:1: cannot be read: {error}") from None
    lines = text.removesuffix("\n").split("\n")
    for number, line in enumerate(lines, 1):
        if re.search("[\0\r\f\v\u2028\ufeff]", line):
            raise Wrong(
                f"{name}:{number}: a line ends with LF and has no control codes"
            )
    return lines


def docstring(path):
    """The text of a script's docstring, or "" if it does not begin with one."""
    text = Path(path).read_bytes().decode(errors="replace")
    found = re.match(r"""(?:#.*\n|\s)*("{3}|'{3})(.*?)\1""", text, re.S)
    return found[2] if found else ""


def find_rungs():
    """{name: parent name or None} of every script that names its parent."""
    rungs = {}
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("variants/**/*.py")]):
        parent = re.search(r"Parent: (\S+)", docstring(path))
        if parent:
            name = str(path.relative_to(ROOT))
            rungs[name] = None if parent[1] == "none" else parent[1]
    return rungs


RUNGS = find_rungs()
EDGES = [(parent, child) for child, parent in RUNGS.items() if parent]


def check_rungs():
    """Raise Wrong unless all scripts are on one tree: one has no parent."""
    for path in ROOT.glob("variants/**/*.py"):
        name = str(path.relative_to(ROOT))
        if name not in RUNGS and path.name != "__init__.py":
            raise Wrong(
                f"{name}:1: the docstring names no parent (Parent: multinode.py)"
            )
    for name, parent in RUNGS.items():
        above = []
        while parent:
            if parent not in RUNGS:
                raise Wrong(f"{name}:1: its parent {parent} is no rung")
            if parent in above:
                raise Wrong(f"{name}:1: its parents go round in a circle")
            above.append(parent)
            parent = RUNGS[parent]
    if list(RUNGS.values()).count(None) != 1:
        raise Wrong("single_gpu.py:1: one rung has no parent (Parent: none), not more")


def depth(name):
    """Where a rung stands in the tree: its ancestors' names, then its own."""
    path = []
    while name:
        path, name = [name, *path], RUNGS[name]
    return path


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


@functools.cache
def scopes(name):
    """[(first line, last line, name)] of a file's classes and functions, or Wrong."""
    try:
        tree = ast.parse("\n".join(read_lines(name)))
    except SyntaxError as error:
        raise Wrong(f"{name}:{error.lineno}: {error.msg}") from None
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
    gone_from, come_to = scopes(old), scopes(new)
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    found = []
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag != "equal":
            place = (j1 + 1, come_to) if j2 > j1 else (i1 + 1, gone_from)
            lines = i1 + 1, before[i1:i2], j1 + 1, after[j1:j2]
            found.append(Hunk(len(found) + 1, *lines, scope_of(*place)))
    return found


def changed_lines(old, new):
    """The changed lines, each with its sign, blank ones apart: the size of a diff."""
    return [x for hunk in hunks(old, new) for x in hunk.lines if x[1:].strip()]
