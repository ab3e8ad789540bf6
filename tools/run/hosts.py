"""A cluster on one Linux machine: hosts with a name, an address and a network each.

    python -m tools.run.hosts 2 -- torchrun --nnodes=2 --nproc-per-node=2 \\
        --rdzv-backend=c10d --rdzv-endpoint=node0:29500 multinode.py 50 10

starts the command on node0 and node1, which are Linux namespaces joined by a bridge,
and prints what they print. With --kill 'epoch 10 saved', all processes of the last host
die at once when a line has this text, and their connections are closed.

All run in this folder, as on a shared disk. The exit status is 0 if the command ends
with 0 on every host that still stands, else 1.

Needs iproute2 and util-linux, and root or unprivileged user namespaces, which live as
long as the process that made them, however that ends.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tools.cli import Parser, error
from tools.run import processes
from tools.run.processes import Program, clean_env, descendants

SUBNET = "10.77.0"
TOOLS = ("ip", "tc", "unshare", "nsenter", "mount")
PATH = f"{processes.PATH}:/usr/sbin:/sbin"  # a user's has no sbin
# What a host does first: $0 is its name, and $1 has the lines of its /etc/hosts.
BOOT = """
hostname "$0"
mount -t tmpfs -o size=50% tmpfs /dev/shm
cd /dev/shm; echo "$1" > .hosts; mount --bind .hosts /etc/hosts
ip link set lo up
"""
# The first process of each set of namespaces says that they are made, and waits for the
# end of its stdin. The kernel closes that pipe however the process that made them ends.
HOLD = "echo; read _"
# Without root, all namespaces are in one where this user is root.
IS_ROOT = os.geteuid() == 0
UNSHARE = "unshare" if IS_ROOT else "unshare --map-root-user"
AS_ROOT = "" if IS_ROOT else "--user --preserve-credentials"
# The namespaces that each host has of its own
SPACES = "--net --uts --mount --ipc --pid"


def why_not():
    """Why there can be no hosts on this machine; None if there can be."""
    missing = [tool for tool in TOOLS if not shutil.which(tool, path=PATH)]
    if missing:
        return f"there is no {missing[0]}: install iproute2"
    tried = Program(
        f"{UNSHARE} --net true".split(), None, real=True, PATH=PATH
    ).finish()
    return f"not allowed: {tried.stderr.strip()}" if tried.returncode else None


class Network:
    """A set of namespaces: `inside(command)` are the words that run a command there."""

    def run(self, *command):
        command = self.inside(command)
        done = Program(command, None, real=True, PATH=PATH).finish()
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def ip(self, words):
        self.run("ip", *words.split())


class Host(Network):
    """One of the `hosts`: `name`, `address`, `folder` (its working folder)."""

    def __init__(self, hosts, number):
        self.hosts = hosts
        self.number = number
        self.name = f"node{number}"
        self.address = f"{SUBNET}.{number + 1}"
        self.link = f"veth{number}"  # the bridge's end of its cable
        self.folder = hosts.folder
        if hosts.own_disks:
            self.folder /= self.name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.first = None  # the first process of its namespaces; None while it is off

    def boot(self):
        """Turn it on, with nothing running."""
        own = f"unshare {SPACES} --fork --mount-proc --kill-child"
        self.first = start_first(self.hosts.inside(own.split()))
        (self.pid,) = descendants(self.first.pid)
        self.run("sh", "-ec", BOOT, self.name, self.hosts.names)
        # The same card after each boot: neighbours remember it for half a minute.
        card = f"02:00:0a:4d:00:{self.number + 1:02x}"
        peer = f"peer name eth0 address {card} netns /proc/{self.pid}/ns/net"
        self.hosts.ip(f"link add {self.link} type veth {peer}")
        self.hosts.ip(f"link set {self.link} master switch up")
        self.ip(f"addr add {self.address}/24 dev eth0")
        self.ip("link set eth0 up")

    def inside(self, command):
        """`command`, to be run on this host in its folder: a list of words."""
        enter = f"nsenter --target {self.pid} {SPACES} {AS_ROOT}"
        return [*enter.split(), f"--wd={self.folder}", "--", *map(str, command)]

    def start(self, command, **env):
        """Start a long one in its folder: a Program, with all it prints in `output`."""
        env = {"PATH": PATH} | env
        return Program(self.inside(command), None, real=True, merged=True, **env)

    def processes(self):
        """{pid as seen from here: command line} of all that runs on it."""
        namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if os.readlink(path / "ns/pid") == namespace:
                    words = (path / "cmdline").read_text().split("\0")
                    found[int(path.name)] = " ".join(words).strip()
        found.pop(self.pid, None)
        return found

    def kill(self):
        """End all its processes at once; the kernel closes their connections."""
        assert self.first, f"{self.name} is off"
        os.kill(self.pid, signal.SIGKILL)
        self.first.wait()
        self.first = None
        # The kernel takes the link away somewhat later, and its name must be free.
        with contextlib.suppress(OSError):
            self.hosts.ip(f"link del {self.link}")

    def unplug(self):
        """Cut its power: no other host is told."""
        self.hosts.ip(f"link del {self.link}")
        self.kill()

    def cut(self):
        self.hosts.ip(f"link set {self.link} down")

    def mend(self):
        self.hosts.ip(f"link set {self.link} up")
        self.slow(None)

    def slow(self, rate):
        """Carry no more than `rate` (such as 100mbit) in each direction, if any."""
        queue = f"tbf rate {rate} burst 64kb latency 400ms" if rate else "pfifo"
        for network, link in (self.hosts, self.link), (self, "eth0"):
            network.run(*f"tc qdisc replace dev {link} root {queue}".split())


class Hosts(Network, list):
    """`count` hosts on one switch, at the longest until the end of this process.

    folder: where all run, as on a shared disk. own_disks: each runs in folder/NAME.
    """

    def __init__(self, count, folder, own_disks=False):
        self.folder = Path(folder).resolve()
        self.own_disks = own_disks
        self.switch = start_first(f"{UNSHARE} --net".split())
        self.ip("link add switch type bridge")
        self.ip("link set switch up")
        super().__init__(Host(self, number) for number in range(count))
        lines = [f"{host.address} {host.name}" for host in self]
        self.names = "\n".join(["127.0.0.1 localhost", *lines])
        for host in self:
            host.boot()

    def inside(self, command):
        """`command`, to be run in the switch's network: a list of words."""
        enter = f"nsenter --target {self.switch.pid} --net {AS_ROOT} --"
        return [*enter.split(), *command]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for first in [self.switch, *(host.first for host in self)]:
            if first:
                first.stdin.close()
                first.wait()
                first.stdout.close()


def start_first(unshare):
    """Start the first process of new namespaces, which runs HOLD, and wait for them."""
    first = subprocess.Popen(
        [*unshare, "sh", "-c", HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=clean_env(PATH=PATH),
    )
    if not first.stdout.readline():
        raise OSError(f"{' '.join(unshare)}: see above")
    return first


# Run a command, with the host's name, $0, before each line of what it prints.
LABELLED = """set -o pipefail; "$@" 2>&1 | sed -u "s/^/$0: /" """


def main(count, command, kill):
    """Run `command` on `count` hosts; return the exit status.

    kill: None, or a text: the last host is killed once a line has it.
    """
    printed, output = os.pipe()
    with Hosts(count, ".") as hosts, open(printed) as lines:
        standing = [*hosts]
        programs = {}
        for host in hosts:
            words = host.inside(["bash", "-c", LABELLED, host.name, *command])
            env = clean_env(PATH=PATH)
            programs[host] = subprocess.Popen(words, stdout=output, env=env)
        os.close(output)  # `lines` end with the last program
        for line in lines:
            print(line, end="", flush=True)
            if kill and kill in line:
                kill = None
                last = standing.pop()
                print(f"-- kill {last.name}", flush=True)
                last.kill()
        return any(programs[host].wait() for host in standing)


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("count", type=int, help="how many hosts")
    parser.add_argument("--kill", metavar="TEXT", help="kill the last at this text")
    parser.add_argument("command", nargs="+", help="after --: what each of them runs")
    args = parser.parse_args()
    reason = why_not()
    if reason:
        error(f"no hosts on this machine: {reason}")
    sys.exit(main(**vars(args)))
