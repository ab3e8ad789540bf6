"""real_job.py: a schedule that resumes, clipping, accuracy, random workers, a log."""

import csv
import math
import os
import re
import sys

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.conftest import once
from tests.helpers.checks import import_script, noted, stack
from tools.run.launch import command, environment, objects_of, plant, train
from tools.run.processes import Program, left_over
from tools.run.results import load

NAME = "variants/real_job.py"
STEPS = 22  # of an epoch with an effective batch of 64


def rows(folder, name="snapshot.pt.csv"):
    """The lines of the log, as dicts of floats."""
    found = []
    with open(folder / name, newline="") as file:
        for row in csv.DictReader(file):
            found.append({column: float(text) for column, text in row.items()})
    return found


def expected_rates(total_steps):
    """The learning rate of each step as the chapter describes it."""
    rates = []
    for step in range(total_steps):
        warm_up = min((step + 1) / (total_steps / 10), 1)
        cosine = (1 + math.cos(math.pi * step / total_steps)) / 2
        rates.append(0.01 * warm_up * cosine)
    return rates


@pytest.mark.waits
def test_learns(typed):
    """The docstring's own command reads at least 93 % of the held-out digits."""
    folder, done, _ = typed(NAME)
    log = rows(folder)
    assert [row["epoch"] for row in log] == list(range(1, 21))
    assert log[-1]["accuracy"] >= 0.93
    printed = re.findall(r"\| accuracy (\S+)", done.stdout)
    assert printed == [f"{row['accuracy']:.6f}" for row in log]
    assert log[-1]["held-out loss"] < log[0]["held-out loss"] / 3
    assert "lr_scheduler" not in done.stderr, "it warns if steps come in a wrong order"


# Two epochs on two ranks


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory):
    """`two_epochs()`: their folder."""

    @once
    def run():
        folder = tmp_path_factory.mktemp("noted")
        script = plant(NAME, folder / "copy", hooks=["real_job"])
        done = train(script, 2, 2, cwd=folder)
        (folder / "printed.txt").write_text(done.stdout)
        return folder

    return run


def test_the_learning_rate_of_each_step(two_epochs):
    """It rises for a tenth of the steps and follows a cosine, the same on each rank."""
    expected = pytest.approx(expected_rates(2 * STEPS))
    for rank in noted(two_epochs()):
        assert rank["rates"] == expected


def test_accuracy_counts_each_sample_once(two_epochs):
    """Of 17 samples, a third with wrong labels, that two ranks cannot share equally."""
    _, eval_set, model, *_ = objects_of(NAME)
    model.load_state_dict(load(two_epochs() / "snapshot.pt")["MODEL_STATE"])
    source, targets = stack(eval_set[:17])
    targets[::3] = (targets[::3] + 1) % 10
    right = (model(source).argmax(1) == targets).sum().item()
    last = rows(two_epochs(), "snapshot.pt.csv.0")[-1]
    assert last["accuracy"] == right / 17
    assert 0 < right < 17, "or a mean of means could be as good"


def test_each_epoch_has_noise_of_its_own(two_epochs):
    """No two images that the ranks train on are equal, in two epochs."""
    first, second = noted(two_epochs())
    images = first["images"] + second["images"]
    assert len(set(images)) == len(images) == 2 * STEPS * 64


def test_two_workers_of_each_rank_live_on(two_epochs):
    """And two more load what is held out, from the first evaluation on."""
    for rank in noted(two_epochs()):
        first, second = rank["workers"]
        assert len(first) == 2
        assert len(second) == 4
        assert first.keys() < second.keys()
        assert set(second.values()) == {"forkserver"}, "forked, they may hang"
        assert rank["exits"] == [0] * 4, "one that does not end in 5 s is terminated"
        assert rank["preload"] == ["torch"], "or each worker imports it"


def test_loaders_leave_the_random_numbers_of_dropout_alone(two_epochs):
    """A new loader draws a seed for its workers, and one that lives on does not."""
    for rank in noted(two_epochs()):
        assert rank["untouched"] == [True] * 2 * STEPS


@pytest.mark.waits
def test_a_killed_rank_leaves_no_worker(tmp_path):
    """Nor the fork server that the workers come from."""
    script = plant(NAME, tmp_path / "copy", hooks=["faults:in_step_80"])
    env = environment(script, {"IN_STEP_80": "kill", "MARK": tmp_path})
    done = Program(command(script, 5, 2), tmp_path, real=True, **env).finish()
    assert done.returncode == 1
    assert not left_over(tmp_path)


def test_one_rank_writes_the_log(two_epochs):
    """The other, which would write a file of its own here, does not.

    Its learning rate is that of an epoch's first step.
    """
    (log,) = two_epochs().glob("*.csv*")
    assert log.name == "snapshot.pt.csv.0"
    first, second = rows(two_epochs(), "snapshot.pt.csv.0")
    assert list(first)[2:] == ["train loss", "held-out loss", "accuracy"]
    rates = [first["learning rate"], second["learning rate"]]
    assert rates == pytest.approx(expected_rates(2 * STEPS)[::STEPS])


def test_a_huge_gradient_is_clipped(tmp_path):
    """To a norm of 1, on each rank."""
    script = plant(NAME, tmp_path / "copy", hooks=["real_job"])
    train(script, 1, 1, cwd=tmp_path, LOSS_TIMES=1e6)
    first, second = noted(tmp_path)
    assert first["norms"] == pytest.approx([1] * STEPS, rel=1e-4)
    assert first["norms"] == second["norms"]


def test_the_largest_norm_of_each_epoch_is_printed(two_epochs):
    """As it was before the gradients were clipped."""
    text = (two_epochs() / "printed.txt").read_text()
    printed = re.findall(r"\| gradient norm (\S+)", text)
    for rank in noted(two_epochs()):
        steps = rank["unclipped"]
        largest = [max(steps[:STEPS]), max(steps[STEPS:])]
        assert printed == [f"{norm:.3f}" for norm in largest]


# Resumed, as is tested of all scripts, with another batch


@pytest.mark.waits
def test_resumed_with_another_batch_the_schedule_keeps_its_place(runs, copy_of):
    """An epoch has twice as many steps then. Another script's snapshot has no log."""
    folder, _ = runs(NAME)
    path = copy_of(folder)
    folder = path.parent
    snapshot = load(path)
    del snapshot["LOG"]
    torch.save(snapshot, path)
    script = plant(NAME, folder / "copy", hooks=["real_job"])
    done = train(script, 8, 2, "--batch-size", 16, cwd=folder)
    assert len(re.findall("(?m)^lr is .* as in .*, not ", done.stdout)) == 1
    steps = 1437 // 32
    expected = pytest.approx(expected_rates(8 * steps)[5 * steps :])
    for rank in noted(folder):
        assert rank["rates"] == expected
    assert [row["epoch"] for row in rows(folder, "snapshot.pt.csv.0")] == [6, 7, 8]


# The data, and its random numbers


@pytest.mark.parametrize(("which", "right"), [("real", 0.88), ("made up", 1)])
def test_the_digits_are_what_they_say(monkeypatch, which, right):
    """1437 and 360 samples of 10 classes, the same each time; noise for training."""
    if which == "made up":
        monkeypatch.setitem(sys.modules, "sklearn", None)  # cannot be imported
    else:
        pytest.importorskip("sklearn", reason="needs tests/requirements.txt")
    real_job = import_script(NAME)
    train_set, held_out = real_job.load_digits()
    assert len(train_set) == 1437
    assert len(held_out) == 360
    source, targets = stack(held_out)
    clean, labels = stack(train_set.data)
    assert source.dtype == torch.float32
    assert targets.dtype == torch.int64
    assert set(targets.tolist()) == set(range(10))
    different = {tuple(image.tolist()) for image in [*clean, *source]}
    assert len(different) > 1790, "none in both"
    _, again = real_job.load_digits()
    assert torch.equal(again[0][0], source[0]), "each time"
    noisy, _ = stack(train_set)
    noise = noisy - clean
    assert noise.std().item() == pytest.approx(0.1, rel=0.01)
    # What can be reached: the mean image of each class that is nearest.
    means = torch.stack([clean[labels == digit].mean(0) for digit in range(10)])
    nearest = torch.cdist(source, means).argmin(1)
    assert (nearest == targets).double().mean() >= right


class Drawing(Dataset):  # each sample: its index, a random number, its process
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index, torch.rand(1).item(), os.getpid()


def epochs(ranks=1, **workers):
    """[{sample: number}] of two epochs, and the processes that drew them."""
    real_job = import_script(NAME)
    drawn = [{}, {}]
    pids = [set(), set()]
    for rank in range(ranks):
        data = real_job.SeededDataset(Drawing())
        sampler = DistributedSampler(data, num_replicas=ranks, rank=rank)
        loader = DataLoader(data, batch_size=2, sampler=sampler, **workers)
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            data.set_epoch(epoch)
            for batch in loader:
                for index, number, pid in zip(*batch, strict=True):
                    drawn[epoch][int(index)] = float(number)
                    pids[epoch].add(int(pid))
    return drawn, pids


def test_random_numbers_follow_from_epoch_and_sample():
    """In this process, in two workers that live on, and on two ranks."""
    drawn, _ = epochs()
    first, second = drawn
    assert len({*first.values(), *second.values()}) == 24, "all differ"
    by_two, pids = epochs(num_workers=2, persistent_workers=True)
    assert pids[0] == pids[1], "the same processes"
    assert len(pids[0]) == 2
    assert by_two == drawn
    on_two_ranks, _ = epochs(ranks=2, num_workers=1, persistent_workers=True)
    assert on_two_ranks == drawn


def test_drawing_for_a_sample_leaves_other_random_numbers_alone(monkeypatch):
    """Without workers, dropout draws in the same process. GPUs are not asked."""
    real_job = import_script(NAME)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    torch.manual_seed(3)
    undisturbed = torch.rand(2).tolist()
    torch.manual_seed(3)
    first = torch.rand(1).item()
    _ = real_job.SeededDataset(Drawing())[5]
    assert [first, torch.rand(1).item()] == undisturbed
