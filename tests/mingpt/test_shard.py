"""mingpt.train --shard: the training without it, with a part of the model on a rank."""

import os
import re

import pytest
import torch

from tests.conftest import OBSERVER
from tests.mingpt.test_train import TINY, check_runs, gpt, text  # noqa: F401  fixtures, too
from tools.run.processes import Program
from tools.run.results import load
from tools.scripts import ROOT

pytestmark = pytest.mark.waits

# Ranks draw different weights, in float64. Each notes the bytes that its tensors take.
OWN = """
import gc
import os

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from mingpt import model
from mingpt.model import GPTConfig, make_optimizer

RANK = os.environ.get("RANK", "0")


class GPT(model.GPT):
    def __init__(self, config):
        torch.manual_seed(int(RANK))
        super().__init__(config)
        self.double()


def bytes_of_tensors():
    # {the address of a tensor: its bytes}
    found = {}
    for tensor in gc.get_objects():
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


INHERITED = bytes_of_tensors()  # by a fork, from other tests


def note_bytes(*_):
    path = f"held.{RANK}"
    if os.path.exists(path):  # since the first step
        return
    own = bytes_of_tensors()
    for address in INHERITED:
        own.pop(address, None)
    with open(path, "w") as file:
        file.write(str(sum(own.values())))


register_optimizer_step_post_hook(note_bytes)
"""
OPTIONS = ["--steps", 8, "--eval-every", 4, "--clip", 0.5]
# Of the validation text, rank 0 has 55 blocks, and rank 1 has 54: a batch less.
OPTIONS += ["--block-size", 18]
TWO = ["--batch-size", 2, "--accumulate", 2]


@pytest.fixture(scope="module")
def runs(gpt, tmp_path_factory):  # noqa: F811
    """`gpt` for OWN and OPTIONS, and two folders: without --shard, and with it."""
    own = tmp_path_factory.mktemp("own")
    (own / "own.py").write_text(OWN)

    def run(folder, *options, **how):
        how = {"DO": "", "GPT": "own", "PYTHONPATH": f"{ROOT}:{own}"} | how
        return gpt(folder, *OPTIONS, *options, **how)

    whole = own / "whole"
    parts = own / "parts"
    run(whole, *TWO, nprocs=2)
    run(parts, *TWO, "--shard", nprocs=2)
    return run, whole, parts


def bytes_held(folder, rank):
    """The bytes of a rank's tensors after the first step."""
    return int((folder / f"held.{rank}").read_text())


def test_trains_the_same_with_half_of_the_bytes(runs):
    _, whole, parts = runs
    check_runs(whole, parts, "train loss", "val loss")
    all_bytes = bytes_held(whole, rank=0)
    bytes_of_parts = [bytes_held(parts, rank) for rank in (0, 1)]
    assert max(bytes_of_parts) < 0.52 * all_bytes < sum(bytes_of_parts)


def test_a_rank_may_have_an_empty_part(runs, tmp_path):
    """Four positions on three ranks: the last has none, and gathers with the others.

    It resumes with its empty parts, too.
    """
    run = runs[0]
    few = ["--block-size", 4, "--batch-size", 2, "--steps", 4, "--eval-every", 2]
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    run(whole, *few, nprocs=3)
    run(parts, *few, "--shard", nprocs=3, status=1, DO="sigkill", AT_STEP=3)
    run(parts, *few, "--shard", nprocs=3)
    check_runs(whole, parts, "train loss", "val loss")


# A module that was changed after the snapshot was saved. The sizes are the same.
CHANGED = """
import torch

import own
from mingpt.model import GPTConfig


class GPT(own.GPT):
    def __init__(self, config):
        super().__init__(config)
        {change}


make_optimizer = own.make_optimizer
"""
CHANGES = {
    "a new name": "self.new = torch.nn.Linear(1, 1)",
    "another shape": "self.transformer.wpe = torch.nn.Embedding(40, 1).double()",
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_snapshot_of_a_changed_module(runs, tmp_path, what):
    """One line, and the snapshot as it was."""
    run, whole, _ = runs
    module = CHANGED.format(change=CHANGES[what])
    name = f"changed_{len(what)}"
    (whole.parent / f"{name}.py").write_text(module)
    snapshot = load(whole / "mingpt.pt")
    snapshot["CONFIGURATION"]["model"] = name
    path = tmp_path / "mingpt.pt"
    torch.save(snapshot, path)
    before = path.read_bytes()
    done = run(tmp_path, *TWO, "--model", name, "--shard", nprocs=2, status=1)
    errors = re.findall("^train.py: error: (.*)$", done.stderr, re.M)
    hint = "choose another --snapshot-path"
    assert errors == [f"mingpt.pt belongs to another model: {hint}"]
    assert path.read_bytes() == before


@pytest.mark.waits
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="only Linux has it")
@pytest.mark.parametrize("lr", [0.001, 1e38])  # the second: weights are not finite
@pytest.mark.parametrize("how", [["--shard"], ["--split", 2]])
def test_no_gloo_thread_outlives_main(text, tmp_path, how, lr):  # noqa: F811
    """One that does may abort the exit. Only a new interpreter shows it."""
    log = tmp_path / "log"
    log.mkdir()
    words = ["torchrun", "--standalone", "--nproc-per-node=2", "-m", "mingpt.train"]
    words += [*text, *TINY, "--steps", 2, *how, "--lr", lr]
    path = f"{OBSERVER}:{ROOT}"
    env = {"PYTHONPATH": path, "THREADS_LOG": log, "OMP_NUM_THREADS": 1}
    done = Program(words, tmp_path, real=True, **env).finish()
    threads = [file.read_text() for file in log.iterdir()]
    error = "error: step 1: the loss is "
    if lr < 1:
        assert done.returncode == 0
        assert error not in done.stderr
        assert threads == ["[]", "[]"]
    else:
        assert done.returncode == 1
        assert error in done.stderr
        # os._exit ends a rank whose weights are not finite: it notes nothing.
        assert not threads
