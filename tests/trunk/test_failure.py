"""A process that dies takes the run with it: soon, by name, leaving nothing behind."""

import os
import re
import signal

import pytest

from tests.helpers.checks import assert_same_snapshot
from tests.hooks.faults import killed_attempts, raise_error_in_step_80
from tools.run.launch import ENTRY, start, train
from tools.run.processes import Program, descendants, wait_until
from tools.run.results import load
from tools.scripts import ROOT

linux = pytest.mark.skipif(
    not os.path.isdir("/proc/self"), reason="processes are looked up in /proc"
)


@pytest.mark.waits
@linux
@pytest.mark.parametrize("name", ["multigpu.py", "multinode.py"])
def test_a_rank_that_is_killed_is_named(killed, name):
    _, done, left = killed(name)
    assert re.search("process 1 terminated with signal|rank +: 1 ", done.stderr)
    assert "SIGKILL" in done.stderr
    assert not left


def test_multigpu_names_the_rank_and_shows_its_traceback(tmp_path):
    hooks = [raise_error_in_step_80]
    done = train("multigpu.py", 5, 2, status=1, cwd=tmp_path, hooks=hooks)
    assert "-- Process 1 terminated with the following error:" in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: planted")


@linux
@pytest.mark.waits
def test_multinode_shows_the_traceback_of_the_rank_that_failed(tmp_path):
    """In a fork, torchrun itself would do what `@record` does."""
    hooks = [raise_error_in_step_80]
    done = train("multinode.py", 5, 2, status=1, cwd=tmp_path, real=True, hooks=hooks)
    # In all of the report: torchrun counts in seconds, and may take the lost connection
    # of rank 0 for the root cause.
    report = done.stderr.split(" FAILED\n")[1]
    assert "rank      : 1 (local_rank: 1)" in report
    assert "ValueError: planted" in report


@pytest.mark.waits
@linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_ending_multigpu_ends_its_processes(tmp_path, number):
    """The signal reaches the first process alone.

    SIGTERM here in the background of a shell script, where SIGINT is ignored.
    """
    changes = []
    if number == signal.SIGTERM:
        ignore = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
        changes = [(ENTRY, f"{ENTRY}\n    {ignore}")]
    # Not a fork, which leaves out what Python does at its end: wait for its processes.
    run = start("multigpu.py", 10**6, 1, cwd=tmp_path, real=True, changes=changes)
    wait_until((tmp_path / "snapshot.pt").exists)
    ranks = descendants(run.pid)
    assert len(ranks) >= 2
    os.kill(run.pid, number)
    assert run.finish().returncode != 0
    wait_until(lambda: not any(os.path.exists(f"/proc/{rank}") for rank in ranks))
    assert load(tmp_path)["EPOCHS_RUN"] >= 1


ERROR_WITH_TENSORS_IN_GLOOS_THREADS = """
import os, time
import torch
import utils

class SlowToFree(torch.Tensor):
    def __del__(self):
        time.sleep(0.02)

ranks = range(4)
for _ in ranks:
    if os.fork() == 0:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        for _ in range(4):
            tensor = torch.zeros(1).as_subclass(SlowToFree)
            torch.distributed.all_reduce(tensor, async_op=True)
            del tensor
        utils.error("bad input")
print([os.waitstatus_to_exitcode(os.wait()[1]) for _ in ranks])
"""


def test_an_error_lets_gloos_threads_free_their_tensors():
    """Python ends a thread that needs it while it exits: SIGABRT, not status 2."""
    done = Program(
        ["python", "-c", ERROR_WITH_TENSORS_IN_GLOOS_THREADS], ROOT, real=True
    ).finish()
    assert done.stdout == "[2, 2, 2, 2]\n", done


def restarted(folder, status, kills, restarts):
    """Run 5 epochs of multinode.py, killed so often, with the documents' cure."""
    return train(
        "multinode.py",
        5,
        1,
        status=status,
        cwd=folder,
        real=True,
        hooks=[killed_attempts],
        KILLS=kills,
        PET_MAX_RESTARTS=restarts,  # torchrun's --max-restarts
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1,
    )


@pytest.mark.waits
def test_restarts_after_kills_end_with_the_same_bits(runs, tmp_path):
    """Exactly one restart each, and a store of its own for every attempt.

    Were the store shared, an attempt could read the addresses of the one before.
    """
    done = restarted(tmp_path, status=0, kills=2, restarts=2)
    found = re.findall(r"attempt (\d) has port (\d+)", done.stdout)
    attempts, ports = zip(*found, strict=True)
    assert attempts == ("0", "1", "2")
    assert len(set(ports)) == 3
    resumed = re.findall(r"(\d) of 5 epochs are finished", done.stdout)
    assert resumed == ["0", "1", "2"], "nothing that was saved is done again"
    undisturbed, _ = runs("multinode.py")
    assert_same_snapshot(tmp_path, undisturbed)


@pytest.mark.waits
def test_restarts_are_used_up(tmp_path):
    done = restarted(tmp_path, status=1, kills=9, restarts=1)
    # On a busy machine, both ranks have failed when torchrun looks. It then takes the
    # rank that wrote down its error for the first.
    report = done.stderr.split("FAILED")[1]
    killed = report.split("rank      : 1 (local_rank: 1)")[1].split("rank  ")[0]
    assert "Signal 9 (SIGKILL) received by PID" in killed
    assert load(tmp_path)["EPOCHS_RUN"] == 2  # one by each attempt
