"""What each change from GPT-2 to the model of 2026 buys, measured on a small model.

    python -m benchmarks.ablation              print the table of ablation.csv
    python -m benchmarks.ablation --measure    measure anew, for half an hour, before

A change is what one heading of docs/modern_gpt.md explains. Each is put into model.py
alone ("one in") and taken out of modern.py alone ("one out"). Five seeds of each are
trained as long as model.py: for as many tokens, and for as much time.
"""

import csv
import functools
import statistics
import time
import types
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import report
from mingpt import data, options, train
from mingpt.strategy import Strategy
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
SIZE = {"n_layer": 4, "n_head": 4, "n_embd": 64, "block_size": 64}
BATCH = 12
STEPS = 300  # about half a pass over the text
OPTIONS = ["--device=cpu", "--precision=fp32", "--compile=off", f"--batch-size={BATCH}"]
SEEDS = range(5)
# The learning rate is chosen with another seed, for each end with each optimizer.
RATES = (0.00125, 0.0025, 0.005, 0.01, 0.02, 0.04)
RATE_SEED = 100
ROUNDS = 100  # in which each variant makes one step, to time it
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


def tuned(variant):
    """The variant whose learning rate this one takes: the same end and optimizer."""
    if variant.endswith("Muon"):
        return variant
    if variant.startswith(("one out", "modern")):
        return "modern.py"
    return "model.py"


class Training(train.Trainer):
    """mingpt's Trainer for a variant, in one process. It prints and saves nothing."""

    def __init__(self, variant, corpus, seed, lr, steps):
        words = [f"--seed={seed}", f"--lr={lr}", f"--steps={steps}"]
        words += [f"--eval-every={steps}", *OPTIONS]
        args = options.make_parser(__doc__).parse_args(words)
        configuration = options.resolve(args)
        torch.manual_seed(seed)
        module = load(variant)
        model = module.GPT(module.GPTConfig(vocab_size=corpus.vocab_size, **SIZE))
        # The same batches for each variant, so that runs of one seed are pairs.
        train_data, eval_data = train.load_batches(
            configuration, corpus, SIZE["block_size"], replica_size=1
        )
        super().__init__(
            configuration=configuration,
            corpus=corpus,
            model=model,
            optimizer=module.make_optimizer(model, lr, configuration.weight_decay),
            strategy=Strategy(),
            train_data=train_data,
            eval_data=eval_data,
        )

    def _load_snapshot(self):
        pass

    def _print(self, text):
        pass


def step_of(variant, corpus):
    """The function that makes a step alone. It returns its seconds on the processor."""
    training = Training(variant, corpus, seed=0, lr=1e-3, steps=2 * ROUNDS)
    batches = iter(training.train_data)

    def step():
        batch = next(batches)
        start = time.thread_time()
        training._run_batch(*batch)
        training.steps_run += 1
        return time.thread_time() - start

    return step


def measure():
    """Make all runs, one after the other, and write them to RESULTS."""
    torch.set_num_threads(1)
    train.ddp_setup(torch.device("cpu"))
    corpus = data.prepare()
    runs = []

    def add(kind, variant, *how):
        training = Training(variant, corpus, *how)
        training._run_steps()
        runs.append(Run(kind, variant, *how, training._evaluate()["val loss"]))
        print(runs[-1], flush=True)

    for variant in dict.fromkeys(map(tuned, variants())):
        for lr in RATES:
            add("rate", variant, RATE_SEED, lr, STEPS)
    steps = {variant: step_of(variant, corpus) for variant in variants()}
    turns = report.take_turns(steps, ROUNDS, warm_up=5)
    seconds = {variant: statistics.median(turns[variant]) for variant in turns}
    for variant in variants():
        lr = best_rate(runs, variant)
        as_long = round(STEPS * seconds["model.py"] / seconds[variant])
        for seed in SEEDS:
            add("tokens", variant, seed, lr, STEPS)
            add("time", variant, seed, lr, as_long)
    with RESULTS.open("w") as file:
        file.writelines(f"# {line}\n" for line in report.setting("torch"))
        csv.writer(file, lineterminator="\n").writerows([Run._fields, *runs])


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
    """The learning rate with the lowest loss of the variant `tuned`."""
    tried = select(runs, "rate", tuned(variant))
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
plan      {SIZE["n_layer"]} layers, {SIZE["n_head"]} heads, {SIZE["n_embd"]} wide,\
 {SIZE["block_size"]} tokens, batch {BATCH},
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
    print(f"\nat equal tokens: {STEPS} steps of {BATCH * SIZE['block_size']} tokens")
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
    parser = report.make_parser(__doc__)
    parser.add_argument("--measure", action="store_true", help="measure anew")
    if parser.parse_args().measure:
        measure()
    print_table(*read())
