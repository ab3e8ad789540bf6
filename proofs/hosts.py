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

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from ladder.cli import Parser, fail
from proofs import processes
from proofs.processes import TIMEOUT_S, TimedOut, clean_env

SUBNET = "10.77.0"
TOOLS = ("ip", "tc", "unshare", "nsenter", "mount")
# A shell command that gives a host an /etc/hosts of its own, with the lines in $0. The
# file is in the host's memory, so that it goes with the host.
SET_NAMES = 'cd /dev/shm; echo "$0" > .hosts; mount --bind .hosts /etc/hosts'
# The first process of each set of namespaces says that they are made, and waits for the
# end of its stdin. The kernel closes that pipe however the process that made them ends.
HOLD = "echo; read _"


def why_not():
    """Why there can be no hosts on this machine, in one line; None if there can be."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    missing = [tool for tool in TOOLS if not shutil.which(tool, path=search_path())]
    if missing:
        return f"there is no {' and no '.join(missing)}: install iproute2"
    command = [*_unshare(), "--net", "true"]
    tried = processes.run(command, None, PATH=search_path())
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
    stderr together. on_line: a function that is called with each line.
    """

    def __init__(self, command, on_line=None, stdin=subprocess.DEVNULL, **popen):
        self.lines = []
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [str(word) for word in command],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            **popen,
        )
        self.all_read = False  # whether nobody is left who could print
        self.news = threading.Condition()  # a line came, or all is read
        threading.Thread(target=self._read, args=(on_line,), daemon=True).start()

    def _read(self, on_line):
        for line in self.process.stdout:
            line = line.rstrip("\n")
            with self.news:
                self.lines.append((time.monotonic(), line))
                self.news.notify_all()
            if on_line:
                on_line(line)
        with self.news:
            self.all_read = True
            self.news.notify_all()

    @property
    def pid(self):
        """The command's own process, which is nsenter's child, as seen from here."""
        return child_of(self.process)

    @property
    def output(self):
        return "\n".join(line for _, line in list(self.lines))

    def wait(self, timeout=TIMEOUT_S):
        """The exit status, once all output is read; TimedOut if that takes longer."""
        deadline = time.monotonic() + timeout
        with self.news:
            self.news.wait_for(lambda: self.all_read, timeout)
        # Either can come first: it closes its output and runs on, or it ends and leaves
        # processes behind that could still print.
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.process.wait(max(0.1, deadline - time.monotonic()))
        if status is None or not self.all_read:
            raise TimedOut(f"no end within {timeout} s:\n{self.output}")
        return status

    def wait_for(self, pattern, timeout=TIMEOUT_S, since=0):
        """(time, match) of the first line since `since` in which `pattern` is found.

        AssertionError if it ends without such a line, TimedOut if that takes too long.
        """
        deadline, seen = time.monotonic() + timeout, 0
        while True:
            with self.news:
                # Both at one moment: no line can come after `all_read`.
                new, all_read = self.lines[seen:], self.all_read
                if not new and not all_read:
                    in_time = self.news.wait(max(0, deadline - time.monotonic()))
                    if not in_time:
                        what = f"no {pattern!r} within {timeout} s"
                        raise TimedOut(f"{what}:\n{self.output}")
                    continue
            seen += len(new)
            for when, line in new:
                match = re.search(pattern, line)
                if match and when >= since:
                    return when, match
            if all_read:
                raise AssertionError(f"it ended without {pattern!r}:\n{self.output}")


def child_of(process):
    """The process number of the only child of `process`, a Popen, once there is one.

    ProcessLookupError if `process` ends without one.
    """
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + TIMEOUT_S
    while process.poll() is None:
        # It may have ended since, and be a zombie: that has no children either.
        found = children.read_text().split()
        if found:
            return int(found[0])
        if time.monotonic() > deadline:
            raise TimedOut(f"process {process.pid} has no child after {TIMEOUT_S} s")
        time.sleep(0.005)
    raise ProcessLookupError(f"process {process.pid} has ended")


class Host:
    """One of the `hosts`: `name`, `address`, `folder` (its working folder)."""

    def __init__(self, hosts, number):
        self.hosts = hosts
        self.number = number
        self.name = f"node{number}"
        self.address = f"{SUBNET}.{number + 1}"
        self.link = f"veth{number}"  # the bridge's end of its cable
        self.folder = hosts.folder_of(self.name)
        self.first = None  # the first process of its namespaces; None while it is off

    def __repr__(self):
        return self.name

    def boot(self):
        """Turn it on, with nothing running."""
        assert self.first is None, f"{self.name} runs already"
        spaces = ["--net", "--uts", "--mount", "--ipc", "--pid", "--fork"]
        first = ["unshare", *spaces, "--mount-proc", "--kill-child", "sh", "-c", HOLD]
        self.first = start_first(self.hosts.inside(first))
        self.pid = child_of(self.first)
        self.run("hostname", self.name)
        self.run("mount", "-t", "tmpfs", "-o", "size=50%", "tmpfs", "/dev/shm")
        self.run("sh", "-ec", SET_NAMES, self.hosts.names)
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
        """`command`, to be run on this host in its folder: a list of words."""
        enter = ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount"]
        enter += ["--ipc", "--pid"]
        if os.geteuid() != 0:
            enter += ["--user", "--preserve-credentials"]
        return [*enter, f"--wd={self.folder}", "--", *map(str, command)]

    def run(self, *command):
        """Run a short command on it and insist that it ends well; return its stdout."""
        return _run(self.inside(command))

    def start(self, command, on_line=None, **env):
        """Start a long one in its folder: a Job."""
        return Job(self.inside(command), on_line, env=environment(**env))

    def processes(self):
        """{pid as seen from here: command line} of all that runs on it."""
        namespace, found = os.readlink(f"/proc/{self.pid}/ns/pid"), {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if os.readlink(path / "ns/pid") == namespace:
                    line = (path / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(path.name)] = line.decode(errors="replace").strip()
        found.pop(self.pid, None)
        return found

    def kill(self):
        """End all its processes at once; the kernel closes their connections."""
        assert self.first, f"{self.name} is off"
        os.kill(self.pid, signal.SIGKILL)
        self.first.wait()
        self.first = None
        # The kernel takes the link away with the namespace, but somewhat later, and the
        # name must be free when the host is turned on again.
        with contextlib.suppress(OSError):
            self.hosts.run("ip", "link", "del", self.link)

    def unplug(self):
        """The power goes: nothing more is sent, then all processes are gone at once."""
        assert self.first, f"{self.name} is off"
        self.hosts.run("ip", "link", "del", self.link)
        self.kill()

    def cut(self):
        """Take its link down: nothing comes in or goes out, and nobody is told."""
        self.hosts.run("ip", "link", "set", self.link, "down")

    def mend(self):
        """Bring its link up again, at full speed."""
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
        self.switch = start_first([*_unshare(), "--net", "sh", "-c", HOLD])
        try:
            self.run("ip", "link", "add", "switch", "type", "bridge")
            self.run("ip", "link", "set", "switch", "up")
            super().__init__(Host(self, number) for number in range(count))
            lines = [f"{host.address} {host.name}" for host in self]
            self.names = "\n".join(["127.0.0.1 localhost", *lines])
            for host in self:
                host.boot()
        except BaseException:
            self.close()
            raise

    def folder_of(self, name):
        """Where the host of that name runs; the folder is made."""
        folder = self.folder / name if self.own_disks else self.folder
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def inside(self, command):
        """`command`, to be run in the network namespace of the switch."""
        enter = ["nsenter", "--target", str(self.switch.pid), "--net"]
        if os.geteuid() != 0:
            enter += ["--user", "--preserve-credentials"]
        return [*enter, "--", *command]

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


def start_first(command):
    """Start the first process of new namespaces, which runs HOLD, and wait for them."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    first = subprocess.Popen(command, **pipes, env=environment())
    if not first.stdout.readline():
        error = first.stderr.read().decode().strip()
        raise OSError(f"{' '.join(command)}: {error}")
    return first


def _run(command):
    done = processes.run(command, None, PATH=search_path())
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def print_line(line):
    """Print it in one piece: threads do, and `print` writes the newline by itself."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Session:
    """A command that runs on all `hosts`, and the actions that happen to them.

    when: pairs (text, action). Each action is run once, when the first line with its
    text comes.
    """

    def __init__(self, hosts, command, when=()):
        self.hosts = {host.name: host for host in hosts}
        self.command = command
        self.pending = list(when)
        self.jobs = {}  # of the hosts that are on
        self.lock = threading.RLock()  # held while an action is run
        self.actions = {
            "kill": self._kill,
            "unplug": self._unplug,
            "start": self._start,
            "cut": Host.cut,
            "mend": Host.mend,
            "slow": Host.slow,
        }
        with self.lock:  # no action before all hosts are on
            for host in hosts:
                self._start(host)

    def _start(self, host):
        if host.first is None:
            host.boot()
        on_line = functools.partial(self._on_line, host)
        self.jobs[host] = host.start(self.command, on_line)

    def _kill(self, host):
        self.jobs.pop(host, None)  # only hosts that still stand count in the end
        host.kill()

    def _unplug(self, host):
        self.jobs.pop(host, None)
        host.unplug()

    def _on_line(self, host, line):
        """Print it, and start what waits for it; called by the thread that reads."""
        print_line(f"{host.name}: {line}")
        for pair in self.pending:
            if pair[0] in line:
                # Not in this thread: the action may wait for the end of its host.
                target = functools.partial(self._run_pending, pair)
                threading.Thread(target=target, daemon=True).start()

    def _run_pending(self, pair):
        with self.lock:
            if pair in self.pending:  # else another host printed such a line as well
                self.pending = [other for other in self.pending if other is not pair]
                self.run_action(pair[1])

    def run_action(self, line):
        """Do what `line` says, such as `kill node1`, and print it, or why not."""
        if not line.strip():
            return
        with self.lock:
            print_line(f"-- {line.strip()}")
            try:
                action, name, *rest = line.split()
                self.actions[action](self.hosts[name], *rest)
            except (KeyError, TypeError, ValueError, AssertionError, OSError) as error:
                known = f"{', '.join(self.actions)}; {', '.join(self.hosts)}"
                print_line(f"-- not done: {error!r} (there are {known})")

    def run_typed(self):
        """Run the actions that are typed, to the end of stdin."""
        for line in sys.stdin:
            self.run_action(line)

    def wait(self):
        """The exit status: 0 if the command ended with 0 on every host that is on."""
        try:
            while self._is_running():
                time.sleep(0.05)
        except KeyboardInterrupt:
            for job in self.jobs.values():
                if job.process.poll() is None:
                    os.kill(job.pid, signal.SIGINT)
        statuses = [job.wait() for job in self.jobs.values()]
        return 0 if statuses and not any(statuses) else 1

    def _is_running(self):
        with self.lock:  # not while a host is killed or turned on
            return any(job.process.poll() is None for job in self.jobs.values())


def main(count, command, own_disks=None, when=()):
    """Run `command` on `count` hosts and do what is typed; return the exit status."""
    with Hosts(count, own_disks or ".", bool(own_disks)) as hosts:
        session = Session(hosts, command, when)
        threading.Thread(target=session.run_typed, daemon=True).start()
        return session.wait()


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("count", type=int, help="how many hosts")
    parser.add_argument("--own-disks", metavar="DIR", help="run each host in DIR/NAME")
    parser.add_argument(
        "--when",
        nargs=2,
        action="append",
        default=[],
        metavar=("TEXT", "ACTION"),
        help="do ACTION, such as 'kill node1', once a line with TEXT is printed",
    )
    parser.add_argument("command", nargs="+", help="after --: what each of them runs")
    args = parser.parse_args()
    if not 1 <= args.count <= 200:
        fail(f"{args.count} hosts: from 1 to 200 can be made")
    if why_not():
        fail(f"no hosts on this machine: {why_not()}")
    sys.exit(main(args.count, args.command, args.own_disks, args.when))
