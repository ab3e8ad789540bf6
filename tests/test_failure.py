"""A process that dies takes the run with it: soon, by name, leaving nothing behind."""

import os
import re
import signal
import threading
import time
import uuid

import pytest

from ladder.rungs import ROOT
from proofs import processes
from proofs.launch import as_typed, command, launch, plant, start
from proofs.processes import TIMEOUT_S, finish, left_over
from proofs.results import load, same_bits

# Why these tests take new interpreters, and no forks.
ENDS = "how a launcher ends, and what it says, is the claim"

linux = pytest.mark.skipif(
    not os.path.isdir("/proc/self"), reason="processes are looked up in /proc"
)


@linux
def test_multigpu_names_the_rank_and_shows_its_traceback(tmp_path):
    script = plant("multigpu.py", tmp_path, hooks=["in_step_80"])
    mark = uuid.uuid4().hex
    env = {"MARK": mark, "IN_STEP_80": "raise"}
    done = launch(script, 5, 2, cwd=tmp_path, real=ENDS, **env)
    assert done.returncode == 1
    assert "-- Process 1 terminated with the following error:" in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: planted")
    assert not left_over(mark)


@linux
def test_multinode_shows_the_traceback_of_the_rank_that_failed(tmp_path):
    script = plant("multinode.py", tmp_path, hooks=["in_step_80"])
    mark = uuid.uuid4().hex
    env = {"MARK": mark, "IN_STEP_80": "raise"}
    done = launch(script, 5, 2, cwd=tmp_path, real=ENDS, **env)
    assert done.returncode == 1
    summary = done.stderr.split("Root Cause (first observed failure):")[1]
    assert "rank      : 1 (local_rank: 1)" in summary
    assert "ValueError: planted" in summary
    assert not left_over(mark)


@linux
@pytest.mark.parametrize("name", ["multigpu.py", "multinode.py"])
def test_a_rank_that_is_killed_is_named(name, tmp_path):
    script = plant(name, tmp_path, hooks=["in_step_80"])
    mark = uuid.uuid4().hex
    env = {"MARK": mark, "IN_STEP_80": "kill"}
    done = launch(script, 5, 2, cwd=tmp_path, real=ENDS, **env)
    assert done.returncode == 1
    assert re.search("process 1 terminated with signal|rank +: 1 ", done.stderr)
    assert "SIGKILL" in done.stderr
    assert not left_over(mark)


@linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ending_multigpu_ends_its_processes(tmp_path, number):
    """Ctrl-C reaches the whole group; SIGKILL reaches the first process alone."""
    mark = uuid.uuid4().hex
    process = start(ROOT / "multigpu.py", 10**6, 10**6, cwd=tmp_path, MARK=mark)
    timer = threading.Timer(TIMEOUT_S, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    assert any("epoch 2/" in line for line in process.stdout), "it must be training"
    timer.cancel()
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        os.kill(process.pid, number)
    left = left_over(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    done = finish(process)
    assert not left
    assert done.returncode != 0


@linux
def test_multigpu_does_not_wait_for_a_rank_that_dies_at_once(tmp_path):
    script = plant("multigpu.py", tmp_path, hooks=["die_at_once"])
    began = time.monotonic()
    done = launch(script, 5, 2, cwd=tmp_path, real=ENDS)
    assert time.monotonic() - began < 100, "not by the five minutes' time-out"
    assert done.returncode == 1
    assert "-- Process 1 terminated with the following error:" in done.stderr


def restarted(folder, kills, restarts, hooks=(), **env):
    """Run 5 epochs of multinode.py, killed so often, with the documents' cure."""
    hooks = ["killed_attempts", *hooks]
    script = plant("multinode.py", folder / "copy", hooks=hooks)
    words = as_typed(command(script, 5, 1))
    words.insert(words.index("--standalone"), f"--max-restarts={restarts}")
    env |= {"KILLS": kills, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}
    return processes.run(words, folder, **env)


@pytest.mark.waits
def test_restarts_after_kills_end_with_the_same_bits(runs, tmp_path):
    """Exactly one restart each, and a store of its own for every attempt.

    Were the store shared, an attempt could read the addresses of the one before.
    """
    done = restarted(tmp_path, kills=2, restarts=2)
    assert done.returncode == 0, done.stderr
    ports = re.findall(r"attempt (\d) has port (\d+)", done.stdout)
    assert [attempt for attempt, _ in ports] == ["0", "1", "2"]
    assert len({port for _, port in ports}) == 3
    resumed = re.findall(r"resuming from snapshot.pt: (\d) of 5", done.stdout)
    assert resumed == ["1", "2"], "nothing that was saved is done again"
    undisturbed = load(runs("multinode.py")[0] / "snapshot.pt")
    assert same_bits(load(tmp_path / "snapshot.pt"), undisturbed)


@pytest.mark.waits
def test_restarts_are_used_up(tmp_path):
    mark = uuid.uuid4().hex
    done = restarted(tmp_path, kills=9, restarts=1, MARK=mark)
    assert done.returncode == 1
    assert [x for x in done.stdout.splitlines() if "attempt 1 has" in x]
    # Both ranks have failed by the time that torchrun looks, if the machine is busy. It
    # then takes the one that wrote down its error for the first.
    report = done.stderr.split("FAILED")[1]
    killed = report.split("rank      : 1 (local_rank: 1)")[1].split("rank  ")[0]
    assert "Signal 9 (SIGKILL) received by PID" in killed
    assert load(tmp_path / "snapshot.pt")["EPOCHS_RUN"] == 2
    assert not left_over(mark)


@pytest.mark.waits
def test_half_an_error_file_ends_torchrun(tmp_path):
    """torchrun's own fault (2.10 to 2.13): it ends with restarts left.

    Its SIGTERM meets a worker that is writing its error file, and it cannot parse what
    is there. If this fails, torchrun has been mended: then the hook that keeps this out
    of proofs/chaos.py, and what the documents say of it, can go.
    """
    done = restarted(tmp_path, kills=1, restarts=2, hooks=["slow_record"])
    assert done.returncode == 1
    assert "Failed to parse reply file" in done.stderr
    assert "JSONDecodeError" in done.stderr
    assert "attempt 1 has port" not in done.stdout


@pytest.mark.waits
def test_an_error_file_in_one_piece_does_not(tmp_path):
    hooks = ["slow_record", "record_in_one_piece"]
    done = restarted(tmp_path, kills=1, restarts=2, hooks=hooks)
    assert done.returncode == 0, done.stderr
    assert "attempt 1 has port" in done.stdout
