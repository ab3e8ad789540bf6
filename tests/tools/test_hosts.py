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
    done = Program(words, tmp_path, real=True, PYTHONPATH=ROOT).end_with(1)
    assert done.stdout.splitlines() == ["node1: up", "-- kill node1"]


# The tool that kills at random: two short runs of it


def chaos(options):
    words = f"python -W ignore -m benchmarks.chaos {options}".split()
    done = Program(words, ROOT, real=True).succeed(8 * TIMEOUT_S)
    assert "final weights and optimizer state: the same bits" in done.stdout
    return done.stdout


def test_each_kill_of_a_worker_costs_one_restart():
    """Also while it starts or saves: 8 restarts are enough for 8 kills."""
    assert "8 kills; 0 agents were started again" in chaos("--kills=8 --workers")


def test_a_worker_an_agent_and_a_host_are_killed_and_nothing_is_lost():
    out = chaos("--kills=3 --seed=7")
    kinds = re.findall(r"s  (\w+), \d+ epochs saved", out)
    assert sorted(kinds) == ["agent", "host", "worker"]
