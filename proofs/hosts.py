"""A cluster on one Linux machine: hosts with a name, an address and a network each.

    python -m proofs.hosts 2 -- torchrun --nnodes=2 --nproc-per-node=2 \\
        --rdzv-backend=c10d --rdzv-endpoint=node0:29500 multinode.py 50 10

starts the command on node0 and node1, each a set of Linux namespaces (network,
processes, mounts, host name, shared memory), joined by a bridge, and prints what they
print. While they run, type what happens to them:

    kill node1          all its processes die at once, and their connections are closed
    unplug node1        the power goes: its processes die and nobody is told
    start node1         it is on again if it was off, and runs the command again
    cut node1           its link is down
    mend node1          its link is up again, at full speed
    slow node1 100mbit  its link carries no more than that, each way

or say beforehand when it shall happen: --when 'epoch 10 saved' 'kill node1'.

All run in this folder, as on a shared disk; with --own-disks DIR, each in DIR/NAME. The
exit status is 0 if the command ends with 0 on every host that still stands, else 1.

Needs iproute2 and util-linux, and root or unprivileged user namespaces. The namespaces
live as long as the process that made them, however that ends, and leave nothing behind
but what the command has written.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from proofs.processes import clean_env

SUBNET = "10.77.0"
TOOLS = ("ip", "tc", "unshare", "nsenter", "mount")
# The names of all, in a file that only this host has, and that goes with it.
NAMES = 'cd /dev/shm; echo "$0" > .hosts; mount --bind .hosts /etc/hosts'
HOLD = "echo; read _"  # a namespace lives until the pipe to its first process closes


def why_not():
    """Why there can be no hosts on this machine, in one line; None if there can be."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    missing = [x for x in TOOLS if not shutil.which(x, path=search_path())]
    if missing:
        return f"there is no {' and no '.join(missing)}: install iproute2"
    tried = subprocess.run(
        [*_unshare(), "--net", "true"],
        capture_output=True,
        text=True,
        env=environment(),
    )
    return f"not allowed: {tried.stderr.strip()}" if tried.returncode else None


def search_path():
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # a user's has no sbin


def environment(**extra):
    return clean_env(**({"PATH": search_path()} | extra))


def _unshare():
    """The start of an `unshare` command: without root, as root of a user namespace."""
    return ["unshare"] if os.geteuid() == 0 else ["unshare", "--map-root-user"]


class Job:
    """A command that runs, with every line that it prints and when it came.

    lines: list of (time.monotonic() in seconds, line without its end), from stdout and
    stderr together. `pid` is the command's own process, as seen from here.
    """

    def __init__(self, command, echo=None, **popen):
        self.lines = []
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [str(x) for x in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            **popen,
        )
        self.thread = threading.Thread(target=self._read, args=(echo,), daemon=True)
        self.thread.start()

    def _read(self, echo):
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip("\n")))
            if echo:
                echo(line.rstrip("\n"))

    @property
    def pid(self):
        """nsenter's child is the command; its number here, whatever it is in there."""
        return child_of(self.process.pid)

    @property
    def output(self):
        return "\n".join(line for _, line in list(self.lines))

    def wait(self, timeout):
        """The exit status, once all output is read; AssertionError if it hangs."""
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"hung for {timeout} s:\n{self.output}") from None
        self.thread.join(10)
        return status

    def wait_for(self, pattern, timeout, since=0):
        """(time, match) of the first line since `since` in which `pattern` is found."""
        deadline, at = time.monotonic() + timeout, 0
        while True:
            ended = self.process.poll() is not None and not self.thread.is_alive()
            while at < len(self.lines):
                when, line = self.lines[at]
                at += 1
                match = re.search(pattern, line)
                if match and when >= since:
                    return when, match
            if ended or time.monotonic() > deadline:
                what = "it ended" if ended else f"not within {timeout} s"
                raise AssertionError(f"no {pattern!r}, {what}:\n{self.output}")
            time.sleep(0.01)


def child_of(pid, patience_s=5):
    """The process number of the only child of process `pid`, once there is one."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if children:
            return int(children[0])
        time.sleep(0.005)
    raise ProcessLookupError(f"process {pid} has no child")


class Host:
    """One of the `hosts`: `name`, `address`, `folder` (its working folder)."""

    def __init__(self, hosts, number):
        self.hosts = hosts
        self.number = number
        self.name = f"node{number}"
        self.address = f"{SUBNET}.{number + 1}"
        self.link = f"veth{number}"  # the bridge's end of its cable
        self.folder = hosts.disk(self.name)
        self.first = None

    def __repr__(self):
        return self.name

    def boot(self):
        """Turn it on, with nothing running."""
        assert self.first is None, f"{self.name} runs already"
        spaces = ["--net", "--uts", "--mount", "--ipc", "--pid", "--fork"]
        first = ["unshare", *spaces, "--mount-proc", "--kill-child", "sh", "-c", HOLD]
        self.first = self.hosts.hold(self.hosts.inside([]) + first)
        self.pid = child_of(self.first.pid)
        self.run("hostname", self.name)
        self.run("mount", "-t", "tmpfs", "-o", "size=50%", "tmpfs", "/dev/shm")
        self.run("sh", "-ec", NAMES, self.hosts.names)
        self.run("ip", "link", "set", "lo", "up")
        inside = f"/proc/{self.pid}/ns/net"
        # Its own card, as a real machine's: neighbours remember it, and would look for
        # the old one for half a minute if there were a new one after each boot.
        card = f"02:00:0a:4d:00:{self.number + 1:02x}"
        peer = ["peer", "name", "eth0", "address", card, "netns", inside]
        self.hosts.run("ip", "link", "add", self.link, "type", "veth", *peer)
        self.hosts.run("ip", "link", "set", self.link, "master", "switch", "up")
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")
        return self

    def inside(self, command):
        enter = ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount"]
        enter += ["--ipc", "--pid"]
        if os.geteuid() != 0:
            enter += ["--user", "--preserve-credentials"]
        return [*enter, f"--wd={self.folder}", "--", *map(str, command)]

    def run(self, *command):
        """Run a short command on it and insist that it ends well; return its stdout."""
        return _run(self.inside(command))

    def start(self, command, echo=None, **env):
        """Start a long one in its folder: a Job."""
        return Job(self.inside(command), echo, env=environment(**env))

    def processes(self):
        """{pid as seen from here: command line} of all that runs on it."""
        space, found = os.readlink(f"/proc/{self.pid}/ns/pid"), {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(path / "ns/pid") == space:
                    line = (path / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(path.name)] = line.decode(errors="replace").strip()
            except OSError:
                pass  # it has ended
        found.pop(self.pid, None)
        return found

    def kill(self):
        """End all its processes at once; the kernel closes their connections."""
        assert self.first, f"{self.name} is off"
        os.kill(self.pid, signal.SIGKILL)
        self.first.wait()
        self.first = None
        with contextlib.suppress(OSError):  # else the kernel does so, somewhat later
            self.hosts.run("ip", "link", "del", self.link)

    def unplug(self):
        """The power goes: nothing more is sent, then all processes are gone at once."""
        assert self.first, f"{self.name} is off"
        self.hosts.run("ip", "link", "del", self.link)
        self.kill()

    def cut(self):
        self.hosts.run("ip", "link", "set", self.link, "down")

    def mend(self):
        self.hosts.run("ip", "link", "set", self.link, "up")
        self.hosts.run("tc", "qdisc", "replace", "dev", self.link, "root", "pfifo")
        self.run("tc", "qdisc", "replace", "dev", "eth0", "root", "pfifo")

    def slow(self, rate):
        """Carry no more than `rate` (such as 100mbit) in each direction."""
        shape = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
        self.hosts.run("tc", "qdisc", "replace", "dev", self.link, *shape)
        self.run("tc", "qdisc", "replace", "dev", "eth0", *shape)


class Hosts(list):
    """`count` hosts on one switch, until `close()` or the end of this process.

    folder: where all run, as on a shared disk. own_disks: each runs in folder/NAME.
    """

    def __init__(self, count, folder, own_disks=False):
        self.folder, self.own_disks = Path(folder).resolve(), own_disks
        self.switch = self.hold([*_unshare(), "--net", "sh", "-c", HOLD])
        try:
            self.run("ip", "link", "add", "switch", "type", "bridge")
            self.run("ip", "link", "set", "switch", "up")
            super().__init__(Host(self, i) for i in range(count))
            lines = ["127.0.0.1 localhost", *(f"{x.address} {x.name}" for x in self)]
            self.names = "\n".join(lines)
            for host in self:
                host.boot()
        except BaseException:
            self.close()
            raise

    def disk(self, name):
        folder = self.folder / name if self.own_disks else self.folder
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def hold(self, command):
        """Start the first process of new namespaces and wait until they are made."""
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        first = subprocess.Popen(command, **pipes, env=environment())
        if not first.stdout.readline():
            raise OSError(
                f"{' '.join(command)}: {first.stderr.read().decode().strip()}"
            )
        return first

    def inside(self, command):
        enter = ["nsenter", "--target", str(self.switch.pid), "--net"]
        if os.geteuid() != 0:
            enter += ["--user", "--preserve-credentials"]
        return [*enter, "--", *command] if command else [*enter, "--"]

    def run(self, *command):
        """Run a short command on the switch."""
        return _run(self.inside(command))

    def close(self):
        for first in [self.switch, *(host.first for host in self)]:
            if first:
                first.stdin.close()
                first.wait()
                first.stdout.close()
                first.stderr.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _run(command):
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def tell(line):
    """Print it in one piece: threads do, and `print` writes the newline by itself."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(count, command, own_disks=None, when=()):
    """Run `command` on `count` hosts and do what is typed; return the exit status.

    when: pairs (text, deed), done once each, when the first line with `text` comes.
    """
    waiting = list(when)
    with Hosts(count, own_disks or ".", bool(own_disks)) as hosts:
        named, jobs = {host.name: host for host in hosts}, {}

        def start(host):
            def echo(line):
                tell(f"{host.name}: {line}")
                for pair in [x for x in waiting if x[0] in line]:
                    waiting.remove(pair)
                    threading.Thread(target=obey, args=pair[1:], daemon=True).start()

            jobs[host] = host.start(command, echo)

        def end(host, how):
            jobs.pop(host, None)
            how(host)

        deeds = {"kill": lambda host: end(host, Host.kill)}
        deeds["unplug"] = lambda host: end(host, Host.unplug)
        deeds["start"] = lambda host: start(host if host.first else host.boot())
        deeds |= {"cut": Host.cut, "mend": Host.mend, "slow": Host.slow}

        def obey(line):
            if not line.strip():
                return
            tell(f"-- {line.strip()}")
            try:
                deed, name, *rest = line.split()
                deeds[deed](named[name], *rest)
            except (KeyError, TypeError, ValueError, AssertionError, OSError) as error:
                known = f"{', '.join(deeds)}; {', '.join(named)}"
                tell(f"-- not done: {error!r} (there are {known})")

        for host in hosts:
            start(host)
        typed = threading.Thread(target=lambda: [*map(obey, sys.stdin)], daemon=True)
        typed.start()
        try:
            while any(job.process.poll() is None for job in list(jobs.values())):
                time.sleep(0.05)
        except KeyboardInterrupt:
            for job in jobs.values():
                if job.process.poll() is None:
                    os.kill(job.pid, signal.SIGINT)
        return int(any(job.wait(60) != 0 for job in jobs.values()) or not jobs)


def fail(message):
    print(f"proofs.hosts: error: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = fail
    parser.add_argument("count", type=int, help="how many hosts")
    parser.add_argument("--own-disks", metavar="DIR", help="run each host in DIR/NAME")
    parser.add_argument(
        "--when",
        nargs=2,
        action="append",
        default=[],
        metavar=("TEXT", "DEED"),
        help="do DEED, such as 'kill node1', once a line with TEXT is printed",
    )
    parser.add_argument("command", nargs="+", help="after --: what each of them runs")
    args = parser.parse_args()
    if not 1 <= args.count <= 200:
        fail(f"{args.count} hosts: from 1 to 200 can be made")
    if why_not():
        fail(f"no hosts on this machine: {why_not()}")
    sys.exit(main(args.count, args.command, args.own_disks, args.when))
