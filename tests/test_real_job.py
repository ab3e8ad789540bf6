"""real_job.py: a schedule that resumes, clipping, accuracy, random workers, a log."""

import csv
import json
import math
import os
import re
import shutil
import signal
import sys

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import utils
from ladder.rungs import ROOT
from proofs.launch import launch, objects_of, plant, train
from proofs.results import load, same_bits, weights

NAME = "variants/real_job.py"
STEPS = 22  # of an epoch with an effective batch of 64


def rows(folder):
    """The lines of the log, as dicts of floats."""
    with open(folder / "snapshot.pt.csv", newline="") as file:
        return [{x: float(row[x]) for x in row} for row in csv.DictReader(file)]


def noted(folder, nprocs=2):
    """What proofs/hooks/real_job.py has noted, for each rank."""
    files = [folder / f"noted.{rank}.json" for rank in range(nprocs)]
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture
def script(tmp_path):
    return plant(NAME, tmp_path / "copy", hooks=["real_job"])


def expected_rates(total_steps, lr=0.01):
    """The learning rate of each step as the chapter describes it."""
    rates = []
    for step in range(total_steps):
        cosine = (1 + math.cos(math.pi * step / total_steps)) / 2
        rates.append(lr * cosine * min((step + 1) / (total_steps / 10), 1))
    return rates


def right_answers(path, eval_set):
    """How many of the held-out samples the saved model gets right."""
    _, _, model, *_ = objects_of(NAME)
    model.load_state_dict(load(path)["MODEL_STATE"])
    source, targets = map(torch.stack, zip(*eval_set, strict=True))
    return int((model(source).argmax(1) == targets).sum())


# The training


def test_learns(typed):
    """The docstring's own command reads at least 93 % of the held-out digits."""
    folder, done, _ = typed(NAME)
    log = rows(folder)
    assert [row["epoch"] for row in log] == list(range(1, 21))
    assert log[-1]["accuracy"] >= 0.93
    assert log[-1]["held-out loss"] < log[0]["held-out loss"] / 3
    saved = re.findall(r"epoch (\d+) saved to snapshot.pt", done.stdout)
    assert saved == ["5", "10", "15", "20"]
    assert "lr_scheduler" not in done.stderr, "it warns if steps come in a wrong order"


@pytest.mark.parametrize("nprocs", [1, 2])
def test_the_learning_rate_of_each_step(script, tmp_path, nprocs):
    """It rises for a tenth of the steps and follows a cosine, the same on each rank."""
    options = ("--batch-size", 64 // nprocs)
    train(script, 2, 1, *options, cwd=tmp_path, nprocs=nprocs)
    expected = pytest.approx(expected_rates(2 * STEPS))
    assert [x["rates"] for x in noted(tmp_path, nprocs)] == [expected] * nprocs


def test_a_huge_gradient_is_clipped(script, tmp_path):
    """To a norm of 1, on each rank, and a smaller one is left as it is."""
    train(script, 1, 1, cwd=tmp_path, LOSS_TIMES=1e6)
    first, second = noted(tmp_path)
    assert first["norms"] == pytest.approx([1] * STEPS, rel=1e-4)
    assert first["norms"] == second["norms"]
    os.remove(tmp_path / "snapshot.pt")
    train(script, 1, 1, cwd=tmp_path, LOSS_TIMES=1e-3)
    assert max(noted(tmp_path)[0]["norms"]) < 0.1


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_accuracy_counts_each_sample_once(script, tmp_path, nprocs):
    """Of 17 samples, which no number of ranks but 1 divides."""
    train(script, 1, 1, cwd=tmp_path, nprocs=nprocs, HELD_OUT=17)
    _, eval_set, *_ = objects_of(NAME)
    right = right_answers(tmp_path / "snapshot.pt", eval_set[:17])
    (row,) = rows(tmp_path)
    assert row["accuracy"] == right / 17
    assert 0 < right < 17, "or a mean of means could be as good"


# Interrupted, and resumed


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """A folder with a run that failed in its fourth epoch of five."""
    folder = tmp_path_factory.mktemp("failed")
    script = plant(NAME, tmp_path_factory.mktemp("copy"), hooks=["in_step_80"])
    done = launch(script, 5, 2, cwd=folder, real="", IN_STEP_80="raise")
    assert done.returncode == 1
    assert [row["epoch"] for row in rows(folder)] == [1, 2, 3]
    assert load(folder / "snapshot.pt")["EPOCHS_RUN"] == 2
    return folder


@pytest.fixture
def interrupted(failed, tmp_path):
    """A copy of it, to be resumed."""
    return shutil.copytree(failed, tmp_path / "interrupted")


def test_resumed_it_repeats_rates_noise_and_log(interrupted, runs):
    """The learning rates, the random numbers of the workers, the lines of the log."""
    script = plant(NAME, interrupted / "noting", hooks=["real_job"])
    train(script, 5, 2, cwd=interrupted)
    expected = pytest.approx(expected_rates(5 * STEPS)[2 * STEPS :])
    assert [x["rates"] for x in noted(interrupted)] == [expected] * 2
    undisturbed, _ = runs(NAME)
    files = [folder / "snapshot.pt.csv" for folder in (interrupted, undisturbed)]
    assert files[0].read_text() == files[1].read_text()
    snapshots = [load(folder / "snapshot.pt") for folder in (interrupted, undisturbed)]
    assert same_bits(*snapshots)


def test_without_the_schedulers_state_the_schedule_begins_anew(interrupted):
    """This is why a snapshot that has none is refused, in the next test."""
    load_state = '        self.scheduler.load_state_dict(snapshot["SCHEDULER_STATE"])\n'
    change = (load_state, "")
    script = plant(NAME, interrupted / "noting", change, hooks=["real_job"])
    train(script, 5, 2, cwd=interrupted)
    rates = noted(interrupted)[0]["rates"]
    assert rates[1:] == pytest.approx(expected_rates(5 * STEPS)[1 : 3 * STEPS])


def test_a_snapshot_without_the_schedulers_state_is_refused(runs, copy_of):
    """It is another rung's: where its schedule should go on, nobody knows."""
    path = copy_of(runs(NAME)[0])
    snapshot = load(path)
    del snapshot["SCHEDULER_STATE"]
    torch.save(snapshot, path)
    done = launch(ROOT / NAME, 9, 9, cwd=path.parent, real="")
    assert done.returncode == 1, "torchrun's"
    assert (
        "real_job.py: error: snapshot.pt was saved without a schedule: choose"
        in done.stderr
    )
    assert "exitcode  : 2 " in done.stderr


def test_another_effective_batch_is_refused(runs, copy_of):
    """The schedule counts steps: it would jump to another place, with no error."""
    path = copy_of(runs(NAME)[0])
    before = path.read_bytes()
    options = ("--batch-size", 16)
    done = launch(ROOT / NAME, 9, 9, *options, cwd=path.parent, real="")
    line = (
        "snapshot.pt has made 22 steps in each epoch, and this run would make 44: keep"
    )
    assert line in done.stderr
    assert path.read_bytes() == before


def test_another_rung_keeps_the_learning_rate_of_the_moment(runs, copy_of, tmp_path):
    """The parent has no schedule: after the last epoch, it trains on at a rate of 0."""
    path = copy_of(runs(NAME)[0])
    before = weights(path)
    objects = [
        (ROOT / name).read_text().partition("def load_train_objs")[2].partition("def ")
        for name in ("multinode.py", NAME)
    ]
    change = (objects[0][0], objects[1][0])
    done = train(plant("multinode.py", tmp_path / "copy", change), 6, 6, cwd=tmp_path)
    assert "resuming from snapshot.pt: 5 of 6 epochs are finished" in done.stdout
    assert torch.equal(weights(path), before)


# The log


def test_one_rank_writes_the_log(script, tmp_path):
    train(script, 2, 2, cwd=tmp_path)
    assert [x["logged"] for x in noted(tmp_path)] == [2, 0]
    header, *_ = (tmp_path / "snapshot.pt.csv").read_text().splitlines()
    assert header == "epoch,learning rate,train loss,held-out loss,accuracy"
    rates = [row["learning rate"] for row in rows(tmp_path)]
    assert rates == pytest.approx([expected_rates(2 * STEPS)[STEPS], 0])


def test_a_row_loses_no_column_of_the_others(tmp_path):
    """A metric got another name, and somebody added notes: earlier numbers stay."""
    path = tmp_path / "log.csv"
    path.write_text("epoch,accuracy,notes\n1,0.5,good\n# by hand\n")
    utils.log_row(str(path), 2, {"top-1": 0.75})
    lines = ["epoch,top-1,accuracy,notes", "1,,0.5,good", "2,0.75,,"]
    assert path.read_text().splitlines() == lines


def test_a_file_that_is_no_log_is_moved_away(tmp_path):
    """A spreadsheet has saved it with semicolons: the run goes on, and it is kept."""
    path = tmp_path / "log.csv"
    path.write_text("epoch;accuracy\n1;0,5\n")
    utils.log_row(str(path), 2, {"accuracy": 0.75})
    assert path.read_text().splitlines() == ["epoch,accuracy", "2,0.75"]
    assert (tmp_path / "log.csv.old").read_text() == "epoch;accuracy\n1;0,5\n"


def test_a_row_takes_the_place_of_its_epoch_and_of_later_ones(tmp_path):
    """Columns may come and go. What a killed writer has left behind is removed."""
    path = tmp_path / "log.csv"
    (tmp_path / "log.csv.01234567.tmp").touch()
    for epoch in (1, 2, 3):
        utils.log_row(path, epoch, {"loss": epoch / 2})
    utils.log_row(path, 2, {"loss": 7.0, "accuracy": 0.5})
    assert path.read_text() == "epoch,loss,accuracy\n1,0.5,\n2,7.0,0.5\n"
    utils.log_row(path, 1, {"accuracy": 0.5})
    assert path.read_text() == "epoch,accuracy\n1,0.5\n"
    assert os.listdir(tmp_path) == ["log.csv"]


def test_a_kill_tears_no_line_of_the_log(tmp_path):
    """The process is killed when all but the renaming is done."""
    path = tmp_path / "log.csv"
    utils.log_row(path, 1, {"loss": 0.5})
    pid = os.fork()
    if pid == 0:
        utils.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        utils.log_row(path, 2, {"loss": 0.25})
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert path.read_text() == "epoch,loss\n1,0.5\n"


# The data, and its random numbers


@pytest.mark.parametrize("which", ["real", "made up"])
def test_the_digits_are_what_they_say(monkeypatch, which):
    """1437 and 360 samples of 10 classes, the same each time; noise for training."""
    if which == "made up":
        monkeypatch.setitem(sys.modules, "sklearn", None)  # cannot be imported
    else:
        pytest.importorskip("sklearn", reason="needs tests/requirements.txt")
    train_set, held_out = utils.load_digits()
    assert (len(train_set), len(held_out)) == (1437, 360)
    source, targets = map(torch.stack, zip(*held_out, strict=True))
    clean, labels = map(torch.stack, zip(*train_set.data, strict=True))
    assert (source.dtype, source.shape) == (torch.float32, (360, 64))
    assert (targets.dtype, targets.shape) == (torch.int64, (360,))
    assert sorted({*targets.tolist()}) == list(range(10))
    assert len({tuple(x.tolist()) for x in [*clean, *source]}) > 1790, "none in both"
    again = torch.stack([x for x, _ in utils.load_digits()[1]])
    assert torch.equal(source, again)
    noise = torch.stack([x for x, _ in train_set]) - clean
    assert noise.std().item() == pytest.approx(0.1, rel=0.01)
    # What can be reached: the mean image of each class that is nearest.
    means = torch.stack([clean[labels == digit].mean(0) for digit in range(10)])
    right = torch.cdist(source, means).argmin(1) == targets
    assert right.double().mean() >= {"real": 0.88, "made up": 1}[which]


class Drawing(torch.utils.data.Dataset):
    """Each sample is its index, a random number, and the process that drew it."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index, torch.rand(1).item(), os.getpid()


def epochs(ranks=1, **workers):
    """[{sample: number}] of two epochs, and the processes that drew them."""
    drawn, pids = [{}, {}], [set(), set()]
    for rank in range(ranks):
        data = utils.SeededDataset(Drawing())
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
    """In this process, in two workers that live on, in one that does not, on ranks."""
    drawn, _ = epochs()
    assert len({*drawn[0].values(), *drawn[1].values()}) == 24, "all differ"
    by_two, pids = epochs(num_workers=2, persistent_workers=True)
    assert pids[0] == pids[1] and len(pids[0]) == 2, "the same two processes"
    assert by_two == drawn
    assert epochs(num_workers=1)[0] == drawn
    assert epochs(ranks=2, num_workers=1, persistent_workers=True)[0] == drawn


def test_the_seed_of_workers_that_live_on_does_not_follow_the_epoch():
    """So torch has it: hence the data set's own seeds. The order is fixed here."""
    drawn = []
    for persistent in (True, False):
        loader = DataLoader(Drawing(), num_workers=1, persistent_workers=persistent)
        for seed in (0, 1):
            torch.manual_seed(seed)
            drawn.append([float(number) for _, number, _ in loader])
    torch.manual_seed(1)
    resumed = [float(number) for _, number, _ in loader]
    assert resumed == drawn[3] != drawn[1]
    assert drawn[0] == drawn[2], "the first epoch is seeded"


def test_each_epoch_has_noise_of_its_own(script, tmp_path):
    """No two images that the ranks train on are equal, in two epochs."""
    train(script, 2, 2, cwd=tmp_path)
    images = [x for rank in noted(tmp_path) for x in rank["images"]]
    assert len({*images}) == len(images) == 2 * STEPS * 64


def test_drawing_for_a_sample_leaves_other_random_numbers_alone():
    """Without workers, dropout draws in the same process."""
    torch.manual_seed(3)
    undisturbed = torch.rand(2).tolist()
    torch.manual_seed(3)
    first = torch.rand(1).item()
    _ = utils.SeededDataset(Drawing())[5]
    assert [first, torch.rand(1).item()] == undisturbed


def test_two_workers_of_each_rank_live_on(script, tmp_path):
    """And two more load what is held out, from the first evaluation on."""
    train(script, 3, 3, cwd=tmp_path)
    for first, second, third in [x["children"] for x in noted(tmp_path)]:
        assert len(first) == 2
        assert len(second) == 4 and {*first} < {*second}
        assert third == second
