"""Kill workers, agents and hosts at random moments until training completes.

    python -m tools.prove.chaos --kills 30 --seed 1

trains multinode.py on two hosts (tools/run/hosts.py) with one disk between them,
kills and starts again, and compares the final weights with those of a run left alone:

    worker  SIGKILL to one training process: torchrun restarts all of them
    agent   SIGKILL to a torchrun, and then to the processes that it leaves behind
    host    all its processes at once; turned on and started again after a second

A quarter of the kills wait until a snapshot is being written and go for the writer, a
quarter come while the job is still starting after the kill before, the others at a
random step. An agent that ends with another status than 0 is started again. Steps and
snapshots take longer than usual, so that there is something to hit.

    python -m tools.prove.chaos --kills 20 --only worker --hosts 1 [--defaults]

insists on one machine (`torchrun --standalone`) that each kill of a worker costs one
restart; --defaults leaves out TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and only counts.
It fails unless training completes, all weights and optimizer state have the same bits,
every snapshot can be read, and each attempt begins where the newest snapshot ends.
"""

import collections
import contextlib
import os
import random
import re
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import utils
from tools.cli import Parser, error
from tools.run.hosts import Hosts, child_of, why_not
from tools.run.launch import plant
from tools.run.processes import began
from tools.run.results import load, same_bits
from tools.scripts import ROOT

KINDS = ("worker", "agent", "host")
MOMENTS = ("training", "saving", "training", "starting")
# "Give every attempt a store of its own" in docs/when_machines_fail.md
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
IMPATIENT = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
HOOKS = ("timing:slow_steps", "chaos", "faults:record_in_one_piece")
SAVE_EVERY = 2  # epochs
STEP_S = 0.02
SAVE_S = 0.8
RESTART_S = 1  # from a kill until what was killed is started again
LIMIT_S = 180  # no step for so long is a hang


class Note(NamedTuple):
    """A line of the log: rank 0, whose process began at `began`, did `step` at `when`.

    Steps are counted from 0 through all epochs; -1 is the start of the process.
    """

    began: float
    when: float
    step: int
    restarts: int


class Job:
    """A training on all `hosts`, and its supervisor, which starts again what ended."""

    def __init__(self, hosts, command, snapshot, step_s, save_s, env):
        self.hosts, self.snapshot = hosts, Path(hosts.folder, snapshot)
        log = self.snapshot.with_suffix(".steps")
        log.touch()
        self.log = open(log)  # noqa: SIM115
        self.command = [*command, "--snapshot-path", self.snapshot]
        self.env = env | {"STEP_S": step_s, "SAVE_S": save_s, "STEPS": log}
        self.env |= {"OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT}
        self.notes, self.killed = [], []
        self.restart_at = {}  # {host: when its agent is started again}
        self.failures = []  # of agents that nobody killed: what they printed last
        self.began = self.last_step = time.time()
        self.agents = {host: host.start(self.command, **self.env) for host in hosts}

    def update(self):
        """One round: read the log, start what has ended, raise if nothing moves."""
        for line in self.log.readlines():
            began, when, step, restarts = line.split()
            self.notes.append(Note(float(began), float(when), int(step), int(restarts)))
            if self.notes[-1].step >= 0:
                self.last_step = time.time()
        for host, agent in self.agents.items():
            if host not in self.restart_at and agent.poll():
                self.failures.append(f"{host}: {agent.output[-4000:]}")
                self.restart_at[host] = time.time() + RESTART_S
            if host in self.restart_at and self.restart_at[host] < time.time():
                if host.first is None:
                    host.boot()
                self.agents[host] = host.start(self.command, **self.env)
                del self.restart_at[host]
        if time.time() > self.last_step + LIMIT_S:
            said = [agent.output[-4000:] for agent in self.agents.values()]
            raise AssertionError("\n".join([f"no step for {LIMIT_S} s", *said]))

    def wait(self, condition):
        """Supervise the job until `condition()`; return what that returned."""
        while not (result := condition()):
            self.update()
            time.sleep(0.005)
        return result

    def steps(self, since=0):
        """Notes of the steps of attempts that began after `since`."""
        return [note for note in self.notes if note.step >= 0 and note.began > since]

    def is_writing(self, since):
        """Whether an attempt that began after `since` is writing a snapshot."""
        steps, written = self.steps(since), [0]
        for file in self.snapshot.parent.glob(f"{self.snapshot.name}.*.tmp"):
            with contextlib.suppress(FileNotFoundError):
                written.append(file.stat().st_mtime)
        # A file from before the attempt was left by a kill.
        return bool(steps) and max(written) > steps[-1].began

    def finished(self):
        """Whether all agents have ended with 0."""
        return all(agent.poll() == 0 for agent in self.agents.values())

    def victim(self, kind, moment, since, rng):
        """(host, process number or None); None while there is no such victim."""
        host, workers = rng.choice(self.hosts), {}
        if moment != "saving" and kind != "worker":
            return None if host in self.restart_at else (host, None)
        for place in self.hosts:
            for pid in place.processes() if place.first else ():
                with contextlib.suppress(OSError):  # it has ended
                    environ = Path(f"/proc/{pid}/environ").read_text()
                    rank = re.search(r"\0RANK=(\d+)", environ)
                    if rank and began(pid) > since:  # not what the kill before ends
                        workers[int(rank[1])] = place, pid
        if moment == "saving":
            return workers.get(0)  # the writer, or what it runs on
        there = [worker for _, worker in sorted(workers.items()) if worker[0] is host]
        return rng.choice(there) if there else None

    def kill(self, kind, host, pid):
        """Kill worker `pid`, or the agent of `host` with all it started, or `host`."""
        if kind == "worker":
            os.kill(pid, signal.SIGKILL)
            return
        self.restart_at[host] = time.time() + RESTART_S
        agent = self.agents[host]
        if kind == "host":
            host.kill()
        else:
            if agent.poll() is None:
                os.kill(child_of(agent), signal.SIGKILL)
            for left in host.processes():
                with contextlib.suppress(ProcessLookupError):  # it ended by itself
                    os.kill(left, signal.SIGKILL)
        agent.finish()


def kill(job, kind, moment, step, start_s, rng):
    """Wait for the moment, from `step` on, and kill; the job notes it as `killed`."""
    since, delay = job.killed[-1]["when"] if job.killed else job.began, rng.random()

    def is_due():
        steps = job.steps(since)
        if moment == "starting":
            # At the latest with the first step: the start is over then.
            return steps or time.time() > since + delay * start_s
        reached = steps and steps[-1].step >= step
        return reached and (moment != "saving" or job.is_writing(since))

    job.wait(is_due)
    # A little later, so that a kill can hit any part of a step or of a save.
    length = {"training": STEP_S, "saving": SAVE_S / 2, "starting": 0}
    time.sleep(delay * length[moment])
    while True:
        host, pid = job.wait(lambda: job.victim(kind, moment, since, rng))
        found = {"when": time.time(), "kind": kind, "writing": job.is_writing(since)}
        try:
            job.kill(kind, host, pid)
            break
        except ProcessLookupError:
            job.update()  # it ended a moment before: there will be another
    steps = job.steps(since)
    at = f"after step {steps[-1].step}" if steps else "while starting"
    at += ", writing" * found["writing"]
    print(f"{found['when'] - job.began:6.1f} s  {kind} on {host}, {at}", flush=True)
    saved = load(job.snapshot)["EPOCHS_RUN"] if job.snapshot.exists() else 0
    job.killed.append(found | {"starting": not steps, "saved": saved})


def recovery(job, killed, steps_per_epoch):
    """(seconds, attempts, steps done twice) from a kill to the first step after it."""
    first = job.steps(killed["when"])[0]
    before = [note.step for note in job.steps() if note.began < killed["when"]]
    twice = before[-1] + 1 - first.step if before else 0
    starts = [note.began for note in job.notes if note.step < 0]
    attempts = sum(killed["when"] < start <= first.began for start in starts)
    assert 0 <= twice <= SAVE_EVERY * steps_per_epoch, f"{twice} steps done twice"
    assert first.step >= killed["saved"] * steps_per_epoch, "saved, and done again"
    return first.when - killed["when"], attempts, twice


def disturb(job, kills, seed, kinds, steps_per_epoch, start_s):
    """Kill so often, wait for the end, and print what the kills did."""
    rng, recoveries = random.Random(seed), []
    steps = kills * SAVE_EVERY * steps_per_epoch
    at = sorted(rng.randrange(1, steps) for _ in range(kills))
    both = [[x[i % len(x)] for i in range(kills)] for x in (kinds, MOMENTS)]
    for planned in zip(*(rng.sample(x, kills) for x in both), at, strict=True):
        kill(job, *planned, start_s, rng)
        if len(job.killed) > 1 and not job.killed[-1]["starting"]:
            recoveries.append(recovery(job, job.killed[-2], steps_per_epoch))
    job.wait(job.finished)
    job.update()
    recoveries.append(recovery(job, job.killed[-1], steps_per_epoch))

    counts = collections.Counter(x["kind"] for x in job.killed)
    print(f"kills: {kills} ({', '.join(f'{counts[x]} {x}s' for x in kinds)})")
    writing, starting = (sum(x[y] for x in job.killed) for y in ("writing", "starting"))
    print(f"    while a snapshot was written: {writing}; while starting: {starting}")
    took, attempts, twice = zip(*recoveries, strict=True)
    print(f"recoveries: {len(took)}, at the first attempt: {attempts.count(1)}")
    times = f"median {statistics.median(took):.1f} s, worst {max(took):.1f} s"
    print(f"a start takes {start_s:.1f} s; to recover: {times}")
    print(f"steps done twice: {sum(twice)} in all, at most {max(twice)} for a kill")


def train(hosts, script, kills, seed, nprocs, kinds, env):
    """Do it all and print it."""
    epochs = SAVE_EVERY * (kills + 3)
    command = ["torchrun", "--standalone"]
    if len(hosts) > 1:
        command = ["torchrun", f"--nnodes={len(hosts)}", "--rdzv-backend=c10d"]
        command += ["--rdzv-endpoint=node0:29500", "--rdzv-conf", IMPATIENT]
    command += [f"--nproc-per-node={nprocs}", f"--max-restarts={10 * kills}"]
    command += [script, epochs, SAVE_EVERY]

    # The right weights, how many steps there are, and how long a start takes.
    alone = Job(hosts, command, "undisturbed.pt", 0, 0, env)
    alone.wait(lambda: alone.finished() or alone.failures)
    assert not alone.failures, alone.failures[0]
    alone.update()
    steps, start_s = len(alone.steps()), alone.steps()[0].when - alone.began
    print(f"{len(hosts)} x {nprocs} processes, {steps} steps in {epochs} epochs")

    job = Job(hosts, command, "snapshot.pt", STEP_S, SAVE_S, env)
    disturb(job, kills, seed, kinds, steps // epochs, start_s)
    assert {note.step for note in job.steps()} == {*range(steps)}, "steps are left out"
    assert same_bits(load(alone.snapshot), load(job.snapshot)), "other final weights"
    print("final weights and optimizer state: the same bits")
    restarts = job.notes[-1].restarts
    if kinds == ["worker"] and len(hosts) == 1:
        print(f"torchrun's last restart count: {restarts}")
        assert restarts == kills or env[OWN_STORE] == "0", "\n".join(job.failures)


if __name__ == "__main__":
    parser = Parser(__doc__)
    number = utils.positive_int
    parser.add_argument("--kills", type=number, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", type=number, default=2)
    parser.add_argument("--nproc-per-node", type=number, default=1, dest="nprocs")
    parser.add_argument("--only", choices=KINDS, help="kill nothing else")
    parser.add_argument("--defaults", action="store_true", help="with the shared store")
    args = parser.parse_args()
    if reason := why_not():
        error(f"no hosts on this machine: {reason}")
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        soon = ("timedelta(minutes=5)", "timedelta(seconds=20)")
        script = plant("multinode.py", Path(folder), soon, hooks=HOOKS)
        kinds = [args.only] if args.only else KINDS
        how = script, args.kills, args.seed, args.nprocs, kinds
        with Hosts(args.hosts, folder) as hosts:
            train(hosts, *how, {OWN_STORE: "0" if args.defaults else "1"})
