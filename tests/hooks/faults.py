"""Disturb a script at an exact place."""

import functools
import glob
import os
import signal
import time

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from . import replace


def in_step(script, number, befall):
    """Call `befall(trainer)` before a step, the first of them being number 1."""
    steps = []

    def step(inner, self, *arguments):
        steps.append(1)
        if len(steps) == number:
            befall(self)
        return inner(self, *arguments)

    replace(script["Trainer"], "_run_batch", step)


def record_in_one_piece():
    """`@record` writes a worker's error file in one piece.

    Otherwise torchrun can end instead of restarting: torchrun's SIGTERM comes before a
    worker that raises has written error.json, which cannot be parsed then (torch 2.10
    to 2.13, `ProcessFailure.__post_init__`).
    """

    def in_one_piece(record_exception, handler, error):
        file = os.environ["TORCHELASTIC_ERROR_FILE"]
        os.environ["TORCHELASTIC_ERROR_FILE"] = f"{file}.tmp"
        record_exception(handler, error)
        os.replace(f"{file}.tmp", file)

    replace(ErrorHandler, "record_exception", in_one_piece)


def in_step_80(befall):
    """The hook that calls `befall(trainer)` on the last rank, in step 80.

    That is in the third epoch of five.
    """

    def befall_last(trainer):
        if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
            befall(trainer)

    @functools.wraps(befall)  # `copy_script` finds it by its name
    def hook(script):
        record_in_one_piece()
        in_step(script, 80, befall_last)

    return hook


@in_step_80
def kill_in_step_80(trainer):
    """SIGKILL comes once the snapshot is there, which a thread may still be writing."""
    assert trainer.epochs_run >= trainer.save_every, "no snapshot by step 80"
    while not glob.glob("snapshot.pt") + glob.glob("snapshot.pt.*/.metadata"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


@in_step_80
def raise_error_in_step_80(_):
    raise ValueError("planted")


@in_step_80
def sigterm_in_step_80(_):
    os.kill(os.getpid(), signal.SIGTERM)


@in_step_80
def sigterm_to_launcher_in_step_80(trainer):
    """preemptible.py waits until the launcher has passed the signal on."""
    os.kill(os.getppid(), signal.SIGTERM)
    wait_for_signal(trainer)


def wait_in_step_80(script):
    """In the first run of preemptible.py by Slurm, all ranks wait for SIGTERM there."""

    def befall(trainer):
        if "SLURM_RESTART_COUNT" not in os.environ:
            print("in step 80", flush=True)
            wait_for_signal(trainer)

    in_step(script, 80, befall)


def wait_for_signal(trainer):
    while not trainer.sigterm:
        time.sleep(0.01)


def killed_attempts(script):
    """Rank 1 of two ends itself inside its second epoch, in the first KILLS attempts.

    In each attempt it prints the port of the store that the attempt uses.
    """

    def befall(_):
        if dist.get_rank() == 1:
            attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            port = os.environ["MASTER_PORT"]
            print(f"attempt {attempt} has port {port}", flush=True)
            if attempt < int(os.environ["KILLS"]):
                os.kill(os.getpid(), signal.SIGKILL)

    record_in_one_piece()
    in_step(script, 40, befall)
