"""tools/run/hosts.py kills a host of several, by a command of your own."""

import pytest

from tests.helpers.needs import needs_hosts
from tools.run.processes import Program
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
