"""Snapshots: which one a run resumes from, and that a kill never leaves half of one."""

import collections
import json
import os
import pickle
import random
import shutil
import signal
import socket
import time

import numpy
import pytest
import torch

import utils
from ladder.rungs import ROOT
from proofs.launch import DISTRIBUTED, plant, train
from proofs.processes import TIMEOUT_S, TimedOut
from proofs.results import load, weights
from proofs.warm import Fork


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimedOut("a write takes too long")
        time.sleep(0.001)


def unfinished(folder):
    return list(folder.glob("snapshot.pt.*.tmp"))


def test_killed_while_writing(tmp_path):
    """40 kills at random moments of an endless row of 8 MB writes."""
    path = str(tmp_path / "snapshot.pt")
    utils.save_atomically({"n": torch.zeros(2_000_000)}, path)
    random.seed(0)
    interrupted = 0
    for _ in range(40):
        first = int(load(path)["n"][0])
        before = os.stat(path).st_mtime_ns
        pid = os.fork()
        if pid == 0:
            for n in range(first + 1, 10**9):
                utils.save_atomically({"n": torch.full((2_000_000,), float(n))}, path)
        # A write has succeeded, however slow the disk, and the next one has begun.
        wait_until(lambda before=before: os.stat(path).st_mtime_ns != before)
        wait_until(lambda: unfinished(tmp_path))
        time.sleep(random.uniform(0, 0.01))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        interrupted += len(unfinished(tmp_path))
        values = load(path)["n"].unique().tolist()
        assert len(values) == 1 and values[0] > first
    assert interrupted > 5, "the kills must hit writes"
    utils.save_atomically({"n": torch.zeros(1)}, path)
    assert os.listdir(tmp_path) == ["snapshot.pt"], "what a kill left is removed"


def test_what_cannot_be_loaded_is_not_saved(tmp_path):
    """A reader adds a number of NumPy's. It must not replace a good snapshot."""
    path = str(tmp_path / "snapshot.pt")
    utils.save_atomically({"EPOCHS_RUN": 1}, path)
    with pytest.raises(pickle.UnpicklingError, match="numpy"):
        utils.save_atomically({"EPOCHS_RUN": 2, "BEST": numpy.float64(1)}, path)
    assert load(path) == {"EPOCHS_RUN": 1}
    assert os.listdir(tmp_path) == ["snapshot.pt"]


def test_a_counter_travels_as_it_is():
    """MultiStepLR keeps its milestones in one, and its update() adds."""
    milestones = collections.Counter({30: 1, 80: 1})
    mapped = utils.map_tensors(lambda x: x, {"milestones": milestones})
    assert mapped == {"milestones": milestones}


def test_a_private_snapshot_stays_private(tmp_path):
    path = tmp_path / "snapshot.pt"
    utils.save_atomically({"EPOCHS_RUN": 1}, str(path))
    path.chmod(0o600)
    utils.save_atomically({"EPOCHS_RUN": 2}, str(path))
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_newest_is_told_by_what_is_trained_alone(tmp_path):
    """And by no other number that a reader saves."""
    found = []
    for epochs, seed in ((40, 7), (2, 9)):
        path = tmp_path / f"{epochs}.pt"
        torch.save({"SEED": seed, "EPOCHS_RUN": epochs}, path)
        found.append(utils.identify(str(path)))
    newest, text = utils.compare(found)
    assert newest == 0
    assert f"{tmp_path}/40.pt, with 40 epochs" in text


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link.pt").symlink_to(tmp_path / "snapshot.pt")
    utils.save_atomically({"n": torch.ones(3)}, str(tmp_path / "link.pt"))
    assert (tmp_path / "link.pt").is_symlink()
    assert load(tmp_path / "snapshot.pt")["n"].tolist() == [1, 1, 1]


def test_two_writers_of_one_path_do_not_mix_their_weights(tmp_path):
    """60 times, two processes save to one path at the same time."""
    path = str(tmp_path / "snapshot.pt")
    for turn in range(60):
        pids = []
        for writer in (0.0, 1.0):
            pid = os.fork()
            if pid == 0:
                utils.save_atomically({"n": torch.full((200_000,), writer)}, path)
                os._exit(0)
            pids.append(pid)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(x, 0)[1]) for x in pids]
        assert statuses == [0, 0]
        assert len(load(path)["n"].unique()) == 1, f"mixed at turn {turn}"
    assert os.listdir(tmp_path) == ["snapshot.pt"]


def test_another_run_that_writes_is_left_alone(tmp_path):
    """A write removes what killed writers left, and not what somebody else writes."""
    path = str(tmp_path / "snapshot.pt")
    mine = tmp_path / "snapshot.pt.mine.tmp"
    mine.write_text("a file of the user's")
    left = tmp_path / "snapshot.pt.0123abcd.tmp"
    left.write_text("half a snapshot")
    with utils.open_beside(path) as written:
        pid = os.fork()  # a lock is of one process
        if pid == 0:
            utils.save_atomically({"n": torch.ones(3)}, path)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    assert mine.exists() and not left.exists()
    assert os.path.exists(written.name)


def test_a_full_disk_leaves_the_old_snapshot(tmp_path):
    """The write ends with an error where no more than 64 KiB may be written.

    The error names the cause, and the half that is written is removed.
    """
    import resource

    path = str(tmp_path / "snapshot.pt")
    utils.save_atomically({"n": torch.ones(3)}, path)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        try:
            utils.save_atomically({"n": torch.zeros(1_000_000)}, path)
        except OSError as error:
            known = f"File too large: {path} is not written, the old one is kept"
            os._exit(3 if known in str(error) else 4)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert load(path)["n"].tolist() == [1, 1, 1]
    assert os.listdir(tmp_path) == ["snapshot.pt"]


def test_the_data_is_what_it_says():
    """20 features, 1 target, the same each time, and its noise floor is its floor."""
    train, again = utils.MyTrainDataset(2048), utils.MyTrainDataset(2048)
    held_out = utils.MyTrainDataset(2048, seed=1)
    assert len(train) == 2048
    assert [tuple(x.shape) for x in train[0]] == [(20,), (1,)]
    source, targets = (torch.stack(x) for x in zip(*train, strict=True))
    assert torch.equal(targets, torch.stack([x[1] for x in again]))
    other_source, other = (torch.stack(x) for x in zip(*held_out, strict=True))
    assert not torch.equal(source, other_source)
    best = torch.linalg.lstsq(source, targets).solution  # no bias: none was put in
    loss = (other_source @ best - other).square().mean().item()
    assert abs(loss / train.noise_floor - 1) < 0.1


def on_own_disks(script, disks, *arguments, **env):
    """One process of `script` in each of the folders `disks`, as on two machines."""
    store = torch.distributed.TCPStore("localhost", 0, is_master=True)
    env |= {"WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost"}
    env |= {"MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    words = ["python", script, *arguments]
    workers = [Fork(words, disk, RANK=i, **env) for i, disk in enumerate(disks)]
    done = [worker.finish() for worker in workers]
    assert [x.returncode for x in done] == [0, 0], done[0].stderr + done[1].stderr
    return done


@pytest.mark.parametrize("found", ["old new", "new none", "other new"])
def test_multinode_spreads_the_newest_snapshot(runs, tmp_path, found):
    """Each rank has its own disk; after a restart the newest may be on any of them."""
    new = load(runs("multinode.py")[0] / "snapshot.pt")
    zero = {name: torch.zeros_like(x) for name, x in new["MODEL_STATE"].items()}
    other = new | {"MODEL_STATE": zero}  # as far, and of another run
    old = other | {"EPOCHS_RUN": 2}
    # The first of those that are as far as each other is taken.
    places = found.split() if found != "other new" else ["new", "other"]
    disks = [tmp_path / "disk0", tmp_path / "disk1"]
    for disk, what in zip(disks, places, strict=True):
        disk.mkdir()
        if what != "none":
            snapshot = {"old": old, "new": new, "other": other}[what]
            torch.save(snapshot, disk / "snapshot.pt")
    theirs = (disks[1] / "snapshot.pt").exists() and (disks[1] / "snapshot.pt").stat()
    # Machines with one process each: the device goes by the local rank, which is 0.
    script = plant("multinode.py", tmp_path / "copy", hooks=["note_device"])
    first, second = on_own_disks(script, disks, 6, 1)
    # What is said first: whose it is, on which host, and what others had.
    newest = places.index("new")
    host = socket.gethostname()
    there = {"old": 2, "other": 5, "none": "none"}[places[1 - newest]]
    assert first.stdout.splitlines()[0] == (
        f"ranks found different snapshots: all take rank {newest}'s,"
        f" {host}:{disks[newest]}/snapshot.pt, with 5 epochs"
        f" ({host}:{disks[1 - newest]}/snapshot.pt has {there})"
    )
    assert "resuming from snapshot.pt: 5 of 6 epochs are finished" in first.stdout
    assert [(x / "device").read_text() for x in disks] == ["0", "0"]
    # Only one process in the world writes.
    assert not second.stdout
    after = (disks[1] / "snapshot.pt").exists() and (disks[1] / "snapshot.pt").stat()
    assert (theirs and theirs.st_mtime_ns) == (after and after.st_mtime_ns)
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(runs("multinode.py")[0] / "snapshot.pt", alone)
    train(ROOT / "single_gpu.py", 6, 1, "--batch-size", 64, cwd=alone)
    mine, theirs = (weights(x / "snapshot.pt") for x in (disks[0], alone))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_a_snapshot_travels_through_the_device(runs, tmp_path):
    """NCCL takes nothing else. On a CPU a hook sees to it."""
    disks = [tmp_path / "disk0", tmp_path / "disk1"]
    for disk in disks:
        disk.mkdir()
    shutil.copy(runs("multinode.py")[0] / "snapshot.pt", disks[1])
    script = plant("multinode.py", tmp_path / "copy", hooks=["on_device"])
    first, _ = on_own_disks(script, disks, 6, 1)
    assert "resuming from snapshot.pt: 5 of 6 epochs are finished" in first.stdout


LARGE = {"LAYER_SIZES": "20,3000,3000,1", "TRAIN_SAMPLES": 64}


def peaks(folder, ranks):
    """Of each rank, what checking and loading took, in sizes of the snapshot."""
    size = (folder / "snapshot.pt").stat().st_size
    facts = [json.loads((folder / f"memory.{i}.json").read_text()) for i in ranks]
    return [{key: value / size for key, value in x.items()} for x in facts]


@pytest.mark.skipif(
    not os.path.exists("/proc/self/clear_refs"), reason="only Linux counts peaks there"
)
@pytest.mark.parametrize("name", ["single_gpu.py", "multigpu.py", "multinode.py"])
def test_the_memory_that_a_resume_takes(name, tmp_path):
    """A job that trains is not too big to resume: once the snapshot on each rank.

    Where disks differ, a rank may hold its own for a moment as well: twice. To check a
    snapshot before the start takes next to nothing, for the file is mapped.
    """
    script = plant(name, tmp_path / "copy", hooks=["large_model", "note_memory"])
    train(script, 1, 1, cwd=tmp_path, **LARGE)
    train(script, 2, 1, cwd=tmp_path, **LARGE)
    ranks = [0, 1] if name in DISTRIBUTED else [0]
    for peak in peaks(tmp_path, ranks):
        assert peak["load"] < 1.25
        if "check" in peak:  # the ranks of multigpu.py do not check
            assert peak["check"] < 0.25
    if name == "multinode.py":
        disks = [tmp_path / "disk0", tmp_path / "disk1"]
        for disk, epochs in zip(disks, (1, 2), strict=True):
            disk.mkdir()
            snapshot = load(tmp_path / "snapshot.pt") | {"EPOCHS_RUN": epochs}
            torch.save(snapshot, disk / "snapshot.pt")
        del snapshot
        on_own_disks(script, disks, 2, 1, **LARGE)
        for i, disk in enumerate(disks):
            assert peaks(disk, [i])[0]["load"] < 2.25


def test_any_dtype_travels_to_the_other_disks(tmp_path):
    """gloo itself knows no float8; a tensor without dimensions is one, too."""
    text = "torch.tensor(3.5).to(torch.float8_e4m3fn)"
    disks = [tmp_path / "disk0", tmp_path / "disk1"]
    snapshots = [tmp_path / "0.pt", tmp_path / "1.pt"]
    for disk in disks:
        disk.mkdir()
    script = tmp_path / "spread.py"
    script.write_text(SPREAD.format(tensor=text))
    shutil.copy(ROOT / "utils.py", tmp_path)
    on_own_disks(script, disks, tmp_path)
    first, second = (load(x) for x in snapshots)
    assert first["STATE"][0]["x"].dtype == torch.float8_e4m3fn
    assert first["STATE"][0]["x"].float() == second["STATE"][0]["x"].float() == 3.5
    assert first["STATE"][1] == second["STATE"][1] == (1, "text")
    # A module that has changed its state since asks for the version of what is loaded.
    for snapshot in (first, second):
        assert snapshot["MODEL_STATE"]._metadata[""] == {"version": 1}


SPREAD = """
import sys

import torch
import torch.distributed as dist

import utils

dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2).state_dict()
there = {{"EPOCHS_RUN": 3, "STATE": [{{"x": {tensor}}}, (1, "text")]}}
there["MODEL_STATE"] = model
mine = there if dist.get_rank() == 1 else {{"EPOCHS_RUN": 0}}
got = utils.broadcast_snapshot(mine, 1, torch.device("cpu"))
torch.save(got, f"{{sys.argv[1]}}/{{dist.get_rank()}}.pt")
dist.destroy_process_group()
"""
