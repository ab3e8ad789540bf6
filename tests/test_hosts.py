"""The hosts that other tests fail on purpose: separate, and gone without a trace."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ladder.rungs import ROOT
from proofs import processes
from proofs.hosts import Hosts, Job, why_not
from proofs.processes import TIMEOUT_S, clean_env, left_over

on_hosts = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
BED = [sys.executable, "-W", "ignore", "-m", "proofs.hosts"]


def sockets(*words):
    return [sys.executable, ROOT / "tests/faults/sockets.py", *words]


@pytest.fixture
def pair(tmp_path):
    with Hosts(2, tmp_path, own_disks=True) as hosts:
        yield hosts


@pytest.mark.waits
@on_hosts
def test_each_has_a_name_an_address_and_a_folder(pair, tmp_path):
    for host in pair:
        assert host.run("hostname").strip() == host.name
        assert host.run("pwd").strip() == str(tmp_path / host.name)
        assert f"{host.address}/24" in host.run("ip", "addr", "show", "eth0")
    one, other = pair
    assert one.run("getent", "hosts", "node1").split()[0] == other.address
    job = other.start(["sh", "-c", "echo up; exec sleep 100; true"])
    job.wait_for("up")
    assert set(other.processes()) == {job.pid}
    assert one.processes() == {}
    assert "tmpfs" in one.run("df", "/dev/shm")
    assert not Path(f"/proc/{job.pid}/ns/net").samefile("/proc/self/ns/net")


@pytest.mark.waits
@on_hosts
def test_links_are_cut_mended_and_slowed(pair):
    one, other = pair
    other.start(sockets("listen")).wait_for("ready")
    assert one.run(*sockets("ask", "node1", TIMEOUT_S)).strip() == "node1"
    other.cut()
    with pytest.raises(OSError, match="timed out|No route"):
        one.run(*sockets("ask", "node1", 1))
    other.mend()
    assert one.run(*sockets("ask", "node1", TIMEOUT_S)).strip() == "node1"
    other.kill()
    other.boot()
    receiver = other.start(sockets("receive", 4))
    receiver.wait_for("ready")
    for _ in range(3):
        one.run(*sockets("send", "node1"))
    other.slow("50mbit")
    one.run(*sockets("send", "node1"))
    assert receiver.wait() == 0
    *fast, slow = [float(line.split()[1]) for _, line in receiver.lines[1:]]
    assert slow > 0.5, "4 MiB take 0.67 s at 50 Mbit/s"
    # The quickest of three, because another process may hold one of them up.
    assert min(fast) < slow


@pytest.mark.waits
@on_hosts
@pytest.mark.parametrize("how", ["kill", "unplug"])
def test_a_host_that_dies_takes_all_with_it(pair, how):
    """Of one that is killed, the others learn at once; of one unplugged, nothing."""
    one, other = pair
    server = other.start(sockets("listen"))
    server.wait_for("ready")
    client = one.start(sockets("stay", "node1"))
    client.wait_for("connected to node1")
    died = [server.pid, other.pid]
    getattr(other, how)()
    server.wait()
    assert not [pid for pid in died if Path(f"/proc/{pid}").exists()]
    if how == "kill":
        client.wait_for("then came|Error")
    else:
        time.sleep(1)  # nothing comes, and a second is long where "at once" is said
        assert client.output == "connected to node1"
        # And the kernel of the other host goes on taking the connection for good.
        kept = one.run("ss", "-tnH", "state", "established", "dport = :5000")
        assert kept.count("\n") == 1
    other.boot()
    assert other.run("hostname").strip() == "node1"
    assert other.processes() == {}


@pytest.mark.waits
@on_hosts
def test_nothing_is_left_when_the_maker_is_killed(tmp_path):
    """Not a process, a network, an address, a mount or a file."""
    mark = f"hosts-{os.getpid()}"
    command = [*BED, "2", "--own-disks", tmp_path]
    command += ["--", "sh", "-c", "echo up; sleep 1000"]
    networks = subprocess.run(["ip", "link"], capture_output=True).stdout
    mounts = Path("/proc/self/mountinfo").read_text()
    maker = Job(command, cwd=ROOT, env=clean_env(MARK=mark))
    maker.wait_for("^node0: up$")
    maker.wait_for("^node1: up$")
    maker.process.kill()
    assert maker.wait() == -signal.SIGKILL
    assert not left_over(mark, TIMEOUT_S)
    assert subprocess.run(["ip", "link"], capture_output=True).stdout == networks
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "node0", tmp_path / "node1"]


# Each host ends with its number, once there is a file `go` beside their folders.
UNTIL_GO = """
echo up; pwd
until [ -e ../go ]; do sleep 0.05; done
exit $(hostname | tr -d a-z)
"""


@pytest.mark.waits
@on_hosts
def test_what_is_typed_happens(tmp_path):
    command = [*BED, "2", "--own-disks", tmp_path, "--", "sh", "-c", UNTIL_GO]
    bed = Job(command, stdin=subprocess.PIPE, cwd=ROOT)

    def type_line(line):
        typed = time.monotonic()
        os.write(bed.process.stdin.fileno(), f"{line}\n".encode())
        bed.wait_for(f"^-- {line}$", since=typed)
        return typed

    bed.wait_for("^node0: up$")
    bed.wait_for(f"^node1: {tmp_path}/node1$")
    type_line("kill node1")
    typed = type_line("start node1")
    bed.wait_for("^node1: up$", since=typed)
    typed = type_line("fly node1")
    known = "kill, unplug, start, cut, mend, slow; node0, node1"
    message = f"-- not done: KeyError('fly') (there are {known})"
    bed.wait_for(f"^{re.escape(message)}$", since=typed)
    (tmp_path / "go").touch()
    assert bed.wait() == 1, "node1 ends with 1"
    assert bed.output.count("node0: up") == 1
    assert bed.output.count("node1: up") == 2
    # With `go` there, they end at once.
    alone = [*BED, "1", "--own-disks", tmp_path, "--", "sh", "-c", UNTIL_GO]
    assert processes.run(alone, ROOT).returncode == 0, "node0 ends with 0"


@pytest.mark.waits
@on_hosts
def test_what_is_told_beforehand_happens_once(tmp_path):
    def run(script, text):
        command = [*BED, "2", "--own-disks", tmp_path, "--when", text, "unplug node1"]
        return processes.run([*command, "--", "sh", "-c", script], ROOT)

    done = run("echo late; exit $(hostname | tr -d a-z)", "node1: late")
    assert done.returncode == 1, "that is not in the line that the command prints"
    assert "unplug" not in done.stdout
    # node1 waits to be unplugged.
    done = run('echo late; [ "$(hostname)" = node0 ] || sleep 1000', "late")
    assert done.returncode == 0, "only hosts that still stand count"
    assert done.stdout.count("-- unplug node1\n") == 1


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["0", "--", "true"], "0 hosts: from 1 to 200 can be made"),
        (["2"], "the following arguments are required: command"),
        (["two", "--", "true"], "argument count: invalid int value: 'two'"),
    ],
)
def test_bad_input(args, line):
    done = processes.run([*BED, *args], ROOT)  # without torch: at once
    assert done.returncode == 2
    assert not done.stdout
    assert done.stderr == f"hosts.py: error: {line}\n"
