"""ddp2.py: a loss over the whole batch of a node, and gradients over all nodes."""

import json
import math
import re
import socket

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import once
from tests.helpers.forked import in_a_fork
from tools.run.launch import command, environment, objects_of, plant, run_script
from tools.run.processes import Program
from tools.run.results import load, losses, weights
from tools.scripts import ROOT

NAME = "variants/ddp2.py"


def accuracies(done):
    return [float(x) for x in re.findall(r"retrieval accuracy (\S+)", done.stdout)]


@pytest.mark.waits
def test_learns(typed):
    """The docstring's own command finds at least 92 % of the held-out points."""
    folder, done, _ = typed(NAME)
    curve, found = losses(done), accuracies(done)
    assert len(curve) == len(found) == 20
    assert found[-1] > 0.92
    assert curve[-1][1] < curve[0][1] / 5
    log_scale = load(folder / "snapshot.pt")["MODEL_STATE"]["log_scale"].item()
    assert log_scale > math.log(10) + 0.5, "the temperature has fallen"


def test_gather_has_static_methods():
    """As PyTorch's documentation asks. Up to 2.13 it computes the same without."""
    from variants import ddp2

    gather = vars(ddp2.Gather)
    assert {type(gather[x]) for x in ("forward", "backward")} == {staticmethod}


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
    script = plant(NAME, folder / "copy", *changes, hooks=["ddp2", "float64"])
    with socket.socket() as any_free:
        any_free.bind(("localhost", 0))
        port = any_free.getsockname()[1]
    forks = []
    for node in range(nodes):
        words = command(script, 1, 1, "--batch-size", 24 // nprocs, nprocs=nprocs)
        at = words.index("--standalone")
        where = ["--master-addr=localhost", f"--master-port={port}"]
        words[at : at + 1] = [f"--nnodes={nodes}", f"--node-rank={node}", *where]
        forks.append(Program(words, folder, **environment(script, {})))
    done = [fork.finish() for fork in forks]
    assert [x.returncode for x in done] == [0] * nodes, done
    return done[0]


@in_a_fork
def assert_as_by_hand(folder, done, nodes, batch_size):
    """It ends as an epoch in one process, with nothing to gather: here.

    The loss is the mean over the batches that one process on each node would take.
    """
    train_set, eval_set, model, loss_fn, optimizer = objects_of(NAME)
    source, targets = map(torch.stack, zip(*train_set, *eval_set, strict=True))
    model, source = model.double(), source.double()
    order = torch.randperm(2048, generator=torch.Generator().manual_seed(0))
    train_losses = []
    for step in range(2048 // (nodes * batch_size)):
        dealt = order[nodes * batch_size * step :][: nodes * batch_size]
        batches = [dealt[node::nodes] for node in range(nodes)]
        parts = [loss_fn(model(source[x]), targets[x]) for x in batches]
        train_losses.append(sum(parts) / nodes)
        optimizer.zero_grad()
        train_losses[-1].backward()
        optimizer.step()
    expected = torch.cat([x.detach().flatten() for x in model.state_dict().values()])
    mine = weights(folder / "snapshot.pt")
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
    held_out = loss_fn(model(source[2048:2051]), targets[2048:2051])
    expected = (sum(train_losses) / len(train_losses)).item(), held_out.item()
    assert losses(done) == [pytest.approx(expected, abs=1e-6)]


def test_a_node_trains_as_one_process_with_its_batch(two_nodes):
    """With the temperature, which is one of the parameters."""
    assert_as_by_hand(*two_nodes(), 2, 24)


@pytest.mark.waits
def test_all_nodes_can_compare_together(tmp_path):
    """If the group has all ranks, 4 ranks on 2 nodes train as one process."""
    change = "new_subgroups(nprocs, ", "new_subgroups(world_size, "
    done = trained(tmp_path, 2, 2, change)
    assert_as_by_hand(tmp_path, done, 1, 48)


def test_the_ranks_of_a_node_and_how_long_they_wait(two_nodes):
    folder, _ = two_nodes()
    noted = [json.loads((folder / f"noted.{i}.json").read_text()) for i in "0123"]
    assert noted == [[[0, 1], 300]] * 2 + [[[2, 3], 300]] * 2


@pytest.mark.waits
def test_retrieval_is_among_all_held_out_points(runs):
    """The same on one and on two ranks, and as the saved model has it."""
    folder, done = runs(NAME)
    assert accuracies(done) == accuracies(runs(NAME, 1)[1])
    _, eval_set, model, *_ = objects_of(NAME)
    model.load_state_dict(load(folder / "snapshot.pt")["MODEL_STATE"])
    source = torch.stack([source for source, _ in eval_set])
    first, second = F.normalize(model.linear(source), dim=-1).unbind(1)
    nearest = torch.cdist(first, second).argmin(1)
    right = (nearest == torch.arange(512)).sum().item()
    assert accuracies(done)[-1] == pytest.approx(right / 512, abs=1e-6)
    assert 0.5 < right / 512 < 1


@pytest.mark.parametrize(
    ("world_size", "nodes", "batch_size", "line"),
    [
        (6, 3, 32, "this machine has 1 of 6 processes, and there are 3 machines: give"),
        (1, 1, 1, "a machine takes 1 sample in a step: raise --batch-size"),
    ],
)
def test_refused_in_one_line(tmp_path, world_size, nodes, batch_size, line):
    """Before a process group is made, by torchrun's own variables."""
    env = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world_size}
    env |= {"LOCAL_WORLD_SIZE": 1, "GROUP_WORLD_SIZE": nodes}
    options = "--batch-size", batch_size
    done = run_script(ROOT / NAME, 1, 1, *options, cwd=tmp_path, **env)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"ddp2.py: error: {line}")
    assert not list(tmp_path.iterdir())


# What it learns


def test_the_views_are_what_they_say():
    """Of 20 directions, 8 tell points apart, and 4 of these the families."""
    from variants import ddp2

    train_set, held_out = ddp2.load_views()
    assert (len(train_set), len(held_out)) == (2048, 512)
    assert torch.equal(ddp2.load_views()[0][0][0], train_set[0][0]), "each time"
    source, targets = map(torch.stack, zip(*train_set, *held_out, strict=True))
    assert (source.dtype, source.shape) == (torch.float32, (2560, 2, 20))
    assert targets.tolist() == list(range(2560))
    first, second = source.unbind(1)
    noise = torch.cov((first - second).T) / 2
    spread = torch.linalg.eigvalsh(noise)
    assert spread[:8].max() < 0.05 and spread[8:].min() > 0.8
    assert noise.triu(1).abs().max() > 0.1, "no direction is one of the 20 numbers"
    common = torch.linalg.svdvals(first.T @ second / 2560)
    assert common[:4].min() > 5, "families"
    assert common[4:8].min() > 0.8 and common[8:].max() < 0.15


def test_a_product_of_outputs_is_cosine_by_temperature():
    _, _, model, *_ = objects_of(NAME)
    source = torch.randn(5, 2, 20)
    output = model(source)
    expected = F.cosine_similarity(*model.linear(source).unbind(1)) / 0.1
    torch.testing.assert_close((output[:, 0] * output[:, 1]).sum(1), expected)


def test_info_nce_is_the_mean_over_both_directions():
    """Written out, and in any order of the batch."""
    output = torch.randn(6, 2, 3, dtype=torch.float64)
    expected = 0
    for mine, others in (output.unbind(1), output.flip(1).unbind(1)):
        for i in range(6):
            scores = torch.stack([mine[i] @ other for other in others])
            expected -= (scores[i].exp() / scores.exp().sum()).log() / 12
    _, _, _, loss_fn, _ = objects_of(NAME)
    targets, order = torch.tensor([7, 3, 9, 1, 0, 4]), torch.randperm(6)
    torch.testing.assert_close(loss_fn(output, targets), expected)
    torch.testing.assert_close(loss_fn(output[order], targets[order]), expected)
