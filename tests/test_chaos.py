"""The tool that kills at random: a short run of it, and what it says to bad input."""

import re
import sys

import pytest

from ladder.rungs import ROOT
from proofs import processes
from proofs.hosts import why_not
from proofs.processes import TIMEOUT_S
from proofs.warm import Fork

on_hosts = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def chaos(*args):
    command = [sys.executable, "-W", "ignore", "-m", "proofs.chaos", *args]
    # It ends by itself if nothing moves for three minutes.
    return processes.finish(processes.start(command, ROOT), 8 * TIMEOUT_S)


@pytest.mark.waits
@on_hosts
def test_twenty_kills_of_a_worker_cost_twenty_restarts():
    """Also while it starts or saves; each ends in the next attempt, and none hangs."""
    args = "--kills", "20", "--only", "worker", "--hosts", "1", "--nproc-per-node", "2"
    done = chaos(*args)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torchrun's last restart count: 20\n" in done.stdout
    found = re.search(r"recoveries: (\d+), at the first attempt: (\d+)", done.stdout)
    assert found[1] == found[2]
    assert "final weights and optimizer state: the same bits" in done.stdout


@pytest.mark.waits
@on_hosts
def test_a_worker_an_agent_and_a_host_are_killed_and_nothing_is_lost():
    """The agent is killed while its worker writes a snapshot."""
    done = chaos("--kills", "3", "--seed", "7")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kills: 3 (1 workers, 1 agents, 1 hosts)" in done.stdout
    assert re.search(r"while a snapshot was written: [1-3];", done.stdout)
    assert "final weights and optimizer state: the same bits" in done.stdout
    assert "steps lost of those that were saved: 0\n" in done.stdout
    assert "left beside the snapshot: nothing" in done.stdout
    twice = re.search(r"steps done twice: \d+ in all, at most (\d+)", done.stdout)
    assert 0 < int(twice[1]) <= 64, "what was hit in its write is done again"


@pytest.mark.parametrize("args", [("--kills", "0"), ("--only", "everybody")])
def test_bad_input_is_one_line(args):
    done = Fork(["python", "-m", "proofs.chaos", *args], ROOT).finish()
    assert done.returncode == 2
    assert not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("chaos.py: error: ")
