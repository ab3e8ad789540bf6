"""The hosts that other tests fail on purpose are separate."""

import sys
from pathlib import Path

import pytest

from tests.conftest import needs_hosts
from tools.proofs import processes
from tools.proofs.hosts import Hosts
from tools.scripts import ROOT

pytestmark = [pytest.mark.waits, needs_hosts]


def test_each_has_a_name_an_address_and_a_folder(tmp_path):
    with Hosts(2, tmp_path, own_disks=True) as hosts:
        for host in hosts:
            assert host.run("hostname").strip() == host.name
            assert host.run("pwd").strip() == str(tmp_path / host.name)
            assert f"{host.address}/24" in host.run("ip", "addr", "show", "eth0")
        one, other = hosts
        assert one.run("getent", "hosts", "node1").split()[0] == other.address
        job = other.start(["sh", "-c", "echo up; exec sleep 100; true"])
        job.wait_for("up")
        assert [*other.processes()] == [job.pid]
        assert not one.processes()
        assert "tmpfs" in one.run("df", "/dev/shm")
        assert not Path(f"/proc/{job.pid}/ns/net").samefile("/proc/self/ns/net")


def bed(*words):
    """What one types to run a command on two hosts."""
    return [sys.executable, "-W", "ignore", "-m", "tools.proofs.hosts", "2", *words]


def test_what_is_told_beforehand_happens_once():
    """Where the line is printed, which the host's name is no part of."""
    script = 'echo late; [ "$(hostname)" = node0 ] || sleep 1000'
    when = "--when", "late", "unplug node1", "--when", "node0: late", "kill node0"
    done = processes.run(bed(*when, "--", "sh", "-c", script), ROOT)
    assert done.returncode == 0, "only hosts that still stand count"
    assert done.stdout.count("-- unplug node1\n") == done.stdout.count("-- ") == 1


def test_a_host_is_killed_and_started_again(tmp_path):
    """It runs the command again; what comes then is in its folder already."""
    script = "[ -e twice ] && echo again && exit 3; touch twice; echo up; sleep 1000"
    script = f"[ $(hostname) = node1 ] || exit 0; {script}"
    when = "--when", "up", "kill node1", "--when", "up", "start node1"
    command = bed(*when, "--", "sh", "-c", script)
    done = processes.run(command, tmp_path, PYTHONPATH=ROOT)
    lines = ["node1: up", "-- kill node1", "-- start node1", "node1: again"]
    assert done.stdout.splitlines() == lines
    assert done.returncode == 1, "node1 ends with 3"
