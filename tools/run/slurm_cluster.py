"""A little Slurm on one Linux machine: real daemons on hosts of tools/run/hosts.py.

    python -m tools.run.slurm_cluster 2

starts slurmctld on the host node0 and a slurmd on node1 and on node2, and opens a shell
on node0, as on a login node: sinfo, sbatch, squeue and scancel work there as on any
cluster. `exit` ends it all. A command after -- runs instead of the shell:

    python -m tools.run.slurm_cluster 2 -- sbatch --wait cluster/multinode.sbatch 5 1

All hosts work in this folder. Each has 4 CPUs on paper. Some waits are shorter than
Slurm's own. Needs root, Debian's slurm-wlm and munge, and what tools/run/hosts.py
needs. The machine's own Slurm and munge, if it has any, are not touched.
"""

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys

import utils
from tools.cli import Parser, error
from tools.run import hosts
from tools.run.processes import TIMEOUT_S, TimedOut, clean_env, wait

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch")
CONF = """
ClusterName=little
SlurmctldHost=node0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=disk,gpu
StateSaveLocation=/run/slurm
SlurmdSpoolDir=/run/slurm
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile=/run/slurm/log
SlurmdLogFile=/run/slurm/log
"""  # linuxproc: cgroups may be read-only in a container
# Slurm's own are 120 s, for which a requeued job waits at least, and 3 s and 60 s.
QUICK = {
    "AuthInfo": "cred_expire=5",
    "SchedulerParameters": "batch_sched_delay=0,sched_interval=1",
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
[ "$3" = 0 ] || echo "Name=disk Count=1" > /etc/slurm/gres.conf
for i in $(seq "$3"); do
    : > /run/gpu$i
    echo "Name=gpu File=/run/gpu$i" >> /etc/slurm/gres.conf
done
munged --force --key-file=$PWD/key --seed-file=$PWD/seed --log-file=$PWD/log \
    --pid-file=$PWD/pid --socket=/run/munge/munge.socket.2
"""


def why_not():
    """Why there can be no Slurm on this machine; None if there can be."""
    missing = [tool for tool in TOOLS if not shutil.which(tool, path=hosts.PATH)]
    if missing:
        return f"there is no {missing[0]}: install slurm-wlm and munge"
    if os.geteuid() != 0:
        return "slurmd needs root"
    return hosts.why_not()


class Slurm:
    """`count` nodes to compute on and one, `login`, to submit from.

    All work in `folder`. gpus: per node, on paper. conf: more lines of slurm.conf, such
    as `KillWait=5`.
    """

    def __init__(self, count, folder, gpus=0, **conf):
        text = CONF
        for name, value in (QUICK | conf).items():
            text += f"{name}={value}\n"
        text += f"NodeName=node[1-{count}] CPUs=4 RealMemory=16000"
        if gpus:
            text += f" Gres=disk:1,gpu:{gpus}"
        text += "\nPartitionName=all Nodes=ALL Default=YES"
        key = secrets.token_hex(64)
        self.hosts = hosts.Hosts(count + 1, folder)
        self.login, *self.nodes = self.hosts
        self.run = self.login.run
        for host in self.hosts:
            host.run("sh", "-ec", SETUP, "sh", key, text, gpus)
        self.run("slurmctld", "-i")
        for node in self.nodes:
            node.run("slurmd", "-N", node.name)
        states = "sinfo", "--noheader", "--format=%T"
        self.wait_until(
            lambda: {*self.run(*states).split()} == {"idle"}, "not all nodes are idle"
        )

    def job(self, number):
        """What `scontrol show job` knows, as a dict of strings."""
        text = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def wait_until(self, condition, problem):
        """Wait for `condition()` to be true, and return what it returned."""

        def answer():
            with contextlib.suppress(OSError):  # a daemon that is busy may not answer
                return condition()

        result = wait(answer, TIMEOUT_S, 0.25)  # each look is a process
        if not result:
            log = self.run("tail", "-n30", "/run/slurm/log")
            raise TimedOut(f"{problem} after {TIMEOUT_S} s:\n{log}")
        return result

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.hosts.__exit__()


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("count", type=utils.positive_int, help="nodes to compute on")
    parser.add_argument("command", nargs="*", help="after --: what to run in it")
    args = parser.parse_args()
    reason = why_not()
    if reason:
        error(f"no Slurm on this machine: {reason}")
    with Slurm(args.count, ".") as slurm:
        shell = os.environ.get("SHELL", "sh")
        words = slurm.login.inside(args.command or [shell])
        sys.exit(subprocess.call(words, env=clean_env(PATH=hosts.PATH)))
