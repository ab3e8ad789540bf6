"""Mutants take out what they should, and the proof that uses them can fail."""

import ast
import functools
import shutil
import subprocess
from pathlib import Path

import pytest

from ladder.diffs import changed_lines, hunks
from ladder.files import copy_tree, edit
from ladder.rungs import ALL_EDGES, EDGES, ROOT
from proofs.lines import about, is_of, mutants_of, named_files
from proofs.mutations import meaning, mutants
from proofs.warm import Fork

# Mutants of small texts


def found(parent, child, kind):
    """[(what is taken out, the text without it)] of the mutants of one kind."""
    return [(x.what, x.text) for x in mutants(parent, child) if x.kind == kind]


def block(text):
    """`text` as the body of a function."""
    indented = "".join(f"    {line}\n" for line in text.splitlines())
    return f"def f(self):\n    first()\n{indented}    last()\n"


UNWRAPPED = {
    "if a:\n    b()": "b()",
    "if a:\n    b()\nelse:\n    c()": "b()",
    "with self.no_sync():\n    b()": "b()",
    "with a, \\\n     b:\n    # why\n    c()": "c()",
    "for x in y:\n    b(x)": "b(x)",
    "while a:\n    b()": "b()",
    "try:\n    b()\nexcept ValueError:\n    c()": "b()",
    "try:\n    b()\nfinally:\n    c()": "b()",
    "def g():\n    b()\n    c()": "b()\nc()",
    "class G:\n    b = 1": "b = 1",
    "@cached\ndef g():\n    b()": "b()",
}


@pytest.mark.parametrize("statement", UNWRAPPED)
def test_a_block_stays_alone(statement):
    parent, child = block(""), block(statement)
    texts = [text for _, text in found(parent, child, "block")]
    assert [meaning(x) for x in texts] == [meaning(block(UNWRAPPED[statement]))]


@pytest.mark.parametrize("statement", UNWRAPPED)
def test_a_compound_statement_is_taken_out_whole(statement):
    parent, child = block(""), block(statement)
    texts = [meaning(text) for _, text in found(parent, child, "statement")]
    assert meaning(block("pass")) in texts


def test_a_block_around_lines_of_the_parent_gives_them_back():
    """Taken out whole, and its block alone: both are the parent."""
    parent = block("loss = g(x)\nloss.backward()")
    child = block("with self.no_sync():\n    loss = g(x)\n\n    loss.backward()")
    texts = [text for _, text in found(parent, child, "statement")]
    assert meaning(parent) in [meaning(x) for x in texts]
    assert not found(parent, child, "block"), "it is the same as the whole"
    assert meaning(block("with self.no_sync():\n    loss = g(x)\n    pass")) in [
        meaning(x) for x in texts
    ]


def test_a_line_that_only_moved_is_taken_out():
    """It must not come back as the child: with the parent's line it would."""
    parent = block("self.optimizer.zero_grad()\nself.optimizer.step()")
    step = "self.optimizer.step()"
    child = block(f"if self.due():\n    self.optimizer.zero_grad()\n{step}")
    cases = dict(found(parent, child, "statement"))
    expected = block(f"if self.due():\n    pass\n{step}")
    assert meaning(cases["self.optimizer.zero_grad()"]) == meaning(expected)
    whole = cases["if self.due(): self.optimizer.zero_grad()"]
    assert meaning(whole) == meaning(parent)


def test_a_return_outside_a_function_is_no_mutant():
    assert not found("a()\n", "a()\ndef f():\n    return 1\n", "block")


BRANCHES = {
    "if a:\n    b()\nelse:\n    c()": "if a:\n    b()",
    "try:\n    a()\nexcept B:\n    c()\nelse:\n    d()": (
        "try:\n    a()\nexcept B:\n    c()"
    ),
    "for x in y:\n    b()\nelse:\n    c()": "for x in y:\n    b()",
}


@pytest.mark.parametrize("statement", BRANCHES)
def test_a_branch_is_taken_out(statement):
    texts = [text for _, text in found(block(""), block(statement), "branch")]
    assert meaning(block(BRANCHES[statement])) in [meaning(x) for x in texts]


def test_a_branch_that_the_parent_does_not_have():
    parent, child = block("if a:\n    b()"), block("if a:\n    b()\nelse:\n    c()")
    assert parent in [text for _, text in found(parent, child, "branch")]


def test_an_elif_is_taken_out_or_becomes_an_else():
    parent = block("if a:\n    b()")
    child = block("if a:\n    b()\nelif c:\n    d()")
    (whole, *_) = (x for what, x in found(parent, child, "statement") if "elif" in what)
    assert meaning(whole) == meaning(block("if a:\n    b()\npass"))
    ((_, alone),) = found(parent, child, "block")
    assert meaning(alone) == meaning(block("if a:\n    b()\nelse:\n    d()"))


def test_comments_and_docstrings_of_functions_do_not_count():
    child = "# Why.\ndef f():\n    pass\n"
    assert not mutants("def f():\n    pass\n", child)
    assert not mutants("a()\n", "a()  # why\n")
    header = "for x in {}:\n    a()\n"
    (mutant,) = mutants(header.format("y"), header.format("z"))
    assert mutant.text == header.format("y"), "its block is not added"
    child = 'def f():\n    """What it does."""\n    a()\n'
    assert not mutants("def f():\n    a()\n", child)


ARGUMENTS = {  # a line of the parent's, of the child's, and what is made of the latter
    ("", "f(a, b=1)"): ["f(b=1)", "f(a)"],
    ("", "f(\n        a,\n        b=g(1),\n    )"): [
        "f(b=g(1))",
        "f(a)",
        "f(a, b=g())",
    ],
    ("", "f((a + b), (c))"): ["f((c))", "f((a + b))"],
    ("", "f(x for x in y)"): ["f()"],
    ("", "f(*a, **b)"): ["f(**b)", "f(*a)"],
    ("", "f('ä, ö', b)"): ["f(b)", "f('ä, ö')"],
    ("", "(f)(a)"): ["(f)()"],
    ("x = f(a)", "x = f(a, b)"): ["x = f(a)"],
    ("x = f(a, b=1)", "x = f(a, b=2)"): ["x = f(a, b=1)"],
    ("x = f(a)", "x = f(b)"): ["x = f(a)"],
    ("x = f(g(a))", "x = f(g(a)) + 1"): [],
    ("x = f(a=1)", "x = g(a=1)"): ["x = g()"],
    ("", "print(f'{g(a)}')"): ["print()"],
    ("", "def g(a=h(1)):\n        pass"): [],
}


@pytest.mark.parametrize(("old", "new"), ARGUMENTS)
def test_arguments_are_taken_out_or_set_to_the_parents(old, new):
    texts = [x for _, x in found(block(old), block(new), "argument")]
    expected = [meaning(block(x)) for x in ARGUMENTS[old, new]]
    got = [meaning(x) for x in texts]
    if block(old) == block(ARGUMENTS[old, new][0] if ARGUMENTS[old, new] else ""):
        expected = []  # it is the statement's mutant already
    assert sorted(got) == sorted(expected)


def test_an_argument_alone_may_be_added():
    """To a call of several lines, whose other arguments are the parent's."""
    parent = block("f(\n    a,\n    b=1,\n)")
    child = block("f(\n    a,\n    b=1,\n    c=2,\n)")
    (mutant,) = mutants(parent, child)
    assert meaning(mutant.text) == meaning(parent)


# Mutants of the rungs


@functools.cache
def of_edge(parent, child):
    """The mutants of a rung or a sequel."""
    return mutants_of((parent, child))


@pytest.mark.parametrize(("parent", "child"), ALL_EDGES)
def test_no_mutant_equals_the_child_or_another(parent, child):
    meanings = [meaning(x.text) for x in of_edge(parent, child)]
    assert None not in meanings, "one does not compile"
    assert meaning((ROOT / child).read_text()) not in meanings
    assert len({*meanings}) == len(meanings)


@pytest.mark.parametrize(("parent", "child"), ALL_EDGES)
def test_every_line_that_is_only_taken_away_is_put_back(parent, child):
    back = [x for x in of_edge(parent, child) if x.kind == "put back"]
    assert len(back) == len([x for x in hunks(parent, child) if not x.added])


@functools.cache
def docstrings_of_functions(name):
    """Their lines, which change nothing."""
    text = (ROOT / name).read_text()
    kinds = ast.FunctionDef, ast.ClassDef
    nodes = [x for x in ast.walk(ast.parse(text)) if isinstance(x, kinds)]
    found = [x.body[0] for x in nodes if ast.get_docstring(x)]
    lines = text.splitlines()
    return {y for x in found for y in lines[x.lineno - 1 : x.end_lineno]}


@pytest.mark.parametrize(("parent", "child"), ALL_EDGES)
def test_every_added_line_is_taken_out_once(parent, child):
    """No line of the diff is left out of the proof."""
    lines = (ROOT / child).read_text().splitlines()
    found = [x for x in of_edge(parent, child) if x.kind != "argument"]
    cases = [mutant.text.splitlines() for mutant in found]
    added = [x[1:] for x in changed_lines(parent, child) if x[0] == "+"]
    for line in added:
        if line.strip().startswith("#") or line.strip() in {'"""', ")"}:
            continue
        if line in docstrings_of_functions(child):
            continue
        without = [text for text in cases if line not in text]
        several = lines.count(line) > 1
        assert without or several, f"{child}: {line!r} is never taken out"


# The proof, on a tree with faults


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A copy of the tree in which multigpu.py has lines that it does not need."""
    folder = tmp_path_factory.mktemp("planted")
    copy_tree(folder)
    seam = "    def train(self):\n"
    useless = "        useless = dict(unused=self.total_epochs)\n"
    others = "        waits = self.total_epochs\n        nobody = self.total_epochs\n"
    edit(folder / "multigpu.py", (seam, f"{seam}{useless}{others}"))
    faults = Path(__file__).parent / "faults"
    shutil.copy(faults / "needs_lines.py", folder / "tests" / "test_planted.py")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


def prove(root, only, *tests):
    """(exit status, output) of the proof for what has `only` in it, by these tests."""
    command = ["python", "-m", "proofs.lines", "single_gpu.py", "multigpu.py"]
    command += ["--root", root, "--only", only, "--tests", *tests]
    done = Fork(command, ROOT).finish()
    assert not done.stderr
    return done.returncode, done.stdout


def test_a_useless_line_and_argument_are_found_out(planted):
    status, out = prove(planted, "unused=", "test_diff")
    assert "1 of argument, 1 of statement" in out
    assert out.count("NO TEST MISSES IT (") == 2
    assert status == 1
    for log in kept(out, 2):
        assert " passed" in log


def test_a_useful_line_is_missed(planted):
    status, out = prove(planted, "Parent: single_gpu.py", "test_diff")
    assert "tests/test_diff.py::test_docstring[multigpu.py]" in out
    assert status == 0
    kept(out, 0)


def test_a_hang_is_no_verdict(planted):
    status, out = prove(planted, "waits =", "test_planted")
    hanging = "tests/test_planted.py::test_multigpu_hangs_without_a_line"
    assert f"TIMED OUT: {hanging}" in out
    assert status == 1
    (log,) = kept(out, 1)
    assert "no end within 0.5 s" in log


def test_after_a_hang_the_other_tests_decide(planted, tmp_path):
    """Both lines are one here: without it one test hangs and the other one fails."""
    shutil.copytree(planted, tmp_path, dirs_exist_ok=True)
    both = "waits = self.total_epochs; nobody = self.total_epochs"
    two = "waits = self.total_epochs\n        nobody = self.total_epochs"
    edit(tmp_path / "multigpu.py", (two, both))
    status, out = prove(tmp_path, "waits =", "test_planted")
    assert "tests/test_planted.py::test_multigpu_has_a_line (" in out
    assert status == 0


def test_without_a_passing_control_nothing_is_taken_out(tmp_path, planted):
    shutil.copytree(planted, tmp_path, dirs_exist_ok=True)
    edit(tmp_path / "multigpu.py", ("nobody = self.total_epochs", "pass"))
    status, out = prove(tmp_path, "waits =", "test_planted")
    assert "test_multigpu_has_a_line fails" in out
    assert "The control fails, nothing is taken out" in out
    assert "waits =" not in out
    assert status == 1
    kept(out, 1)


def kept(out, count):
    """The texts of the logs that the proof says it has kept; they are removed."""
    paths = [Path(x) for x in out.split() if x.endswith(".log")]
    assert len(paths) == count, out
    texts = [path.read_text() for path in paths]
    for folder in {path.parent for path in paths}:
        shutil.rmtree(folder)
    return texts


# What the proof decides


def test_tests_of_other_rungs_are_left_out():
    probe = "tests/test_probe.py::test_samples_of_a_step"
    assert about(f"{probe}[multigpu.py-2]", "multigpu.py")
    assert about(f"{probe}[multigpu.py-multinode.py]", "multigpu.py")
    assert about(probe, "multigpu.py"), "it names none"
    assert not about(f"{probe}[multinode.py-2]", "multigpu.py")
    other = "tests/test_preemptible.py::test_multinode"
    assert about(other, "multinode.py")
    assert not about(other, "multigpu.py")
    assert about(other, "utils.py"), "all rungs import it"


def test_a_chapter_names_a_file_or_a_function():
    test = "tests/test_probe.py::test_one_rank_prints[multigpu.py-2]"
    assert is_of(test, "tests/test_probe.py")
    assert is_of(test, "tests/test_probe.py::test_one_rank_prints")
    assert not is_of(test, "tests/test_probe.py::test_one_rank")


def test_the_tests_of_rungs_are_those_that_chapters_name():
    files = named_files(EDGES)
    assert {"tests/test_probe.py", "tests/test_training.py"} <= {*files}
    assert "tests/test_docs.py" not in files
