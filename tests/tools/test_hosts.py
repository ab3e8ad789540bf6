"""What kills on hosts: a command of one's own, and the tool that kills at random."""

import re

import pytest

from tests.helpers.needs import needs_hosts
from tools.run.processes import TIMEOUT_S, Program
from tools.scripts import ROOT

pytestmark = [pytest.mark.waits, needs_hosts]


def test_a_host_is_killed(tmp_path):
    """The others go on, and the exit status tells that one of them has failed."""
    script = "[ $(hostname) = node1 ] && touch up && echo up && sleep 1000; "
    script += "until [ -e up ]; do sleep 0.1; done; sleep 1; exit 3"
    command = "python -W ignore -m tools.run.hosts 2 --kill up -- sh -c"
    words = [*command.split(), script]
    done = Program(words, tmp_path, real=True, PYTHONPATH=ROOT).finish()
    assert done.stdout.splitlines() == ["node1: up", "-- kill node1"]
    assert done.returncode == 1


# The tool that kills at random: two short runs of it


def chaos(options):
    words = f"python -W ignore -m benchmarks.chaos {options}".split()
    # It ends by itself if nothing moves for three minutes.
    done = Program(words, ROOT, real=True).succeed(8 * TIMEOUT_S)
    assert "final weights and optimizer state: the same bits" in done.stdout
    return done.stdout


def test_each_kill_of_a_worker_costs_one_restart():
    """Also while it starts or saves; each ends in the next attempt, and none hangs."""
    out = chaos("--kills=8 --workers")
    found = re.search(r"recoveries: (\d+), at the first attempt: (\d+)", out)
    assert found[1] == found[2]


def test_a_worker_an_agent_and_a_host_are_killed_and_nothing_is_lost():
    out = chaos("--kills=3 --seed=7")
    assert "kills: 3 (1 workers, 1 agents, 1 hosts)" in out
    assert ", writing\n" in out
    twice = re.search(r"steps done twice: \d+ in all, at most (\d+)", out)
    assert 0 < int(twice[1]) <= 64, "what was hit in its write is done again"
