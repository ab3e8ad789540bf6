"""Make something take longer, or do not wait for it so long."""

import os
import time
from datetime import timedelta

import torch.distributed as dist

from . import replace


def after(seconds):
    def slowly(inner, *arguments):
        time.sleep(seconds)
        return inner(*arguments)

    return slowly


def slow_steps(script):
    """Each step takes STEP_S seconds longer."""
    replace(script["Trainer"], "_run_batch", after(float(os.environ["STEP_S"])))


def slow_save(script):
    """Each snapshot takes 4 s longer to write."""
    replace(script["utils"], "save_atomically", after(4))


def quick_stores(_):
    """Wait 10 s for a store that nobody hosts, and not five minutes."""

    def quickly(store, *arguments, **options):
        return store(*arguments, **options | {"timeout": timedelta(seconds=10)})

    replace(dist, "TCPStore", quickly)
