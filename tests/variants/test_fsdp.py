"""fsdp.py: the training of multinode.py, with a part of the model on each rank."""

import json
import math
import os
import re
import shutil
from textwrap import indent

import pytest
import torch
from torch import nn

from tests.helpers.checks import (
    STANDIN,
    assert_same_losses,
    assert_same_weights,
    fence,
    noted,
)
from tests.helpers.needs import needs_hosts
from tests.helpers.own_disks import launch_on_own_disks
from tests.helpers.scripts import LAYERS, MODEL
from tests.hooks import replace
from tests.hooks.models import float64, running_mean
from tests.hooks.parts import limit_memory, note_held
from tools.run import hosts
from tools.run.launch import copy_script, train
from tools.run.results import load, losses

NAME = "variants/fsdp.py"
TENSOR_PARALLEL = "variants/tensor_parallel.py"


@pytest.mark.waits
def test_learns(typed):
    """With the docstring's own command: to near the noise floor, which is 0.01."""
    _, done = typed(NAME)
    _, held_out_loss = losses(done)[-1]
    assert held_out_loss < 0.013


class Blocks(nn.Module):
    """A block that is used twice, and a parameter and a buffer in no block."""

    def __init__(self):
        super().__init__()
        first = nn.Sequential(nn.Linear(20, 30), nn.Tanh())
        twice = nn.Linear(30, 30)
        self.layers = nn.ModuleList([first, twice, nn.Linear(30, 2)])
        self.scale = nn.Parameter(torch.ones(2, 1))
        self.register_buffer("shift", torch.randn(3))

    def forward(self, source):
        first, twice, last = self.layers
        hidden = twice(first(source)).tanh()
        hidden = twice(hidden).tanh()
        return last(hidden) @ self.scale + self.shift.sum()


def train_blocks(script):
    """Each rank draws other weights. Adagrad has its state before the first step."""

    def load_train_objs(inner):
        train_set, eval_set, _, loss_fn = inner()
        torch.manual_seed(int(os.environ["RANK"]))
        return train_set, eval_set, Blocks(), loss_fn

    def make_optimizer(model):
        return torch.optim.Adagrad(
            model.parameters(), 0.1, lr_decay=0.1, initial_accumulator_value=1
        )

    replace(script, "load_train_objs", load_train_objs)
    script["make_optimizer"] = make_optimizer
    script["blocks_of"] = lambda model: model.layers


@pytest.mark.waits
def test_trains_blocks_as_multinode_does(tmp_path):
    """2 ranks, then 4 that go on, then one of multinode.py: the plain file fits all."""
    pieces = []
    for name, epochs, nprocs in [(NAME, 1, 2), (NAME, 2, 4), ("multinode.py", 3, 1)]:
        hooks = [train_blocks, note_held] if name == NAME else [train_blocks]
        done = train(name, epochs, 1, cwd=tmp_path, nprocs=nprocs, hooks=hooks)
        pieces += losses(done)
    for held in noted(tmp_path, "held", ranks=4):
        assert held["mapped"]
    whole = tmp_path / "whole"
    done = train("multinode.py", 3, 3, cwd=whole, hooks=[train_blocks])
    assert_same_losses(pieces, losses(done))
    assert_same_weights(tmp_path, whole)


def test_a_rank_holds_its_share_of_the_rows(tmp_path):
    """Of weights, gradients and state. Nothing that was sharded stays whole."""
    train(NAME, 1, 1, cwd=tmp_path, nprocs=3, hooks=[train_blocks, note_held])
    first = 4 * (20 * 30 + 30)
    twice = 4 * (30 * 30 + 30)
    last = 4 * (30 * 2 + 2)
    scale = 4 * 2
    for rank, held in enumerate(noted(tmp_path, "held", ranks=3)):
        numbers = 0
        for rows, *rest in held["shapes"]:
            most = math.ceil(rows / 3)  # as torch.chunk does
            its_rows = max(0, min(most, rows - rank * most))
            numbers += its_rows * math.prod(rest)
        assert held["parts"] == [4 * numbers] * 3
        assert held["gathered"] == ("None" if rank else "cpu")
        assert not held["wrapped"]
        # What goes to the device, and what is whole by then. (A loop in `shard` still
        # holds the last bias.)
        assert held["moved"] == [
            ["Sequential", first, first + twice + last + scale],
            ["Linear", twice, 4 * 30 + twice + last + scale],
            ["Linear", last, 4 * 30 + last + scale],
            ["Blocks", scale, 4 * 2 + scale],
            ["MSELoss", 0, 0],
        ]


@pytest.mark.waits
def test_files_of_one_epoch_that_differ(tmp_path):
    """All take rank 0's: parts of two models are no model, and no error."""
    train(NAME, 1, 1, cwd=tmp_path / "0")
    changes = [("utils.seed(0)", "utils.seed(1)")]
    train(NAME, 1, 1, cwd=tmp_path / "1", changes=changes)
    shutil.copytree(tmp_path / "0", tmp_path / "alike")
    expected = train(NAME, 2, 1, cwd=tmp_path / "alike")
    first, _ = launch_on_own_disks(NAME, 2, 1, cwd=tmp_path)
    assert losses(first) == losses(expected) != []


@pytest.mark.parametrize(
    ("name", "nprocs", "batch", "options"),
    [(NAME, 2, 64, ()), (TENSOR_PARALLEL, 4, 32, ("--split", 2))],
)
def test_buffers_that_training_reads(tmp_path, name, nprocs, batch, options):
    """Both replicas have rank 0's in each step, as under DDP."""
    hooks = [running_mean, float64]
    changes = (MODEL, LAYERS), ("lr=0.001", "lr=0.01")
    parent = tmp_path / "parent"
    expected = train("multinode.py", 2, 2, cwd=parent, changes=changes, hooks=hooks)
    how = {"cwd": tmp_path, "nprocs": nprocs, "batch": batch, "hooks": hooks}
    done = train(name, 2, 2, *options, **how)
    assert_same_losses(losses(done), losses(expected))


TIED = """\
    layers = torch.nn.Linear(20, 20), torch.nn.GELU(), torch.nn.Linear(20, 20)
    model = torch.nn.Sequential(*layers)
    model[2].weight = model[0].weight
"""


@pytest.mark.parametrize(
    ("name", "who"), [(NAME, "blocks"), (TENSOR_PARALLEL, "layers of PLAN")]
)
def test_a_parameter_that_two_share(tmp_path, name, who):
    """PyTorch makes two of it, and trains both without a word (FSDP2: 2.11 alone)."""
    done = train(name, 1, 1, status=1, cwd=tmp_path, changes=[(LAYERS, TIED)])
    assert f"error: {who} share a parameter" in done.stderr
    assert "epoch 1/1" not in done.stdout


@pytest.mark.waits
@pytest.mark.usefixtures("standin")
def test_ranks_with_unequally_many_batches(tmp_path):
    """Of one held-out sample, rank 1 has no batch. It goes along with rank 0's."""
    few = "MyTrainDataset(512, seed=1)", "MyTrainDataset(1, seed=1)"
    soon = "timedelta(minutes=5)", "timedelta(seconds=10)"  # if a rank waits alone
    evaluate = "        self.model.eval()\n"
    note = """\
        def note(module, inputs):
            print("it evaluates on", inputs[0].device.type)
        self.model.register_forward_pre_hook(note)
"""
    changes = few, soon, (evaluate, evaluate + note)
    how = {"changes": changes, "hooks": [train_blocks, float64]}
    one = train(NAME, 1, 1, cwd=tmp_path / "1", nprocs=1, **how)
    two = train(NAME, 1, 1, cwd=tmp_path, **how, **STANDIN)
    assert_same_losses(losses(two), losses(one))
    assert two.stdout.count("it evaluates on standin") == 2, "each rank, once"


LARGE = """\
    sizes = [(20, 1000), *[(1000, 1000)] * 12, (1000, 1)]
    model = torch.nn.Sequential(*[torch.nn.Linear(*size) for size in sizes])
"""
ALL = "[model[0], model[2]]", "[*model]"
FEW = [("MyTrainDataset(2048)", "MyTrainDataset(64)"), ("(512, seed", "(32, seed")]


@pytest.mark.waits
@pytest.mark.parametrize("name", [NAME, "multinode.py"])
def test_a_model_too_large_for_one_rank(tmp_path, name):
    """Its weights take 48 MB; with gradients, buckets and momentum, four times that.

    Each of four ranks gets 140 MB more memory. Forks would have more: what pytest has
    freed before.
    """
    changes = [(LAYERS, LARGE), ALL] if name == NAME else [(MODEL, LARGE)]
    done = train(
        name,
        2,
        2,
        status=0 if name == NAME else 1,
        cwd=tmp_path,
        real=True,
        nprocs=4,
        batch=32,
        changes=[*changes, *FEW],
        hooks=[limit_memory],
        LIMIT_MB=140,
    )
    no_memory = re.search("can't allocate memory|std::bad_alloc", done.stderr)
    assert bool(no_memory) == (name != NAME)


def train_on_two_hosts(folder, *changes):
    """(the model's state, the bytes that the first host has sent) of 32 steps."""
    copy_script(NAME, folder, *changes)
    words = "torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d"
    words += " --rdzv-endpoint=node0:29500 -m variants.fsdp 1 1 --batch-size 16"
    with hosts.Hosts(2, folder) as both:
        jobs = [host.start(words.split(), PYTHONPATH=folder) for host in both]
        for job in jobs:
            job.succeed()
        (link,) = json.loads(both[0].run("ip", "-s", "-j", "link", "show", "eth0"))
    return load(folder)["MODEL_STATE"], link["stats64"]["tx"]["bytes"]


@needs_hosts
@pytest.mark.waits
def test_hsdp_sends_less_between_machines(tmp_path):
    """With the lines of the chapter; 2 machines, 2 ranks each, 32 steps."""
    one_mesh = "    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))"
    code = fence("docs/shard_your_model.md", '("machines", "devices")')
    two_dimensions = indent(code, 4 * " ")
    large = LARGE.replace("1000", "500").replace("12", "2")
    changes = (LAYERS, large), ALL, FEW[1], ("lr=0.01", "lr=0.001")
    fsdp, fsdp_bytes = train_on_two_hosts(tmp_path / "fsdp", *changes)
    hsdp, hsdp_bytes = train_on_two_hosts(
        tmp_path / "hsdp", *changes, (one_mesh, two_dimensions)
    )
    torch.testing.assert_close(hsdp, fsdp, rtol=0, atol=1e-6)
    # All start from rank 0's weights: these are sent once, and not in each step.
    model_bytes = sum(weight.nbytes for weight in fsdp.values())
    assert 0.95 < hsdp_bytes / model_bytes / 32 < 1.1
    assert fsdp_bytes / model_bytes / 32 > 2.2
