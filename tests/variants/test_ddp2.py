"""ddp2.py: a loss over the whole batch of a node, and gradients over all nodes."""

import math
import re
import socket

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import once
from tests.helpers.checks import import_script, noted, stack
from tests.helpers.forked import in_a_fork
from tools.run.launch import command, environment, objects_of, plant, run_script
from tools.run.processes import Program
from tools.run.results import load, losses, weights
from tools.scripts import ROOT

NAME = "variants/ddp2.py"


def accuracies(done):
    found = re.findall(r"retrieval accuracy (\S+)", done.stdout)
    return [float(accuracy) for accuracy in found]


@pytest.mark.waits
def test_learns(typed):
    """The docstring's own command finds at least 92 % of the held-out points."""
    folder, done, _ = typed(NAME)
    held_out = [held_out_loss for _, held_out_loss in losses(done)]
    found = accuracies(done)
    assert len(held_out) == len(found) == 20
    assert found[-1] > 0.92
    assert held_out[-1] < held_out[0] / 5
    state = load(folder / "snapshot.pt")["MODEL_STATE"]
    assert state["log_scale"] > math.log(10) + 0.5, "the temperature has fallen"


def test_gather_has_static_methods():
    """As PyTorch's documentation asks. Up to 2.13 it computes the same without."""
    ddp2 = import_script(NAME)
    members = vars(ddp2.Gather)
    assert type(members["forward"]) is staticmethod
    assert type(members["backward"]) is staticmethod


# Nodes and their processes


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory):
    """`two_nodes()`: (folder, Done of the first node) of two nodes with two ranks each.

    One epoch in float64. A node takes 24 samples a step. Three samples are held out, so
    that one rank has none.
    """

    @once
    def run():
        folder = tmp_path_factory.mktemp("trained")
        return folder, trained(folder, 2, 2)

    return run


def trained(folder, nodes, nprocs, *changes):
    """Done of the first node. Each node has a torchrun of its own."""
    script = plant(NAME, folder / "copy", *changes, hooks=["ddp2", "models:float64"])
    with socket.socket() as any_free:
        any_free.bind(("localhost", 0))
        port = any_free.getsockname()[1]
    words = command(script, 1, 1, "--batch-size", 24 // nprocs, nprocs=nprocs)
    words.remove("--standalone")
    start, *rest = words
    start = [start, f"--nnodes={nodes}", "--master-addr=localhost"]
    start.append(f"--master-port={port}")
    forks = []
    for node in range(nodes):
        words = [*start, f"--node-rank={node}", *rest]
        forks.append(Program(words, folder, **environment(script, {})))
    done = [fork.finish() for fork in forks]
    for node in done:
        assert node.returncode == 0, done
    return done[0]


@in_a_fork
def assert_as_by_hand(folder, done, nodes, batch_size):
    """It ends as an epoch in one process, with nothing to gather: here.

    The loss is the mean over the batches that one process on each node would take.
    """
    train_set, eval_set, model, loss_fn, optimizer = objects_of(NAME)
    source, targets = stack([*train_set, *eval_set])
    source = source.double()
    model.double()
    order = torch.randperm(2048, generator=torch.Generator().manual_seed(0))
    size = nodes * batch_size
    train_losses = []
    for step in range(2048 // size):
        samples = order[size * step : size * (step + 1)]
        loss = 0
        for node in range(nodes):
            batch = samples[node::nodes]  # as the sampler deals them
            loss += loss_fn(model(source[batch]), targets[batch]) / nodes
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        train_losses.append(loss.item())
    found = weights(folder / "snapshot.pt")
    state = model.state_dict().values()
    expected = torch.cat([tensor.flatten() for tensor in state])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    held_out_loss = loss_fn(model(source[2048:2051]), targets[2048:2051]).item()
    train_loss = sum(train_losses) / len(train_losses)
    expected = pytest.approx((train_loss, held_out_loss), abs=1e-6)
    assert losses(done) == [expected]


def test_a_node_trains_as_one_process_with_its_batch(two_nodes):
    """With the temperature, which is one of the parameters."""
    folder, done = two_nodes()
    assert_as_by_hand(folder, done, nodes=2, batch_size=24)


@pytest.mark.waits
def test_all_nodes_can_compare_together(tmp_path):
    """If the group has all ranks, 4 ranks on 2 nodes train as one process."""
    change = "new_subgroups(nprocs, ", "new_subgroups(world_size, "
    done = trained(tmp_path, 2, 2, change)
    assert_as_by_hand(tmp_path, done, nodes=1, batch_size=48)


def test_the_ranks_of_a_node_and_how_long_they_wait(two_nodes):
    folder, _ = two_nodes()
    first = [[0, 1], 300]
    second = [[2, 3], 300]
    assert noted(folder, ranks=4) == [first, first, second, second]


@pytest.mark.waits
def test_retrieval_is_among_all_held_out_points(runs):
    """The same on one and on two ranks, and as the saved model has it."""
    folder, done = runs(NAME)
    _, on_one_rank = runs(NAME, 1)
    assert accuracies(done) == accuracies(on_one_rank)
    _, eval_set, model, *_ = objects_of(NAME)
    model.load_state_dict(load(folder / "snapshot.pt")["MODEL_STATE"])
    source, _ = stack(eval_set)
    first, second = F.normalize(model.linear(source), dim=-1).unbind(1)
    nearest = torch.cdist(first, second).argmin(1)
    accuracy = (nearest == torch.arange(512)).double().mean().item()
    assert accuracies(done)[-1] == pytest.approx(accuracy, abs=1e-6)
    assert 0.5 < accuracy < 1


@pytest.mark.parametrize(
    ("world_size", "nodes", "batch_size", "line"),
    [
        (6, 3, 32, "this machine has 1 of 6 processes, and there are 3 machines: give"),
        (1, 1, 1, "a machine takes 1 sample in a step: raise --batch-size"),
    ],
)
def test_refused_in_one_line(tmp_path, world_size, nodes, batch_size, line):
    """Before a process group is made, by torchrun's own variables."""
    env = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": 1,
        "GROUP_WORLD_SIZE": nodes,
    }
    script = ROOT / NAME
    done = run_script(script, 1, 1, "--batch-size", batch_size, cwd=tmp_path, **env)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"ddp2.py: error: {line}")
    assert not list(tmp_path.iterdir())


# What it learns


def test_the_views_are_what_they_say():
    """Of 20 directions, 8 tell points apart, and 4 of these the families."""
    ddp2 = import_script(NAME)
    train_set, held_out = ddp2.load_views()
    assert len(train_set) == 2048
    assert len(held_out) == 512
    again, _ = ddp2.load_views()
    assert torch.equal(again[0][0], train_set[0][0]), "each time"
    source, targets = stack([*train_set, *held_out])
    assert source.dtype == torch.float32
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
    torch.testing.assert_close(products, expected)


def test_info_nce_is_the_mean_over_both_directions():
    """Written out, and in any order of the batch."""
    output = torch.randn(6, 2, 3, dtype=torch.float64)
    first, second = output.unbind(1)
    expected = 0
    for views, others in ((first, second), (second, first)):
        for index, view in enumerate(views):
            scores = torch.exp(others @ view)
            expected -= torch.log(scores[index] / scores.sum()) / 12
    _, _, _, loss_fn, _ = objects_of(NAME)
    targets = torch.tensor([7, 3, 9, 1, 0, 4])
    order = torch.randperm(6)
    torch.testing.assert_close(loss_fn(output, targets), expected)
    torch.testing.assert_close(loss_fn(output[order], targets[order]), expected)
