"""tensor_parallel.py: the training of one process, with layers cut over ranks."""

import json
import re
from textwrap import indent

import pytest
import torch

from tests.trunk.test_probe import replicas
from tests.variants.test_fsdp import FEW, LARGE, MODEL
from tools.run.launch import command, environment, launch, plant, run_script, train
from tools.run.processes import Program
from tools.run.results import load, losses, weights
from tools.scripts import ROOT

NAME, PARENT = "variants/tensor_parallel.py", "multinode.py"
LAYERS = """\
    layers = torch.nn.Linear(20, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)
    model = torch.nn.Sequential(*layers)
"""
PLAN = '{"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}'
RATE = "lr=0.001", "lr=0.01"
PAGE = (ROOT / "docs/tensor_parallel.md").read_text()
CLIPPING = re.search("```python\n(weights = .*?)```", PAGE, re.S)[1]
# Layers that stay whole, a frozen one, weights in another order of memory.
MORE = """    layers = torch.nn.Linear(20, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)
    model = torch.nn.Sequential(*layers, torch.nn.LayerNorm(4), torch.nn.Linear(4, 1))
    model[0].weight.data = torch.randn(16, 40)[:, ::2]
    model[3].requires_grad_(False)
"""
SEED = "torch.manual_seed(0)", 'torch.manual_seed(int(os.environ["RANK"]))'


@pytest.mark.waits
def test_learns(typed):
    """With the docstring's own command: to near the noise floor, which is 0.01."""
    folder, done, _ = typed(NAME)
    assert losses(done)[0][1] > 0.1
    assert losses(done)[-1][1] < 0.016
    assert len(weights(folder / "snapshot.pt")) == 20 * 16 + 16 + 16 + 1


@pytest.mark.waits
@pytest.mark.parametrize("model", [LAYERS, MORE])
def test_any_split_continues_any_other(tmp_path, model):
    """2 replicas of 2 ranks, 1 of 4, 2 of 1, then the parent, as the parent alone.

    Ranks begin with other weights. The page's lines clip by the norm of all gradients.
    """
    clip = "        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)\n"
    step = "        self.optimizer.step()\n"
    its = [(step, indent(CLIPPING, 8 * " ") + step), SEED]
    its += [(LAYERS, model)] * (model != LAYERS)
    hooks = {"hooks": ["float64"]}  # in which rounding hides nothing
    mine = plant(NAME, tmp_path / "mine", *its, **hooks)
    changes = (step, clip + step), (MODEL, model), RATE
    parent = plant(PARENT, tmp_path / "parent", *changes, **hooks)
    pieces = []
    for epochs, (ranks, split) in enumerate([(4, 2), (4, 4), (2, 1)], start=1):
        size = "--batch-size", 64 * split // ranks, "--split", split
        how = {"cwd": tmp_path, "nprocs": ranks, "own_options": False}
        pieces += losses(train(mine, epochs, 1, *size, **how))
    alone = {"cwd": tmp_path, "nprocs": 1}
    pieces += losses(train(parent, 4, 1, "--batch-size", 64, **alone))
    whole = "--snapshot-path", "whole.pt"
    curve = losses(train(parent, 4, 4, "--batch-size", 64, *whole, **alone))
    torch.testing.assert_close(pieces, curve, rtol=1e-6, atol=2e-6)
    found, expected = (load(tmp_path / f"{x}.pt") for x in ("snapshot", "whole"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_two_replicas_of_two_ranks(tmp_path):
    """Each replica has its samples and its random numbers, and both its ranks them.

    A rank holds its half. To save the model, rank 0 alone keeps the whole.
    """
    script = plant(NAME, tmp_path, hooks=["probe", "fsdp:held"])
    how = {"cwd": tmp_path, "nprocs": 4, "own_options": False}
    train(script, 2, 1, "--batch-size", 33, "--split", 2, **how)
    files = [tmp_path / f"probe.{rank}.json" for rank in range(4)]
    first, second = replicas([json.loads(x.read_text()) for x in files])
    assert not {*first["orders"][0]} & {*second["orders"][0]}
    assert sorted(first["evaluated"] + second["evaluated"]) == [*range(17)]
    assert len({*first["random"], *second["random"]}) == 4
    for rank in range(4):
        held = json.loads((tmp_path / f"held.{rank}.json").read_text())
        assert held["parts"] == [4 * (8 * 20 + 8 + 8 + 1)] * 3, "half, and a bias"
        assert held["gathered"] == ("meta" if rank else "cpu")
        assert held["moved"] == ["MSELoss"], "no device holds the whole model"


ODD = LAYERS, LAYERS.replace("16", "15")
WRONG = [
    ("--split 4 does not divide 2 ranks", 4, ()),
    ("PLAN names ['4'], the model has ['', '0', '1', '2']", 2, [('"2": p', '"4": p')]),
    ("--split 2 does not divide 0.weight", 2, [ODD]),
]


@pytest.mark.parametrize(("line", "split", "changes"), WRONG)
def test_what_cannot_be_cut_ends_with_a_line(tmp_path, line, split, changes):
    script = plant(NAME, tmp_path / "copy", *changes)
    how = {"cwd": tmp_path, "real": "", "own_options": False}
    done = launch(script, 1, 1, "--split", split, **how)
    assert f"error: {line}\n" in done.stderr
    assert done.returncode != 0 and not (tmp_path / "snapshot.pt").exists()


def test_a_parameter_that_no_rank_uses(tmp_path):
    unused = LAYERS, LAYERS + "    model.unused = torch.nn.Linear(1, 1)\n"
    used = (
        "self.model(source)\n        loss =",
        "self.model[:3](source)\n        loss =",
    )
    script = plant(NAME, tmp_path / "copy", unused, used)
    done = launch(script, 1, 1, cwd=tmp_path, real="")
    assert "RuntimeError: unused.weight has no gradient" in done.stderr


ADDED = """
import os
import torch
import torch.distributed as dist
from torch.profiler import profile
from torch.utils.data import DistributedSampler
from variants import tensor_parallel

os.environ["LOCAL_WORLD_SIZE"] = "1"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
layers = torch.nn.Linear(2, 2), torch.nn.GELU(), torch.nn.Linear(2, 2)
model = torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(2))
optimizer = torch.optim.SGD(model.parameters(), 1)
its_list = optimizer.param_groups[0]["params"]
optimizer.state[model[0].weight] |= {"note": 3, "mean": torch.zeros(2, 2)}
sampler, cpu = DistributedSampler([0]), torch.device("cpu")
old = model[0].weight
with profile() as seen:
    group = tensor_parallel.split_layers(model, optimizer, sampler, cpu)
print([x.name for x in seen.events()].count("gloo:broadcast"))
print(old.sum().item(), old.untyped_storage().nbytes())
with profile() as seen:
    model(torch.zeros(3, 2)).sum().backward()
    tensor_parallel.average_gradients(model, group)
print([x.name for x in seen.events()].count("gloo:broadcast"))
new, state = model[0].weight, optimizer.state[model[0].weight]
print(its_list[0] is new, state["note"], state["mean"].placements == new.placements)
print(*[type(x) for x in tensor_parallel.gather([(model[0].weight,)])[0]])
"""


def test_what_a_reader_adds(tmp_path):
    """A list that an optimizer keeps, a note in its state, a tuple.

    All 9 tensors are sent once, and one to a replica. The whole weights are freed. What
    still uses them is NaN. After a step, all ranks have the 3 buffers of rank 0.
    """
    (tmp_path / "added.py").write_text(ADDED)
    done = run_script(tmp_path / "added.py", cwd=tmp_path, PYTHONPATH=ROOT)
    lines = ["10", "nan 4", "3", "True 3 True", "<class 'torch.Tensor'>"]
    assert done.stdout.splitlines() == lines, done.stderr


def test_without_the_option_each_rank_is_a_replica(tmp_path):
    done = train(ROOT / NAME, 1, 1, cwd=tmp_path, own_options=False)
    assert "2 x cpu, batch 32 each: effective batch 64" in done.stdout
    words = " ".join(run_script(ROOT / NAME, "--help", cwd=tmp_path).stdout.split())
    assert "--split SPLIT ranks that share a layer" in words


def test_a_layer_on_two_machines_is_told(tmp_path):
    how = {"nprocs": 1, "own_options": False}
    words = command(ROOT / NAME, 1, 1, "--split", 2, **how)
    words.remove("--standalone")
    meet = "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:29531"
    words[1:1] = meet.split()
    env = environment(ROOT / NAME, {"OMP_NUM_THREADS": 1})
    forks = []
    for machine in range(2):
        (folder := tmp_path / str(machine)).mkdir()
        forks.append(Program(words, folder, **env))
    text = "".join(fork.finish().stdout for fork in forks)
    line = "the 2 ranks of a layer are on several machines: it will be slow\n"
    assert text.count(line) == 1


@pytest.mark.waits
def test_a_model_too_large_for_one_rank(tmp_path):
    """The model and the limit of fsdp.py's test, where multinode.py fails."""
    pairs = "str(i): (parallel.ColwiseParallel, parallel.RowwiseParallel)[i % 2]()"
    plan = PLAN, f"{{{pairs} for i in range(14)}}"
    changes = (LAYERS, LARGE), plan, *FEW
    script = plant(NAME, tmp_path / "copy", *changes, hooks=["fsdp:limited"])
    how = {"nprocs": 4, "real": "", "LIMIT_MB": 170}
    done = launch(script, 2, 2, "--batch-size", 8, cwd=tmp_path, **how)
    assert done.returncode == 0, done.stderr
