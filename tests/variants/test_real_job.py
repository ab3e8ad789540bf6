"""real_job.py: a schedule that resumes, clipping, accuracy, random workers, a log."""

import math
import multiprocessing.forkserver
import re
import sys
from unittest.mock import Mock

import numpy
import pytest
import torch
import torch.distributed as dist

from tests.helpers.checks import fence, import_script, noted, objects_of, stack
from tests.helpers.made_once import made_once
from tests.hooks import replace, write
from tests.hooks.faults import kill_in_step_80
from tests.hooks.models import changes_objects
from tests.hooks.notes import note_each
from tools.run.launch import train
from tools.run.processes import left_over
from tools.run.results import load

NAME = "variants/real_job.py"
STEPS = 22  # of an epoch with an effective batch of 64


def read_log(path):
    """The columns of the log, by name: a space becomes `_`, and `-` is left out."""
    return numpy.genfromtxt(path, delimiter=",", names=True)


def expected_rates(total_steps):
    """The learning rate of each step as the chapter describes it."""
    step = numpy.arange(total_steps)
    warm_up = numpy.minimum((step + 1) / (total_steps / 10), 1)
    cosine = (1 + numpy.cos(math.pi * step / total_steps)) / 2
    return 0.01 * warm_up * cosine


@pytest.mark.waits
def test_learns(typed):
    """The docstring's own command reads at least 93 % of the held-out digits."""
    folder, done = typed(NAME)
    log = read_log(folder / "snapshot.pt.csv")
    assert log["accuracy"][-1] >= 0.93
    printed = re.findall(r"\| accuracy (\S+)", done.stdout)
    assert printed == [f"{accuracy:.6f}" for accuracy in log["accuracy"]]


# Two epochs on two ranks


def few_of(eval_set):
    """17 samples, a third of them with wrong labels: no model has all right."""
    few = []
    for index, (image, digit) in enumerate(eval_set[:17]):
        few.append((image, digit if index % 3 else (digit + 1) % 10))
    return few


@changes_objects
def few_and_large(train_set, eval_set, model, loss_fn):
    """17 samples are held out, and the loss is a million times as large."""
    loss_fn.register_forward_hook(lambda module, batch, loss: 1e6 * loss)
    return train_set, few_of(eval_set), model, loss_fn


def own_logs(script):
    """Each rank that writes the log does so in snapshot.pt.csv.RANK."""

    def write_log(inner, path, rows):
        inner(f"{path}.{dist.get_rank()}", rows)

    replace(script, "write_log", write_log)


def note_steps(script):
    """Of each step: rate.RANK.json, the learning rate; images.RANK.json, the sum of
    each image's pixels; untouched.RANK.json, whether nothing has drawn from the epoch's
    random numbers.
    """

    def rate(trainer, *batch):
        return trainer.optimizer.param_groups[0]["lr"]

    def images(trainer, source, targets):
        return source.double().sum(1).tolist()

    def untouched(*batch):
        seeded = torch.Generator().manual_seed(torch.initial_seed())
        return torch.equal(torch.get_rng_state(), seeded.get_state())

    for fact in rate, images, untouched:
        note_each(script, "_run_batch", fact.__name__, fact)


def note_clipping(script):
    """norms.RANK.json: of each step, the gradient's norm and what is left of it."""
    norms = []

    def clip(inner, parameters, most):
        weights = [*parameters]
        norm = inner(weights, most)
        left = inner(weights, math.inf)
        norms.append([norm.item(), left.item()])
        write("norms", norms)
        return norm

    replace(torch.nn.utils, "clip_grad_norm_", clip)


def note_workers(script):
    """workers.RANK.json: {process: how it started} after each epoch's training.

    exits.RANK.json: their exit statuses, and what their server has imported.
    """
    started = []

    def run_epoch(inner, *arguments):
        loss = inner(*arguments)
        workers = torch.multiprocessing.active_children()
        started.append({each.pid: each._start_method for each in workers})
        return loss

    def train(inner, self, *arguments):
        inner(self, *arguments)
        workers = torch.multiprocessing.active_children()
        self.train_data._iterator = self.eval_data._iterator = None  # they end
        preload = multiprocessing.forkserver._forkserver._preload_modules
        write("workers", started)
        write("exits", [[worker.exitcode for worker in workers], preload])

    replace(script["Trainer"], "_run_epoch", run_epoch)
    replace(script["Trainer"], "train", train)


@made_once
def two_epochs(folder):
    """`two_epochs()`: (folder, Done)."""
    hooks = [few_and_large, own_logs, note_steps, note_clipping, note_workers]
    return folder, train(NAME, 2, 2, cwd=folder, hooks=hooks)


def test_the_learning_rate_of_each_step(two_epochs):
    """It rises for a tenth of the steps and follows a cosine, the same on each rank."""
    folder, _ = two_epochs()
    expected = pytest.approx(expected_rates(2 * STEPS))
    assert noted(folder, "rate") == [expected, expected]


def test_accuracy_counts_each_sample_once(two_epochs):
    """Of 17 samples, which two ranks cannot share equally."""
    folder, _ = two_epochs()
    _, eval_set, model, *_ = objects_of(NAME)
    model.load_state_dict(load(folder)["MODEL_STATE"])
    source, targets = stack(few_of(eval_set))
    right = (model(source).argmax(1) == targets).sum().item()
    log = read_log(folder / "snapshot.pt.csv.0")
    assert log["accuracy"][-1] == right / 17
    assert 0 < right < 17, "or a mean of means could be as good"


def test_each_epoch_has_noise_of_its_own(two_epochs):
    """No two images that the ranks train on are equal, in two epochs."""
    folder, _ = two_epochs()
    images = []
    for rank in noted(folder, "images"):
        images += sum(rank, [])
    assert len(set(images)) == len(images) == 2 * STEPS * 64


def test_two_workers_of_each_rank_live_on(two_epochs):
    """And two more load what is held out, from the first evaluation on."""
    folder, _ = two_epochs()
    for first, second in noted(folder, "workers"):
        assert len(first) == 2
        assert len(second) == 4
        assert first.keys() < second.keys()
        assert set(second.values()) == {"forkserver"}, "forked, they may hang"
    for exits, preload in noted(folder, "exits"):
        assert exits == [0] * 4, "one that does not end in 5 s is terminated"
        assert preload == ["torch"], "or each worker imports it"
    # A new loader draws a seed for its workers, and one that lives on does not.
    for untouched in noted(folder, "untouched"):
        assert untouched == [True] * 2 * STEPS, "random numbers are dropout's"


@pytest.mark.waits
def test_a_killed_rank_leaves_no_worker(tmp_path):
    """Nor the fork server that the workers come from."""
    how = {"cwd": tmp_path, "real": True, "hooks": [kill_in_step_80]}
    train(NAME, 5, 2, status=1, MARK=tmp_path, **how)
    assert not left_over(tmp_path)


def test_one_rank_writes_the_log(two_epochs):
    """The other, which would write a file of its own here, does not.

    Its learning rate is that of an epoch's first step.
    """
    folder, _ = two_epochs()
    (path,) = folder.glob("*.csv*")
    log = read_log(path)
    losses = "train_loss", "heldout_loss"
    assert log.dtype.names == ("epoch", "learning_rate", *losses, "accuracy")
    expected = expected_rates(2 * STEPS)[::STEPS]
    assert log["learning_rate"] == pytest.approx(expected)


def test_a_huge_gradient_is_clipped(two_epochs):
    """To a norm of 1, on each rank. The largest norm of each epoch is printed."""
    folder, done = two_epochs()
    printed = re.findall(r"\| gradient norm (\S+)", done.stdout)
    for rank in noted(folder, "norms"):
        norms, left = zip(*rank, strict=True)
        assert left == pytest.approx([1] * 2 * STEPS, rel=1e-4)
        largest = [max(norms[:STEPS]), max(norms[STEPS:])]
        assert printed == [f"{norm:.3f}" for norm in largest]


# Resumed, as is tested of all scripts, with another batch


@pytest.mark.waits
def test_resumed_with_another_batch_the_schedule_keeps_its_place(runs, tmp_path):
    """An epoch has twice as many steps then. Another script's snapshot has no log."""
    folder, _ = runs(NAME)
    snapshot = load(folder)
    del snapshot["LOG"]
    torch.save(snapshot, tmp_path / "snapshot.pt")
    train(NAME, 8, 2, "--batch-size", 16, cwd=tmp_path, hooks=[note_steps])
    steps = 1437 // 32
    expected = pytest.approx(expected_rates(8 * steps)[5 * steps :])
    assert noted(tmp_path, "rate") == [expected, expected]
    log = read_log(tmp_path / "snapshot.pt.csv")
    assert log["epoch"].tolist() == [6, 7, 8]


def test_tensorboard_hides_what_follows_the_snapshot(monkeypatch):
    """The lines of the page, with a writer that notes what it is told."""
    tensorboard = Mock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    trainer = Mock(epochs_run=5)
    lines = fence("docs/real_job.md", "purge_step")
    exec(lines, {"self": trainer, "accuracy": 0.9})
    tensorboard.SummaryWriter.assert_called_once_with("runs", purge_step=6)
    trainer.writer.add_scalar.assert_called_once_with("accuracy", 0.9, 5)


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
    assert torch.cdist(source, clean).min() > 0.1, "none in both"
    _, again = real_job.load_digits()
    assert torch.equal(again[0][0], source[0]), "each time"
    noisy, _ = stack(train_set)
    noise = noisy - clean
    assert noise.std().item() == pytest.approx(0.1, rel=0.01)
    # What can be reached: the mean image of each class that is nearest.
    means = torch.stack([clean[labels == digit].mean(0) for digit in range(10)])
    nearest = torch.cdist(source, means).argmin(1)
    assert (nearest == targets).double().mean() >= right


def test_drawing_for_a_sample_leaves_other_random_numbers_alone(monkeypatch):
    """Without workers, dropout draws in the same process. GPUs are not asked."""
    real_job = import_script(NAME)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    noisy = real_job.NoisyDataset([(torch.zeros(64), 0)], 0.1)
    before = torch.get_rng_state()
    _ = real_job.SeededDataset(noisy)[0]
    assert torch.equal(torch.get_rng_state(), before), "it has drawn here"
