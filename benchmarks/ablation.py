"""What each change from GPT-2 to the model of 2026 buys, measured on a small model.

    python -m benchmarks.ablation    print the table of ablation.csv

A change is what one heading of docs/modern_gpt.md explains. Each is put into model.py
alone ("one in") and taken out of modern.py alone ("one out"). Five seeds of each were
trained as long as model.py: for as many tokens, and for as much time.
"""

import csv
import functools
import statistics
import types
from pathlib import Path
from typing import NamedTuple

from tools.diffs import hunks
from tools.scripts import read_lines
from tools.site import pages

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
WIDTH = 64
BLOCK = 64
BATCH = 12
STEPS = 300  # about half a pass over the text
SEEDS = range(5)
# The learning rate was chosen with another seed, for each end with each optimizer.
RATES = (0.00125, 0.0025, 0.005, 0.01, 0.02, 0.04)
# Student's t for 5 seeds: beyond it, a difference comes by chance 1 time in 100.
CLEAR = 4.604
RESULTS = Path(__file__).with_suffix(".csv")


class Run(NamedTuple):
    kind: str  # "rate", to choose the learning rate, or at equal "tokens" or "time"
    variant: str
    seed: int
    lr: float
    steps: int
    loss: float


def model_with(numbers):
    """The text of model.py with some hunks of the diff to modern.py in it."""
    before = read_lines(OLD)
    lines = []
    done = 0
    for hunk in hunks(OLD, NEW):
        lines += before[done : hunk.old_start - 1]
        lines += hunk.added if hunk.number in numbers else hunk.removed
        done = hunk.old_end - 1
    return "\n".join([*lines, *before[done:]]) + "\n"


@functools.cache
def variants():
    """{variant: the text of its module}: both ends, one in, one out."""
    explained = pages.explanations([pages.parse("docs/modern_gpt.md")])[OLD, NEW]
    everything = {hunk.number for hunk in hunks(OLD, NEW)}
    found = {}
    found["model.py"] = model_with(set())
    found["modern.py"] = model_with(everything)
    for heading, change in CHANGES.items():
        its = {number for number, place in explained.items() if place[1] == heading}
        assert its, f"no hunk stands under {heading!r}"
        found[f"one in: {change}"] = model_with(its)
        found[f"one out: {change}"] = model_with(everything - its)
    return found


def load(variant):
    """The module of a variant."""
    module = types.ModuleType(variant)
    exec(compile(variants()[variant], variant, "exec"), module.__dict__)
    return module


def read():
    """(the lines about the machine, all runs) of RESULTS."""
    machine, versions, _, *rows = RESULTS.read_text().splitlines()
    runs = []
    for kind, variant, seed, lr, steps, loss in csv.reader(rows):
        run = Run(kind, variant, int(seed), float(lr), int(steps), float(loss))
        runs.append(run)
    return [machine.removeprefix("# "), versions.removeprefix("# ")], runs


def select(runs, kind, variant):
    return [run for run in runs if run.kind == kind and run.variant == variant]


def best_rate(runs, variant):
    """The learning rate with the lowest loss."""
    tried = select(runs, "rate", variant)
    return min(tried, key=lambda run: run.loss).lr


def difference(runs, others):
    """The mean over seeds of loss - other's, its standard error, and a verdict."""
    apart = [run.loss - other.loss for run, other in zip(runs, others, strict=True)]
    mean = statistics.mean(apart)
    error = statistics.stdev(apart) / len(apart) ** 0.5
    verdict = "unclear"
    if abs(mean) > CLEAR * error:
        verdict = "better" if mean < 0 else "worse"
    return f"{mean:+.4f} ± {error:.4f} {verdict}"


def print_table(setting, runs):
    print("command   python -m benchmarks.ablation", *setting, sep="\n")
    print(
        f"""\
plan      4 layers, 4 heads, {WIDTH} wide, {BLOCK} tokens, batch {BATCH},
          characters of python-docs, float32, one thread
loss      on the whole validation text, in nats for a character:
          mean of {len(SEEDS)} seeds (standard deviation)
compared  mean difference of the runs with equal seeds ± standard error;
          unclear if chance makes such a difference 1 time in 100 or more
lr        the best of {", ".join(map(str, RATES))} for another seed:
          {best_rate(runs, "model.py")} AdamW,\
 {best_rate(runs, "one in: Muon")} Muon in model.py
          {best_rate(runs, "one out: Muon")} AdamW,\
 {best_rate(runs, "modern.py")} Muon in modern.py"""
    )
    print(f"\nat equal tokens: {STEPS} steps of {BATCH * BLOCK} tokens")
    print_half(runs, "tokens")
    print(f"\nat equal time: the steps that fit into the time of {STEPS}")
    print_half(runs, "time")


def print_half(runs, kind):
    print(f"{'':26}{'steps':>6}  {'loss':16} compared with")
    for end, place in (("model.py", "one in"), ("modern.py", "one out")):
        names = [f"{place}: {change}" for change in CHANGES.values()]
        for name in [end, *names]:
            found = select(runs, kind, name)
            losses = [run.loss for run in found]
            mean = statistics.mean(losses)
            line = f"{name:26}{found[0].steps:6}"
            line += f"  {mean:.4f} ({statistics.stdev(losses):.4f})"
            if name != "model.py":
                other = end if name != end else "model.py"
                against = difference(found, select(runs, kind, other))
                line += f"  {other:9} {against}"
            print(line)


if __name__ == "__main__":
    print_table(*read())
