"""Micro-batches: the gradient of the whole batch, and one all-reduce for each step.

What a run sends, how far its gradient is off, and how far its ranks drift apart is what
docs/gradient_accumulation/watch.py prints, as on the page.
"""

import contextlib
import itertools
import re
import shutil

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.forked import in_a_fork
from tools.run.launch import launch, plant, run_script, train
from tools.run.processes import Program
from tools.run.results import load, same_bits
from tools.scripts import ROOT

NAME = "variants/gradient_accumulation.py"
PAGE = ROOT / "docs/gradient_accumulation.md"
TOKENS = ROOT / "docs/gradient_accumulation/tokens.py"
ALL_REDUCE = 21 * 4  # the bytes of all gradients

# What the mistakes of the page put into the script
WITH = "with contextlib.nullcontext() if last else self.ddp_model.no_sync():"
EVERY_TIME = (WITH, "if True:")
BACKWARD_ONLY = (EVERY_TIME, ("loss.backward()", f"{WITH} loss.backward()"))
FLAG = "self.ddp_model.require_backward_grad_sync = last; loss.backward()"
BETWEEN = (EVERY_TIME, ("loss.backward()", FLAG))
BY_N = (
    ("(output, targets[micro]) * share", "(output, targets[micro]) / self.accumulate"),
)


@pytest.fixture
def watched(tmp_path):
    """`watched(accumulate, *changes)`: the numbers in watch.py's line, after an epoch.

    All-reduces and their bytes in a step, the gradient's error in percent, the largest
    difference of a weight between ranks, the bytes that autograd has kept.
    """

    def run(accumulate, *changes):
        attach = "from docs.gradient_accumulation import watch; watch.attach(self)"
        changes = (("self.epochs_run = 0", f"self.epochs_run = 0; {attach}"), *changes)
        script = plant(NAME, tmp_path / "copy", *changes)
        shutil.copytree(TOKENS.parent, tmp_path / "copy/docs/gradient_accumulation")
        how = {"cwd": tmp_path, "real": ""}  # it refuses to save ranks that differ
        done = launch(script, 1, 1, "--accumulate", accumulate, **how)
        (line,) = re.findall(r"^per step.*", done.stdout, re.M)
        return [float(x) for x in re.findall(r"\d+(?:\.\d+)?", line)]

    return run


@pytest.mark.parametrize(
    ("accumulate", "largest"), [(5, 7), pytest.param(40, 1, marks=pytest.mark.waits)]
)
def test_one_all_reduce_of_the_whole_batchs_gradient(watched, accumulate, largest):
    """Autograd keeps the largest micro-batch: 20 features, an output and a target."""
    assert watched(accumulate) == [1, ALL_REDUCE, 0, 0, largest * 22 * 4]


def test_one_micro_batch_is_the_parent(runs, tmp_path):
    """Without the option, to the last bit."""
    done = train(ROOT / NAME, 5, 2, cwd=tmp_path, own_options=False)
    folder, parent = runs("multigpu.py")
    assert same_bits(load(tmp_path / "snapshot.pt"), load(folder / "snapshot.pt"))
    speed = r"[\d,]+ samples/s.*"
    assert re.sub(speed, "", done.stdout) == re.sub(speed, "", parent.stdout)


def test_help_says_what_is_cut(tmp_path):
    words = " ".join(run_script(ROOT / NAME, "--help", cwd=tmp_path).stdout.split())
    assert "micro-batches that a process cuts its batch into (default: 1)" in words


# The mistakes that no error shows


def test_no_sync_around_backward_alone_sends_every_micro_batch(watched):
    assert watched(5, *BACKWARD_ONLY)[:4] == [5, 5 * ALL_REDUCE, 0, 0]


@pytest.mark.waits
def test_a_flag_set_between_forward_and_backward_lets_ranks_drift(watched):
    """DDP sends the first micro-batch's gradients alone; the others stay local."""
    all_reduces, size, error, apart, _ = watched(5, *BETWEEN)
    assert (all_reduces, size) == (1, ALL_REDUCE)
    assert error > 40 and apart > 0.1


@pytest.mark.waits
def test_divided_by_n_uneven_micro_batches_are_wrong(watched):
    """Right for equal pieces only."""
    *_, error, apart, _ = watched(5, *BY_N)
    assert error > 10 and apart == 0


# What a reader adds


def test_a_mean_over_tokens(tmp_path):
    """Exact if divided by the tokens of all ranks. By this rank's: if it is alone."""
    for nprocs in (1, 2):
        words = ["torchrun", "--standalone", f"--nproc-per-node={nprocs}", str(TOKENS)]
        done = Program(words, tmp_path, OMP_NUM_THREADS=1).finish()
        assert done.returncode == 0, done.stdout + done.stderr
        errors = [float(x) for x in re.findall(r"error (\S+) %", done.stdout)]
        assert [x > 1 for x in errors] == [True, nprocs > 1, False]


class Alone(torch.nn.Linear):
    """Has what the page's lines ask of a DDP model, and trains in one process."""

    no_sync = contextlib.nullcontext


@in_a_fork
def test_groups_of_a_loader():
    """The page's lines, for ten batches of eight and one of five, four to a step."""
    fences = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (lines,) = (x for x in fences if "islice" in x)
    data = torch.randn(85, 20), torch.randn(85, 1)
    ended = []
    for text, size in ((lines, 8), (lines.replace("ACCUMULATE", "1"), 32)):
        torch.manual_seed(0)
        model = Alone(20, 1)
        names = {
            "loader": list(zip(*(x.split(size) for x in data), strict=True)),
            "ddp_model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            "ACCUMULATE": 4,
        }
        exec(text, names | {"F": F, "contextlib": contextlib, "itertools": itertools})
        ended.append(model.weight)
    torch.testing.assert_close(*ended, rtol=1e-5, atol=1e-6)


@pytest.mark.text
def test_the_page_shows_lines_of_the_script():
    there = {line.strip() for line in TOKENS.read_text().splitlines()}
    fences = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (shown,) = (x for x in fences if "total" in x)
    assert not [x for x in shown.splitlines() if x.strip() not in there]
