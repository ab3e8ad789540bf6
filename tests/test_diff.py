"""The diff is the product: within budget, no noise, the parent's order kept."""

import ast

import pytest

from ladder.diffs import by_function, changed_lines, hunks, mix, unified
from ladder.rungs import (
    ALL_EDGES,
    EDGES,
    PARENTS,
    ROOT,
    RUNGS,
    SEQUELS,
    commands,
    docstring,
    read_lines,
)

BUDGETS = {  # changed lines, blank ones apart; a variant has 40
    ("single_gpu.py", "multigpu.py"): 48,
    ("multigpu.py", "multinode.py"): 37,
    ("single_gpu.py", "multinode.py"): 52,
    ("multinode.py", "mingpt/train.py"): 280,
    ("mingpt/model.py", "mingpt/modern.py"): 100,
}
ALL = sorted({*ALL_EDGES, ("single_gpu.py", "multinode.py")})
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


def outline(path):
    """{"": names in a file, class: names in the class}, in their order."""
    body = ast.parse((ROOT / path).read_text()).body
    kinds = ast.ClassDef, ast.FunctionDef
    classes = {x.name: x.body for x in body if isinstance(x, ast.ClassDef)}
    return {
        where: [x.name for x in inside if isinstance(x, kinds)]
        for where, inside in {"": body, **classes}.items()
    }


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


PARENT = """class Trainer:
    def train(self):
        for epoch in range(9):
            self.run_epoch(epoch)
            if last:
                self.save()

    def run_epoch(self, epoch):
        self.seed(epoch)
        self.model.train()
        return self.loss

    def log(self):
        print(
            self.loss
        )
        self.flush()
"""
CHILD = """class Trainer:
    def train(self):
        while True:
            self.run_steps()
            self.save()

    def run_steps(self):
        for _ in range(9):
            if stop:
                self.save()
        self.model.train()
        return self.loss

    def log(self):
        self.flush()
        send(
            1
        )

    def draw(self):
        return 1


class Other:
    def one(self):
        return 1

    def two(self):
        return 2
"""


def test_the_diff_of_a_sequel_goes_function_by_function(tmp_path):
    """A renamed function stays one, and a new function or class is a change of its own.

    difflib would pair the `self.save()` of `train` with that of `run_steps`, and rather
    a bracket than `self.flush()`.
    """
    (tmp_path / "old.py").write_text(PARENT)
    (tmp_path / "new.py").write_text(CHILD)
    changes = by_function(str(tmp_path / "old.py"), str(tmp_path / "new.py"))
    lines = CHILD.splitlines()
    shown = [[x.strip() for x in lines[j1:j2] if x] for *_, j1, j2 in changes]
    assert [(x[0], x[-1]) for x in shown if x] == [
        ("while True:", "self.save()"),
        ("def run_steps(self):", "self.save()"),
        ("send(", ")"),
        ("def draw(self):", "return 1"),
        ("class Other:", "return 2"),
    ]


@pytest.mark.parametrize(("parent", "child"), EDGES)
def test_function_by_function_no_line_is_lost(parent, child):
    old, new = (read_lines(name) for name in (parent, child))
    for i1, i2, j1, j2 in reversed(by_function(parent, child)):
        old[i1:i2] = new[j1:j2]
    assert old == new


@pytest.mark.parametrize(("parent", "child"), ALL)
def test_a_mix_has_the_hunks_that_it_is_given(parent, child):
    old, new = ((ROOT / x).read_text() for x in (parent, child))
    numbers = {hunk.number for hunk in hunks(parent, child)}
    assert (mix(parent, child, set()), mix(parent, child, numbers)) == (old, new)
    first = hunks(parent, child)[0]
    assert mix(parent, child, {1}) == old.replace(*map("\n".join, first[2::2]), 1)


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
    if child in RUNGS:
        assert not [x for x in removed if x.startswith("#")]
    assert not [x for hunk in hunks(parent, child) for x in left_alone(hunk.removed)]
    moved = set(removed) & set(added) - {")", '"""'}  # which end many a text
    indented = {x for x in moved if not_only_indented(x, parent, child)}
    assert not indented


def left_alone(removed):
    """The comments of removed lines that were above a line which is still there."""
    found = []
    for line in filter(str.strip, removed):
        found = [*found, line] if line.strip().startswith("#") else []
    return found


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


@pytest.mark.parametrize("name", SEQUELS)
def test_a_sequel_keeps_the_order_of_what_it_shares_with_its_parent(name):
    old, new = outline(SEQUELS[name]), outline(name)
    shared = {x: [y for y in old[x] if y in new[x]] for x in old if x in new}
    for where, names_of_both in shared.items():
        assert [x for x in new[where] if x in names_of_both] == names_of_both
    assert 2 * len(sum(shared.values(), [])) > len(sum(old.values(), []))


@pytest.mark.parametrize("name", PARENTS)
def test_docstring(name):
    """It names its parent, which is there, and a command that runs this very file.

    mingpt/modern.py is run by mingpt/train.py.
    """
    assert PARENTS[name] is None or (ROOT / PARENTS[name]).is_file()
    assert commands(name) or "__main__" not in (ROOT / name).read_text()
    module = name.removesuffix(".py").replace("/", ".")
    its = {name, module} | ({"mingpt.train"} if name in SEQUELS else set())
    assert all(its & set(words) for words in commands(name))
    first = docstring(ROOT / name).splitlines()[0]
    others = [docstring(ROOT / x).splitlines()[0] for x in PARENTS if x != name]
    assert first not in others


MINGPT = [str(x.relative_to(ROOT)) for x in sorted(ROOT.glob("mingpt/**/*.py"))]


@pytest.mark.parametrize("name", [*RUNGS, "utils.py", *MINGPT])
def test_width(name):
    """Two files fit side by side."""
    lines = (ROOT / name).read_text().splitlines()
    assert not [x for x in lines if len(x) > 88]
