"""The hosts that other tests fail on purpose: separate, and gone without a trace."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ladder.rungs import ROOT
from proofs.hosts import Hosts, why_not
from proofs.processes import TIMEOUT_S, left_over, start

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

LISTEN = """
import socket
server = socket.create_server(("0.0.0.0", 5000))
print("ready", flush=True)
while True:
    peer, _ = server.accept()
    peer.sendall(socket.gethostname().encode())
"""
ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000), timeout=1) as s:
    print(s.recv(99).decode())
"""
SEND = """
import socket, sys, time
with socket.create_connection(("node1", 5001)) as s:
    s.sendall(bytes(4 << 20))
    s.shutdown(socket.SHUT_WR)
    s.recv(1)
"""
RECEIVE = """
import socket, time
server = socket.create_server(("0.0.0.0", 5001))
print("ready", flush=True)
for _ in range(2):
    peer, _ = server.accept()
    began = time.monotonic()
    while peer.recv(1 << 20):
        pass
    print(f"took {time.monotonic() - began} s", flush=True)
    peer.close()
"""


def python(code, *args):
    return [sys.executable, "-c", code, *args]


@pytest.fixture
def pair(tmp_path):
    with Hosts(2, tmp_path, own_disks=True) as hosts:
        yield hosts


def test_each_has_a_name_an_address_and_a_folder(pair, tmp_path):
    for host in pair:
        assert host.run("hostname").strip() == host.name
        assert host.run("pwd").strip() == str(tmp_path / host.name)
        assert f"{host.address}/24" in host.run("ip", "addr", "show", "eth0")
    one, other = pair
    assert one.run("getent", "hosts", "node1").split()[0] == other.address
    job = other.start(["sh", "-c", "echo up; exec sleep 100; true"])
    job.wait_for("up", TIMEOUT_S)
    assert set(other.processes()) == {job.pid}
    assert one.processes() == {}
    assert "tmpfs" in one.run("df", "/dev/shm")
    assert not Path(f"/proc/{job.pid}/ns/net").samefile("/proc/self/ns/net")


def test_links_are_cut_mended_and_slowed(pair):
    one, other = pair
    server = other.start(python(LISTEN))
    server.wait_for("ready", TIMEOUT_S)
    assert one.run(*python(ASK, "node1")).strip() == "node1"
    other.cut()
    with pytest.raises(OSError, match="timed out|No route"):
        one.run(*python(ASK, "node1"))
    other.mend()
    assert one.run(*python(ASK, "node1")).strip() == "node1"
    receiver = other.start(python(RECEIVE))
    receiver.wait_for("ready", TIMEOUT_S)
    one.run(*python(SEND))
    other.slow("50mbit")
    one.run(*python(SEND))
    assert receiver.wait(TIMEOUT_S) == 0
    fast, slow = [float(line.split()[1]) for _, line in receiver.lines[1:]]
    assert slow > 0.5, "4 MiB take 0.67 s at 50 Mbit/s"
    assert fast < slow


@pytest.mark.parametrize("how", ["kill", "unplug"])
def test_a_host_that_dies_takes_all_with_it(pair, how):
    """Of one that is killed, the others learn at once; of one unplugged, nothing."""
    one, other = pair
    server = other.start(python(LISTEN))
    server.wait_for("ready", TIMEOUT_S)
    wait = "import socket; s = socket.create_connection(('node1', 5000)); s.recv(99);"
    wait += "print('in', flush=True); print('told', s.recv(9), flush=True)"
    client = one.start(python(wait))
    client.wait_for("in", TIMEOUT_S)
    processes = [server.pid, other.pid]
    getattr(other, how)()
    server.wait(TIMEOUT_S)
    assert not [x for x in processes if Path(f"/proc/{x}").exists()]
    if how == "kill":
        client.wait_for("told|Error", TIMEOUT_S)
    else:
        time.sleep(1)
        assert "told" not in client.output and "Error" not in client.output
    other.boot()
    assert other.run("hostname").strip() == "node1"
    assert other.processes() == {}


def test_nothing_is_left_when_the_maker_is_killed(tmp_path):
    """Not a process, a network, an address, a mount or a file."""
    mark = f"hosts-{os.getpid()}"
    command = [sys.executable, "-W", "ignore", "-m", "proofs.hosts", "2", "--own-disks"]
    command += [tmp_path, "--", "sh", "-c", "echo up; sleep 1000"]
    networks = subprocess.run(["ip", "link"], capture_output=True).stdout
    mounts = Path("/proc/self/mountinfo").read_text()
    process = start(command, ROOT, MARK=mark)
    lines = {process.stdout.readline().strip() for _ in range(2)}
    assert lines == {"node0: up", "node1: up"}
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=TIMEOUT_S)
    assert not left_over(mark)
    assert subprocess.run(["ip", "link"], capture_output=True).stdout == networks
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "node0", tmp_path / "node1"]


def by_hand(*args, typed="", cwd=ROOT):
    """(exit status, output) of `python -m proofs.hosts` with something typed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "proofs.hosts", *args],
        input=typed,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=cwd,
    )
    return done.returncode, done.stdout + done.stderr


def test_by_hand(tmp_path):
    script = "hostname; pwd; sleep 1; echo late; sleep 1; exit $(hostname | tr -d a-z)"
    command = ["--own-disks", tmp_path, "--", "sh", "-c", script]
    status, out = by_hand("2", *command, typed="kill node1\nstart node1\nfly node1\n")
    assert status == 1, "node1 ends with 1"
    assert f"node1: {tmp_path}/node1" in out
    assert out.count("node0: node0\n") == 1
    assert "-- kill node1\n" in out and "-- start node1\n" in out
    known = "kill, unplug, start, cut, mend, slow; node0, node1"
    assert f"-- fly node1\n-- not done: KeyError('fly') (there are {known})" in out
    assert by_hand("1", *command)[0] == 0, "node0 ends with 0"
    status, out = by_hand("2", "--when", "node1: late", "unplug node1", *command)
    assert status == 1, "that is not in the line that the command prints"
    status, out = by_hand("2", "--when", "late", "unplug node1", *command)
    assert status == 0, "only hosts that still stand count"
    assert out.count("-- unplug node1\n") == 1


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["0", "--", "true"], "0 hosts: from 1 to 200 can be made"),
        (["2"], "the following arguments are required: command"),
        (["two", "--", "true"], "argument count: invalid int value: 'two'"),
    ],
)
def test_bad_input(args, line):
    status, out = by_hand(*args)
    assert status == 2
    assert out.count("\n") == 1 and line in out
