"""The diff is the product: within budget, no noise, the parent's order kept."""

import ast

import pytest

from ladder.diffs import changed_lines, hunks, unified
from ladder.rungs import EDGES, ROOT, RUNGS, commands, docstring

BUDGETS = {  # changed lines, blank ones apart; a variant has 40
    ("single_gpu.py", "multigpu.py"): 48,
    ("multigpu.py", "multinode.py"): 37,
    ("single_gpu.py", "multinode.py"): 52,
}
ALL = sorted({*EDGES, *BUDGETS})
METHODS = ["__init__", "train", "_run_epoch", "_run_batch", "_evaluate"]
METHODS += ["_save_snapshot", "_load_snapshot"]
FUNCTIONS = ["ddp_setup", "load_train_objs", "prepare_dataloader", "main"]


def names(path, kind):
    """Names of the functions of a file in their order, or of its Trainer's methods."""
    body = ast.parse((ROOT / path).read_text()).body
    if kind == "methods":
        (trainer,) = (x for x in body if getattr(x, "name", "") == "Trainer")
        body = trainer.body
    return [x.name for x in body if isinstance(x, ast.FunctionDef)]


def in_order(some, of):
    rest = iter(of)
    return all(x in rest for x in some)


def test_a_long_file_has_no_blank_line_for_a_change():
    """difflib takes them for junk from 200 lines on, and shows them as changed."""
    old, new = "docs/convert/step2.py", "docs/convert/after.py"
    assert len((ROOT / new).read_text().splitlines()) >= 200
    shown = [x for x in unified(old, new, 0)[2:] if not x.startswith("@@")]
    assert shown == [line for hunk in hunks(old, new) for line in hunk.lines]
    heads = [x for x in unified(old, new, 0) if x.startswith("@@")]
    assert heads[:3] == ["@@ -1 +1 @@", "@@ -3 +3 @@", "@@ -6,0 +7 @@"]


def test_the_root_holds_three_scripts():
    trunk = ["multigpu.py", "multinode.py", "single_gpu.py"]
    assert [name for name in RUNGS if "/" not in name] == trunk
    assert sorted(x.name for x in ROOT.glob("*.py")) == [*trunk, "utils.py"]


@pytest.mark.text
@pytest.mark.parametrize(("parent", "child"), ALL)
def test_budget(parent, child):
    lines = changed_lines(parent, child)
    assert len(lines) <= BUDGETS.get((parent, child), 40), "\n".join(lines)


@pytest.mark.text
@pytest.mark.parametrize(("parent", "child"), ALL)
def test_no_noise(parent, child):
    """No line only moved or reformatted, and no comment that goes without its line."""
    lines = changed_lines(parent, child)
    removed = ["".join(x[1:].split()) for x in lines if x[0] == "-"]
    added = ["".join(x[1:].split()) for x in lines if x[0] == "+"]
    assert not [x for x in removed if x.startswith("#")]
    moved = set(removed) & set(added) - {")"}  # which ends many a call
    indented = {x for x in moved if not_only_indented(x, parent, child)}
    assert not indented


def not_only_indented(squeezed, parent, child):
    """Whether a line both removed and added differs in more than its depth."""
    found = []
    for name in (parent, child):
        lines = (ROOT / name).read_text().splitlines()
        found.append({x.strip() for x in lines if "".join(x.split()) == squeezed})
        depths = {len(x) - len(x.lstrip()) for x in lines if x.strip() in found[-1]}
        found.append(depths)
    return found[0] != found[2] or found[1] == found[3]


@pytest.mark.parametrize("name", RUNGS)
def test_order(name):
    assert in_order(METHODS, names(name, "methods"))
    functions = [x for x in FUNCTIONS if x in names(name, "functions")]
    assert in_order(functions, names(name, "functions"))
    assert {"load_train_objs", "prepare_dataloader", "main"} <= set(functions)
    parent = RUNGS[name]
    if parent:
        assert in_order(names(parent, "methods"), names(name, "methods"))
        assert in_order(names(parent, "functions"), names(name, "functions"))


@pytest.mark.parametrize("name", RUNGS)
def test_docstring(name):
    """It names its parent, which is there, and a command that runs this very file."""
    assert RUNGS[name] is None or RUNGS[name] in RUNGS
    assert commands(name)
    module = name.removesuffix(".py").replace("/", ".")
    assert all({name, module} & set(words) for words in commands(name))
    first = docstring(ROOT / name).splitlines()[0]
    assert all(first != docstring(ROOT / x).splitlines()[0] for x in RUNGS if x != name)


@pytest.mark.parametrize("name", [*RUNGS, "utils.py"])
def test_width(name):
    """Two files fit side by side."""
    lines = (ROOT / name).read_text().splitlines()
    assert not [x for x in lines if len(x) > 88]
