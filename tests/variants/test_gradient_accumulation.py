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

from tests.helpers.checks import help_of
from tests.helpers.forked import in_a_fork
from tools.run.launch import launch, plant, train
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
        options = "--accumulate", accumulate
        # It may end with an error, because it refuses to save ranks that differ.
        done = launch(script, 1, 1, *options, cwd=tmp_path, real="")
        (line,) = re.findall(r"^per step.*", done.stdout, re.M)
        numbers = re.findall(r"\d+(?:\.\d+)?", line)
        return [float(number) for number in numbers]

    return run


@pytest.mark.parametrize(
    ("accumulate", "largest"), [(5, 7), pytest.param(40, 1, marks=pytest.mark.waits)]
)
def test_one_all_reduce_of_the_whole_batchs_gradient(watched, accumulate, largest):
    """Autograd keeps the largest micro-batch: 20 features, an output and a target."""
    kept = largest * 22 * 4  # bytes
    assert watched(accumulate) == [1, ALL_REDUCE, 0, 0, kept]


def test_one_micro_batch_is_the_parent(runs, tmp_path):
    """Without the option, to the last bit."""
    done = train(ROOT / NAME, 5, 2, cwd=tmp_path, own_options=False)
    folder, parent = runs("multigpu.py")
    assert same_bits(load(tmp_path / "snapshot.pt"), load(folder / "snapshot.pt"))
    speed = r"[\d,]+ samples/s.*"
    assert re.sub(speed, "", done.stdout) == re.sub(speed, "", parent.stdout)


def test_help_says_what_is_cut(tmp_path):
    line = "micro-batches that a process cuts its batch into (default: 1)"
    assert line in help_of(NAME, tmp_path)


# The mistakes that no error shows


def test_no_sync_around_backward_alone_sends_every_micro_batch(watched):
    all_reduces, size, error, apart, _ = watched(5, *BACKWARD_ONLY)
    assert all_reduces == 5
    assert size == 5 * ALL_REDUCE
    assert error == apart == 0


@pytest.mark.waits
def test_a_flag_set_between_forward_and_backward_lets_ranks_drift(watched):
    """DDP sends the first micro-batch's gradients alone; the others stay local."""
    all_reduces, size, error, apart, _ = watched(5, *BETWEEN)
    assert all_reduces == 1
    assert size == ALL_REDUCE
    assert error > 40
    assert apart > 0.1


@pytest.mark.waits
def test_divided_by_n_uneven_micro_batches_are_wrong(watched):
    """Right for equal pieces only."""
    _, _, error, apart, _ = watched(5, *BY_N)
    assert error > 10
    assert apart == 0


# What a reader adds


def test_a_mean_over_tokens(tmp_path):
    """Exact if divided by the tokens of all ranks. By this rank's: if it is alone."""
    for nprocs in (1, 2):
        words = ["torchrun", "--standalone", f"--nproc-per-node={nprocs}", str(TOKENS)]
        done = Program(words, tmp_path, OMP_NUM_THREADS=1).finish()
        assert done.returncode == 0, done.stdout + done.stderr
        errors = re.findall(r"error (\S+) %", done.stdout)
        mean_of_means, by_its_own, by_all = map(float, errors)
        assert mean_of_means > 1
        assert (by_its_own > 1) == (nprocs > 1)
        assert by_all <= 1


def shown_on_the_page(word):
    """The lines of Python on the page that have the word."""
    fences = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (lines,) = (fence for fence in fences if word in fence)
    return lines


class Alone(torch.nn.Linear):
    """Has what the page's lines ask of a DDP model, and trains in one process."""

    no_sync = contextlib.nullcontext


@in_a_fork
def test_groups_of_a_loader():
    """The page's lines, for ten batches of eight and one of five, four to a step."""
    lines = shown_on_the_page("islice")
    source = torch.randn(85, 20)
    targets = torch.randn(85, 1)

    def trained(lines, size):
        torch.manual_seed(0)
        model = Alone(20, 1)
        names = {
            "loader": list(zip(source.split(size), targets.split(size), strict=True)),
            "ddp_model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            "ACCUMULATE": 4,
            "F": F,
            "contextlib": contextlib,
            "itertools": itertools,
        }
        exec(lines, names)
        return model.weight

    in_four = trained(lines, size=8)
    in_one = trained(lines.replace("ACCUMULATE", "1"), size=32)
    torch.testing.assert_close(in_four, in_one, rtol=1e-5, atol=1e-6)


@pytest.mark.text
def test_the_page_shows_lines_of_the_script():
    there = {line.strip() for line in TOKENS.read_text().splitlines()}
    for line in shown_on_the_page("total").splitlines():
        assert line.strip() in there
