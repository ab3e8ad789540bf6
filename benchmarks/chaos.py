"""Kill workers, agents and hosts at random moments until training completes.

    python -m benchmarks.chaos --kills 30 --seed 1

trains multinode.py on two hosts (tools/run/hosts.py) with one disk between them,
kills and starts again, and compares the final weights with those of a run left alone:

    worker  SIGKILL to one training process: torchrun restarts all of them
    agent   SIGKILL to a torchrun, and then to the processes that it leaves behind
    host    all its processes at once; turned on and started again after a second

A quarter of the kills wait until a snapshot is being written and go for the writer, a
quarter come while the job is still starting after the kill before, the others at a
random step. An agent that ends with another status than 0 is started again. Steps and
snapshots take longer than usual, so that there is something to hit.

    python -m benchmarks.chaos --kills 20 --workers

trains with two processes on one host (`torchrun --standalone`), and kills only workers.

It fails unless training completes, all weights and optimizer state have the same bits,
every snapshot can be read, and each attempt begins where the newest snapshot ends.
"""

import contextlib
import itertools
import json
import math
import os
import random
import re
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.chaos_job import SAVE_S, STEP_S, began
from benchmarks.report import make_parser
from tools.cli import error
from tools.run.hosts import Hosts, why_not
from tools.run.results import load, same_bits
from tools.scripts import ROOT

KINDS = ("worker", "agent", "host")
MOMENTS = ("training", "saving", "training", "starting")
# "Give every attempt a store of its own" in docs/when_machines_fail.md
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
IMPATIENT = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
SAVE_EVERY = 2  # epochs
RESTART_S = 1  # from the end of an agent until it is started again
LIMIT_S = 180  # no step for so long is a hang


class Note(NamedTuple):
    """A line of the log: rank 0, whose process began at `began`, did `step` at `when`.

    Steps are counted from 0 through all epochs. -1 is the start of the process, -2 that
    of a save, and -3 its end.
    """

    began: float
    when: float
    step: int


class Job:
    """A training on all `hosts`, and its supervisor, which starts again what ended."""

    def __init__(self, hosts, command, snapshot):
        self.hosts = hosts
        self.snapshot = hosts.folder / snapshot
        log = self.snapshot.with_suffix(".steps")
        log.touch()
        self.log = open(log)  # noqa: SIM115
        self.command = [*command, "--snapshot-path", self.snapshot]
        self.env = {"STEPS": log, "OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT}
        self.notes = []
        self.kills = []  # (when, how many epochs were saved then)
        self.restart_at = {}  # {host: when its agent is started again}
        self.began = time.time()
        self.last_step = self.began
        self.agents = {host: self.start(host) for host in hosts}

    def start(self, host):
        """Start an agent."""
        return host.start(self.command, **self.env)

    def update(self):
        """One round: read the log, start what has ended, raise if nothing moves."""
        while line := self.log.read(64):  # as many bytes as each line has
            note = Note(*json.loads(line))
            self.notes.append(note)
            if note.step >= 0:
                self.last_step = note.when
        for host, agent in self.agents.items():
            if agent.poll():
                self.restart_at.setdefault(host, time.time() + RESTART_S)
            if self.restart_at.get(host, math.inf) < time.time():
                if host.first is None:
                    host.boot()
                self.agents[host] = self.start(host)
                del self.restart_at[host]
        if time.time() > self.last_step + LIMIT_S:
            outputs = [agent.output[-4000:] for agent in self.agents.values()]
            raise AssertionError("\n".join([f"no step for {LIMIT_S} s", *outputs]))

    def wait(self, condition):
        """Supervise the job until `condition()`; return what that returned."""
        result = condition()
        while not result:
            self.update()
            time.sleep(0.005)
            result = condition()
        return result

    def steps(self, since=0):
        """Notes of the steps of attempts that began after `since`."""
        return [note for note in self.notes if note.step >= 0 and note.began > since]

    def is_writing(self, since):
        """Whether an attempt that began after `since` is writing a snapshot."""
        last = self.notes[-1]
        return last.step == -2 and last.began > since

    def finished(self):
        """Whether all agents have ended with 0."""
        return all(agent.poll() == 0 for agent in self.agents.values())

    def workers(self, since):
        """{rank: (host, process number)} of those that began after `since`."""
        found = {}
        for host in self.hosts:
            if host.first is None:
                continue
            for pid in host.processes():
                with contextlib.suppress(OSError):  # it has ended
                    environ = Path(f"/proc/{pid}/environ").read_text()
                    rank = re.search(r"\0RANK=(\d+)", environ)
                    if rank and began(pid) > since:
                        found[int(rank[1])] = (host, pid)
        return found

    def victim(self, kind, moment, since, rng):
        """(host, process number or None); None while there is no such victim."""
        if moment == "saving":
            return self.workers(since).get(0)  # the writer, or what it runs on
        if kind == "worker":
            # Not those that the kill before ends: they began before it.
            workers = [*self.workers(since).values()]
            return rng.choice(workers) if workers else None
        host = rng.choice(self.hosts)
        return (host, None) if self.agents[host].poll() is None else None

    def kill(self, kind, host, pid):
        """Kill worker `pid`, or the agent of `host` with all it started, or `host`."""
        if kind == "worker":
            os.kill(pid, signal.SIGKILL)
            return
        if kind == "host":
            host.kill()
        else:
            for started in sorted(host.processes()):  # the agent first
                with contextlib.suppress(ProcessLookupError):  # it ended by itself
                    os.kill(started, signal.SIGKILL)
        self.agents[host].finish()


def kill(job, kind, moment, step, start_s, rng):
    """Wait for the moment, from `step` on, and kill; the job notes it in `kills`."""
    since, _ = job.kills[-1] if job.kills else (job.began, 0)
    delay = rng.random()

    def is_due():
        steps = job.steps(since)
        if moment == "starting":
            # At the latest with the first step: the start is over then.
            return steps or time.time() > since + delay * start_s
        if not steps or steps[-1].step < step:
            return False
        return moment != "saving" or job.is_writing(since)

    job.wait(is_due)
    # A little later, so that a kill can hit any part of a step or of a save.
    time.sleep(delay * (SAVE_S / 2 if moment == "saving" else STEP_S))
    host, pid = job.wait(lambda: job.victim(kind, moment, since, rng))
    job.update()
    when = time.time()
    job.kill(kind, host, pid)
    saved = load(job.snapshot)["EPOCHS_RUN"] if job.snapshot.exists() else 0
    steps = job.steps(since)
    at = f"after step {steps[-1].step}" if steps else "while starting"
    if job.is_writing(since):
        at += ", writing"
    job.kills.append((when, saved))
    print(f"{when - job.began:6.1f} s  {kind} on {host}, {at}", flush=True)


def recoveries(job, steps_per_epoch):
    """[(seconds, attempts, steps done twice)] from a kill to the first step after it.

    Without the kills after which the next one came before.
    """
    found = []
    starts = [note.began for note in job.notes if note.step == -1]
    for (when, saved), (end, _) in itertools.pairwise([*job.kills, (math.inf, 0)]):
        first = job.steps(when)[0]
        if first.when > end:
            continue
        before = [note.step for note in job.steps() if note.began < when]
        twice = before[-1] + 1 - first.step if before else 0
        attempts = sum(when < start <= first.began for start in starts)
        assert first.step >= saved * steps_per_epoch, "saved, and done again"
        found.append((first.when - when, attempts, twice))
    return found


def disturb(job, kills, seed, kinds, steps_per_epoch, start_s):
    """Kill so often, wait for the end, and print what the kills did."""
    rng = random.Random(seed)
    steps = range(1, kills * SAVE_EVERY * steps_per_epoch)
    kill_steps = sorted(rng.choices(steps, k=kills))
    # Each equally often, in random order
    kill_kinds = rng.sample((kinds * kills)[:kills], kills)
    kill_moments = rng.sample((MOMENTS * kills)[:kills], kills)
    for kind, moment, step in zip(kill_kinds, kill_moments, kill_steps, strict=True):
        kill(job, kind, moment, step, start_s, rng)
    job.wait(job.finished)
    job.update()

    counts = [f"{kill_kinds.count(kind)} {kind}s" for kind in kinds]
    print(f"kills: {kills} ({', '.join(counts)})")
    took, attempts, twice = zip(*recoveries(job, steps_per_epoch), strict=True)
    print(f"recoveries: {len(took)}, at the first attempt: {attempts.count(1)}")
    times = f"median {statistics.median(took):.1f} s, worst {max(took):.1f} s"
    print(f"a start takes {start_s:.1f} s; to recover: {times}")
    print(f"steps done twice: {sum(twice)} in all, at most {max(twice)} for a kill")


def train(hosts, kills, seed, workers):
    """Do it all and print it."""
    epochs = SAVE_EVERY * (kills + 3)
    command = ["torchrun", f"--max-restarts={10 * kills}"]
    if workers:
        command += ["--standalone", "--nproc-per-node=2"]
    else:
        command += ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
        command += ["--rdzv-endpoint=node0:29500", "--rdzv-conf", IMPATIENT]
    command += ["-m", "benchmarks.chaos_job", epochs, SAVE_EVERY]

    # The right weights, how many steps there are, and how long a start takes.
    alone = Job(hosts, command, "undisturbed.pt")
    for agent in alone.agents.values():
        done = agent.finish()
        assert done.returncode == 0, done.stdout
    alone.update()
    steps = len(alone.steps())
    start_s = alone.steps()[0].when - alone.began
    print(f"{len(hosts)} hosts, {steps} steps in {epochs} epochs")

    job = Job(hosts, command, "snapshot.pt")
    kinds = KINDS[:1] if workers else KINDS
    disturb(job, kills, seed, kinds, steps // epochs, start_s)
    assert {note.step for note in job.steps()} == {*range(steps)}, "steps are left out"
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
