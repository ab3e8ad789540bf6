"""fsdp.py: the training of multinode.py, with a part of the model on each rank."""

import json
import math
import re

import pytest
import torch

from tests.conftest import needs_hosts
from tools.run import hosts
from tools.run.launch import launch, plant, run_script, train
from tools.run.processes import Program
from tools.run.results import load, losses, weights
from tools.scripts import ROOT

NAME = "variants/fsdp.py"
MODEL = "    model = torch.nn.Linear(20, 1)\n"
BLOCKS, HELD = "fsdp:blocks", "fsdp:held"
RECORD = "faults:record_in_one_piece"


@pytest.mark.waits
def test_trains_blocks_as_multinode_does(tmp_path):
    """2 ranks, then 4 that go on, then one of multinode.py: the plain file fits all."""
    multinode = plant("multinode.py", tmp_path / "parent", hooks=[BLOCKS])
    script = plant(NAME, tmp_path / "copy", hooks=[BLOCKS, HELD])
    ways = [(script, 2), (script, 4), (multinode, 1)]
    pieces = []
    for epochs, (way, nprocs) in enumerate(ways, start=1):
        size = "--batch-size", 64 // nprocs
        done = train(way, epochs, 1, *size, cwd=tmp_path, nprocs=nprocs)
        pieces += losses(done)
    held = [json.loads(x.read_text()) for x in sorted(tmp_path.glob("held.*"))]
    assert [x["mapped"] for x in held] == [True] * 4
    (others := tmp_path / "others").mkdir()
    curve = losses(train(multinode, 3, 3, cwd=others))
    torch.testing.assert_close(pieces, curve, rtol=1e-6, atol=2e-6)
    mine, theirs = (weights(x / "snapshot.pt") for x in (tmp_path, others))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_a_rank_holds_its_share_of_the_rows(tmp_path):
    """Of weights, gradients and state. Nothing that was sharded stays whole."""
    script = plant(NAME, tmp_path / "copy", hooks=[BLOCKS, HELD])
    train(script, 1, 1, cwd=tmp_path, nprocs=3)
    for rank in range(3):
        held = json.loads((tmp_path / f"held.{rank}.json").read_text())
        numbers = 0
        for rows, *rest in held["shapes"]:
            each = -(-rows // 3)  # as torch.chunk does
            numbers += max(0, min(each, rows - rank * each)) * math.prod(rest)
        assert held["parts"] == [4 * numbers] * 3
        assert held["moved"] == ["MSELoss"], "no device holds the whole model"
        assert held["gathered"] == ("meta" if rank else "cpu")
        blocks, whole = zip(*held["whole"], strict=True)
        assert blocks == ("Sequential", "Linear", "Linear", "Blocks", "")
        sizes = [2, 30 * 2 + 2, 30 * 30 + 30, 20 * 30 + 30]  # the last comes first
        left = [4 * sum(sizes[:i]) for i in range(5)]
        assert whole == (*left[::-1],)


ADDED = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from variants import fsdp

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.init_device_mesh("cpu", (1,))
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 1)
its_list = optimizer.param_groups[0]["params"]
optimizer.state[model.weight]["note"] = 3
fsdp.shard(model, mesh, optimizer, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
print(its_list[0] is model.weight, optimizer.state[model.weight])
print(*[type(x) for x in fsdp.gather([(model.weight,)])[0]])
print(model(torch.ones(1, 2)).dtype)
"""


def test_what_a_reader_adds(tmp_path):
    """A list that an optimizer keeps, a note in its state, an option, a tuple."""
    (tmp_path / "added.py").write_text(ADDED)
    done = run_script(tmp_path / "added.py", cwd=tmp_path, PYTHONPATH=ROOT)
    assert done.stdout.splitlines() == [
        "True {'note': 3}",
        "<class 'torch.Tensor'>",
        "torch.bfloat16",
    ], done.stderr


ODD = """
import sys
import torch
import torch.distributed as dist
import utils
from variants import fsdp

def line(message):
    raise ValueError(message)

def refused(make, *arguments):
    try:
        make(*arguments)
    except ValueError as message:
        print(message)

utils.error = line
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.init_device_mesh("cpu", (1,))
nn, number = torch.nn, torch.ones(())
for odd in (number, torch.empty(0, 2), number.double().view(1), None):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight if odd is None else nn.Parameter(odd)
    refused(fsdp.shard, model, mesh)
for name in ("Adafactor", "Muon", "Rprop"):
    optimizer = getattr(torch.optim, name)(nn.Linear(2, 2, bias=False).parameters())
    refused(fsdp.Trainer, None, None, optimizer, *[None] * 5)
"""


def test_what_fsdp2_refuses_ends_with_a_line(tmp_path):
    (tmp_path / "odd.py").write_text(ODD)
    done = run_script(tmp_path / "odd.py", cwd=tmp_path, PYTHONPATH=ROOT)
    odd = "['weight']", "['weight']", "{torch.float", "['weight']"
    starts = [f"FSDP2 refuses {x}" for x in odd]
    optimizers = "Adafactor", "Muon", "Rprop"
    starts += [f"{name} needs whole parameters" for name in optimizers]
    lines = done.stdout.splitlines()
    assert [y[: len(x)] for x, y in zip(starts, lines, strict=True)] == starts


def test_ranks_that_use_different_blocks(tmp_path):
    """Else FSDP2 gathers and trains one block for the other, without an error."""
    script = plant(NAME, tmp_path / "copy", hooks=["fsdp:experts", RECORD])
    done = launch(script, 1, 1, cwd=tmp_path, real="")
    assert done.returncode == 1
    assert "RuntimeError: a parameter has no gradient" in done.stderr
    assert "epoch 1/1" not in done.stdout


@pytest.mark.waits
@pytest.mark.parametrize("held_out", [65, 1])
def test_ranks_with_unequally_many_batches(tmp_path, held_out):
    """Of 65 samples in batches of 32, rank 1 has one batch, and of 1 sample none."""
    few = "MyTrainDataset(512, seed=1)", f"MyTrainDataset({held_out}, seed=1)"
    hooks = [BLOCKS, "float64", "accelerators:strict", "fsdp:passes"]
    script = plant(NAME, tmp_path / "copy", few, hooks=hooks)
    text = script.read_text()  # a rank that waits alone raises soon
    script.write_text(text.replace("timedelta(minutes=5)", "timedelta(seconds=10)"))
    curves = []
    for nprocs in (1, 2):
        (folder := tmp_path / str(nprocs)).mkdir()
        args = (1, 1, "--batch-size", 64 // nprocs)
        curves += losses(train(script, *args, cwd=folder, nprocs=nprocs))
    torch.testing.assert_close(curves[0], curves[1], rtol=1e-6, atol=2e-6)
    for rank in "01":  # as many as the rank that has the most
        passes = json.loads((tmp_path / f"2/passes.{rank}.json").read_text())
        assert passes == [True] * (2 if held_out == 65 else 1)


LARGE = "[(20, 1000), *[(1000, 1000)] * 12, (1000, 1)]"
LARGE = f"    model = torch.nn.Sequential(*[torch.nn.Linear(*x) for x in {LARGE}])\n"
FEW = [("MyTrainDataset(2048)", "MyTrainDataset(64)"), ("(512, seed", "(32, seed")]


@pytest.mark.waits
@pytest.mark.parametrize("name", [NAME, "multinode.py"])
def test_a_model_too_large_for_one_rank(tmp_path, name):
    """Its weights take 48 MB; with gradients, buckets and momentum, four times that."""
    script = plant(
        name, tmp_path / "copy", (MODEL, LARGE), *FEW, hooks=["fsdp:limited"]
    )
    how = {"nprocs": 4, "real": "", "LIMIT_MB": 170}
    done = launch(script, 2, 2, "--batch-size", 8, cwd=tmp_path, **how)
    failed = "DefaultCPUAllocator: can't allocate memory" in done.stderr
    assert (done.returncode, failed) == ((0, False) if name == NAME else (1, True))


def sent_by(host):
    (link,) = json.loads(host.run("ip", "-s", "-j", "link", "show", "eth0"))
    return link["stats64"]["tx"]["bytes"]


@needs_hosts
@pytest.mark.waits
def test_hsdp_sends_less_between_machines(tmp_path):
    """With the lines of the chapter; 2 machines, 2 ranks each, 32 steps."""
    page = (ROOT / "docs/7_sharding.md").read_text()
    (code,) = re.findall(r"## Shard inside a machine.*?```python\n(.*?)```", page, re.S)
    one_mesh = re.search(r" +mesh = .*\n", (ROOT / NAME).read_text())[0]
    two_dimensions = "".join(f"        {line}\n" for line in code.splitlines())
    wide = MODEL, LARGE.replace("1000", "500").replace("12", "2")
    changes = wide, FEW[1]  # all start from rank 0's weights: sent once, not each step
    words = "torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d"
    words += " --rdzv-endpoint=node0:29500 -m variants.fsdp 1 1 --batch-size 16"
    sent, saved = [], []
    for name, mesh in (("fsdp", one_mesh), ("hsdp", two_dimensions)):
        folder = tmp_path / name
        plant(NAME, folder, *changes, (one_mesh, mesh))
        with hosts.Hosts(2, folder) as two:
            before = sent_by(two[0])
            jobs = [host.start(words.split(), PYTHONPATH=folder) for host in two]
            assert [job.finish().returncode for job in jobs] == [0, 0], jobs[0].output
            sent.append(sent_by(two[0]) - before)
        saved.append(load(folder / "snapshot.pt")["MODEL_STATE"])
    torch.testing.assert_close(saved[0], saved[1], rtol=0, atol=1e-6)
    model = 32 * 4 * sum(x.numel() for x in saved[0].values())
    fsdp_sent, hsdp_sent = (x / model for x in sent)
    print(f"times the model, each step: FSDP {fsdp_sent:.2f}, HSDP {hsdp_sent:.2f}")
    assert 0.95 < hsdp_sent < 1.1
    assert fsdp_sent > 2.2


@pytest.mark.waits
def test_the_table_of_the_chapter():
    """Bytes of each parameter: the formula, and what 4 ranks hold. What is whole."""
    words = ["torchrun", "--standalone", "--nproc-per-node=4"]
    done = Program([*words, "-m", "docs.7_sharding.memory"], ROOT).finish()
    rows = re.findall(r"formula +([\d.]+) \| +([\d.]+)", done.stdout)
    assert rows == [(x, x) for x in ("16.0", "10.0", "8.0", "4.0")]
    kept = [float(x) for x in re.findall(r"activations.*\| ([\d.]+)", done.stdout)]
    assert kept == pytest.approx([64.5, 4.1], abs=0.3)
    assert "| 47%; both ends alone, 0%" in done.stdout
