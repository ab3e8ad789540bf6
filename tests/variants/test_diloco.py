"""variants/diloco.py: the outer steps, computed once more in one process."""

import pytest
import torch
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, DistributedSampler

from tests.helpers.checks import assert_same_snapshot, help_of, objects_of
from tests.helpers.forked import in_a_fork
from tools.run.launch import train
from tools.run.results import load, losses, weights

NAME = "variants/diloco.py"
OPTIONS = ("--local-steps", 5, "--outer-lr", 0.7, "--outer-momentum", 0.9)
SEED = ("utils.seed(0)", "torch.manual_seed(utils.torchrun_env()[0])")
LINEAR = "model = torch.nn.Linear(20, 1)"
DEEP = "nn = torch.nn; model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 1))"


@in_a_fork
def weights_after(ranks_by_epoch):
    """What these epochs end with, here. The outer optimizer is torch.optim's."""
    train_set, _, model, loss_fn, _ = objects_of(NAME)
    start = parameters_to_vector(model.parameters()).detach()
    outer = torch.optim.SGD([start], lr=0.7, momentum=0.9, nesterov=True)
    momentum = torch.zeros_like(start)
    for epoch, ranks in enumerate(ranks_by_epoch):
        loaders = []
        for rank in range(ranks):
            sampler = DistributedSampler(train_set, ranks, rank, drop_last=True)
            sampler.set_epoch(epoch)
            loaders.append(DataLoader(train_set, 32, sampler=sampler))
        weights = [start] * ranks
        momenta = [momentum] * ranks
        for step, batches in enumerate(zip(*loaders, strict=True), start=1):
            for rank, (source, targets) in enumerate(batches):
                weight = weights[rank].clone().requires_grad_()
                output = source @ weight[:-1, None] + weight[-1]
                loss_fn(output, targets).backward()
                momenta[rank] = 0.9 * momenta[rank] + weight.grad
                weights[rank] = weight.detach() - 0.001 * momenta[rank]
            if step % 5 == 0 or step == len(loaders[0]):
                start.grad = start - torch.stack(weights).mean(0)
                outer.step()
                weights = [start] * ranks
        momentum = torch.stack(momenta).mean(0)
    return start


def test_a_machine_leaves_and_comes_back(tmp_path):
    """Nothing is lost, and all begin with rank 0's weights."""
    for end, ranks in ((2, 2), (3, 1), (5, 2)):
        how = {"nprocs": ranks, "batch": 32 * ranks, "changes": [SEED]}
        done = train(NAME, end, 1, *OPTIONS, cwd=tmp_path, **how)
    assert "3 of 5 epochs are finished" in done.stdout
    expected = weights_after([2, 2, 1, 2, 2])
    assert weights(tmp_path) == pytest.approx(expected, rel=1e-4)


def test_it_goes_on_with_its_parents_snapshot(runs, tmp_path):
    train("multinode.py", 1, 1, cwd=tmp_path)
    done = train(NAME, 2, 1, cwd=tmp_path)
    _, parent = runs("multinode.py")
    _, second_epoch, *_ = losses(parent)
    assert losses(done) == [pytest.approx(second_epoch)]


def test_any_layout_of_a_weight_and_any_state_of_an_optimizer(tmp_path):
    """And integers, which a mean in float32 would round: they are frozen parameters.

    The ranks begin with different weights here, too.
    """
    large = "torch.tensor([2**24 + 1]), requires_grad=False"
    numbers = f"{DEEP}; model.numbers = torch.nn.Parameter({large})"
    optimizer = "optimizer = make_optimizer(model)"
    count = f"{optimizer}; optimizer.state[model[0].weight]['calls'] = 1"
    found = []
    for layout in ("", ".T.contiguous().T"):
        model = f"{numbers}; model[0].weight.data = model[0].weight.data{layout}"
        changes = SEED, (LINEAR, model), (optimizer, count)
        folder = tmp_path / f"layout{layout}"
        train(NAME, 2, 2, *OPTIONS, cwd=folder, changes=changes)
        snapshot = load(folder)
        assert snapshot["OPTIMIZER_STATE"]["state"][1]["calls"] == 1
        assert snapshot["MODEL_STATE"]["numbers"].item() == 2**24 + 1
        found.append(weights(folder))
    row_by_row, column_by_column = found
    assert column_by_column == pytest.approx(row_by_row, rel=1e-4)


def test_a_layer_that_is_unfrozen_resumes_with_the_same_bits(tmp_path):
    frozen = (LINEAR, f"{DEEP}; model[0].requires_grad_(False)")
    train_mode = "self.model.train()"
    thaw = (train_mode, f"{train_mode}; self.model[0].requires_grad_(epoch > 0)")
    undisturbed = tmp_path / "undisturbed"
    resumed = tmp_path / "resumed"
    for folder, end in (undisturbed, 3), (resumed, 2), (resumed, 3):
        train(NAME, end, 1, *OPTIONS, cwd=folder, changes=[frozen, thaw])
    assert_same_snapshot(resumed, undisturbed)


def test_help(tmp_path):
    shown = help_of(NAME, tmp_path)
    assert "that a rank makes by itself before all average (default: 1)" in shown
    assert "of the mean movement that all ranks make (default: 1)" in shown
    assert "of the movements before that is added (default: 0)" in shown
