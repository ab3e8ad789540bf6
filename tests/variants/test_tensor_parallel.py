"""tensor_parallel.py: the training of one process, with layers cut over ranks."""

import re

import pytest
import torch

from tests.helpers.checks import (
    STANDIN,
    assert_same_losses,
    fence,
    help_of,
    noted,
    replicas,
)
from tests.helpers.scripts import LAYERS, MODEL
from tests.hooks.models import float64
from tests.hooks.parts import note_held
from tests.hooks.probe import probe
from tools.run.launch import torchrun, train
from tools.run.results import load, losses
from tools.scripts import ROOT

NAME = "variants/tensor_parallel.py"
PARENT = "multinode.py"
RATE = "lr=0.001", "lr=0.01"
FOLDER = "docs/split_your_model"
LOOP = fence(f"{FOLDER}.md", "def clip_grad_norm_")
CLIP = re.search(r"def clip_grad_norm_.*?\n\n\n", LOOP, re.S)[0]
# Layers that stay whole, a frozen one
MORE = """    layers = torch.nn.Linear(20, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)
    model = torch.nn.Sequential(*layers, torch.nn.LayerNorm(4), torch.nn.Linear(4, 1))
    model[3].requires_grad_(False)
"""
SEED = "utils.seed(0)", 'torch.manual_seed(int(utils.os.environ["RANK"]))'


@pytest.mark.waits
def test_learns(typed):
    """With the docstring's own command: to near the noise floor, which is 0.01."""
    _, done = typed(NAME)
    _, held_out_loss = losses(done)[-1]
    assert held_out_loss < 0.016


@pytest.mark.waits
@pytest.mark.parametrize("model", [LAYERS, MORE])
def test_any_split_continues_any_other(tmp_path, model):
    """2 replicas of 2 ranks, 1 of 4, 2 of 1, then the parent, as the parent alone.

    Ranks begin with other weights. They clip by the norm of all gradients.
    """
    step = "        self.optimizer.step()\n"
    clip = "        clip_grad_norm_(self.model, 1.0)\n"
    trainer = "class Trainer:\n"
    clipping = (trainer, CLIP + trainer)
    changes = [(step, clip + step), clipping, SEED, (LAYERS, model)]
    parents_clip = (
        "        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)\n"
    )
    parents_changes = [(step, parents_clip + step), (MODEL, model), RATE]

    def train_split(epochs, ranks, split):
        return train(
            NAME,
            epochs,
            1,
            "--split",
            split,
            cwd=tmp_path,
            nprocs=ranks,
            batch=64 * split // ranks,  # of a replica
            changes=changes,
            hooks=[float64],  # in which rounding hides nothing
        )

    def train_parent(path):
        return train(
            PARENT,
            4,
            1,
            "--snapshot-path",
            path,
            cwd=tmp_path,
            nprocs=1,
            changes=parents_changes,
            hooks=[float64],
        )

    pieces = losses(train_split(epochs=1, ranks=4, split=2))
    pieces += losses(train_split(epochs=2, ranks=4, split=4))
    pieces += losses(train_split(epochs=3, ranks=2, split=1))
    pieces += losses(train_parent("snapshot.pt"))
    assert_same_losses(pieces, losses(train_parent("whole.pt")))
    found = load(tmp_path)
    expected = load(tmp_path / "whole.pt")
    for snapshot in (found, expected):
        (group,) = snapshot["OPTIMIZER_STATE"]["param_groups"]
        del group["foreach"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_whole_weights_stay_equal_in_a_replica(tmp_path):
    """Though each rank rounds gradients otherwise, as some of a GPU's kernels do.

    If they drifted apart, the check before the snapshot would end the run.
    """

    backward = "        loss.backward()\n"
    otherwise = """\
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad *= 1 + 1e-3 * dist.get_rank()
"""
    changes = (LAYERS, MORE), (backward, backward + otherwise)
    train(NAME, 1, 1, "--split", 2, cwd=tmp_path, nprocs=4, changes=changes)


def test_two_replicas_of_two_ranks(tmp_path):
    """Each replica has its samples and its random numbers, and both its ranks them.

    A rank holds its half. To save the model, rank 0 alone keeps the whole.
    """
    train(
        NAME,
        2,
        1,
        "--split",
        2,
        cwd=tmp_path,
        nprocs=4,
        batch=33,
        hooks=[probe, note_held],
    )
    first, second = replicas(noted(tmp_path, "probe", ranks=4))
    assert not set(first["orders"][0]) & set(second["orders"][0])
    assert sorted(first["evaluated"] + second["evaluated"]) == list(range(17))
    assert len(set(first["random"] + second["random"])) == 4
    for rank, held in enumerate(noted(tmp_path, "held", ranks=4)):
        assert held["parts"] == [4 * (8 * 20 + 8 + 8 + 1)] * 3, "half, and a bias"
        assert held["gathered"] == ("None" if rank else "cpu")
        no_layer_is_whole = [["Sequential", 0, 0], ["MSELoss", 0, 0]]
        assert held["moved"] == no_layer_is_whole
        assert not held["wrapped"]


@pytest.mark.waits
@pytest.mark.usefixtures("standin")
def test_layers_that_stay_whole_go_to_the_device(tmp_path):
    """With foreach=True, the default there, the optimizer would refuse the mixture."""
    done = train(
        NAME, 1, 1, cwd=tmp_path, changes=[(LAYERS, MORE)], STANDIN_DEVICES=2, **STANDIN
    )
    assert "2 x standin, " in done.stdout


SMALL = "MyTrainDataset(2048)", "MyTrainDataset(31)"
WRONG = [
    ("--split 4 does not divide 2 ranks", 4, []),
    ("too few samples: a step takes 64, and there are 31", 2, [SMALL]),
]


@pytest.mark.parametrize(("line", "split", "changes"), WRONG)
def test_what_cannot_be_cut_ends_with_a_line(tmp_path, line, split, changes):
    options = "--split", split
    done = train(NAME, 1, 1, *options, status=1, cwd=tmp_path, changes=changes)
    assert f"error: {line}" in done.stderr
    assert not (tmp_path / "snapshot.pt").exists()


# The two ranks of a replica round a whole weight's gradient up and down.
ROUND_OTHERWISE = """\
        place = mesh.get_local_rank("split") - (split - 1) / 2
        model.norm.weight.grad.to_local().mul_(1 + 1e-3 * place)
"""


def test_the_pages_loop_trains_the_same(tmp_path):
    """Two replicas of two ranks, with FSDP between them, and one process."""
    average = "        average_in_replica(model)\n"
    loop = LOOP.replace("model = Model()", "model = Model().double()")
    loop = loop.replace("make_data(512,", "make_data(128,")
    loop = loop.replace(average, ROUND_OTHERWISE + average)
    (tmp_path / "loop.py").write_text(loop)
    ended = []
    for nprocs, split in [(1, 1), (4, 2)]:
        folder = tmp_path / f"of {nprocs}"
        words = ["../loop.py", split, 2]
        torchrun(*words, cwd=folder, nprocs=nprocs, PYTHONPATH=ROOT / FOLDER)
        snapshot = load(folder / "loop.pt")
        ended.append((snapshot["MODEL_STATE"], snapshot["OPTIMIZER_STATE"]["state"]))
    torch.testing.assert_close(*ended, rtol=0, atol=1e-8)


def test_without_the_option_each_rank_is_a_replica(tmp_path):
    done = train(NAME, 1, 1, cwd=tmp_path, own_options=False)
    assert "2 x cpu, batch 64 each: effective batch 128" in done.stdout
    assert "--split SPLIT ranks that share a layer" in help_of(NAME, tmp_path)
