"""Mutants take out what they should, and the proof that uses them can fail."""

import re
from collections import Counter

import pytest

from tools.files import copy_tree, edit
from tools.prove import proof
from tools.prove.mutants import meaning, mutants
from tools.run.processes import Program
from tools.scripts import ALL_EDGES, ROOT

pytestmark = pytest.mark.waits

# Mutants of small texts


def block(text):
    """`text` as the body of a function."""
    indented = "".join(f"    {line}\n" for line in text.splitlines())
    return f"def f(self):\n    first()\n{indented}    last()\n"


MADE = [  # the kind, lines of the parent's, of the child's, and what is made of them
    ("block", "", "if a:\n    b()\nelse:\n    c()", ["b()"]),
    ("block", "", "with a, \\\n     b:\n    # why\n    c()", ["c()"]),
    ("block", "", "@cached\ndef g():\n    b()\n    c()", ["b()\nc()"]),
    ("statement", "", "try:\n    b()\nexcept E:\n    pass", ["pass"]),
    ("statement", "b(x)", "with a():\n    b(x)", ["b(x)"]),
    ("argument", "", "f(a, b=g(1))", ["f(b=g(1))", "f(a)", "f(a, b=g())"]),
    ("argument", "", "f('ä, ö', *c)", ["f(*c)", "f('ä, ö')"]),
    ("argument", "x = f(a, b=1)", "x = f(a, b=2)", ["x = f(a)"]),
    ("argument", "x = f(a=1)", "x = g(a=1)", ["x = g()"]),
]


@pytest.mark.parametrize(("kind", "parent", "child", "made"), MADE)
def test_a_statement_a_header_or_an_argument_is_taken_out(kind, parent, child, made):
    all_found = mutants(block(parent), block(child))
    found = [meaning(mutant.text) for mutant in all_found if mutant.kind == kind]
    expected = {meaning(block(text)) for text in made}
    assert expected <= {*found}
    # Of statements there are more: the lines inside of a block, one by one.
    assert kind == "statement" or len(found) == len(made)


# Mutants of the scripts


@pytest.mark.parametrize(("parent", "child"), ALL_EDGES)
def test_every_added_line_is_taken_out_once(parent, child):
    """Not counting docstrings, comments and parentheses. No mutant is another one."""
    before = (ROOT / parent).read_text()
    after = (ROOT / child).read_text()
    made = [mutant.text for mutant in mutants(before, after)]
    meanings = {*map(meaning, made)}
    assert len(meanings - {None, meaning(after)}) == len(made) > 0
    code = re.sub('(?s)""".*?"""', "", after).splitlines()
    added = Counter(after.splitlines()) - Counter(before.splitlines())
    for line in added:
        if line in code and re.match(r" *[^# ]*\w", line):
            counts = [text.splitlines().count(line) for text in made]
            assert min(counts) < after.splitlines().count(line), line


# The proof, on a tree with faults

EDGE = ("single_gpu.py", "multigpu.py")
TESTS = "tests/test_planted.py"
NEEDS_LINES = """import pytest
from tools.run.processes import Program
from tools.scripts import ROOT

TEXT = (ROOT / "multigpu.py").read_text()
assert "planted_collected = " in TEXT

@pytest.fixture
def in_setup():
    assert "planted_in_setup = " in TEXT

@pytest.fixture
def in_teardown():
    yield
    assert "planted_in_teardown = " in TEXT

def test_multigpu_hangs_without_a_line(in_setup, in_teardown):
    if "planted_waits = " not in TEXT:
        Program(["sleep", "60"], ROOT, real=True).finish(timeout_s=0.5)

@pytest.mark.waits
def test_multigpu_has_a_line():
    assert "planted_needed = " in TEXT
"""
CONFTEST = """
from tools.scripts import ROOT
assert "planted_starts = " in (ROOT / "multigpu.py").read_text()
"""
HANGS = f"{TESTS}::test_multigpu_hangs_without_a_line"
VERDICTS = {  # of each planted line, and of an argument in one
    "planted_useless = ": "NO TEST FAILS WITHOUT IT",
    "planted_unused=total_epochs in ": "NO TEST FAILS WITHOUT IT",
    "planted_needed = ": f"{TESTS}::test_multigpu_has_a_line",
    "planted_waits = ": f"NO VERDICT: {HANGS} times out",
    "planted_in_setup = ": f"NO VERDICT: {HANGS} fails in its setup",
    "planted_in_teardown = ": f"NO VERDICT: {HANGS} fails in its teardown",
    "planted_collected = ": f"NO VERDICT: {TESTS} cannot be collected",
    "planted_starts = ": "NO VERDICT: pytest does not start",
}
PAGE = """# The scripts

<!-- diff single_gpu.py multigpu.py: `planted_useless = dict` -->
<!-- end -->

Tests: [test_multigpu_hangs_without_a_line](../tests/test_planted.py), \
[test_multigpu_has_a_line](../tests/test_planted.py)
"""


def test_only_a_test_that_ran_and_failed_kills_a_mutant(tmp_path):
    """A hang, a fixture, a file or a pytest that fails is no verdict.

    In a copy of the tree, multigpu.py has the lines of VERDICTS. Its only page names
    two tests that miss some of them. A killed mutant runs again only with --full, or if
    the page no longer names its killer.
    """
    copy_tree(tmp_path)
    added = [f"{what}0" for what in VERDICTS if what.endswith("= ")]
    added[0] = "planted_useless = dict(planted_unused=total_epochs)"
    method = "    def train(self, total_epochs):"
    changed = "\n        ".join([method, *added])
    edit(tmp_path / "multigpu.py", (method, changed))
    edit(tmp_path / "tests/conftest.py", ("# Runs\n", f"{CONFTEST}# Runs\n"))
    for page in tmp_path.glob("**/*.md"):
        page.unlink()
    for name, text in {"README": "", "CONTRIBUTING": "", "docs/page": PAGE}.items():
        (tmp_path / f"{name}.md").write_text(text)
    (tmp_path / "tests/test_planted.py").write_text(NEEDS_LINES)

    def prove(only):
        command = f"python -m tools.prove.lines {' '.join(EDGE)} --only {only}"
        done = Program(command.split(), tmp_path).finish()
        assert not done.stderr
        return done

    done = prove("planted_")
    # Those that are bad are printed at once, and again at the end.
    printed = {*re.findall(r"(?m)^multigpu.py:\d.*", done.stdout)}
    assert len(printed) == len(VERDICTS)
    for what, verdict in VERDICTS.items():
        (line,) = [line for line in printed if f" {what}" in line]
        assert line.endswith(f" {verdict}")
    assert done.returncode == 1

    assert "1 mutants, 0 to run" in prove("planted_needed").stdout
    assert "1 mutants, 1 to run" in prove("planted_needed --full").stdout
    edit(tmp_path / "docs/page.md", ("[test_multigpu_has_a_line]", "[another]"))
    assert prove("planted_needed").returncode == 1


# What is proven already

FILES = {
    "multigpu.py": """import utils
def first(a):
    b = utils.called(a)
    c = 1  # why
def second(a):
    d = 1
""",
    "utils.py": """
def called(a):
    return deeper(a)
def deeper(a):
    return 1
""",
    "tests/test_them.py": """import os
SIZE = 3
OTHER = 5
TABLE = {}
TABLE["size"] = 4
if os.sep == "/":
    STEP = 1
@pytest.mark.waits
def test_named():
    assert SIZE + STEP == TABLE["size"]
def test_another():
    assert OTHER == 5
""",
}
CHANGES = [  # a text of a file, another one, and the lines that are proven once more
    ("multigpu.py", "c = 1", "c = 2", [3, 4]),
    ("utils.py", "return 1", "return 3", [3]),
    ("tests/test_them.py", "STEP == ", "STEP < ", [3, 4, 6]),
    ("tests/test_them.py", "SIZE = 3", "SIZE = 4", [3, 4, 6]),
    ("tests/test_them.py", '["size"] = 4', '["size"] = 5', [3, 4, 6]),
    ("tests/test_them.py", "STEP = 1", "STEP = 2", [3, 4, 6]),
    ("tests/test_them.py", "OTHER = 5", "OTHER = 6", []),
]


NAMED = "tests/test_them.py::test_named"
EMPTY = "import utils\ndef first(a):\n    0\ndef second(a):\n    0\n"


def proofs():
    """{line: the proof of the mutant there} of multigpu.py, which adds all lines."""
    proof.code_of.cache_clear()
    proof.code_of_test.cache_clear()
    text = (proof.ROOT / "multigpu.py").read_text()
    found = {}
    for mutant in mutants(EMPTY, text):
        if mutant.kind == "statement":
            found[mutant.line] = proof.make_proof(EDGE, mutant, NAMED)
    return found


@pytest.mark.parametrize(("name", "old", "new", "changed"), CHANGES)
def test_what_makes_a_mutant_run_again(tmp_path, monkeypatch, name, old, new, changed):
    monkeypatch.setattr(proof, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    before = proofs()
    assert [*before] == [3, 4, 6]
    edit(tmp_path / name, (old, new))
    after = proofs()
    assert [line for line in after if after[line] != before[line]] == changed
