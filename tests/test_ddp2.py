"""ddp2.py: a loss over the whole batch of a node, and gradients over all nodes."""

import ast
import importlib
import inspect
import json
import math
import re
import socket

import pytest
import torch
import torch.nn.functional as F

import utils
from ladder.rungs import ROOT
from proofs.launch import command, environment, objects_of, plant, run_script, train
from proofs.results import load, losses, weights
from proofs.warm import Fork

NAME = "variants/ddp2.py"
SCRIPT = "docs/ddp2/gradients.py"
NODE = "new_subgroups(nprocs, "  # the ranks whose samples one loss compares


def accuracies(done):
    return [float(x) for x in re.findall(r"retrieval accuracy (\S+)", done.stdout)]


def test_learns(typed):
    """The docstring's own command finds at least 92 % of the held-out points."""
    folder, done, _ = typed(NAME)
    curve, found = losses(done), accuracies(done)
    assert len(curve) == len(found) == 20
    assert found[-1] > 0.92
    assert curve[-1][1] < curve[0][1] / 5
    saved = re.findall(r"epoch (\d+) saved to snapshot.pt", done.stdout)
    assert saved == ["5", "10", "15", "20"]
    before = objects_of(NAME)[2].state_dict()
    after = load(folder / "snapshot.pt")["MODEL_STATE"]
    assert not torch.isclose(before["linear.weight"], after["linear.weight"]).any()
    assert after["log_scale"] > before["log_scale"] + 0.5, "the temperature has fallen"


def test_every_import_is_used():
    """The parent needs one more, for its loss."""
    nodes = list(ast.walk(ast.parse((ROOT / NAME).read_text())))
    imports = [x for x in nodes if isinstance(x, (ast.Import, ast.ImportFrom))]
    names = {y.asname or y.name.partition(".")[0] for x in imports for y in x.names}
    assert names <= {x.id for x in nodes if isinstance(x, ast.Name)}


def test_gather_has_static_methods():
    """As PyTorch's documentation asks. Up to 2.13 it computes the same without."""
    gather = importlib.import_module("variants.ddp2").Gather
    for name in ("forward", "backward"):
        assert isinstance(inspect.getattr_static(gather, name), staticmethod)


# Nodes and their processes


def on_nodes(nodes, script, *args, cwd, nprocs, **env):
    """Run it under a torchrun for each node, with `nprocs[node]` processes: [Done]."""
    with socket.socket() as any_free:
        any_free.bind(("localhost", 0))
        port = any_free.getsockname()[1]
    forks = []
    for node in range(nodes):
        words = command(script, *args, nprocs=nprocs[node])
        at = words.index("--standalone")
        words[at : at + 1] = [
            f"--nnodes={nodes}",
            f"--node-rank={node}",
            "--master-addr=localhost",
            f"--master-port={port}",
        ]
        forks.append(Fork(words, cwd, **environment(script, env)))
    return [fork.finish() for fork in forks]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """`trained(nodes, nprocs, batch_size)`: (folder, Done of the first node).

    One epoch in float64. `everywhere`: the loss is over the batch of all nodes. Five
    samples are held out, so that of six ranks one has none.
    """
    made = {}

    def get(nodes, nprocs, batch_size, everywhere=False):
        key = nodes, nprocs, batch_size, everywhere
        if key not in made:
            folder = tmp_path_factory.mktemp("trained")
            changes = [(NODE, "new_subgroups(world_size, ")] if everywhere else []
            script = plant(NAME, folder / "copy", *changes, hooks=["ddp2"])
            args = (1, 1, "--batch-size", batch_size)
            how = {"cwd": folder, "nprocs": [nprocs] * nodes, "HELD_OUT": 5}
            done = on_nodes(nodes, script, *args, **how)
            assert [x.returncode for x in done] == [0] * nodes, done
            made[key] = folder, done[0]
        return made[key]

    return get


def by_hand(nodes, batch_size):
    """(weights, train loss, held-out loss) of the same epoch, with nothing to gather.

    Here, in one process: the mean of the losses of `nodes` batches, as one process on
    each node would take them.
    """
    train_set, eval_set, model, loss_fn, make_optimizer = objects_of(NAME)
    source, targets = map(torch.stack, zip(*train_set, *eval_set, strict=True))
    model, source = model.double(), source.double()
    optimizer = make_optimizer(model.parameters())
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
    held_out = slice(2048, 2048 + 5)
    held_out_loss = loss_fn(model(source[held_out]), targets[held_out])
    state = torch.cat([x.detach().flatten() for x in model.state_dict().values()])
    return state, sum(train_losses) / len(train_losses), held_out_loss


def assert_same(run, expected):
    folder, done = run
    expected_weights, *expected_losses = expected
    mine = weights(folder / "snapshot.pt")
    torch.testing.assert_close(mine, expected_weights, rtol=0, atol=1e-12)
    (printed,) = losses(done)
    assert printed == pytest.approx([x.item() for x in expected_losses], abs=1e-6)


@pytest.mark.parametrize(("nodes", "nprocs"), [(2, 2), (1, 4), (2, 3), (2, 1)])
def test_a_node_trains_as_one_process_with_its_batch(trained, nodes, nprocs):
    """4 ranks on 2 nodes, 4 on 1, 6 on 2, and such a process: in float64.

    The temperature is one of the parameters.
    """
    run = trained(nodes, nprocs, 24 // nprocs)
    assert_same(run, by_hand(nodes, 24))
    scale = load(run[0] / "snapshot.pt")["MODEL_STATE"]["log_scale"].item()
    assert abs(scale - math.log(10)) > 0.01, "it is learned"


def test_each_node_compares_its_own_samples_only(trained):
    """So its loss is lower than that over the samples of all nodes."""
    runs = [trained(2, 2, 12, everywhere) for everywhere in (False, True)]
    (mine, _), (of_all, _) = (losses(done)[0] for _, done in runs)
    assert mine < of_all - 0.1


def test_all_nodes_can_compare_together(trained):
    """If the group has all ranks, 4 ranks on 2 nodes train as one process."""
    assert_same(trained(2, 2, 12, everywhere=True), by_hand(1, 48))


def test_the_ranks_of_a_node_and_how_long_they_wait(trained):
    folder, _ = trained(2, 3, 8)
    noted = [json.loads((folder / f"noted.{i}.json").read_text()) for i in range(6)]
    assert [x["node"] for x in noted] == [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3
    assert [x["timeout_s"] for x in noted] == [300] * 6


def test_retrieval_is_among_all_held_out_points(runs):
    """The same on one and on two ranks, and as the saved model has it."""
    folder, done = runs(NAME)
    assert accuracies(done) == accuracies(runs(NAME, 1)[1])
    _, eval_set, model, *_ = objects_of(NAME)
    model.load_state_dict(load(folder / "snapshot.pt")["MODEL_STATE"])
    source = torch.stack([source for source, _ in eval_set])
    first, second = F.normalize(model.linear(source), dim=-1).unbind(1)
    distance = (first[:, None] - second).norm(dim=-1)
    right = sum(int(row.argmin()) == i for i, row in enumerate(distance))
    assert accuracies(done)[-1] == pytest.approx(right / 512, abs=1e-6)
    assert 0.5 < right / 512 < 1


# Bad input


def refused(folder, *options, **env):
    """The one line with which it refuses to run; `env` is what torchrun sets."""
    env = {"RANK": 0, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost", **env}
    env = {"MASTER_PORT": 1, **env}
    done = run_script(ROOT / NAME, 1, 1, *options, cwd=folder, **env)
    assert (done.returncode, done.stdout) == (2, "")
    assert not list(folder.iterdir())
    (line,) = done.stderr.splitlines()
    return line.removeprefix("ddp2.py: error: ")


def test_nodes_of_unequal_size_are_refused(tmp_path):
    """By torchrun's own variables, before a process group is made."""
    sizes = {"WORLD_SIZE": 6, "GROUP_WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 1}
    line = refused(tmp_path, **sizes)
    assert line == (
        "this node has 1 of 6 processes, and there are 3 nodes: give every node the"
        " same --nproc-per-node"
    )
    args = {"cwd": tmp_path, "nprocs": [1, 3]}
    done = on_nodes(2, ROOT / NAME, 1, 1, **args)
    assert [x.returncode for x in done] == [1, 1], "torchrun's"
    assert "this node has 1 of 4 processes, and there are 2 nodes" in done[0].stderr
    assert "this node has 3 of 4 processes, and there are 2 nodes" in done[1].stderr


def test_half_set_sizes_of_nodes_are_refused(tmp_path):
    """A start without torchrun, by Slurm's srun say, may set some of its variables."""
    line = refused(tmp_path, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2)
    assert line == "not set: GROUP_WORLD_SIZE. torchrun sets it"


def test_one_sample_is_nothing_to_compare(tmp_path):
    """Its loss is 0 and its gradient too: training would change nothing."""
    sizes = {"WORLD_SIZE": 1, "GROUP_WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    line = refused(tmp_path, "--batch-size", 1, **sizes)
    assert line.startswith("a node takes 1 sample in a step, and there is none to tell")


# The mistakes that the chapter shows


def test_what_the_usual_mistakes_do_to_the_gradient(tmp_path):
    """The table of the chapter: (length, angle, temperature) beside the true ones."""
    words = ["torchrun", "--standalone", "--nproc-per-node=4", ROOT / SCRIPT]
    done = Fork(words, tmp_path).finish()
    assert done.returncode == 0, done.stderr
    row = r"(.{26}) +([\d.]+) +([\d.]+)° +([\d.]+)"
    table = {
        name.strip(): tuple(map(float, numbers))
        for name, *numbers in re.findall(row, done.stdout)
    }
    assert len(table) == 6
    assert table["gathered with gradient"] == (1, 0, 1)
    assert table["... the loss of own points"] == (1, 0, 1)
    assert table["own part put in"] == (0.25, 0, 1)
    assert table["... and the loss times 4"] == (1, 0, 4)
    _, angle, scale = table["others without gradient"]
    assert angle > 5 and scale == 1
    _, angle, scale = table["no gather, plain DDP"]
    assert angle > 10 and scale < 0.9


ADD_UP = "dist.all_reduce(parts, group=ctx.group)"
GATHER = "(Gather.apply(x, self.node) for x in (output, targets))"
SGD = "torch.optim.SGD, lr=0.001, momentum=0.9"


def after(folder, name, *changes, epochs=5):
    """(weights, retrieval accuracy of each epoch) of a copy with these changes."""
    folder = folder / name
    script = plant(NAME, folder / "copy", *changes)
    done = train(script, epochs, epochs, cwd=folder)
    return weights(folder / "snapshot.pt"), accuracies(done)


def test_mistakes_find_fewer_points(runs, tmp_path):
    """After the same five epochs."""
    (*_, right) = accuracies(runs(NAME)[1])
    _, (*_, small) = after(tmp_path, "small", (ADD_UP, "pass"))
    _, (*_, local) = after(tmp_path, "local", (GATHER, "(output, targets)"))
    assert right > local + 0.03
    assert right > small + 0.1


def test_adam_hides_a_gradient_that_is_too_small(tmp_path):
    """It divides the gradient by its size."""
    adam = (SGD, "torch.optim.Adam, lr=0.01")
    before = torch.cat([x.flatten() for x in objects_of(NAME)[2].state_dict().values()])
    right, _ = after(tmp_path, "right", adam, epochs=1)
    small, _ = after(tmp_path, "small", adam, (ADD_UP, "pass"), epochs=1)
    assert (right - small).abs().max() < 0.01 * (right - before).abs().max()


# What it learns


def test_the_views_are_what_they_say():
    """2048 and 512 points of 64 families, numbered, seen twice with other noise."""
    train_set, held_out = utils.load_views()
    assert (len(train_set), len(held_out)) == (2048, 512)
    source, targets = map(torch.stack, zip(*train_set, *held_out, strict=True))
    assert (source.dtype, source.shape) == (torch.float32, (2560, 2, 20))
    assert targets.tolist() == list(range(2560))
    assert torch.equal(source[2048:], torch.stack([x for x, _ in held_out]))
    # By themselves, views that look alike are not of one point.
    first, second = source[2048:].unbind(1)
    nearest = torch.cdist(first, second).argmin(1)
    assert (nearest == torch.arange(512)).double().mean() < 0.4


def test_a_product_of_outputs_is_cosine_by_temperature():
    _, _, model, *_ = objects_of(NAME)
    source = torch.randn(5, 2, 20)
    output = model(source)
    first, second = model.linear(source).unbind(1)
    cosine = F.cosine_similarity(first, second)
    expected = cosine * model.log_scale.exp()
    torch.testing.assert_close((output[:, 0] * output[:, 1]).sum(1), expected)
    assert model.log_scale.exp().item() == pytest.approx(10)


def test_info_nce_is_the_mean_over_both_directions():
    """Written out, and in any order of the batch."""
    output = torch.randn(6, 2, 3, dtype=torch.float64)
    expected = 0
    for mine, others in (output.unbind(1), output.flip(1).unbind(1)):
        for i in range(6):
            scores = [mine[i] @ other for other in others]
            total = sum(score.exp() for score in scores)
            expected -= (scores[i].exp() / total).log() / 12
    targets = torch.tensor([7, 3, 9, 1, 0, 4])
    torch.testing.assert_close(utils.info_nce(output, targets), expected)
    order = torch.randperm(6)
    shuffled = utils.info_nce(output[order], targets[order])
    torch.testing.assert_close(shuffled, expected)
