"""What each change from GPT-2 to the model of 2026 buys, measured on a small model.

    python -m benchmarks.ablation              measure what is missing, print the table
    python -m benchmarks.ablation --table      only print the table
    python -m benchmarks.ablation --steptime   measure the step times again, and then
                                               what is missing

A change is what one heading of docs/modern_gpt.md explains of the diff from
mingpt/model.py to mingpt/modern.py. Each is put into mingpt/model.py alone ("one in")
and taken out of mingpt/modern.py alone ("one out"). Each variant is trained with five
seeds, and its loss on the whole validation text is measured after as many tokens as
mingpt/model.py gets, and after as many as it trains in the time of mingpt/model.py.

Each run is a line in a CSV file, so that a run that was killed goes on where it was.
"""

import argparse
import csv
import itertools
import multiprocessing
import os
import random
import statistics
import sys
import time
import types
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import torch

import utils
from benchmarks import report
from ladder import pages
from ladder.diffs import hunks, mix
from mingpt import batches, data
from mingpt.train import lr_scale

OLD, NEW = "mingpt/model.py", "mingpt/modern.py"
CHANGES = {  # the headings of docs/modern_gpt.md that change what is computed
    "Rotate queries and keys by their position": "rotary positions",
    "Normalize with RMSNorm, without parameters": "RMSNorm",
    "Normalize queries and keys": "QK-norm",
    "Square the ReLU": "squared ReLU",
    "Start the projections at zero": "zero init",
    "Leave the biases out": "no biases",
    "Train the matrices with Muon": "Muon",
}
SIZE = {"n_layer": 4, "n_head": 4, "n_embd": 64, "block_size": 64}
BATCH = 12
STEPS = 300  # about half a pass over the text
WARMUP, WEIGHT_DECAY, CLIP = 0.05, 0.1, 1.0  # mingpt.train's defaults
SEEDS = range(5)
# The learning rate is chosen with another seed, for each end with each optimizer.
RATES = (0.00125, 0.0025, 0.005, 0.01, 0.02, 0.04)
RATE_SEED = 100
ROUNDS = 100  # in which each variant makes one step, to time it
# Student's t for 5 seeds: beyond it, a difference comes by chance 1 time in 100.
CLEAR = 4.604
RESULTS = Path(__file__).with_suffix(".csv")


class Run(NamedTuple):
    """A training run, before it is made."""

    variant: str
    seed: int
    lr: float
    steps: int


def variants():
    """{variant: the text of its module}: both ends, one in, one out."""
    explained = pages.explanations()[OLD, NEW]
    everything = {hunk.number for hunk in hunks(OLD, NEW)}
    found = {"model.py": mix(OLD, NEW, set()), "modern.py": mix(OLD, NEW, everything)}
    for heading, change in CHANGES.items():
        its = {number for number, place in explained.items() if place[1] == heading}
        assert its, f"no hunk stands under {heading!r}"
        found[f"one in: {change}"] = mix(OLD, NEW, its)
        found[f"one out: {change}"] = mix(OLD, NEW, everything - its)
    return found


def load(name, text):
    """The module of a variant."""
    module = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
    return module


def tuned(variant):
    """The variant whose learning rate this one takes: the same end and optimizer."""
    if variant.endswith("Muon"):
        return variant
    return "modern.py" if variant.startswith(("one out", "modern")) else "model.py"


class Training:
    """A variant in training. `corpus` is that of mingpt.data."""

    def __init__(self, text, run, corpus):
        torch.manual_seed(run.seed)
        module = load(run.variant, text)
        config = module.GPTConfig(vocab_size=corpus.vocab_size, **SIZE)
        self.model = module.GPT(config)
        self.optimizer = module.make_optimizer(self.model, run.lr, WEIGHT_DECAY)
        self.run, self.corpus, self.done = run, corpus, 0
        length, block_size = len(corpus.train), SIZE["block_size"]
        self.blocks = batches.Blocks(corpus.train, block_size)
        # The same batches for each variant, so that runs of one seed are pairs.
        self.sampler = batches.StepSampler(length, block_size, BATCH, run.seed)

    def step(self):
        """Make a step as mingpt.train does. Returns its seconds on the processor."""
        starts = self.sampler.starts(self.done)
        source, targets = self.blocks.__getitems__(starts)
        start = time.thread_time()
        for group in self.optimizer.param_groups:
            scale = lr_scale(self.done, self.run.steps, WARMUP)
            group["lr"] = group["initial_lr"] * scale
        self.optimizer.zero_grad()
        _, loss = self.model(source, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.done += 1
        return time.thread_time() - start

    def evaluate(self):
        """The mean loss over all of the validation text, in nats for a token."""
        self.model.eval()
        val = self.corpus.val
        blocks, total, tokens = batches.Blocks(val, SIZE["block_size"]), 0.0, 0
        starts = batches.eval_starts(len(val), SIZE["block_size"], 64)
        with torch.no_grad():
            for i in range(0, len(starts), 64):
                source, targets = blocks.__getitems__(starts[i : i + 64])
                counted = int((targets >= 0).sum())
                total += self.model(source, targets)[1].item() * counted
                tokens += counted
        return total / tokens


def prepare():
    """The corpus; in one thread from here on."""
    torch.set_num_threads(1)
    return data.prepare("python-docs")


def measure(text, run):
    """Train a variant. Returns its validation loss and its seconds of training."""
    training = Training(text, run, prepare())
    seconds = sum(training.step() for _ in range(run.steps))
    return training.evaluate(), seconds


def step_times(texts):
    """{variant: median seconds of a step}. In each round, each makes one step."""
    corpus = prepare()
    runs = {x: Run(x, 0, 1e-3, 2 * ROUNDS) for x in texts}
    trainings = [Training(texts[x], run, corpus) for x, run in runs.items()]
    seconds = {x: [] for x in texts}
    shuffle = random.Random(0).shuffle
    for number in range(ROUNDS + 5):
        shuffle(trainings)
        for training in trainings:
            taken = training.step()
            if number >= 5:  # the rounds before warm up
                seconds[training.run.variant].append(taken)
    return {x: statistics.median(taken) for x, taken in seconds.items()}


# What is measured is kept in a file


class Results:
    """The lines of the CSV file: {Run: loss}, and the seconds of a variant's step.

    A line without a seed is not about one run, but about the time of a step.
    """

    columns = ("variant", "seed", "lr", "steps", "loss", "seconds")

    def __init__(self, path):
        self.path, self.loss, self.step_seconds = Path(path), {}, {}
        self.setting = []
        if not self.path.exists():
            return
        lines = self.path.read_text().splitlines()
        self.setting = [x[2:] for x in lines if x.startswith("# ")]
        for row in csv.DictReader(x for x in lines if not x.startswith("# ")):
            self._note(row)

    def _note(self, row):
        if not row["seed"]:
            self.step_seconds[row["variant"]] = float(row["seconds"])
            return
        numbers = int(row["seed"]), float(row["lr"]), int(row["steps"])
        self.loss[Run(row["variant"], *numbers)] = float(row["loss"])

    def start(self):
        """Note machine and versions, or compare with those of the lines there."""
        here = report.setting("torch")[1:]  # without the command
        if not self.path.exists():
            with self.path.open("w") as file:
                file.writelines(f"# {x}\n" for x in here)
                csv.writer(file, lineterminator="\n").writerow(self.columns)
            self.setting = here
        elif here != self.setting:
            utils.fail(
                f"{self.path} has figures of {' '.join(self.setting)}: name another"
                " file with --results"
            )

    def add(self, **row):
        with self.path.open("a") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writerow(row)
        self._note({x: str(row.get(x, "")) for x in self.columns})

    def rate(self, variant):
        """The learning rate with the lowest loss of the variant `tuned`."""
        tried = self.plan("rate", [variant])
        if self.missing("rate", [variant]):
            utils.fail(f"{self.path} lacks runs of {variant}: leave out --table")
        return min(tried, key=lambda run: self.loss[run]).lr

    def steps_in_time(self, variant):
        """How many steps a variant makes while model.py makes STEPS."""
        seconds = self.step_seconds
        return round(STEPS * seconds["model.py"] / seconds[variant])

    def plan(self, kind, names):
        """The runs that choose the "rate", or those at equal "tokens" or "time"."""
        if kind == "rate":
            corners = dict.fromkeys(tuned(x) for x in names)
            every = itertools.product(corners, RATES)
            return [Run(x, RATE_SEED, lr, STEPS) for x, lr in every]
        steps = self.steps_in_time if kind == "time" else lambda _: STEPS
        every = itertools.product(SEEDS, names)
        return [Run(x, seed, self.rate(x), steps(x)) for seed, x in every]

    def missing(self, kind, names):
        return [run for run in self.plan(kind, names) if run not in self.loss]

    def losses(self, kind, variant):
        """A variant's losses in the order of the seeds, or None if one is missing."""
        if kind == "time" and variant not in self.step_seconds:
            return None
        runs = self.plan(kind, [variant])
        return None if self.missing(kind, [variant]) else [self.loss[x] for x in runs]


def fill(results, kind, texts, jobs):
    """Make the runs of a kind that are missing, and note each as soon as it is made."""
    todo = results.missing(kind, texts)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context) as pool:
        waiting = {pool.submit(measure, texts[x.variant], x): x for x in todo}
        for number, future in enumerate(as_completed(waiting), 1):
            run, (loss, seconds) = waiting[future], future.result()
            results.add(**run._asdict(), loss=f"{loss:.6f}", seconds=f"{seconds:.2f}")
            words = f"{run.variant}, seed {run.seed}, lr {run.lr}, {run.steps} steps"
            utils.say(f"{number}/{len(todo)} {kind}: {words}: loss {loss:.4f}")


# The table


def mean_and_sd(values):
    return f"{statistics.mean(values):.4f} ({statistics.stdev(values):.4f})"


def difference(values, others):
    """The mean over seeds of value - other, its standard error, and a verdict."""
    pairs = [x - y for x, y in zip(values, others, strict=True)]
    mean, error = statistics.mean(pairs), statistics.stdev(pairs) / len(pairs) ** 0.5
    verdict = "unclear"
    if abs(mean) > CLEAR * error:
        verdict = "better" if mean < 0 else "worse"
    return f"{mean:+.4f} ± {error:.4f} {verdict}"


def print_table(results):
    utils.say("command   python -m benchmarks.ablation")
    utils.say("\n".join(results.setting))
    size = f"{SIZE['n_layer']} layers, {SIZE['n_head']} heads, {SIZE['n_embd']} wide"
    utils.say(f"plan      {size}, {SIZE['block_size']} tokens, batch {BATCH},")
    utils.say("          characters of python-docs, float32, one thread")
    utils.say("loss      on the whole validation text, in nats for a character:")
    utils.say(f"          mean of {len(SEEDS)} seeds (standard deviation)")
    utils.say(
        "compared  mean difference of the runs with equal seeds ± standard error;"
    )
    utils.say(
        "          unclear if chance makes such a difference 1 time in 100 or more"
    )
    utils.say(f"lr        the best of {', '.join(map(str, RATES))} for another seed:")
    for name in ("model.py", "modern.py"):
        muon = "one in: Muon" if name == "model.py" else name
        adamw = "one out: Muon" if name == "modern.py" else name
        rates = f"{results.rate(adamw)} AdamW, {results.rate(muon)} Muon"
        utils.say(f"          {rates} in {name}")
    for kind in ("tokens", "time"):
        print_half(results, kind)


def print_half(results, kind):
    if kind == "tokens":
        utils.say(
            f"\nat equal tokens: {STEPS} steps of {BATCH * SIZE['block_size']} tokens"
        )
    else:
        utils.say(f"\nat equal time: the steps that fit into the time of {STEPS}")
    utils.say(f"{'':26}{'steps':>6}  {'loss':16} compared with")
    for place, end in ((0, "model.py"), (1, "modern.py")):
        base = results.losses(kind, end)
        names = [f"{('one in', 'one out')[place]}: {x}" for x in CHANGES.values()]
        for name in [end, *names]:
            losses = results.losses(kind, name)
            if not losses or not base:
                utils.say(f"{name:26}  its runs are not all made")
                continue
            steps = STEPS if kind == "tokens" else results.steps_in_time(name)
            line = f"{name:26}{steps:6}  {mean_and_sd(losses)}"
            if name != "model.py":
                other = "model.py" if place == 0 or name == end else "modern.py"
                against = results.losses(kind, other)
                line += f"  {other:9} {difference(losses, against)}"
            utils.say(line)


def parse_args():
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ablation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = utils.fail
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument(
        "--steptime", action="store_true", help="measure the step times again"
    )
    parser.add_argument(
        "--jobs", type=utils.positive_int, default=2, help="runs at a time (2)"
    )
    parser.add_argument(
        "--results", default=RESULTS, help="the CSV file (benchmarks/ablation.csv)"
    )
    return parser.parse_args()


def main():
    args = parse_args()
    results = Results(args.results)
    if not args.table:
        os.environ["OMP_NUM_THREADS"] = "1"  # of each run
        texts = variants()
        results.start()
        fill(results, "rate", texts, args.jobs)
        fill(results, "tokens", texts, args.jobs)
        if args.steptime or set(results.step_seconds) != set(texts):
            for variant, seconds in step_times(texts).items():
                steps, taken = ROUNDS, f"{seconds:.6f}"
                results.add(variant=variant, steps=steps, seconds=taken)
        fill(results, "time", texts, args.jobs)
    print_table(results)


if __name__ == "__main__":
    sys.exit(main())
