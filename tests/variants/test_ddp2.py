"""ddp2.py: a loss over the whole batch of a node, and gradients over all nodes."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from tests.helpers.checks import import_script, objects_of, stack
from tests.helpers.own_disks import free_port, launch_on_own_disks
from tests.hooks import replace
from tests.hooks.models import float64
from tools.run.launch import command, copy_script
from tools.run.processes import Program
from tools.run.results import load, losses, weights

NAME = "variants/ddp2.py"


def accuracies(done):
    found = re.findall(r"retrieval accuracy (\S+)", done.stdout)
    return [float(accuracy) for accuracy in found]


@pytest.mark.waits
def test_learns(typed):
    """The docstring's own command finds at least 92 % of the held-out points."""
    folder, done = typed(NAME)
    assert accuracies(done)[-1] > 0.92
    state = load(folder)["MODEL_STATE"]
    assert state["log_scale"] > math.log(10) + 0.5, "the temperature has fallen"


def test_gather_has_static_methods():
    """As PyTorch's documentation asks. Up to 2.13 it computes the same without."""
    ddp2 = import_script(NAME)
    members = vars(ddp2.Gather)
    assert type(members["forward"]) is staticmethod
    assert type(members["backward"]) is staticmethod


# Nodes and their processes


def few_held_out(script):
    """Three samples, so that one of four ranks has none."""

    def load_views(inner):
        train_set, held_out = inner()
        return train_set, held_out[:3]

    replace(script, "load_views", load_views)


def trained_on(folder, nodes, nprocs, batch_size, script=NAME):
    """(the weights, the losses) of an epoch in float64.

    Each node has `nprocs` ranks, and torchrun's variables say so.
    """
    ranks = launch_on_own_disks(
        script,
        1,
        1,
        "--batch-size",
        batch_size,
        cwd=folder,
        nprocs=nodes * nprocs,
        hooks=[few_held_out, float64],
        GROUP_WORLD_SIZE=nodes,
        LOCAL_WORLD_SIZE=nprocs,
        OMP_NUM_THREADS=1,
    )
    for rank in ranks:
        assert rank.returncode == 0, rank.stderr
    (epoch,) = losses(ranks[0])
    return weights(folder / "0"), epoch


def test_a_node_trains_as_one_process_with_its_batch(tmp_path):
    """With the temperature, which is one of the parameters."""
    found = trained_on(tmp_path / "two", nodes=2, nprocs=2, batch_size=12)
    alone = copy_script(
        NAME, tmp_path / "copy", ("Gather.apply(output, self.node)", "output")
    )
    expected = trained_on(tmp_path / "one", 2, nprocs=1, batch_size=24, script=alone)
    assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.waits
def test_torchrun_gives_neighbouring_ranks_to_one_machine(tmp_path):
    """Two, each with a torchrun of its own. They wait for each other for 5 minutes."""

    head = "    def train(self, total_epochs):\n"
    print_group = """\
        ranks = dist.get_process_group_ranks(self.node)
        options = self.node._get_backend(self.device).options
        print(f"group {ranks} waits {options._timeout}")
"""
    copy = tmp_path / "copy"
    copy_script(NAME, copy, (head, head + print_group))
    start, _, *rest = command(NAME, 1, 1)
    port = f"--master-port={free_port()}"
    start = [start, "--nnodes=2", "--master-addr=localhost", port]
    machines = []
    for rank in range(2):
        words = [*start, f"--node-rank={rank}", *rest]
        machines.append(Program(words, tmp_path, PYTHONPATH=copy))
    for machine, group in zip(machines, ([0, 1], [2, 3]), strict=True):
        assert machine.finish().stdout.count(f"group {group} waits 0:05:00") == 2


@pytest.mark.waits
def test_all_nodes_can_compare_together(tmp_path):
    """If the group has all ranks, 4 ranks on 2 nodes train as one process."""
    change = ("new_subgroups(nprocs, ", "new_subgroups(world_size, ")
    copy = copy_script(NAME, tmp_path / "copy", change)
    found = trained_on(tmp_path / "four", nodes=2, nprocs=2, batch_size=12, script=copy)
    expected = trained_on(tmp_path / "one", nodes=1, nprocs=1, batch_size=48)
    assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.waits
def test_retrieval_is_among_all_held_out_points(runs):
    """As the saved model has it."""
    folder, done = runs(NAME)
    _, eval_set, model, loss_fn, _ = objects_of(NAME)
    model.load_state_dict(load(folder)["MODEL_STATE"])
    source, targets = stack(eval_set)
    first, second = F.normalize(model.linear(source), dim=-1).unbind(1)
    nearest = torch.cdist(first, second).argmin(1)
    accuracy = (nearest == torch.arange(512)).double().mean().item()
    _, held_out_loss = losses(done)[-1]
    expected = loss_fn(model(source), targets).item()
    assert (held_out_loss, accuracies(done)[-1]) == pytest.approx(
        (expected, accuracy), abs=1e-6
    )
    assert 0.5 < accuracy < 1


@pytest.mark.parametrize(
    ("nodes", "batch_size", "line"),
    [
        (3, 32, "this machine has 1 of 1 processes, and there are 3 machines: give"),
        (1, 1, "a machine takes 1 sample in a step: raise --batch-size"),
    ],
)
def test_refused_in_one_line(tmp_path, nodes, batch_size, line):
    """By torchrun's own variables, before anything is printed or written."""
    (done,) = launch_on_own_disks(
        NAME,
        1,
        1,
        "--batch-size",
        batch_size,
        cwd=tmp_path,
        nprocs=1,
        GROUP_WORLD_SIZE=nodes,
        LOCAL_WORLD_SIZE=1,
    )
    assert done[:2] == (2, "")
    assert done.stderr.startswith(f"ddp2.py: error: {line}")
    assert not list((tmp_path / "0").iterdir())


# What it learns


def test_the_views_are_what_they_say():
    """Of 20 directions, 8 tell points apart, and 4 of these the families."""
    ddp2 = import_script(NAME)
    train_set, held_out = ddp2.load_views()
    again, _ = ddp2.load_views()
    assert torch.equal(again[0][0], train_set[0][0]), "each time"
    source, targets = stack([*train_set, *held_out])
    assert source.shape == (2560, 2, 20)
    assert targets.tolist() == list(range(2560))
    first, second = source.unbind(1)
    noise = torch.cov((first - second).T) / 2
    spread = torch.linalg.eigvalsh(noise)
    assert spread[:8].max() < 0.05
    assert spread[8:].min() > 0.8
    assert noise.triu(1).abs().max() > 0.1, "no direction is one of the 20 numbers"
    common = torch.linalg.svdvals(first.T @ second / 2560)
    assert common[:4].min() > 5, "families"
    assert common[4:8].min() > 0.8, "points"
    assert common[8:].max() < 0.15, "noise"


def test_a_product_of_outputs_is_cosine_by_temperature():
    _, _, model, *_ = objects_of(NAME)
    source = torch.randn(5, 2, 20)
    output = model(source)
    products = (output[:, 0] * output[:, 1]).sum(1)
    first, second = model.linear(source).unbind(1)
    expected = F.cosine_similarity(first, second) / 0.1
    assert_close(products, expected)


def test_info_nce_is_the_mean_over_both_directions():
    """Written out."""
    output = torch.randn(6, 2, 3, dtype=torch.float64)
    first, second = output.unbind(1)
    scores = torch.exp(first @ second.T)
    partners = scores.diagonal()
    shares = torch.stack([partners / scores.sum(0), partners / scores.sum(1)])
    expected = -shares.log().mean()
    _, _, _, loss_fn, _ = objects_of(NAME)
    targets = torch.tensor([7, 3, 9, 1, 0, 4])
    assert_close(loss_fn(output, targets), expected)
