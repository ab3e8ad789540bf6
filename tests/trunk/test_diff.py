"""The diff is the product: no noise, the parent's order kept."""

import ast

import pytest

from tools.diffs import changed_lines
from tools.scripts import (
    ALL_EDGES,
    EDGES,
    PARENTS,
    ROOT,
    SCRIPTS,
    commands,
    docstring,
    tree,
)

ALL = [*ALL_EDGES, ("single_gpu.py", "multinode.py")]


@pytest.mark.text
@pytest.mark.parametrize(("parent", "child"), ALL)
def test_no_noise(parent, child):
    """No line only moved or reformatted, and no comment that goes without its line."""
    changed = changed_lines(parent, child)
    removed = [line[1:] for line in changed if line.startswith("-")]
    added = [line[1:] for line in changed if line.startswith("+")]
    if child in SCRIPTS:
        assert not [line for line in removed if line.strip().startswith("#")]
    old_lines = {squeezed(line): line for line in removed}
    new_lines = {squeezed(line): line for line in added}
    for content in old_lines.keys() & new_lines.keys():
        if len(content) > 3:  # brackets may be in both by chance
            old = old_lines[content]
            new = new_lines[content]
            assert old.strip() == new.strip(), "reformatted"
            assert depth(old) != depth(new), "moved"


def squeezed(line):
    return "".join(line.split())


def depth(line):
    return len(line) - len(line.lstrip())


def in_order(some, of):
    rest = iter(of)
    return all(name in rest for name in some)


def function_names(body):
    return [node.name for node in body if isinstance(node, ast.FunctionDef)]


def names(path):
    """(names of the functions of a file in their order, of its Trainer's methods)."""
    body = tree(path).body
    (trainer,) = (node for node in body if getattr(node, "name", "") == "Trainer")
    return function_names(body), function_names(trainer.body)


@pytest.mark.parametrize(("parent", "child"), EDGES)
def test_order(parent, child):
    """Each function and each method keeps its name and its place."""
    parents_functions, parents_methods = names(parent)
    functions, methods = names(child)
    assert in_order(parents_functions, functions)
    assert in_order(parents_methods, methods)


@pytest.mark.parametrize("name", PARENTS)
def test_docstring(name):
    """It names its parent, and a command that runs this very file."""
    parent = PARENTS[name]
    assert f"Parent: {parent or 'none'}" in docstring(ROOT / name)
    assert commands(name) or "__main__" not in (ROOT / name).read_text()
    if name in SCRIPTS:
        module = name.removesuffix(".py").replace("/", ".")
        for words in commands(name):
            assert name in words or module in words
    first_lines = [docstring(ROOT / script).splitlines()[0] for script in PARENTS]
    own = docstring(ROOT / name).splitlines()[0]
    assert first_lines.count(own) == 1
