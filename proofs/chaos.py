"""Kill workers, agents and hosts at random moments until training completes.

    python -m proofs.chaos --kills 30 --seed 1

trains multinode.py on two hosts (see proofs/hosts.py) with one disk between them, kills
and starts again, and compares the final weights with those of a run left alone:

    worker  SIGKILL to one training process: torchrun restarts all of them
    agent   SIGKILL to a torchrun, and then to the processes that it leaves behind, as
            systemd or Slurm do by cgroup; started again after a second
    host    all its processes at once; turned on and started again after a second

A quarter of the kills wait until snapshot.pt.tmp is being written and go for the
writer, a quarter come while the job is still starting after the kill before, the others
at a random step. Whatever ends with another status than 0 is started again, as when
the rendezvous died with node0. The seed decides on victims, steps and delays.

A copy of multinode.py is run in which these differ: rank 0 notes the time of each
step; a step takes 20 ms longer and a snapshot is written in two halves with 0.8 s
between them, so that there is something to hit; `init_process_group` waits for 20 s
instead of five minutes, so that a hang ends within this run. The agents take a silent
neighbour for dead after 3 s instead of 15 (--rdzv-conf).

    python -m proofs.chaos --kills 20 --only worker --hosts 1 [--defaults]

insists on one machine (`torchrun --standalone`) that each kill of a worker costs one
restart; --defaults leaves out TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and only counts.

Exit status 0 only if training completed, all weights and optimizer state have the same
bits, every snapshot could be read after every kill, each attempt began where the newest
snapshot ended, and no file is left beside it. Needs what proofs/hosts.py needs.
"""

import argparse
import collections
import contextlib
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
from proofs.hosts import Hosts, why_not

KINDS = ("worker", "agent", "host")
MOMENTS = ("training", "saving", "training", "starting")
CURE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
QUICK = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
SAVE_EVERY = 2
STEP_S = 0.02
SAVE_S = 0.8
AGAIN_S = 1  # until what was killed is started again

EARLY = "import time\n\nBEGAN = time.time()\nimport functools\n"
PLANTED = """
import io, os

STEP_S, SAVE_S = float(os.environ["STEP_S"]), float(os.environ["SAVE_S"])

def note(step):
    if os.environ["RANK"] == "0":
        restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
        log = os.open(os.environ["STEPS"], os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(log, f"{BEGAN} {time.time()} {step} {restarts}\\n".encode())
        os.close(log)

note(-1)

class Trainer(Trainer):
    def _run_epoch(self, epoch):
        self.step = epoch * len(self.train_data)
        return super()._run_epoch(epoch)
    def _run_batch(self, source, targets):
        time.sleep(STEP_S)
        loss = super()._run_batch(source, targets)
        note(self.step)
        self.step += 1
        return loss

_save = torch.save
def save_slowly(snapshot, file):
    whole = io.BytesIO()
    _save(snapshot, whole)
    data = whole.getvalue()
    if not isinstance(file, io.BytesIO):
        file.write(data[: len(data) // 2])
        file.flush()
        time.sleep(SAVE_S)
        data = data[len(data) // 2 :]
    file.write(data)
torch.save = save_slowly
"""


class Failed(Exception):
    """What must never happen; the message says what did."""


class Note:
    """A line of the planted log: rank 0 of the attempt begun at `began` did `step`.

    Times are time.time() in seconds. Steps are counted from 0 through all epochs; -1
    stands for the start of the process. restarts: as its torchrun counts them.
    """

    def __init__(self, line):
        began, when, step, restarts = line.split()
        self.began, self.when = float(began), float(when)
        self.step, self.restarts = int(step), int(restarts)


def age(pid):
    """How many seconds ago process `pid` began; OSError if it has ended."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(after_name[19])  # since the machine was started: proc_pid_stat(5)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class Supervised:
    """A training on all `hosts`, with what a supervisor does: start again what ended.

    limit_s: how long there may be no step, in seconds, before `Failed` is raised.
    """

    def __init__(self, hosts, command, snapshot, limit_s, step_s, save_s, env):
        self.hosts, self.command, self.limit_s = hosts, command, limit_s
        self.snapshot = Path(hosts.folder, snapshot)
        self.beside = Path(f"{self.snapshot}.tmp")
        self.log = self.snapshot.with_suffix(".steps")
        self.command = [*command, "--snapshot-path", self.snapshot]
        self.env = env | {"STEP_S": step_s, "SAVE_S": save_s, "STEPS": self.log}
        self.env |= {"OMP_NUM_THREADS": 1}
        self.notes, self.at = [], 0
        self.agents, self.again, self.ended = {}, {}, []
        self.alive = self.began = time.time()
        for host in hosts:
            self.agents[host] = host.start(self.command, **self.env)

    def look(self):
        """One round: read the log, start what has ended, raise if nothing moves."""
        if self.log.exists():
            with open(self.log) as file:
                file.seek(self.at)
                lines = file.readlines()
            if lines and not lines[-1].endswith("\n"):
                lines.pop()
            self.at += sum(map(len, lines))
            new = [Note(line) for line in lines]
            self.notes += new
            if any(note.step >= 0 for note in new):
                self.alive = time.time()
        for host, agent in self.agents.items():
            if host not in self.again and agent.process.poll():
                self.ended.append(f"{host}: {agent.output[-4000:]}")
                self.again[host] = time.time() + AGAIN_S
            if self.again.get(host, time.time() + 1) < time.time():
                if not host.first:
                    host.boot()
                self.agents[host] = host.start(self.command, **self.env)
                del self.again[host]
        if time.time() - self.alive > self.limit_s:
            tries = sum(x.step < 0 and x.when > self.alive for x in self.notes)
            said = f"no step for {self.limit_s} s, and {tries} attempts in that time"
            raise Failed(f"{said}\n{self.state()}")

    def state(self):
        """What runs on each host and the last that its agent said."""
        said = []
        for host, agent in self.agents.items():
            runs = list(host.processes().values()) if host.first else ["it is off"]
            said += [f"-- {host} runs:", *runs, f"-- {host} said:"]
            said += agent.output.splitlines()[-20:]
        return "\n".join(said)

    def wait(self, condition):
        """Look after the job until `condition()`; return what that returned."""
        while not (result := condition()):
            self.look()
            time.sleep(0.005)
        return result

    def steps(self, since=0):
        """Notes of the steps of attempts that began after `since`."""
        return [x for x in self.notes if x.step >= 0 and x.began > since]

    def finished(self):
        """Whether all agents have ended with 0."""
        return all(x.process.poll() == 0 for x in self.agents.values())

    def workers(self, since):
        """{rank: (host, process number)} of the training processes begun after that."""
        found = {}
        for host in self.hosts:
            for pid in host.processes() if host.first else ():
                try:
                    environ = Path(f"/proc/{pid}/environ").read_text()
                    began = age(pid) < time.time() - since
                except OSError:
                    continue  # it has ended
                if began and (rank := re.search(r"\0RANK=(\d+)", environ)):
                    found[int(rank[1])] = host, pid
        return found

    def kill(self, kind, host, pid):
        """Kill process `pid`, or the agent of `host` with all it started, or `host`."""
        if kind == "worker":
            os.kill(pid, signal.SIGKILL)
            return
        self.again[host] = time.time() + AGAIN_S
        if kind == "host":
            host.kill()
        elif self.agents[host].process.poll() is None:
            os.kill(self.agents[host].pid, signal.SIGKILL)
        for pid in host.processes() if kind == "agent" else ():
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                os.kill(pid, signal.SIGKILL)
        self.agents[host].process.wait(60)

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

    def shares(of):
        return rng.sample([of[i % len(of)] for i in range(kills)], kills)

    at = sorted(rng.randrange(1, steps) for _ in range(kills))
    planned = zip(shares(kinds), shares(MOMENTS), at, strict=True)
    return [Kill(*x, rng.random(), rng.random(), rng.random()) for x in planned]


def strike(job, kill, last, start_s):
    """Wait for the moment and do it; return (when, kind, host, what it was doing).

    last: when the kill before was; start_s: how many seconds a start takes.
    """

    def writing():
        mine = job.steps(last)  # a file from before they began was left by a kill
        try:
            return bool(mine) and job.beside.stat().st_mtime > mine[-1].began
        except FileNotFoundError:
            return False

    def due():
        mine = job.steps(last)
        if kill.moment == "starting":
            return mine or time.time() > last + kill.delay * start_s
        reached = mine and mine[-1].step >= kill.step
        return reached and (kill.moment == "training" or writing())

    def victim():
        """(host, process number), of the writer if it is to be hit; false if none."""
        host = job.hosts[int(kill.host * len(job.hosts))]
        if kill.moment != "saving" and kill.kind != "worker":
            return host not in job.again and (host, None)
        workers = job.workers(last)  # not what is ending since the kill before
        if kill.moment == "saving":
            return workers.get(0)
        there = [workers[x] for x in sorted(workers) if workers[x][0] is host]
        return there and there[int(kill.worker * len(there))]

    job.wait(due)
    if kill.moment != "starting":
        time.sleep(kill.delay * (STEP_S if kill.moment == "training" else SAVE_S / 2))
    while True:
        host, pid = job.wait(victim)
        hit, when = writing(), time.time()
        try:
            job.kill(kill.kind, host, pid)
            break
        except (ProcessLookupError, FileNotFoundError):
            job.look()  # it ended a moment before
    mine = job.steps(last)
    at = f"after step {mine[-1].step}" if mine else "while starting"
    return when, kill.kind, host, at + ", writing" * hit


class Tally:
    """What the kills did to `job`; steps_per_epoch says what a snapshot holds."""

    def __init__(self, job, steps_per_epoch):
        self.job, self.steps_per_epoch = job, steps_per_epoch
        self.kills = []  # (when, kind, host, at what)
        self.last = job.began  # or when the last kill was
        self.saved = 0  # epochs, in the snapshot after that kill
        self.waiting = False  # for the first step after that kill
        self.recoveries = []  # (kind, seconds, attempts, steps done twice)
        self.lost = 0  # steps that were saved and are done again all the same

    def killed(self, when, kind, host, at):
        self.kills.append((when, kind, host, at))
        self.last, self.waiting = when, True
        what = f"kill {len(self.kills)}: {kind} on {host} {at}"
        print(f"{when - self.job.began:6.1f} s  {what}", flush=True)
        self.saved = self.job.epochs()

    def recovered(self):
        """Whether there was a step since the last kill; the first is noted."""
        self.job.look()
        steps = self.job.steps(self.last)
        if not steps or not self.waiting:
            return bool(steps)
        first, took = steps[0], steps[0].when - self.last
        before = [x.step for x in self.job.steps() if x.began < self.last]
        twice = before[-1] + 1 - first.step if before else 0
        starts = [x.began for x in self.job.notes if x.step < 0]
        tries = sum(self.last < x <= first.began for x in starts)
        self.recoveries.append((self.kills[-1][1], took, tries, twice))
        self.waiting = False
        said = f"goes on at step {first.step} after {took:.1f} s, attempt {tries}"
        print(f"{first.when - self.job.began:6.1f} s  {said}, {twice} steps done twice")
        sys.stdout.flush()
        if not 0 <= twice <= SAVE_EVERY * self.steps_per_epoch:
            apart = SAVE_EVERY * self.steps_per_epoch
            raise Failed(f"snapshots are {apart} steps apart, and it did not use one")
        self.lost += max(0, self.saved * self.steps_per_epoch - first.step)
        return True

    def report(self, start_s):
        """Print it all; start_s: what a start takes in seconds, to compare."""

        def times(kind=""):
            took = [x[1] for x in self.recoveries if x[0].startswith(kind)]
            return f"median {statistics.median(took):.1f} s, worst {max(took):.1f} s"

        killed = collections.Counter(kind for _, kind, _, _ in self.kills)
        writing = sum("writing" in at for *_, at in self.kills)
        starting = sum("starting" in at for *_, at in self.kills)
        kinds = ", ".join(f"{killed[kind]} {kind}s" for kind in KINDS if killed[kind])
        first = sum(x[2] == 1 for x in self.recoveries)
        twice = [x[3] for x in self.recoveries]
        print(f"kills: {len(self.kills)} ({kinds})")
        print(
            f"    while a snapshot was written: {writing}; while starting: {starting}"
        )
        print(f"recoveries: {len(self.recoveries)}, at the first attempt: {first}")
        print(f"time to recover: {times()}; a start takes {start_s:.1f} s")
        for kind in KINDS:
            if any(x[0] == kind for x in self.recoveries):
                print(f"    {kind}s: {times(kind)}")
        print(f"agents that ended by themselves with a failure: {len(self.job.ended)}")
        if len(self.job.hosts) == 1:
            print(f"torchrun's last restart count: {self.job.notes[-1].restarts}")
        print(f"steps done twice: {sum(twice)} in all, at most {max(twice)} for a kill")
        print(f"steps lost of those that were saved: {self.lost}")


def train(hosts, script, kills, seed, nprocs, kinds, env, limit_s):
    """Do it all and print it; raise `Failed` at the first thing that is wrong."""
    epochs = SAVE_EVERY * (kills + 3)
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    many = ["--rdzv-backend=c10d", "--rdzv-endpoint=node0:29500", "--rdzv-conf", QUICK]
    torchrun += [f"--nnodes={len(hosts)}", *many] if hosts[1:] else ["--standalone"]
    torchrun += [f"--nproc-per-node={nprocs}", f"--max-restarts={10 * kills}"]
    command = [*torchrun, script, epochs, SAVE_EVERY]

    alone = Supervised(hosts, command, "undisturbed.pt", limit_s, 0, 0, env)
    alone.wait(lambda: alone.finished() or alone.ended)
    if alone.ended:
        raise Failed(f"left alone, it does not train\n{alone.state()}")
    alone.look()
    steps, start_s = len(alone.steps()), alone.steps()[0].when - alone.began
    every = f"a snapshot every {steps // epochs * SAVE_EVERY} steps"
    print(f"{len(hosts)} x {nprocs} processes, {steps} steps, {every}")
    print(f"undisturbed: the first step is {start_s:.1f} s after the start", flush=True)

    job = Supervised(hosts, command, "snapshot.pt", limit_s, STEP_S, SAVE_S, env)
    tally = Tally(job, steps // epochs)
    for kill in plan(kills, seed, kinds, kills * SAVE_EVERY * steps // epochs):
        if kill.moment != "starting":
            job.wait(tally.recovered)
        done = strike(job, kill, tally.last, start_s)
        tally.recovered()
        tally.killed(*done)
    job.wait(tally.recovered)
    job.wait(job.finished)
    job.look()
    tally.report(start_s)
    if tally.lost:
        raise Failed("what was saved must not be done again")
    restarts = job.notes[-1].restarts
    if kinds == ["worker"] and not hosts[1:] and env[CURE] == "1" and restarts != kills:
        ended = "\n".join(job.ended)
        raise Failed(f"{kills} kills of a worker cost {restarts} restarts\n{ended}")
    if {x.step for x in job.steps()} != set(range(steps)):
        raise Failed("steps were left out")
    left = sorted(x.name for x in job.snapshot.parent.glob("*.pt.*"))
    print(f"left beside the snapshot: {', '.join(left) or 'nothing'}")
    if left:
        raise Failed("the last save should have used it up")
    same = rungs.same_bits(*(rungs.load(x.snapshot) for x in (alone, job)))
    print(f"final weights and optimizer state: {'the same bits' if same else 'OTHERS'}")
    if not same:
        raise Failed("killed and left alone, the runs ended with different weights")


def main(count, defaults, **how):
    """Train on `count` hosts; return the exit status."""
    env = {CURE: "0" if defaults else "1"}
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        change = ("timedelta(minutes=5)", "timedelta(seconds=20)")
        early = ("import functools\n", EARLY)
        script = rungs.plant(
            "multinode.py", Path(folder), change, early, before_main=PLANTED
        )
        with Hosts(count, folder) as hosts:
            try:
                train(hosts, script, env=env, **how)
            except Failed as failure:
                print(f"FAILED: {failure}", flush=True)
                return 1
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = utils.fail
    number = utils.positive_int
    parser.add_argument("--kills", type=number, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", type=number, default=2, dest="count")
    parser.add_argument("--nproc-per-node", type=number, default=1, dest="nprocs")
    parser.add_argument("--only", choices=KINDS, help="kill nothing else")
    parser.add_argument("--defaults", action="store_true", help="without the cure")
    parser.add_argument(
        "--limit-s", type=number, default=180, help="no step for so long is a hang"
    )
    args = vars(parser.parse_args())
    only = args.pop("only")
    reason = why_not()
    if reason:
        utils.fail(f"no hosts on this machine: {reason}")
    sys.exit(main(kinds=[only] if only else KINDS, **args))
