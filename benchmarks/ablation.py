"""What each change from GPT-2 to the model of 2026 buys, measured on a small model.

    python -m benchmarks.ablation              print the table of ablation.csv
    python -m benchmarks.ablation --measure    measure anew, for half an hour, before

A change is what one heading of docs/modern_gpt.md explains. Each is put into model.py
alone ("one in") and taken out of modern.py alone ("one out"). Five seeds of each are
trained as long as model.py: for as many tokens, and for as much time.
"""

import csv
import multiprocessing
import statistics
import time
import types
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks import report
from mingpt import batches, data, options, train
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
WEIGHT_DECAY = 0.1  # as all else, mingpt.train's default
OPTIONS = ["--device=cpu", "--precision=fp32", "--compile=off"]
SEEDS = range(5)
# The learning rate is chosen with another seed, for each end with each optimizer.
RATES = (0.00125, 0.0025, 0.005, 0.01, 0.02, 0.04)
RATE_SEED = 100
ROUNDS = 100  # in which each variant makes one step, to time it
# Student's t for 5 seeds: beyond it, a difference comes by chance 1 time in 100.
CLEAR = 4.604
RESULTS = Path(__file__).with_suffix(".csv")


class Run(NamedTuple):
    variant: str
    seed: int
    lr: float
    steps: int


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


def load(name, text):
    """The module of a variant."""
    module = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
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

    def __init__(self, text, run, corpus):
        device = torch.device("cpu")
        block = SIZE["block_size"]
        torch.set_num_threads(1)
        if not dist.is_initialized():
            train.ddp_setup(device)
        torch.manual_seed(run.seed)
        module = load(run.variant, text)
        model = module.GPT(module.GPTConfig(vocab_size=corpus.vocab_size, **SIZE))
        optimizer = module.make_optimizer(model, run.lr, WEIGHT_DECAY)
        # The same batches for each variant, so that runs of one seed are pairs.
        sampler = batches.StepSampler(len(corpus.train), block, BATCH, run.seed)
        windows = batches.eval_starts(len(corpus.val), block, 64)
        prepare = train.prepare_dataloader
        words = [*OPTIONS, f"--steps={run.steps}", f"--eval-every={run.steps}"]
        args = options.make_parser(__doc__).parse_args(words)
        super().__init__(
            configuration=options.resolve(args),
            corpus=corpus,
            model=model,
            optimizer=optimizer,
            strategy=Strategy(),
            train_data=prepare(corpus.train, block, BATCH, sampler, device),
            eval_data=prepare(corpus.val, block, 64, windows, device),
        )
        self.batches = iter(self.train_data)

    def _load_snapshot(self):
        pass

    def _print(self, text):
        pass

    def step(self):
        """Make a step alone. Returns its seconds on the processor."""
        batch = next(self.batches)
        start = time.thread_time()
        self._run_batch(*batch)
        self.steps_run += 1
        return time.thread_time() - start


def measure(text, run):
    """Train a variant. Returns its validation loss."""
    training = Training(text, run, data.prepare())
    training._run_steps()
    return training._evaluate()["val loss"]


def step_times(texts):
    """{variant: median seconds of a step}. In each round, each makes one step."""
    corpus = data.prepare()
    steps = {}
    for variant, text in texts.items():
        run = Run(variant, seed=0, lr=1e-3, steps=2 * ROUNDS)
        steps[variant] = Training(text, run, corpus).step
    turns = report.take_turns(steps, ROUNDS, warm_up=5)
    return {variant: statistics.median(seconds) for variant, seconds in turns.items()}


class Results:
    """{Run: its loss}, {variant: seconds of a step}, and on what they were measured."""

    def __init__(self):
        self.loss = {}
        self.step_seconds = {}
        self.setting = report.setting("torch")

    def read(self):
        lines = RESULTS.read_text().splitlines()
        comments = [line for line in lines if line.startswith("# ")]
        self.setting = [line.removeprefix("# ") for line in comments]
        rows = lines[len(comments) + 1 :]  # below the names of the columns
        for variant, seed, lr, steps, loss, seconds in csv.reader(rows):
            if seed:
                run = Run(variant, int(seed), float(lr), int(steps))
                self.loss[run] = float(loss)
            else:
                self.step_seconds[variant] = float(seconds)

    def write(self):
        rows = [(*run, f"{loss:.6f}", "") for run, loss in self.loss.items()]
        for variant, seconds in self.step_seconds.items():
            rows.append((variant, "", "", ROUNDS, "", f"{seconds:.6f}"))
        with RESULTS.open("w") as file:
            file.writelines(f"# {line}\n" for line in self.setting)
            file.write("variant,seed,lr,steps,loss,seconds\n")
            csv.writer(file, lineterminator="\n").writerows(rows)

    def rate(self, variant):
        """The learning rate with the lowest loss of the variant `tuned`."""
        best = min(self.plan("rate", [variant]), key=lambda run: self.loss[run])
        return best.lr

    def steps(self, kind, variant):
        """The steps of a run: as many as STEPS of model.py take, if time is equal."""
        if kind != "time":
            return STEPS
        seconds = self.step_seconds
        return round(STEPS * (seconds["model.py"] / seconds[variant]))

    def plan(self, kind, names):
        """The runs that choose the "rate", or those at equal "tokens" or "time"."""
        if kind == "rate":
            ends = dict.fromkeys(map(tuned, names))
            return [Run(end, RATE_SEED, lr, STEPS) for end in ends for lr in RATES]
        how = {name: (self.rate(name), self.steps(kind, name)) for name in names}
        return [Run(name, seed, *how[name]) for seed in SEEDS for name in names]

    def losses(self, kind, name):
        return [self.loss[run] for run in self.plan(kind, [name])]


def fill(results, kind, texts):
    """Make the runs of a kind, but for those that another kind has, too."""
    todo = [run for run in results.plan(kind, texts) if run not in results.loss]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(mp_context=context) as pool:
        waiting = {pool.submit(measure, texts[run.variant], run): run for run in todo}
        for number, future in enumerate(as_completed(waiting), 1):
            run = waiting[future]
            results.loss[run] = future.result()
            print(f"{number}/{len(todo)} {kind}: {run}", flush=True)


def difference(values, others):
    """The mean over seeds of value - other, its standard error, and a verdict."""
    apart = [value - other for value, other in zip(values, others, strict=True)]
    mean = statistics.mean(apart)
    error = statistics.stdev(apart) / len(apart) ** 0.5
    verdict = "unclear"
    if abs(mean) > CLEAR * error:
        verdict = "better" if mean < 0 else "worse"
    return f"{mean:+.4f} ± {error:.4f} {verdict}"


def print_table(results):
    rate = results.rate
    layers = SIZE["n_layer"]
    heads = SIZE["n_head"]
    width = SIZE["n_embd"]
    block = SIZE["block_size"]
    print("command   python -m benchmarks.ablation", *results.setting, sep="\n")
    print(
        f"""\
plan      {layers} layers, {heads} heads, {width} wide, {block} tokens, batch {BATCH},
          characters of python-docs, float32, one thread
loss      on the whole validation text, in nats for a character:
          mean of {len(SEEDS)} seeds (standard deviation)
compared  mean difference of the runs with equal seeds ± standard error;
          unclear if chance makes such a difference 1 time in 100 or more
lr        the best of {", ".join(map(str, RATES))} for another seed:
          {rate("model.py")} AdamW, {rate("one in: Muon")} Muon in model.py
          {rate("one out: Muon")} AdamW, {rate("modern.py")} Muon in modern.py"""
    )
    print(f"\nat equal tokens: {STEPS} steps of {BATCH * block} tokens")
    print_half(results, "tokens")
    print(f"\nat equal time: the steps that fit into the time of {STEPS}")
    print_half(results, "time")


def print_half(results, kind):
    print(f"{'':26}{'steps':>6}  {'loss':16} compared with")
    for end, place in (("model.py", "one in"), ("modern.py", "one out")):
        names = [f"{place}: {change}" for change in CHANGES.values()]
        for name in [end, *names]:
            losses = results.losses(kind, name)
            mean = statistics.mean(losses)
            deviation = statistics.stdev(losses)
            line = f"{name:26}{results.steps(kind, name):6}"
            line += f"  {mean:.4f} ({deviation:.4f})"
            if name != "model.py":
                other = end if name != end else "model.py"
                against = results.losses(kind, other)
                line += f"  {other:9} {difference(losses, against)}"
            print(line)


def main(args):
    results = Results()
    if args.measure:
        texts = variants()
        fill(results, "rate", texts)
        fill(results, "tokens", texts)
        results.step_seconds = step_times(texts)
        fill(results, "time", texts)
        results.write()
    else:
        results.read()
    print_table(results)


if __name__ == "__main__":
    parser = report.make_parser(__doc__)
    parser.add_argument("--measure", action="store_true", help="measure anew")
    main(parser.parse_args())
