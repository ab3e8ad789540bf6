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

import contextlib
import itertools
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
        self.hosts = hosts
        self.snapshot = Path(hosts.folder, snapshot)
        log = self.snapshot.with_suffix(".steps")
        log.touch()
        self.log = open(log)  # noqa: SIM115
        self.command = [*command, "--snapshot-path", self.snapshot]
        self.env = env | {"STEP_S": step_s, "SAVE_S": save_s, "STEPS": log}
        self.env |= {"OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT}
        self.notes = []
        self.killed = []
        self.restart_at = {}  # {host: when its agent is started again}
        self.failures = []  # of agents that nobody killed: what they printed last
        self.began = time.time()
        self.last_step = self.began
        self.agents = {host: self.start(host) for host in hosts}

    def start(self, host):
        """Start an agent."""
        return host.start(self.command, **self.env)

    def update(self):
        """One round: read the log, start what has ended, raise if nothing moves."""
        while line := self.log.read(64):  # as many bytes as each line has
            began, when, step, restarts = line.split()
            note = Note(float(began), float(when), int(step), int(restarts))
            self.notes.append(note)
            if note.step >= 0:
                self.last_step = time.time()
        for host, agent in self.agents.items():
            if host not in self.restart_at and agent.poll():
                self.failures.append(f"{host}: {agent.output[-4000:]}")
                self.restart_at[host] = time.time() + RESTART_S
            if host in self.restart_at and self.restart_at[host] < time.time():
                if host.first is None:
                    host.boot()
                self.agents[host] = self.start(host)
                del self.restart_at[host]
        if time.time() > self.last_step + LIMIT_S:
            message = f"no step for {LIMIT_S} s"
            for agent in self.agents.values():
                message += f"\n{agent.output[-4000:]}"
            raise AssertionError(message)

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
        steps = self.steps(since)
        written = [0]
        for file in self.snapshot.parent.glob(f"{self.snapshot.name}.*.tmp"):
            with contextlib.suppress(FileNotFoundError):
                written.append(file.stat().st_mtime)
        # A file from before the attempt was left by a kill.
        return bool(steps) and max(written) > steps[-1].began

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
        host = rng.choice(self.hosts)
        if moment != "saving" and kind != "worker":
            return None if host in self.restart_at else (host, None)
        # Not those that the kill before ends: they began before it.
        workers = self.workers(since)
        if moment == "saving":
            return workers.get(0)  # the writer, or what it runs on
        there = [workers[rank] for rank in sorted(workers) if workers[rank][0] is host]
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
    since = job.killed[-1]["when"] if job.killed else job.began
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
    length_s = {"training": STEP_S, "saving": SAVE_S / 2, "starting": 0}
    time.sleep(delay * length_s[moment])
    while True:
        host, pid = job.wait(lambda: job.victim(kind, moment, since, rng))
        when = time.time()
        is_writing = job.is_writing(since)
        try:
            job.kill(kind, host, pid)
            break
        except ProcessLookupError:
            job.update()  # it ended a moment before: there will be another
    steps = job.steps(since)
    at = f"after step {steps[-1].step}" if steps else "while starting"
    if is_writing:
        at += ", writing"
    print(f"{when - job.began:6.1f} s  {kind} on {host}, {at}", flush=True)
    saved = load(job.snapshot)["EPOCHS_RUN"] if job.snapshot.exists() else 0
    job.killed.append(
        {
            "when": when,
            "kind": kind,
            "writing": is_writing,
            "starting": not steps,
            "saved": saved,
        }
    )


def recovery(job, killed, steps_per_epoch):
    """(seconds, attempts, steps done twice) from a kill to the first step after it."""
    when = killed["when"]
    first = job.steps(when)[0]
    before = [note.step for note in job.steps() if note.began < when]
    twice = before[-1] + 1 - first.step if before else 0
    starts = [note.began for note in job.notes if note.step < 0]
    attempts = sum(when < start <= first.began for start in starts)
    assert 0 <= twice <= SAVE_EVERY * steps_per_epoch, f"{twice} steps done twice"
    assert first.step >= killed["saved"] * steps_per_epoch, "saved, and done again"
    return first.when - when, attempts, twice


def equally_often(choices, count, rng):
    """`count` of the choices, in random order."""
    repeated = itertools.islice(itertools.cycle(choices), count)
    return rng.sample([*repeated], count)


def disturb(job, kills, seed, kinds, steps_per_epoch, start_s):
    """Kill so often, wait for the end, and print what the kills did."""
    rng = random.Random(seed)
    steps = kills * SAVE_EVERY * steps_per_epoch
    kill_steps = sorted(rng.randrange(1, steps) for _ in range(kills))
    kill_kinds = equally_often(kinds, kills, rng)
    kill_moments = equally_often(MOMENTS, kills, rng)
    recoveries = []
    for kind, moment, step in zip(kill_kinds, kill_moments, kill_steps, strict=True):
        kill(job, kind, moment, step, start_s, rng)
        if len(job.killed) > 1 and not job.killed[-1]["starting"]:
            recoveries.append(recovery(job, job.killed[-2], steps_per_epoch))
    job.wait(job.finished)
    job.update()
    recoveries.append(recovery(job, job.killed[-1], steps_per_epoch))

    killed_kinds = [killed["kind"] for killed in job.killed]
    counts = [f"{killed_kinds.count(kind)} {kind}s" for kind in kinds]
    print(f"kills: {kills} ({', '.join(counts)})")
    writing = sum(killed["writing"] for killed in job.killed)
    starting = sum(killed["starting"] for killed in job.killed)
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
    alone = Job(hosts, command, "undisturbed.pt", step_s=0, save_s=0, env=env)
    alone.wait(lambda: alone.finished() or alone.failures)
    assert not alone.failures, alone.failures[0]
    alone.update()
    steps = len(alone.steps())
    start_s = alone.steps()[0].when - alone.began
    print(f"{len(hosts)} x {nprocs} processes, {steps} steps in {epochs} epochs")

    job = Job(hosts, command, "snapshot.pt", step_s=STEP_S, save_s=SAVE_S, env=env)
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
    reason = why_not()
    if reason:
        error(f"no hosts on this machine: {reason}")
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        # So that the others notice a kill within the patience of this tool.
        soon = ("timedelta(minutes=5)", "timedelta(seconds=20)")
        script = plant("multinode.py", Path(folder), soon, hooks=HOOKS)
        with Hosts(args.hosts, folder) as hosts:
            train(
                hosts,
                script,
                kills=args.kills,
                seed=args.seed,
                nprocs=args.nprocs,
                kinds=[args.only] if args.only else KINDS,
                env={OWN_STORE: "0" if args.defaults else "1"},
            )
