"""The proof that every line earns its place can fail: a useless line is found out."""

import subprocess
import sys

import pytest

from ladder.diffs import changed_lines, hunks
from ladder.rungs import EDGES, ROOT
from proofs.lines import copy_tree, mutations


@pytest.fixture
def planted(tmp_path):
    """A copy of the tree in which multigpu.py has a line that nothing needs."""
    copy_tree(ROOT, tmp_path)
    script = tmp_path / "multigpu.py"
    seam = "    def train(self, total_epochs):\n"
    text = script.read_text()
    assert text.count(seam) == 1
    script.write_text(text.replace(seam, f"{seam}        useless = total_epochs\n"))
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def lines(root, only):
    """(exit status, output) of the proof for what has `only` in it, by test_diff."""
    command = [sys.executable, "-m", "proofs.lines", "single_gpu.py", "multigpu.py"]
    command += ["--root", root, "--only", only, "--tests", "test_diff"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout


def test_a_useless_line_is_found_out(planted):
    status, out = lines(planted, "useless = total_epochs")
    assert "1 statements to take out" in out
    assert "NO TEST MISSES IT" in out
    assert status == 1


def test_a_useful_line_is_missed(planted):
    status, out = lines(planted, "Parent: single_gpu.py")
    assert "1 statements to take out" in out
    assert "tests/test_diff.py::" in out
    assert status == 0


@pytest.mark.parametrize(("parent", "child"), EDGES)
def test_every_line_that_is_only_taken_away_is_put_back(parent, child):
    texts = [(ROOT / name).read_text() for name in (parent, child)]
    back = [what for _, what, _ in mutations(*texts) if what.startswith("(put back)")]
    assert len(back) == len([x for x in hunks(parent, child) if not x.added])


@pytest.mark.parametrize(("parent", "child"), EDGES)
def test_every_added_line_is_taken_out_once(parent, child):
    """No line of the diff is left out of the proof."""
    texts = [(ROOT / name).read_text() for name in (parent, child)]
    lines = texts[1].splitlines()
    cases = mutations(*texts)
    added = [x[1:] for x in changed_lines(parent, child) if x[0] == "+"]
    for line in added:
        if line.strip().startswith("#") or line.strip() in {'"""', ")"}:
            continue
        without = [text for _, _, text in cases if line not in text.splitlines()]
        several = lines.count(line) > 1
        assert without or several, f"{child}: {line!r} is never taken out"
