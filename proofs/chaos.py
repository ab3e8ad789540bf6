"""Kill workers, agents and hosts at random moments until training completes.

    python -m proofs.chaos --kills 30 --seed 1

trains multinode.py on two hosts (see proofs/hosts.py) with one disk between them, kills
and starts again, and compares the final weights with those of a run left alone:

    worker  SIGKILL to one training process: torchrun restarts all of them
    agent   SIGKILL to a torchrun, and then to the processes that it leaves behind, as
            systemd or Slurm do by cgroup; started again after a second
    host    all its processes at once; turned on and started again after a second

A quarter of the kills wait until a snapshot is being written and go for the
writer, a quarter come while the job is still starting after the kill before, the others
at a random step. Whatever ends with another status than 0 is started again, as when
the rendezvous died with node0. The seed decides on victims, steps and delays.

A copy of multinode.py is run in which these differ: rank 0 notes the time of each
step; a step takes 20 ms longer and a snapshot is written in two halves with 0.8 s
between them, so that there is something to hit; `init_process_group` waits for 20 s
instead of five minutes, so that a hang ends within this run. The agents take a silent
neighbour for dead after 3 s instead of 15 (--rdzv-conf). `@record` writes a worker's
error file in one piece: torchrun itself ends, with restarts left, if it finds half of
one (see proofs/hooks/record_in_one_piece.py).

    python -m proofs.chaos --kills 20 --only worker --hosts 1 [--defaults]

insists on one machine (`torchrun --standalone`) that each kill of a worker costs one
restart; --defaults leaves out TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and only counts.

Exit status 0 only if training completed, all weights and optimizer state have the same
bits, every snapshot could be read after every kill, each attempt began where the newest
snapshot ended, and no file is left beside it. Needs what proofs/hosts.py needs.
"""

import collections
import contextlib
import functools
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import utils
from ladder.cli import Parser, fail
from proofs.hooks import began
from proofs.hosts import Hosts, why_not
from proofs.launch import plant
from proofs.results import load, same_bits

KINDS = ("worker", "agent", "host")
MOMENTS = ("training", "saving", "training", "starting")
# "Give every attempt a store of its own" in docs/when_machines_fail.md
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
IMPATIENT = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
SAVE_EVERY = 2  # epochs
STEP_S = 0.02
SAVE_S = 0.8
RESTART_S = 1  # from a kill until what was killed is started again


class Failed(Exception):
    """What must never happen; the message says what did."""


class Note:
    """A line of the log: rank 0, whose process began at `began`, did `step` at `when`.

    Times are time.time() in seconds. Steps are counted from 0 through all epochs; -1
    stands for the start of the process. restarts: as its torchrun counts them.
    proofs/hooks/chaos.py writes the lines.
    """

    def __init__(self, line):
        began, when, step, restarts = line.split()
        self.began, self.when = float(began), float(when)
        self.step, self.restarts = int(step), int(restarts)


class Supervised:
    """A training on all `hosts`, with what a supervisor does: start again what ended.

    limit_s: how long there may be no step, in seconds, before `Failed` is raised.
    """

    def __init__(self, hosts, command, snapshot, limit_s, step_s, save_s, env):
        self.hosts, self.limit_s = hosts, limit_s
        self.snapshot = Path(hosts.folder, snapshot)
        self.log = self.snapshot.with_suffix(".steps")
        self.command = [*command, "--snapshot-path", self.snapshot]
        self.env = env | {"STEP_S": step_s, "SAVE_S": save_s, "STEPS": self.log}
        self.env |= {"OMP_NUM_THREADS": 1}
        self.notes = []
        self.log_read = 0  # how many characters of the log are in `notes`
        self.restart_at = {}  # {host: when its agent is started again}
        self.failures = []  # of agents that nobody killed: what they printed last
        self.began = self.last_step = time.time()
        self.agents = {host: host.start(self.command, **self.env) for host in hosts}

    def update(self):
        """One round: read the log, start what has ended, raise if nothing moves."""
        self._read_log()
        for host, agent in self.agents.items():
            if host not in self.restart_at and agent.process.poll():
                self.failures.append(f"{host}: {agent.output[-4000:]}")
                self.restart_at[host] = time.time() + RESTART_S
            if host in self.restart_at and self.restart_at[host] < time.time():
                if host.first is None:
                    host.boot()
                self.agents[host] = host.start(self.command, **self.env)
                del self.restart_at[host]
        if time.time() - self.last_step > self.limit_s:
            starts = [note for note in self.notes if note.step < 0]
            attempts = sum(note.when > self.last_step for note in starts)
            what = f"no step for {self.limit_s} s, and {attempts} attempts in that time"
            raise Failed(f"{what}\n{self.state()}")

    def _read_log(self):
        if not self.log.exists():
            return
        with open(self.log) as file:
            file.seek(self.log_read)
            lines = file.readlines()
        if lines and not lines[-1].endswith("\n"):
            lines.pop()  # it is being written
        self.log_read += sum(map(len, lines))
        notes = [Note(line) for line in lines]
        self.notes += notes
        if any(note.step >= 0 for note in notes):
            self.last_step = time.time()

    def state(self):
        """What runs on each host and the last that its agent said."""
        lines = []
        for host, agent in self.agents.items():
            runs = list(host.processes().values()) if host.first else ["it is off"]
            lines += [f"-- {host} runs:", *runs, f"-- {host} said:"]
            lines += agent.output.splitlines()[-20:]
        return "\n".join(lines)

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
        steps = self.steps(since)
        try:
            # A file from before the attempt was left by a kill.
            files = self.snapshot.parent.glob(f"{self.snapshot.name}.*.tmp")
            written = max((file.stat().st_mtime for file in files), default=0)
            return bool(steps) and written > steps[-1].began
        except FileNotFoundError:
            return False

    def finished(self):
        """Whether all agents have ended with 0."""
        return all(agent.process.poll() == 0 for agent in self.agents.values())

    def workers(self, since):
        """{rank: (host, process number)} of the training processes begun after that."""
        found = {}
        for host in self.hosts:
            for pid in host.processes() if host.first else ():
                with contextlib.suppress(OSError):  # it has ended
                    environ = Path(f"/proc/{pid}/environ").read_text()
                    rank = re.search(r"\0RANK=(\d+)", environ)
                    if rank and began(pid) > since:
                        found[int(rank[1])] = host, pid
        return found

    def kill(self, kind, host, pid):
        """Kill worker `pid`, or the agent of `host` with all it started, or `host`.

        ProcessLookupError if that has ended by itself.
        """
        if kind == "worker":
            os.kill(pid, signal.SIGKILL)
            return
        self.restart_at[host] = time.time() + RESTART_S
        agent = self.agents[host]
        if kind == "host":
            host.kill()
        else:
            if agent.process.poll() is None:
                os.kill(agent.pid, signal.SIGKILL)
            for left in host.processes():
                with contextlib.suppress(ProcessLookupError):  # it ended by itself
                    os.kill(left, signal.SIGKILL)
        agent.wait()

    def epochs(self):
        """How many epochs the snapshot holds; `Failed` if it cannot be read."""
        try:
            return utils.read_snapshot(self.snapshot)["EPOCHS_RUN"]
        except Exception as error:  # unreadable in one way or another
            raise Failed(f"{self.snapshot.name} is unreadable: {error!r}") from error


class Kill(NamedTuple):
    """What is planned: `kind` at the `moment` from `step` on; the rest is chance."""

    kind: str
    moment: str
    step: int
    delay: float  # 0 to 1, as are the two that choose the victim
    host: float
    worker: float


def plan(kills, seed, kinds, steps):
    """`kills` of them, in the order of their steps, which are below `steps`."""
    rng = random.Random(seed)

    def shuffled(choices):
        """Each of `choices` as often as the others, in a random order."""
        repeated = [choices[i % len(choices)] for i in range(kills)]
        return rng.sample(repeated, kills)

    at = sorted(rng.randrange(1, steps) for _ in range(kills))
    planned = zip(shuffled(kinds), shuffled(MOMENTS), at, strict=True)
    return [
        Kill(kind, moment, step, rng.random(), rng.random(), rng.random())
        for kind, moment, step in planned
    ]


class Killed(NamedTuple):
    """A kill that was done."""

    when: float
    kind: str
    host: object
    step: int | None  # the last one before; None while the job was starting
    writing: bool  # whether a snapshot was being written

    def __str__(self):
        at = "while starting" if self.step is None else f"after step {self.step}"
        if self.writing:
            at += ", writing"
        return f"{self.kind} on {self.host} {at}"


def wait_for_moment(job, kill, since, start_s):
    """Wait until it is time for `kill`; the arguments are those of `carry_out`."""

    def is_due():
        steps = job.steps(since)
        if kill.moment == "starting":
            # At the latest with the first step: the start is over then.
            return steps or time.time() > since + kill.delay * start_s
        reached = steps and steps[-1].step >= kill.step
        if kill.moment == "saving":
            return reached and job.is_writing(since)
        return reached

    job.wait(is_due)
    # A little later, so that a kill can hit any part of a step or of a save.
    if kill.moment == "training":
        time.sleep(kill.delay * STEP_S)
    elif kill.moment == "saving":
        time.sleep(kill.delay * SAVE_S / 2)


def choose_victim(job, kill, since):
    """(host, process number or None) for `kill`; None while there is no such victim."""
    host = job.hosts[int(kill.host * len(job.hosts))]
    if kill.moment != "saving" and kill.kind != "worker":
        return None if host in job.restart_at else (host, None)
    workers = job.workers(since)  # not what is ending since the kill before
    if kill.moment == "saving":
        return workers.get(0)  # the writer, or what it runs on
    there = [workers[rank] for rank in sorted(workers) if workers[rank][0] is host]
    return there[int(kill.worker * len(there))] if there else None


def carry_out(job, kill, since, start_s):
    """Wait for the moment of `kill` and do it: Killed.

    since: when the kill before was; start_s: how many seconds a start takes.
    """
    wait_for_moment(job, kill, since, start_s)
    while True:
        host, pid = job.wait(functools.partial(choose_victim, job, kill, since))
        writing, when = job.is_writing(since), time.time()
        try:
            job.kill(kill.kind, host, pid)
            break
        except ProcessLookupError:
            job.update()  # it ended a moment before: there will be another
    steps = job.steps(since)
    step = steps[-1].step if steps else None
    return Killed(when, kill.kind, host, step, writing)


class Recovery(NamedTuple):
    """What followed a kill of a `kind`."""

    kind: str
    seconds: float  # from the kill to the first step after it
    attempts: int
    twice: int  # how many steps were done again


class Tally:
    """What the kills did to `job`; steps_per_epoch says what a snapshot holds."""

    def __init__(self, job, steps_per_epoch):
        self.job, self.steps_per_epoch = job, steps_per_epoch
        self.kills, self.recoveries = [], []
        self.last = job.began  # or when the last kill was
        self.saved = 0  # epochs, in the snapshot after that kill
        self.waiting = False  # for the first step after that kill
        self.lost = 0  # steps that were saved and are done again all the same

    def killed(self, killed):
        """Note a kill, and look at the snapshot that it left."""
        self.kills.append(killed)
        self.last, self.waiting = killed.when, True
        self._print(killed.when, f"kill {len(self.kills)}: {killed}")
        self.saved = self.job.epochs()

    def recovered(self):
        """Whether there was a step since the last kill; the first is noted."""
        self.job.update()
        steps = self.job.steps(self.last)
        if not steps or not self.waiting:
            return bool(steps)
        self.waiting = False
        first, took = steps[0], steps[0].when - self.last
        before = [note.step for note in self.job.steps() if note.began < self.last]
        twice = before[-1] + 1 - first.step if before else 0
        starts = [note.began for note in self.job.notes if note.step < 0]
        attempts = sum(self.last < start <= first.began for start in starts)
        self.recoveries.append(Recovery(self.kills[-1].kind, took, attempts, twice))
        what = f"goes on at step {first.step} after {took:.1f} s, attempt {attempts}"
        self._print(first.when, f"{what}, {twice} steps done twice")
        interval = SAVE_EVERY * self.steps_per_epoch
        if not 0 <= twice <= interval:
            what = f"snapshots are {interval} steps apart, and it did not use one"
            raise Failed(what)
        self.lost += max(0, self.saved * self.steps_per_epoch - first.step)
        return True

    def _print(self, when, what):
        print(f"{when - self.job.began:6.1f} s  {what}", flush=True)

    def report(self, start_s):
        """Print it all; start_s: what a start takes in seconds, to compare."""
        counts = collections.Counter(killed.kind for killed in self.kills)
        kinds = ", ".join(f"{counts[kind]} {kind}s" for kind in KINDS if counts[kind])
        print(f"kills: {len(self.kills)} ({kinds})")
        writing = sum(killed.writing for killed in self.kills)
        starting = sum(killed.step is None for killed in self.kills)
        print(
            f"    while a snapshot was written: {writing}; while starting: {starting}"
        )

        at_once = sum(recovery.attempts == 1 for recovery in self.recoveries)
        print(f"recoveries: {len(self.recoveries)}, at the first attempt: {at_once}")
        all_times = self._times(KINDS)
        print(f"time to recover: {all_times}; a start takes {start_s:.1f} s")
        for kind in KINDS:
            if any(recovery.kind == kind for recovery in self.recoveries):
                print(f"    {kind}s: {self._times([kind])}")

        failures = len(self.job.failures)
        print(f"agents that ended by themselves with a failure: {failures}")
        if len(self.job.hosts) == 1:
            print(f"torchrun's last restart count: {self.job.notes[-1].restarts}")
        twice = [recovery.twice for recovery in self.recoveries]
        print(f"steps done twice: {sum(twice)} in all, at most {max(twice)} for a kill")
        print(f"steps lost of those that were saved: {self.lost}")

    def _times(self, kinds):
        recoveries = [x for x in self.recoveries if x.kind in kinds]
        took = [recovery.seconds for recovery in recoveries]
        return f"median {statistics.median(took):.1f} s, worst {max(took):.1f} s"


def train(hosts, script, kills, seed, nprocs, kinds, env, limit_s):
    """Do it all and print it; raise `Failed` at the first thing that is wrong."""
    epochs = SAVE_EVERY * (kills + 3)
    command = [sys.executable, "-m", "torch.distributed.run"]
    if len(hosts) == 1:
        command += ["--standalone"]
    else:
        command += [f"--nnodes={len(hosts)}", "--rdzv-backend=c10d"]
        command += ["--rdzv-endpoint=node0:29500", "--rdzv-conf", IMPATIENT]
    command += [f"--nproc-per-node={nprocs}", f"--max-restarts={10 * kills}"]
    command += [script, epochs, SAVE_EVERY]

    # What the weights shall be, how many steps there are, and how long a start takes.
    alone = Supervised(hosts, command, "undisturbed.pt", limit_s, 0, 0, env)
    alone.wait(lambda: alone.finished() or alone.failures)
    if alone.failures:
        raise Failed(f"left alone, it does not train\n{alone.state()}")
    alone.update()
    steps, start_s = len(alone.steps()), alone.steps()[0].when - alone.began
    every = f"a snapshot every {steps // epochs * SAVE_EVERY} steps"
    print(f"{len(hosts)} x {nprocs} processes, {steps} steps, {every}")
    print(f"undisturbed: the first step is {start_s:.1f} s after the start", flush=True)

    job = Supervised(hosts, command, "snapshot.pt", limit_s, STEP_S, SAVE_S, env)
    tally = Tally(job, steps // epochs)
    for kill in plan(kills, seed, kinds, kills * SAVE_EVERY * steps // epochs):
        if kill.moment != "starting":
            job.wait(tally.recovered)
        killed = carry_out(job, kill, tally.last, start_s)
        tally.recovered()  # there may have been a step before this kill
        tally.killed(killed)
    job.wait(tally.recovered)
    job.wait(job.finished)
    job.update()
    tally.report(start_s)
    check(alone, job, tally, steps)
    restarts = job.notes[-1].restarts
    must_cost_one = kinds == ["worker"] and len(hosts) == 1 and env[OWN_STORE] == "1"
    if must_cost_one and restarts != kills:
        failures = "\n".join(job.failures)
        raise Failed(f"{kills} kills of a worker cost {restarts} restarts\n{failures}")


def check(alone, job, tally, steps):
    """Print what the two runs left, and raise `Failed` if anything was lost."""
    if tally.lost:
        raise Failed("what was saved must not be done again")
    if {note.step for note in job.steps()} != set(range(steps)):
        raise Failed("steps were left out")
    left = sorted(path.name for path in job.snapshot.parent.glob("*.pt.*"))
    print(f"left beside the snapshot: {', '.join(left) or 'nothing'}")
    if left:
        raise Failed("the last save should have used it up")
    same = same_bits(load(alone.snapshot), load(job.snapshot))
    print(f"final weights and optimizer state: {'the same bits' if same else 'OTHERS'}")
    if not same:
        raise Failed("killed and left alone, the runs ended with different weights")


def main(count, defaults, **how):
    """Train on `count` hosts; return the exit status."""
    env = {OWN_STORE: "0" if defaults else "1"}
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        timeout = ("timedelta(minutes=5)", "timedelta(seconds=20)")
        hooks = ["slow_steps", "chaos", "record_in_one_piece"]
        script = plant("multinode.py", Path(folder), timeout, hooks=hooks)
        with Hosts(count, folder) as hosts:
            try:
                train(hosts, script, env=env, **how)
            except Failed as failure:
                print(f"FAILED: {failure}", flush=True)
                return 1
    return 0


if __name__ == "__main__":
    parser = Parser(__doc__)
    number = utils.positive_int
    parser.add_argument("--kills", type=number, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", type=number, default=2, dest="count")
    parser.add_argument("--nproc-per-node", type=number, default=1, dest="nprocs")
    parser.add_argument("--only", choices=KINDS, help="kill nothing else")
    parser.add_argument("--defaults", action="store_true", help="with the shared store")
    parser.add_argument(
        "--limit-s", type=number, default=180, help="no step for so long is a hang"
    )
    args = vars(parser.parse_args())
    only = args.pop("only")
    reason = why_not()
    if reason:
        fail(f"no hosts on this machine: {reason}")
    sys.exit(main(kinds=[only] if only else KINDS, **args))
