"""The diff is the product: no noise, the parent's order kept."""

import ast

import pytest

from tools.diffs import changed_lines, hunks, mix
from tools.scripts import ALL_EDGES, PARENTS, ROOT, SCRIPTS, commands, docstring

ALL = [*ALL_EDGES, ("single_gpu.py", "multinode.py")]
METHODS = ["__init__", "train", "_run_epoch", "_run_batch", "_evaluate"]
METHODS += ["_save_snapshot", "_load_snapshot"]
FUNCTIONS = ["ddp_setup", "load_train_objs", "prepare_dataloader", "main"]


def text(name):
    return (ROOT / name).read_text()


@pytest.mark.parametrize(("parent", "child"), ALL)
def test_a_mix_has_the_hunks_that_it_is_given(parent, child):
    old, new = text(parent), text(child)
    numbers = {hunk.number for hunk in hunks(parent, child)}
    assert (mix(parent, child, set()), mix(parent, child, numbers)) == (old, new)
    first = hunks(parent, child)[0]
    assert mix(parent, child, {1}) == old.replace(*map("\n".join, first[2::2]), 1)


@pytest.mark.text
def test_the_root_holds_three_scripts():
    there = [path.name for path in ROOT.glob("*.py")]
    assert sorted(there) == ["multigpu.py", "multinode.py", "single_gpu.py", "utils.py"]


@pytest.mark.text
@pytest.mark.parametrize(("parent", "child"), ALL)
def test_no_noise(parent, child):
    """No line only moved or reformatted, and no comment that goes without its line."""
    changed = changed_lines(parent, child)
    removed, added = ([x[1:] for x in changed if x[0] == sign] for sign in "-+")
    if child in SCRIPTS:
        assert not [x for x in removed if x.strip().startswith("#")]
    old, new = ({"".join(x.split()): x for x in lines} for lines in (removed, added))
    same = [(old[x], new[x]) for x in {*old} & {*new} if len(x) > 3]
    assert not [x for x, y in same if x.strip() != y.strip() or depth(x) == depth(y)]


def depth(line):
    return len(line) - len(line.lstrip())


def in_order(some, of):
    rest = iter(of)
    return all(x in rest for x in some)


def names(path):
    """(names of the functions of a file in their order, of its Trainer's methods)."""
    body = ast.parse(text(path)).body
    (trainer,) = (x.body for x in body if getattr(x, "name", "") == "Trainer")
    kind = ast.FunctionDef
    return [[x.name for x in y if isinstance(x, kind)] for y in (body, trainer)]


@pytest.mark.parametrize("name", SCRIPTS)
def test_order(name):
    functions, methods = names(name)
    assert in_order(METHODS, methods)
    assert in_order([x for x in FUNCTIONS if x in functions], functions)
    assert set(FUNCTIONS[1:]) <= set(functions)
    assert not SCRIPTS[name] or all(map(in_order, names(SCRIPTS[name]), names(name)))


@pytest.mark.parametrize("name", PARENTS)
def test_docstring(name):
    """It names its parent, which is there, and a command that runs this very file."""
    assert PARENTS[name] is None or (ROOT / PARENTS[name]).is_file()
    assert commands(name) or "__main__" not in text(name)
    module = name.removesuffix(".py").replace("/", ".")
    if name in SCRIPTS:
        assert all({name, module} & set(words) for words in commands(name))
    first = docstring(ROOT / name).splitlines()[0]
    others = [docstring(ROOT / x).splitlines()[0] for x in PARENTS if x != name]
    assert first not in others
