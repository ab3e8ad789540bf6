"""Kill workers, agents and hosts at random moments of a training.

    python -m benchmarks.chaos --kills 30 --seed 1

trains multinode.py on two hosts (tools/run/hosts.py) with one disk between them,
kills and starts again, and compares the final weights with those of a run left alone:

    worker  SIGKILL to one training process: torchrun restarts all of them
    agent   SIGKILL to a torchrun, and then to the processes that it leaves behind
    host    all its processes at once; turned on and started again after a second

A kill comes up to ten seconds after the one before, so that many hit a start. An agent
that ends with another status than 0 is started again.

    python -m benchmarks.chaos --kills 20 --workers

trains with two processes on one host (`torchrun --standalone`), and kills only workers.
torchrun may start them again once for each kill.

It fails unless training completes, and all weights and optimizer state have the bits of
the run left alone.
"""

import contextlib
import os
import random
import signal
import tempfile
import time
from pathlib import Path

from benchmarks.report import make_parser
from tools.cli import error
from tools.run.hosts import Hosts, why_not
from tools.run.launch import copy_script
from tools.run.results import load, same_bits

KINDS = ["worker", "agent", "host"]
# "Give every attempt a store of its own" in docs/when_machines_fail.md
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
ON_TWO_HOSTS = """--nnodes=2 --nproc-per-node=1
--rdzv-backend=c10d --rdzv-endpoint=node0:29500
--rdzv-conf last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"""
# torchrun's SIGTERM may come before a worker has written its error file to the end.
# Then torchrun ends instead of restarting: here it writes none.
SCRIPT = "--no-python env -u TORCHELASTIC_ERROR_FILE python multinode.py"
MOST_S = 10  # between two kills
RESTART_S = 1  # from the end of an agent until it is started again
LIMIT_S = 900  # for the rest of the training, after the last kill


class Job:
    """A training on all `hosts`, and its supervisor, which starts again what ended."""

    def __init__(self, hosts, command, snapshot):
        self.hosts = hosts
        self.command = [*command, "--snapshot-path", snapshot]
        self.snapshot = hosts.folder / snapshot
        self.started_again = 0
        self.agents = {host: self.start(host) for host in hosts}

    def start(self, host):
        return host.start(self.command, OMP_NUM_THREADS=1)

    def supervise(self, seconds):
        """Start again what ends, for so long. Whether the training is complete."""
        end = time.time() + seconds
        while True:
            for host, agent in self.agents.items():
                if agent.poll():
                    time.sleep(RESTART_S)
                    if host.first is None:
                        host.boot()
                    self.agents[host] = self.start(host)
                    self.started_again += 1
            complete = all(agent.poll() == 0 for agent in self.agents.values())
            if complete or time.time() > end:
                return complete
            time.sleep(0.01)

    def workers(self):
        """The process numbers of all ranks."""
        found = []
        for host in self.hosts:
            for pid in host.processes():
                with contextlib.suppress(OSError):  # it has ended
                    if b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes():
                        found.append(pid)
        return found

    def kill_worker(self, rng):
        workers = self.workers()
        while not workers:
            if self.supervise(0.1):
                return
            workers = self.workers()
        os.kill(rng.choice(workers), signal.SIGKILL)

    def kill(self, kind, host):
        """Kill the agent of a host with all that it has started, or the host."""
        if kind == "host":
            host.kill()
        else:
            for pid in sorted(host.processes()):  # the agent first
                with contextlib.suppress(ProcessLookupError):  # it ended by itself
                    os.kill(pid, signal.SIGKILL)
        self.agents[host].finish()


def train(hosts, kills, seed, workers):
    """Do it all and print it."""
    # While a host is dead, the others wait no longer than this for what it sends.
    copy_script("multinode.py", hosts.folder, ("minutes=5", "seconds=20"))
    where = "--standalone --nproc-per-node=2" if workers else ON_TWO_HOSTS
    epochs = 80 * kills
    words = f"torchrun --max-restarts={kills} {where} {SCRIPT} {epochs} 1".split()
    alone = Job(hosts, words, "alone.pt")
    assert alone.supervise(LIMIT_S), "the run that is left alone does not end"

    rng = random.Random(seed)
    kinds = (["worker"] if workers else KINDS) * kills
    job = Job(hosts, words, "snapshot.pt")
    began = time.time()
    for kind in rng.sample(kinds[:kills], kills):  # each equally often
        early = job.supervise(rng.uniform(0, MOST_S))
        assert not early, "it ended before the last kill"
        saved = load(job.snapshot)["EPOCHS_RUN"] if job.snapshot.exists() else 0
        print(f"{time.time() - began:6.1f} s  {kind}, {saved} epochs saved", flush=True)
        if kind == "worker":
            job.kill_worker(rng)
        else:
            job.kill(kind, rng.choice(hosts))
    assert job.supervise(LIMIT_S), [agent.output for agent in job.agents.values()]
    print(f"{kills} kills; {job.started_again} agents were started again")
    assert same_bits(load(alone.snapshot), load(job.snapshot)), "other final weights"
    print("final weights and optimizer state: the same bits")


if __name__ == "__main__":
    parser = make_parser(__doc__, kills=(30, "how often to kill"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", action="store_true", help="kill nothing else")
    args = parser.parse_args()
    reason = why_not()
    if reason:
        error(f"no hosts on this machine: {reason}")
    os.environ.setdefault(OWN_STORE, "1")
    count = 1 if args.workers else 2
    with tempfile.TemporaryDirectory() as folder, Hosts(count, folder) as hosts:
        train(hosts, **vars(args))
