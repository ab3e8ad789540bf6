"""Snapshots: a kill never leaves half of one, and the newest is resumed from."""

import json
import multiprocessing
import os
import re
import shutil
import signal

import numpy
import pytest
import torch
from torch.utils._pytree import tree_map

import utils
from tests.helpers.checks import assert_same_snapshot, noted
from tests.helpers.forked import in_a_fork
from tests.helpers.own_disks import launch_on_own_disks
from tests.hooks.notes import note_device, note_memory
from tools.run.launch import DISTRIBUTED, train
from tools.run.results import load
from tools.scripts import trunk


@pytest.mark.parametrize("moment", ["save", "fsync", "replace"])
def test_killed_while_writing(tmp_path, moment):
    """SIGKILL when half of it is written, all of it, or it is about to be renamed."""
    path = str(tmp_path / "snapshot.pt")
    utils.save_atomically({"n": torch.zeros(3)}, path)

    def die(_, file=None, *rest):
        if moment == "save":
            file.write(b"half")
            file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def save():
        module = torch if moment == "save" else os
        setattr(module, moment, die)
        utils.save_atomically({"n": torch.ones(3)}, path)

    fork = multiprocessing.get_context("fork").Process(target=save)
    fork.start()
    fork.join()
    assert fork.exitcode == -signal.SIGKILL
    assert load(path)["n"].tolist() == [0, 0, 0]
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize("fault", ["numpy", "no rename"])
def test_what_is_complete_is_never_removed(tmp_path, monkeypatch, fault):
    """If no run could load it, or it cannot take the old one's place, it is named."""
    path = tmp_path / "snapshot.pt"
    snapshot = {"lr": numpy.float64(1)}  # as a schedule may compute it
    if fault == "no rename":
        snapshot = {"lr": 1.0}
        monkeypatch.setattr(os, "replace", lambda *_: os.stat("/no such file"))
    with pytest.raises(OSError, match="not written, the new snapshot is") as caught:
        utils.save_atomically(snapshot, str(path))
    (left,) = tmp_path.iterdir()
    assert str(caught.value).endswith(f" is {left}")
    assert torch.load(left, weights_only=False) == snapshot


def test_two_runs_do_not_save_to_one_path(tmp_path, capsys):
    """The first that would replace what the other has saved since ends instead.

    A run that has read what the other saved may replace it. All this also holds for a
    path that is a link, and stays one.
    """
    path = tmp_path / "snapshot.pt"
    link = tmp_path / "link.pt"
    link.symlink_to(path)

    def save(epochs_run):
        snapshot = {"MODEL_STATE": {}, "OPTIMIZER_STATE": {}, "EPOCHS_RUN": epochs_run}
        utils.save_atomically(snapshot, str(link))

    save(1)
    assert link.is_symlink()
    os.utime(path, (1, 1))  # as if another run had saved since
    with pytest.raises(SystemExit):
        save(2)
    assert load(path)["EPOCHS_RUN"] == 1
    (mine,) = tmp_path.glob("snapshot.pt.*")  # nothing that was trained is lost
    assert load(mine)["EPOCHS_RUN"] == 2
    line = f"error: another run saves to {path}, too: this run's is {mine}\n"
    assert capsys.readouterr().err.endswith(line)
    utils.read_snapshot(str(link))
    save(3)
    assert load(path)["EPOCHS_RUN"] == 3


@pytest.mark.parametrize(
    "nan",
    [
        "self.model.weight.data.fill_(torch.nan)",
        "return loss.detach() * torch.nan",  # the held-out samples know nothing of it
    ],
)
def test_weights_that_are_nan_are_not_saved(tmp_path, nan):
    """They, or a loss, become NaN in the third epoch: what two epochs saved is kept."""
    step = "        self.optimizer.step()\n"
    in_third_epoch = f"        if self.epochs_run == 2: {nan}\n"
    changes = [(step, step + in_third_epoch)]
    done = train("single_gpu.py", 5, 1, status=2, cwd=tmp_path, changes=changes)
    line = "single_gpu.py: error: the loss is nan, not saved to snapshot.pt\n"
    assert done.stderr == line
    snapshot = load(tmp_path)
    assert snapshot["EPOCHS_RUN"] == 2
    assert snapshot["MODEL_STATE"]["weight"].isfinite().all()


@in_a_fork
def test_a_full_disk_leaves_the_old_snapshot(tmp_path):
    """The write ends with an error where no more than 64 KiB may be written.

    The error names the file, and the half that is written is removed.
    """
    import resource  # here, because Windows has no such module

    path = str(tmp_path / "snapshot.pt")
    utils.save_atomically({"n": torch.ones(3)}, path)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # which would end it
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
    with pytest.raises(OSError, match=f"{path} is not written"):
        utils.save_atomically({"n": torch.zeros(1_000_000)}, path)
    assert load(path)["n"].tolist() == [1, 1, 1]
    assert os.listdir(tmp_path) == ["snapshot.pt"]


def test_held_out_samples_are_others():
    """The same each time, or no run would resume; its noise floor is test_learns'."""
    source, _ = utils.MyTrainDataset(9)[0]
    held_out, _ = utils.MyTrainDataset(9, seed=1)[0]
    assert not torch.equal(source, held_out)


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        ("old new", ["epochs saved, by rank: [2, 5]. All take rank 1's"]),
        ("none new", ["epochs saved, by rank: [-1, 5]. All take rank 1's"]),
        ("new other", []),
    ],
)
def test_multinode_spreads_the_newest_snapshot(runs, tmp_path, found, lines):
    """Each rank has its own disk; after a restart the newest may be on any of them."""
    folder, _ = runs("multinode.py")
    new = load(folder)
    zeros = tree_map(torch.zeros_like, new["MODEL_STATE"])
    other = new | {"MODEL_STATE": zeros}  # as far, and of another run
    snapshots = {"old": other | {"EPOCHS_RUN": 2}, "new": new, "other": other}
    disks = [tmp_path / "0", tmp_path / "1"]
    for disk, kind in zip(disks, found.split(), strict=True):
        disk.mkdir()
        if kind != "none":
            torch.save(snapshots[kind], disk / "snapshot.pt")
    # Machines with one process each: the device goes by the local rank, which is 0.
    first, second = launch_on_own_disks(
        "multinode.py", 6, 1, cwd=tmp_path, hooks=[note_device]
    )
    assert (first.returncode, second.returncode) == (0, 0), first.stderr
    assert re.findall("epochs saved.*", first.stdout) == lines
    assert "5 of 6 epochs are finished in snapshot.pt" in first.stdout
    for rank, disk in enumerate(disks):
        device = json.loads((disk / f"device.{rank}.json").read_text())
        assert device["local_rank"] == 0
    undisturbed = tmp_path / "undisturbed"
    shutil.copytree(folder, undisturbed)
    train("multinode.py", 6, 1, cwd=undisturbed)
    assert_same_snapshot(disks[0], undisturbed)
    # Only one process in the world prints and writes.
    assert not second.stdout
    assert load(disks[1])["EPOCHS_RUN"] == 5


@pytest.mark.waits
@pytest.mark.skipif(
    not os.path.exists("/proc/self/clear_refs"), reason="only Linux counts peaks there"
)
@pytest.mark.parametrize("name", trunk())
def test_the_memory_that_a_resume_takes(name, tmp_path):
    """A job that trains is not too big to resume: once the snapshot on each rank.

    multinode.py holds its own for a moment as well, beside that of another rank: twice.
    """
    large = (
        "torch.nn.Sequential(torch.nn.Linear(20, 3000), torch.nn.Linear(3000, 3000),"
        " torch.nn.Linear(3000, 1))"
    )
    changes = [("torch.nn.Linear(20, 1)", large), ("Dataset(2048)", "Dataset(64)")]
    for end in (1, 2):
        train(name, end, 1, cwd=tmp_path, changes=changes, hooks=[note_memory])
    size = os.stat(tmp_path / "snapshot.pt").st_size
    ranks = 2 if name in DISTRIBUTED else 1
    most = 2.5 if name == "multinode.py" else 1.25  # a quarter more than it should be
    for peak in noted(tmp_path, "memory", ranks):
        assert peak["load"] / size < most
