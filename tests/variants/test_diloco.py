"""variants/diloco.py: the outer steps, computed once more in one process."""

import pytest
import torch
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DistributedSampler

from tests.helpers.checks import help_of, stack
from tests.helpers.forked import in_a_fork
from tools.run.launch import objects_of, plant, train
from tools.run.results import load, losses, same_bits, weights
from tools.scripts import ROOT

NAME = "variants/diloco.py"
OPTIONS = ("--local-steps", 5, "--outer-lr", 0.7, "--outer-momentum", 0.9)
BATCH = 32
SEED = ("utils.seed(0)", "torch.manual_seed(utils.torchrun_env()[0])")
LINEAR = "model = torch.nn.Linear(20, 1)"
OPTIMIZER = "optimizer = make_optimizer(model)"
DEEP = "nn = torch.nn; model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 1))"


def batches(data, epoch, ranks):
    """For each rank, the samples of each of its steps."""
    for rank in range(ranks):
        sampler = DistributedSampler(data, ranks, rank, drop_last=True)
        sampler.set_epoch(epoch)
        yield torch.tensor(list(sampler)).split(BATCH)


@in_a_fork
def trained(ranks_by_epoch):
    """The weights after these epochs. The outer optimizer is torch.optim's."""
    train_set, _, model, loss_fn, _ = objects_of(NAME)
    source, targets = stack(train_set)
    start = parameters_to_vector(model.parameters()).detach()
    outer = torch.optim.SGD([start], lr=0.7, momentum=0.9, nesterov=True)
    momentum = torch.zeros_like(start)
    for epoch, ranks in enumerate(ranks_by_epoch):
        weights = [start.clone()] * ranks
        momenta = [momentum] * ranks
        steps = list(zip(*batches(train_set, epoch, ranks), strict=True))
        for step, samples_by_rank in enumerate(steps, start=1):
            for rank, samples in enumerate(samples_by_rank):
                weight = weights[rank].requires_grad_()
                output = source[samples] @ weight[:-1, None] + weight[-1]
                loss = loss_fn(output, targets[samples])
                (grad,) = torch.autograd.grad(loss, weight)
                momenta[rank] = 0.9 * momenta[rank] + grad
                weights[rank] = (weight - 0.001 * momenta[rank]).detach()
            if step % 5 == 0 or step == len(steps):
                start.grad = start - torch.stack(weights).mean(0)
                outer.step()
                weights = [start.clone()] * ranks
        momentum = torch.stack(momenta).mean(0)
    return start


def test_a_machine_leaves_and_comes_back(tmp_path):
    """Nothing is lost, and all begin with rank 0's weights."""
    script = plant(NAME, tmp_path / "copy", SEED)
    for end, ranks in ((2, 2), (3, 1), (5, 2)):
        done = train(script, end, 1, *OPTIONS, cwd=tmp_path, nprocs=ranks)
    assert "3 of 5 epochs are finished" in done.stdout
    snapshot = load(tmp_path / "snapshot.pt")["MODEL_STATE"]
    expected = trained([2, 2, 1, 2, 2])
    assert parameters_to_vector(snapshot.values()) == pytest.approx(expected, rel=1e-4)
    assert trained([2, 2, 2, 2, 2]) != pytest.approx(expected, rel=1e-4)
    assert trained([2, 2, 1, 2]) != pytest.approx(expected, rel=1e-4)


def test_it_goes_on_with_its_parents_snapshot(runs, tmp_path):
    train(ROOT / "multinode.py", 1, 1, cwd=tmp_path)
    done = train(ROOT / NAME, 2, 1, cwd=tmp_path)
    _, parent = runs("multinode.py")
    _, second_epoch, *_ = losses(parent)
    assert losses(done) == [pytest.approx(second_epoch)]


def test_any_layout_of_a_weight_and_any_state_of_an_optimizer(tmp_path):
    """The ranks begin with different weights here, too."""
    found = []
    for layout in ("", ".T.contiguous().T"):
        deep = f"{DEEP}; model[0].weight.data = model[0].weight.data{layout}"
        count = f"{OPTIMIZER}; optimizer.state[model[0].weight]['calls'] = 1"
        folder = tmp_path / f"layout{layout}"
        script = plant(NAME, folder / "copy", SEED, (LINEAR, deep), (OPTIMIZER, count))
        train(script, 2, 2, *OPTIONS, cwd=folder)
        snapshot = load(folder / "snapshot.pt")
        assert snapshot["OPTIMIZER_STATE"]["state"][0]["calls"] == 1
        found.append(weights(folder / "snapshot.pt"))
    row_by_row, column_by_column = found
    assert column_by_column == pytest.approx(row_by_row, rel=1e-4)


def test_integers_stay_as_they_are(tmp_path):
    """They are frozen parameters. As float32, in an average, they would be rounded."""
    large = "torch.tensor([2**24 + 1]), requires_grad=False"
    numbers = f"{LINEAR}; model.numbers = torch.nn.Parameter({large})"
    script = plant(NAME, tmp_path / "copy", (LINEAR, numbers))
    train(script, 1, 1, *OPTIONS, cwd=tmp_path)
    model = load(tmp_path / "snapshot.pt")["MODEL_STATE"]
    assert model["numbers"].item() == 2**24 + 1


def test_a_layer_that_is_unfrozen_resumes_with_the_same_bits(tmp_path):
    frozen = f"{DEEP}; model[0].requires_grad_(False)"
    thaw = "self.model.train(); self.model[0].requires_grad_(epoch > 0)"
    changes = (LINEAR, frozen), ("self.model.train()", thaw)
    script = plant(NAME, tmp_path / "copy", *changes)

    def trained_until(folder, *epochs):
        folder.mkdir()
        for end in epochs:
            train(script, end, 1, *OPTIONS, cwd=folder)
        return load(folder / "snapshot.pt")

    undisturbed = trained_until(tmp_path / "undisturbed", 3)
    resumed = trained_until(tmp_path / "resumed", 2, 3)
    assert same_bits(resumed, undisturbed)


def test_help(tmp_path):
    shown = help_of(NAME, tmp_path)
    assert "that a rank makes by itself before all average (default: 1)" in shown
    assert "of the mean movement that all ranks make (default: 1)" in shown
    assert "of the movements before that is added (default: 0)" in shown
