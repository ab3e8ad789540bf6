"""Run mingpt.train on a small text, disturb it, and read what it has left."""

import csv
import dataclasses
import gc
import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.helpers.checks import assert_same_snapshot
from tests.hooks import replace, write
from tests.hooks.faults import in_step
from tools.run.launch import torchrun_words
from tools.run.processes import Program
from tools.run.results import load, weights
from tools.scripts import ROOT

TINY = "--n-layer 2 --n-head 2 --n-embd 32 --block-size 16 --batch-size 8"
TINY += " --compile off --precision fp32"
GPT = f"-m mingpt.train --data {ROOT}/LICENSE {TINY}"
# Each of two ranks then takes 4 blocks in a step, which are 8 together.
SHARE_OF_TWO = "--batch-size 2 --accumulate 2"

# A text that is easily cut wrongly: CRLF, a BOM, tabs, blank lines, 1 to 4 bytes.
TRICKY = (
    "\ufeffFirst line, it's 12345 one_two\r\n\r\n\tBär  \n\n 中文字。\n\u3000\u3000"
    "中文 字 x.\n/path\n    def f(x):\n        return 'a' \n🙂 \0 e\u0301\n"
)


def gpt(folder, options, nprocs=None, status=0, real=False, hooks=(), **env):
    """Run mingpt.train on a small text, all of it ASCII: Done.

    options: as typed, besides TINY's. nprocs: the processes that torchrun starts; None
    if python starts it. status: how it must end. real, hooks, env: those of `start`.
    """
    start = torchrun_words(nprocs) if nprocs else ["python"]
    words = [*start, *f"{GPT} {options}".split()]
    env = {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1} | env
    if not real:
        hooks = [compile_without_a_pool, *hooks]
    return Program(words, folder, real, hooks=hooks, **env).end_with(status)


def sample(folder, options, status=0):
    """Run mingpt.sample: Done. options: as typed."""
    words = f"python -m mingpt.sample {options}".split()
    return Program(words, folder, PYTHONPATH=ROOT).end_with(status)


def long_run(folder, options, hooks=(), **how):
    """`gpt` for 8 steps in float64 with clipped gradients, and with `note_at_end`."""
    options = f"--steps 8 --eval-every 4 --clip 0.5 --block-size 18 {options}"
    return gpt(
        folder, options, hooks=[float64_and_other_weights, note_at_end, *hooks], **how
    )


# Read and compare the files that a run has left


def snapshot(folder):
    return load(folder / "mingpt.pt")


def steps_run(folder):
    return snapshot(folder)["STEPS_RUN"]


def metrics(folder, name="mingpt.metrics.csv"):
    rows = csv.DictReader((folder / name).read_text().splitlines())
    return [{name: float(value) for name, value in row.items()} for row in rows]


def check_runs(one, other, *losses):
    """Two runs in float64 end with the same weights, and have the same losses.

    one, other: their folders. losses: the names of columns.
    """
    both = [weights(folder / "mingpt.pt") for folder in (one, other)]
    torch.testing.assert_close(*both, rtol=0, atol=1e-12)
    rows = [metrics(folder) for folder in (one, other)]
    for row, other_row in zip(*rows, strict=True):
        for name in losses:  # which are summed in float32
            assert row[name] == pytest.approx(other_row[name], rel=1e-6)


def check_resumes(folder, options, disturb, status, resumes_at, run=gpt, **how):
    """A run that was ended resumes, and ends with the bits of one that was not.

    Returns the Done of the resumed run. disturb: the hook that ends the run before it.
    status: the exit status of that run.
    """
    whole = folder / "whole"
    stopped = folder / "stopped"
    run(whole, options, **how)
    run(stopped, options, status=status, hooks=[disturb], **how)
    assert steps_run(stopped) == resumes_at
    done = run(stopped, options, **how)
    assert f"{resumes_at} of {steps_run(whole)} steps are finished in" in done.stdout
    assert_same_snapshot(stopped / "mingpt.pt", whole / "mingpt.pt")
    return done


# Hooks


def compile_without_a_pool(_):
    """Compile in this process, because a pool of processes does not survive a fork."""
    torch._inductor.config.compile_threads = 1


def at_step(number, befall, rank=0, ask_every=10):
    """The hook that calls `befall(trainer)` on one rank, before a step.

    The first step of this process is number 1. Every `ask_every` steps, the ranks ask
    each other whether one of them has got SIGTERM.
    """

    def befall_one(trainer):
        if dist.get_rank() == rank:
            befall(trainer)

    def hook(script):
        script["Trainer"].ask_every = ask_every
        in_step(script, number, befall_one)

    return hook


def get_sigterm(_):
    signal.raise_signal(signal.SIGTERM)


def float64_and_other_weights(script):
    """Train in float64, where sums in any order agree to the last digits.

    Each rank draws other weights.
    """

    def load_train_objs(inner, configuration):
        rank = int(os.environ.get("RANK", 0))
        corpus, model = inner(dataclasses.replace(configuration, seed=rank))
        return corpus, model.double()

    replace(script, "load_train_objs", load_train_objs)


def note_at_end(script):
    """held.RANK.json: the bytes that a rank's tensors take after training.

    seed.RANK.json: what the dropout of its last step was drawn from.
    """

    def train(inner, self):
        inner(self)
        held = {}
        gc.collect()
        for tensor in gc.get_objects():
            if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                storage = tensor.untyped_storage()
                held[storage.data_ptr()] = storage.nbytes()
        write("held", sum(held.values()))
        write("seed", torch.initial_seed())

    replace(script["Trainer"], "train", train)
