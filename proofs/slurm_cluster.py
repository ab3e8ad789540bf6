"""A little Slurm on one Linux machine: real daemons on the hosts of proofs/hosts.py.

    python -m proofs.slurm_cluster 2

starts slurmctld on the host node0 and a slurmd on node1 and on node2, and opens a shell
on node0, as on a login node: sinfo, sbatch, squeue and scancel work there as on any
cluster. `exit`, and all of it is gone. A command after -- runs instead of the shell,
and its exit status is this one's:

    python -m proofs.slurm_cluster 2 -- sbatch --wait slurm/multinode.sbatch 50 10

All hosts work in this folder. Each has 4 CPUs on paper, whatever the machine has, and
with --gpus N also N GPUs that Slurm hands out and that do not exist. Some waits are
shorter than Slurm's own (see QUICK).

Needs root, Debian's slurm-wlm and munge, and what proofs/hosts.py needs. The machine's
own Slurm and munge, if it has any, are neither used nor touched: each host has a /run
and an /etc/slurm of its own, in memory. All ends with the process that made it.
"""

import os
import re
import secrets
import shutil
import subprocess
import sys
import time

import utils
from ladder.cli import Parser, fail
from proofs import hosts
from proofs.processes import TIMEOUT_S, TimedOut

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch")
CONF = {  # for slurm.conf
    "ClusterName": "little",
    "SlurmctldHost": "node0",
    "SlurmUser": "root",
    "SlurmdUser": "root",
    "AuthType": "auth/munge",
    "ProctrackType": "proctrack/linuxproc",  # cgroups may be read-only in a container
    "TaskPlugin": "task/none",
    "MpiDefault": "none",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core",
    "ReturnToService": 2,
    "SlurmdParameters": "config_overrides",  # the CPUs are what slurm.conf says
    "GresTypes": "gpu",
    "StateSaveLocation": "/run/slurm",
    "SlurmdSpoolDir": "/run/slurm",
    "SlurmctldPidFile": "/run/slurm/slurmctld.pid",
    "SlurmdPidFile": "/run/slurm/slurmd.pid",
    "SlurmctldLogFile": "/run/slurm/log",
    "SlurmdLogFile": "/run/slurm/log",
}
QUICK = {  # and what Slurm has by default
    "AuthInfo": "cred_expire=5",  # 120 s: as long a requeued job waits, at the least
    "SchedulerParameters": "batch_sched_delay=0,sched_interval=1",  # 3 s, 60 s
}
# What each host needs before its daemons start: $1 is munge's key, $2 the slurm.conf,
# $3 the number of GPUs. /run and /etc/slurm are in the host's own memory.
SETUP = """
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /etc/slurm
mkdir -p /run/munge /run/slurm
cd /run/munge
umask 077; echo "$1" > key; umask 022
echo "$2" > /etc/slurm/slurm.conf
for i in $(seq "$3"); do
    : > /run/gpu$i
    echo "Name=gpu File=/run/gpu$i" >> /etc/slurm/gres.conf
done
munged --force --key-file=$PWD/key --seed-file=$PWD/seed --log-file=$PWD/log \
    --pid-file=$PWD/pid --socket=/run/munge/munge.socket.2
"""


def why_not():
    """Why there can be no Slurm on this machine, in one line; None if there can be."""
    path = hosts.search_path()
    missing = [tool for tool in TOOLS if not shutil.which(tool, path=path)]
    if missing:
        return f"there is no {missing[0]}: install slurm-wlm and munge"
    if os.geteuid() != 0:
        return "slurmd needs root"
    return hosts.why_not()


class Slurm:
    """`count` nodes to compute on and one to submit from, until `close()` or our end.

    login: the Host where slurmctld runs. nodes: the others, node1 and up. All work in
    `folder`. gpus: per node, on paper. partitions: their lines of slurm.conf. conf: all
    else that stands there, such as `KillWait=5`.
    """

    def __init__(self, count, folder, gpus=0, partitions=(), **conf):
        gres = f" Gres=gpu:{gpus}" if gpus else ""
        conf = {**CONF, **QUICK, **conf}
        lines = [f"{name}={value}" for name, value in conf.items()]
        lines += [f"NodeName=node[1-{count}] CPUs=4 RealMemory=16000{gres}"]
        lines += partitions or ["PartitionName=all Nodes=ALL Default=YES"]
        key, conf = secrets.token_hex(64), "\n".join(lines)
        self.hosts = hosts.Hosts(count + 1, folder)
        try:
            self.login, *self.nodes = self.hosts
            for host in self.hosts:
                host.run("sh", "-ec", SETUP, "sh", key, conf, gpus)
            self.login.run("slurmctld", "-i")
            for node in self.nodes:
                node.run("slurmd", "-N", node.name)
            self.wait_until(lambda: self.states() == {"idle"}, "not all nodes are idle")
        except BaseException:
            self.close()
            raise

    def run(self, *command):
        """Run a short command where users log in; return its stdout."""
        return self.login.run(*command)

    def states(self):
        return set(self.run("sinfo", "--noheader", "--format=%T").split())

    def job(self, number):
        """What `scontrol show job` knows, as a dict of strings."""
        text = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def wait_until(self, condition, problem, timeout=TIMEOUT_S):
        """Wait for `condition()` to be true, and return what it returned.

        TimedOut if that takes too long; problem: what is wrong then.
        """
        deadline = time.monotonic() + timeout
        while True:
            last_error = ""
            try:
                if result := condition():
                    return result
            except OSError as error:  # a daemon that is busy may not answer
                last_error = f" ({error})"
            if time.monotonic() > deadline:
                said = f"{problem} after {timeout} s{last_error}"
                raise TimedOut(f"{said}:\n{self.log()}")
            time.sleep(0.25)  # each look is a process

    def log(self):
        """The last that each daemon wrote."""
        logs = [
            f"{host}:\n{host.run('tail', '-n30', '/run/slurm/log')}"
            for host in self.hosts
            if host.first
        ]
        return "\n".join(logs)

    def close(self):
        self.hosts.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def main(count, gpus, command):
    """Run `command`, or a shell, where users log in; return its exit status."""
    with Slurm(count, ".", gpus) as slurm:
        if not command:
            print(slurm.run("sinfo") + "`exit` ends it, and all that runs in it.")
            command = [os.environ.get("SHELL", "sh")]
        return subprocess.call(slurm.login.inside(command), env=hosts.environment())


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("count", type=utils.positive_int, help="nodes to compute on")
    parser.add_argument("--gpus", type=utils.positive_int, default=0, help="per node")
    parser.add_argument("command", nargs="*", help="after --: what to run in it")
    args = parser.parse_args()
    reason = why_not()
    if reason:
        fail(f"no Slurm on this machine: {reason}")
    sys.exit(main(args.count, args.gpus, args.command))
