"""fsdp.py: the training of multinode.py, with a part of the model on each rank."""

import json
import math
import re
import shutil
from textwrap import indent

import pytest
import torch

from tests.conftest import needs_hosts
from tests.helpers.checks import (
    assert_same_losses,
    assert_same_weights,
    noted,
)
from tests.variants.test_preemptible import ranks
from tools.run import hosts
from tools.run.launch import launch, plant, train
from tools.run.processes import Program
from tools.run.results import load, losses
from tools.scripts import ROOT

NAME = "variants/fsdp.py"
MODEL = "    model = torch.nn.Linear(20, 1)\n"
LAYERS = """\
    layers = torch.nn.Linear(20, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)
    model = torch.nn.Sequential(*layers)
"""
BLOCKS = "fsdp:blocks"
HELD = "fsdp:held"


@pytest.mark.waits
def test_learns(typed):
    """With the docstring's own command: to near the noise floor, which is 0.01."""
    _, done, _ = typed(NAME)
    held_out = [held_out_loss for _, held_out_loss in losses(done)]
    assert held_out[0] > 0.1
    assert held_out[-1] < 0.013


@pytest.mark.waits
def test_trains_blocks_as_multinode_does(tmp_path):
    """2 ranks, then 4 that go on, then one of multinode.py: the plain file fits all."""
    multinode = plant("multinode.py", tmp_path / "parent", hooks=[BLOCKS])
    script = plant(NAME, tmp_path / "copy", hooks=[BLOCKS, HELD])
    chain = [(script, 2), (script, 4), (multinode, 1)]
    pieces = []
    for epochs, (each, nprocs) in enumerate(chain, start=1):
        size = 64 // nprocs
        done = train(each, epochs, 1, "--batch-size", size, cwd=tmp_path, nprocs=nprocs)
        pieces += losses(done)
    for held in noted(tmp_path, "held", ranks=4):
        assert held["mapped"]
    whole = tmp_path / "whole"
    whole.mkdir()
    done = train(multinode, 3, 3, cwd=whole)
    assert_same_losses(pieces, losses(done))
    assert_same_weights(tmp_path / "snapshot.pt", whole / "snapshot.pt")


def test_a_rank_holds_its_share_of_the_rows(tmp_path):
    """Of weights, gradients and state. Nothing that was sharded stays whole."""
    begins = "    trainer.train("
    no_wrapper = "    assert 'DistributedDataParallel' not in str(vars(trainer))\n"
    change = begins, no_wrapper + begins
    script = plant(NAME, tmp_path / "copy", change, hooks=[BLOCKS, HELD])
    train(script, 1, 1, cwd=tmp_path, nprocs=3)
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
        # What goes to the device, and what is whole by then. (A loop in `shard` still
        # holds the last bias.)
        assert held["moved"] == [
            ["Sequential", first, first + twice + last + scale],
            ["Linear", twice, 4 * 30 + twice + last + scale],
            ["Linear", last, 4 * 30 + last + scale],
            ["Blocks", scale, 4 * 2 + scale],
            ["MSELoss", 0, 0],
        ]


def test_files_of_one_epoch_that_differ(tmp_path):
    """All take rank 0's: parts of two models are no model, and no error."""
    script = plant(NAME, tmp_path / "copy")
    other = plant(NAME, tmp_path / "other", ("utils.seed(0)", "utils.seed(1)"))
    for rank, each in enumerate([script, other]):
        folder = tmp_path / str(rank)
        folder.mkdir()
        train(each, 1, 1, cwd=folder)
    alike = tmp_path / "alike"
    shutil.copytree(tmp_path / "0", alike)
    expected = train(script, 2, 1, cwd=alike)
    first, _ = ranks(script, 2, 1, cwd=tmp_path)
    assert losses(first) == losses(expected) != []


TENSOR_PARALLEL = "variants/tensor_parallel.py"


@pytest.mark.parametrize("name", [NAME, TENSOR_PARALLEL])
def test_buffers_that_training_reads(tmp_path, name):
    """All ranks have rank 0's in each step, as under DDP."""
    hooks = ["models:running_mean", "float64"]
    changes = (MODEL, LAYERS), ("lr=0.001", "lr=0.01")
    parent = plant("multinode.py", tmp_path / "parent", *changes, hooks=hooks)
    whole = train(parent, 2, 2, cwd=tmp_path / "parent")
    script = plant(name, tmp_path / "copy", hooks=hooks)
    split = name == TENSOR_PARALLEL
    words = ["--split", 2] if split else []
    ranks = 4 if split else 2
    done = train(script, 2, 2, *words, cwd=tmp_path, nprocs=ranks, own_options=False)
    assert_same_losses(losses(done), losses(whole))


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
    script = plant(name, tmp_path / "copy", (LAYERS, TIED))
    done = launch(script, 1, 1, cwd=tmp_path, real="")
    assert f"error: {who} share a parameter" in done.stderr
    assert "epoch 1/1" not in done.stdout


@pytest.mark.waits
@pytest.mark.parametrize("held_out", [65, 1])
def test_ranks_with_unequally_many_batches(tmp_path, held_out):
    """Of 65 samples in batches of 32, rank 1 has one batch, and of 1 sample none."""
    few = "MyTrainDataset(512, seed=1)", f"MyTrainDataset({held_out}, seed=1)"
    soon = "timedelta(minutes=5)", "timedelta(seconds=10)"  # if a rank waits alone
    hooks = [BLOCKS, "float64", "accelerators:strict", "fsdp:passes"]
    script = plant(NAME, tmp_path / "copy", few, soon, hooks=hooks)
    alone = tmp_path / "alone"
    alone.mkdir()
    one = train(script, 1, 1, "--batch-size", 64, cwd=alone, nprocs=1)
    two = train(script, 1, 1, "--batch-size", 32, cwd=tmp_path)
    assert_same_losses(losses(two), losses(one))
    most = 2 if held_out == 65 else 1  # batches of rank 0: rank 1 goes along
    assert noted(tmp_path, "passes") == [[True] * most] * 2


LARGE = """\
    sizes = [(20, 1000), *[(1000, 1000)] * 12, (1000, 1)]
    model = torch.nn.Sequential(*[torch.nn.Linear(*size) for size in sizes])
"""
ALL = "[model[0], model[2]]", "[*model]"
FEW = [("MyTrainDataset(2048)", "MyTrainDataset(64)"), ("(512, seed", "(32, seed")]


def launch_limited(script, cwd):
    """Done of two epochs on four ranks, each of which gets 170 MB more memory."""
    return launch(
        script, 2, 2, "--batch-size", 8, cwd=cwd, real="", nprocs=4, LIMIT_MB=170
    )


@pytest.mark.waits
@pytest.mark.parametrize("name", [NAME, "multinode.py"])
def test_a_model_too_large_for_one_rank(tmp_path, name):
    """Its weights take 48 MB; with gradients, buckets and momentum, four times that."""
    changes = [(LAYERS, LARGE), ALL] if name == NAME else [(MODEL, LARGE)]
    script = plant(name, tmp_path / "copy", *changes, *FEW, hooks=["fsdp:limited"])
    done = launch_limited(script, cwd=tmp_path)
    has_no_memory = "DefaultCPUAllocator: can't allocate memory" in done.stderr
    assert done.returncode == (0 if name == NAME else 1)
    assert has_no_memory == (name != NAME)


def sent_by(host):
    (link,) = json.loads(host.run("ip", "-s", "-j", "link", "show", "eth0"))
    return link["stats64"]["tx"]["bytes"]


def train_on_two_hosts(folder, *changes):
    """(the model's state, the bytes that the first host has sent) of 32 steps."""
    plant(NAME, folder, *changes)
    words = "torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d"
    words += " --rdzv-endpoint=node0:29500 -m variants.fsdp 1 1 --batch-size 16"
    with hosts.Hosts(2, folder) as both:
        before = sent_by(both[0])
        jobs = [host.start(words.split(), PYTHONPATH=folder) for host in both]
        for job in jobs:
            assert job.finish().returncode == 0, jobs[0].output
        sent = sent_by(both[0]) - before
    return load(folder / "snapshot.pt")["MODEL_STATE"], sent


@needs_hosts
@pytest.mark.waits
def test_hsdp_sends_less_between_machines(tmp_path):
    """With the lines of the chapter; 2 machines, 2 ranks each, 32 steps."""
    page = (ROOT / "docs/7_sharding.md").read_text()
    (code,) = re.findall(r"## Shard inside a machine.*?```python\n(.*?)```", page, re.S)
    one_mesh = re.search(r" +mesh = .*\n", (ROOT / NAME).read_text())[0]
    two_dimensions = indent(code, 4 * " ")
    large = LARGE.replace("1000", "500").replace("12", "2")
    changes = (LAYERS, large), ALL, FEW[1], ("lr=0.01", "lr=0.001")
    fsdp, fsdp_bytes = train_on_two_hosts(tmp_path / "fsdp", *changes)
    hsdp, hsdp_bytes = train_on_two_hosts(
        tmp_path / "hsdp", *changes, (one_mesh, two_dimensions)
    )
    torch.testing.assert_close(hsdp, fsdp, rtol=0, atol=1e-6)
    # All start from rank 0's weights: these are sent once, and not in each step.
    model_bytes = 4 * sum(weight.numel() for weight in fsdp.values())
    fsdp_sent = fsdp_bytes / model_bytes / 32
    hsdp_sent = hsdp_bytes / model_bytes / 32
    print(f"times the model, each step: FSDP {fsdp_sent:.2f}, HSDP {hsdp_sent:.2f}")
    assert 0.95 < hsdp_sent < 1.1
    assert fsdp_sent > 2.2


@pytest.mark.waits
def test_the_table_of_the_chapter():
    """Bytes of each parameter: the formula, and what 4 ranks hold. What is whole."""
    words = ["torchrun", "--standalone", "--nproc-per-node=4"]
    done = Program([*words, "-m", "docs.7_sharding.memory"], ROOT).finish()
    rows = re.findall(r"formula +([\d.]+) \| +([\d.]+)", done.stdout)
    formulas, measured = zip(*rows, strict=True)
    assert formulas == measured == ("16.0", "10.0", "8.0", "4.0")
    whole, kept = re.findall(r"activations.*\| ([\d.]+)", done.stdout)
    assert float(whole) == pytest.approx(64.5, abs=0.3)
    assert float(kept) == pytest.approx(4.1, abs=0.3)
    assert "| 47%; both ends alone, 0%" in done.stdout
