"""What each variant costs and what it buys, measured beside its parent.

    python -m benchmarks.variants                         all variants
    python -m benchmarks.variants variants/real_job.py    only this one

Parent and variant do the same job: the same samples, the same model, which is larger
than the scripts' own, and the same number of processes. They take turns, in a new order
each round. In a turn the script starts anew and trains two epochs. The second one is
measured: steps per second, the bytes that a rank sends in a step, and the peak of a
rank's memory. Evaluation, printing and saving are not measured.

A variant with `--accumulate` is then measured on a slow network as well, where each
rank has a host of its own. Both sides take micro-batches of the same size there.

As root on Linux, the ranks run on a network that nobody else uses, and its cards count
the bytes. Elsewhere DDP's all-reduces are counted. The output says which of the two.
"""

import argparse
import contextlib
import json
import math
import os
import random
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import utils
from benchmarks import report
from ladder.rungs import RUNGS, variants
from proofs import launch
from proofs.hosts import Hosts, why_not
from proofs.processes import TimedOut
from proofs.warm import end_all

ACCUMULATE = 8  # micro-batches in a step, on the slow network
TIMEOUT_S = 1800  # that one run of a script may take


class Side(NamedTuple):
    """A rung, and how it is run: `batch_size` is what a process takes in a step."""

    name: str
    batch_size: int
    options: tuple = ()


class Turn(NamedTuple):
    """The figures of one turn: proofs/hooks/measured_epoch.py says what each is.

    `seconds` and `peak_bytes` are those of the rank that has most.
    """

    weights: int
    loss: float
    seconds: float
    sent_bytes: float
    peak_bytes: float


def parse_args():
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.variants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = utils.fail
    parser.add_argument("name", nargs="?", help="a rung's path (default: all variants)")
    for name, default, text in (
        ("--rounds", 10, "turns of each side"),
        ("--steps", 8, "steps in an epoch"),
        ("--batch-size", 1024, "samples that one process takes in a step"),
        ("--micro-batch", 32, "the same on the slow network, in a micro-batch"),
        ("--nprocs", 2, "processes, if the script runs in several"),
        ("--width", 512, "width of the model's hidden layers"),
        ("--mbit", 100, "what the slow network carries, in Mbit/s each way"),
    ):
        parser.add_argument(
            name, type=utils.positive_int, default=default, help=f"{text} ({default})"
        )
    parser.add_argument("--device", default="auto", help="as for the rungs (auto)")
    args = parser.parse_args()
    known = [name for name, parent in RUNGS.items() if parent]
    if args.name not in (None, *known):
        utils.fail(
            f"{args.name} is no rung with a parent. Those are {', '.join(known)}"
        )
    return args


def why_no_networks(device):
    """Why the ranks cannot have a network of their own, or None."""
    if device != "cpu":
        return f"{device} devices may have other ways to send"
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "a network of their own needs root"
    return why_not()


class Edge:
    """A variant and its parent, ready to be measured.

    networks: paths of the Linux network namespaces that the ranks share out.
    """

    def __init__(self, name, folder, networks, device, args):
        self.name, self.parent = name, RUNGS[name]
        self.device, self.rounds, self.nprocs = device, args.rounds, args.nprocs
        self.env = {"NETWORKS": " ".join(networks), "WIDTH": args.width}
        if networks:
            self.env["GLOO_SOCKET_IFNAME"] = "eth0" if len(networks) > 1 else "lo"
        self.own_task = launch.task_of(name) == name
        if self.own_task:  # the parent trains it as well, and finds it here
            launch.plant(name, folder / "parent")
        self.scripts = {
            rung: launch.plant(rung, folder / side, hooks=["measured_epoch"])
            for side, rung in (("parent", self.parent), ("variant", name))
        }

    def take_turns(self, sides, samples, memory):
        """[(the parent's Turn, the variant's)], one pair for each round.

        samples: how many an epoch has. memory: whether to measure its peak as well.
        """
        shuffle, rounds = random.Random(0).shuffle, []
        for _ in range(self.rounds):
            order = list(sides)
            shuffle(order)
            turns = {side: self.take_turn(side, samples, memory) for side in order}
            rounds.append(tuple(turns[side] for side in sides))
        return rounds

    def take_turn(self, side, samples, memory):
        """A Turn. On a CPU, the script runs again for the memory."""
        turn = self.run(side, TRAIN_SAMPLES=samples)
        if memory and self.device == "cpu":
            few = min(samples, 2 * side.batch_size * self.nprocs)  # two steps show it
            again = self.run(side, TRAIN_SAMPLES=few, GIVE_BACK=1)
            turn = turn._replace(peak_bytes=again.peak_bytes)
        return turn

    def run(self, side, **env):
        """Run a script to its end: a Turn."""
        script = self.scripts[side.name]
        folder, env = launch.home(script), self.env | env
        if self.own_task and side.name == self.parent:
            env["TASK"] = self.name.removesuffix(".py").replace("/", ".")
        for file in folder.glob("measured.*.json"):
            file.unlink()
        options = ("--batch-size", side.batch_size, "--device", self.device)
        done = launch.launch(
            script,
            *(2, 2, *options, *side.options),  # two epochs
            cwd=folder,
            real="" if self.device == "cpu" else "a fork cannot use an accelerator",
            nprocs=self.nprocs,
            own_options=False,
            timeout_s=TIMEOUT_S,
            **env,
        )
        if done.returncode:
            give_up(side.name, done)
        files = folder.glob("measured.*.json")
        ranks = [Turn(**json.loads(file.read_text())) for file in files]
        loss = statistics.fmean(x.loss for x in ranks)
        if not math.isfinite(loss):
            sys.exit(f"variants.py: error: {side.name} has a loss of {loss}")
        return Turn(
            ranks[0].weights,
            loss,
            max(x.seconds for x in ranks),
            statistics.fmean(x.sent_bytes for x in ranks),
            max(x.peak_bytes for x in ranks),
        )


def give_up(name, done):
    """End as a script has ended: with its one line, or with all that it has printed."""
    output = done.stdout + done.stderr
    bad_input = re.search(r"^\S+\.py: error: (.*)", output, re.M)
    if bad_input:
        utils.fail(f"{name}: {bad_input[1]}")
    sys.exit(f"{output}\nvariants.py: error: {name} has failed: see above")


def compare(name, folder, networks, device, args):
    """Print how a variant compares with its parent: the same steps on both sides."""
    edge = Edge(name, folder, networks, device, args)
    together = args.batch_size * (args.nprocs if name in launch.DISTRIBUTED else 1)
    options = tuple(launch.options_of(name))
    sides = [
        Side(rung, launch.batch_size(rung, together, args.nprocs), its)
        for rung, its in ((edge.parent, ()), (name, options))
    ]
    turns = edge.take_turns(sides, together * args.steps, memory=True)
    print(" ".join([name, *options]), f"beside {edge.parent}")
    if edge.own_task:
        print(f"both have the task of {name}")
    parent, variant = turns[-1]
    print(
        f"{variant.weights:,} weights; loss {parent.loss:.6f} of the parent,"
        f" {variant.loss:.6f} of the variant"
    )
    print_table(
        turns,
        ("steps/s", ",.1f", lambda turn: args.steps / turn.seconds),
        ("MB sent in a step", ",.3f", lambda turn: turn.sent_bytes / args.steps / 1e6),
        ("peak MB", ",.1f", lambda turn: turn.peak_bytes / 1e6),
    )


def compare_slow(name, folder, networks, args):
    """Print how a variant that accumulates compares on a slow network.

    Both sides train the same samples in the same micro-batches. The parent makes a step
    of each, and the variant one of ACCUMULATE together.
    """
    edge = Edge(name, folder, networks, "cpu", args)
    options = ("--accumulate", str(ACCUMULATE))
    sides = [
        Side(edge.parent, args.micro_batch),
        Side(name, args.micro_batch * ACCUMULATE, options),
    ]
    samples = args.micro_batch * ACCUMULATE * args.nprocs
    turns = edge.take_turns(sides, samples, memory=False)
    print(" ".join([name, *options]), f"beside {edge.parent}")
    print(
        f"{args.nprocs} hosts with a rank each, {args.mbit} Mbit/s each way;"
        f" micro-batches of {args.micro_batch} samples"
    )
    per_rank = samples / args.nprocs

    def on_the_wire(turn):
        return turn.sent_bytes * 8 / (args.mbit * 1e6) / turn.seconds

    print_table(
        turns,
        ("samples/s", ",.1f", lambda turn: samples / turn.seconds),
        ("kB sent per sample", ",.3f", lambda turn: turn.sent_bytes / per_rank / 1e3),
        ("time on the wire", ".1%", on_the_wire),
    )


def print_table(turns, *columns):
    """columns: (heading, format of a number, function that makes it of a Turn)."""
    rows = {"": [], "parent": [], "variant": [], "ratio": []}
    for heading, form, number in columns:
        parent, variant = (
            [number(x) for x in side] for side in zip(*turns, strict=True)
        )
        pairs = zip(parent, variant, strict=True)
        ratios = [b / a if a else math.nan for a, b in pairs]
        rows[""].append(heading)
        rows["parent"].append(cell(parent, form))
        rows["variant"].append(cell(variant, form))
        rows["ratio"].append(cell(ratios, ".3f"))
    for name, cells in rows.items():
        print(f"{name:7}" + "".join(f"{text:>29}" for text in cells))
    print(flush=True)


def cell(values, form):
    return report.spread(values, form) if all(map(math.isfinite, values)) else "-"


def main(args):
    device = utils.device_type(args.device)
    names = [args.name] if args.name else variants()
    slow = [name for name in names if "--accumulate" in launch.options_of(name)]
    reason = why_no_networks(device)
    report.print_setting("torch")
    print(
        f"plan      {args.rounds} rounds; in each, both sides make {args.steps} steps"
        f" after {args.steps} to warm up,"
        f"\n          {args.batch_size} samples in a step of each process,"
        f" {args.nprocs} processes on {device}"
    )
    if reason:
        print(f"sent      what DDP gives to its all-reduces: {reason}")
    else:
        print("sent      all bytes that leave a rank, counted by the network card")
    if device == "cpu":
        print("peak      of a rank's resident memory, less that before it had a model")
    else:
        print("peak      of what torch had allocated on a rank's device")
    print("\nmedian (lower .. upper quartile) of the rounds\n", flush=True)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.callback(end_all)
        found = []
        if not reason:
            found = stack.enter_context(Hosts(args.nprocs if slow else 1, folder))
        networks = [f"/proc/{host.pid}/ns/net" for host in found]
        for number, name in enumerate(names):
            compare(name, folder / str(number), networks[:1], device, args)
        for host in found:
            host.slow(f"{args.mbit}mbit")
        for name in slow:
            if reason:
                print(f"{name} was not measured on a slow network: {reason}")
            else:
                compare_slow(name, folder / "slow", networks, args)


if __name__ == "__main__":
    arguments = parse_args()
    try:
        main(arguments)
    except TimedOut as error:
        sys.exit(f"variants.py: error: {str(error).splitlines()[0]}")
