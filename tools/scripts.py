"""The scripts: every script whose docstring names its parent, found by listing folders.

`SCRIPTS` is {name: parent's name, or None}; `EDGES` is [(parent, child)]. A name is a
path from the root of the repository, such as `variants/preemptible.py`.

One more diff is explained line by line, that of the two models in mingpt/: `PARENTS`
and `ALL_EDGES` hold it as well. It is no script, and tests of scripts leave it out.
"""

import ast
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class InputError(Exception):
    """Bad input: its message is the one line to print before exit status 2."""


def read_lines(name):
    """The lines of a text file of the repository, or InputError. Ends are cut off."""
    try:
        text = (ROOT / name).read_text()
    except OSError as error:
        raise InputError(f"{name}:1: cannot be read: {error}") from None
    return text.removesuffix("\n").split("\n")


def docstring(path):
    """The text of a script's docstring, or "" if it does not begin with one.

    Read as text and not parsed, so that a script with a syntax error has one as well.
    """
    text = Path(path).read_bytes().decode(errors="replace")
    found = re.match(r"""(?:#[^\n]*\n|\s)*("{3}|'{3})(.*?)\1""", text, re.S)
    return found[2] if found else ""


def summary(name):
    """The first sentence of a script's docstring, without the full stop."""
    return docstring(ROOT / name).split(". ")[0]


def commands(name):
    """The shell commands in the script's docstring, as lists of words."""
    lines = docstring(ROOT / name).splitlines()
    starts = ("python ", "torchrun ")
    lines = [line for line in lines if line.startswith(starts)]
    return [shlex.split(line, comments=True) for line in lines]


# What a script does is read from its syntax tree, so that its layout is free.


def tree(path):
    """The syntax tree of a file, by name or absolute path; empty if it is no Python."""
    try:
        return ast.parse((ROOT / path).read_bytes())
    except SyntaxError:
        return ast.parse("")


def calls(path):
    """{what a file calls, by its last name: the keywords that it is given}."""
    found = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            keywords = found.setdefault(name, set())
            keywords.update(keyword.arg for keyword in node.keywords)
    return found


def find_scripts():
    """{name: its parent's name, or None}, for files whose docstring names a parent."""
    parents = {}
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("variants/**/*.py")]):
        found = re.search(r"Parent: (\S+)", docstring(path))
        if found:
            parent = None if found[1] == "none" else found[1]
            parents[str(path.relative_to(ROOT))] = parent
    return parents


SCRIPTS = find_scripts()
EDGES = [(parent, child) for child, parent in SCRIPTS.items() if parent]
PARENTS = SCRIPTS | {"mingpt/modern.py": "mingpt/model.py"}
ALL_EDGES = [(parent, child) for child, parent in PARENTS.items() if parent]


def check_scripts():
    """Raise InputError unless each variant names its parent, or what it is made of."""
    for path in ROOT.glob("variants/**/*.py"):
        named = re.search(r"Parent: |\nMade of: ", docstring(path))
        if not named and path.name != "__init__.py":
            line = "the docstring names no parent (Parent: multinode.py)"
            raise InputError(f"{path.relative_to(ROOT)}:1: {line}")


def ancestry(name):
    """Where a script stands in the tree: its ancestors' names, then its own."""
    path = []
    while name:
        path.insert(0, name)
        name = SCRIPTS.get(name)
    return path


def trunk():
    """The scripts of the root, from the first to the last."""
    return sorted((name for name in SCRIPTS if "/" not in name), key=ancestry)


def variants():
    """The other scripts, those of the first script of the root first."""
    others = [name for name in SCRIPTS if "/" in name]
    return sorted(others, key=lambda name: (ancestry(root_of(name)), ancestry(name)))


def root_of(name):
    """The last script of the root that a script comes from."""
    return [ancestor for ancestor in ancestry(name) if "/" not in ancestor][-1]
