"""Micro-batches: the gradient of the whole batch, and one all-reduce for each step.

What a run sends, how far its gradient is off, and how far its ranks drift apart is what
docs/gradient_accumulation/watch.py prints, as on the page.
"""

import contextlib
import itertools  # noqa: F401  for the page's lines, as F is
import re
import shutil

import pytest
import torch
import torch.nn.functional as F  # noqa: F401
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.checks import assert_same_snapshot, fence, help_of
from tests.helpers.forked import in_a_fork
from tools.run.launch import train
from tools.scripts import ROOT

NAME = "variants/gradient_accumulation.py"
ALL_REDUCE = 21 * 4  # the bytes of all gradients


def watched(folder, accumulate, *changes):
    """The numbers in watch.py's line, after an epoch.

    All-reduces and their bytes in a step, the gradient's error in percent, the largest
    difference of a weight between ranks, the bytes that autograd has kept.
    """
    start = "self.epochs_run = 0"
    attach = "from docs.gradient_accumulation import watch; watch.attach(self)"
    changes = (start, f"{start}; {attach}"), *changes
    watch = "docs/gradient_accumulation"
    shutil.copytree(ROOT / watch, folder / watch)
    done = train(NAME, 1, 1, "--accumulate", accumulate, cwd=folder, changes=changes)
    (line,) = re.findall(r"^per step.*", done.stdout, re.M)
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", line)]


def test_one_all_reduce_of_the_whole_batchs_gradient(tmp_path):
    """Autograd keeps the largest micro-batch: 20 features, an output and a target."""
    kept = 7 * 22 * 4  # bytes
    assert watched(tmp_path, 5) == [1, ALL_REDUCE, 0, 0, kept]


def test_one_micro_batch_is_the_parent(runs, tmp_path):
    """Without the option, to the last bit."""
    train(NAME, 5, 2, cwd=tmp_path, own_options=False)
    folder, _ = runs("multigpu.py")
    assert_same_snapshot(tmp_path, folder)


def test_help_says_what_is_cut(tmp_path):
    line = "micro-batches that a process cuts its batch into (default: 1)"
    assert line in help_of(NAME, tmp_path)


# Mistakes that no error shows, besides that of the page


def test_no_sync_around_backward_alone_sends_every_micro_batch(tmp_path):
    no_sync = "with contextlib.nullcontext() if last else self.ddp_model.no_sync():"
    backward = "loss.backward()"
    changes = (no_sync, "if True:"), (backward, f"{no_sync} {backward}")
    *found, _ = watched(tmp_path, 5, *changes)
    assert found == [5, 5 * ALL_REDUCE, 0, 0]


@pytest.mark.waits
def test_divided_by_n_uneven_micro_batches_are_wrong(tmp_path):
    """Right for equal pieces only."""
    loss = "(output, targets[micro])"
    by_n = (f"{loss} * share", f"{loss} / self.accumulate")
    _, _, error, apart, _ = watched(tmp_path, 5, by_n)
    assert error > 10
    assert apart == 0


# What a reader adds


@in_a_fork
def test_groups_of_a_loader():
    """The page's lines, for ten batches of eight and one of five, four to a step."""
    lines = fence("docs/gradient_accumulation.md", "itertools.islice(")
    data = TensorDataset(torch.randn(85, 20), torch.randn(85, 1))

    def trained(batch_size, accumulate):
        torch.manual_seed(0)
        model = torch.nn.Linear(20, 1)
        model.no_sync = contextlib.nullcontext  # as of DDP, in one process
        names = {
            "loader": DataLoader(data, batch_size),
            "ddp_model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            "ACCUMULATE": accumulate,
        }
        exec(lines, globals() | names)
        return model.weight

    in_four = trained(batch_size=8, accumulate=4)
    in_one = trained(batch_size=32, accumulate=1)
    torch.testing.assert_close(in_four, in_one, rtol=1e-5, atol=1e-6)
