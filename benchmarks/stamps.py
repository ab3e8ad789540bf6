"""Note when things happen in a process, for benchmarks.startup and benchmarks.gpt.

It is copied beside the script to be measured, which imports it before all else. Each
line of the file `stamps` there is: process id, seconds since boot, what happened. That
clock is one and the same for all processes of a machine.
"""

import importlib.machinery
import os
import sys
import time

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "stamps")
IMPORTS = ("torch", "torch._dynamo")  # those that are stamped


def stamp(what):
    with open(PATH, "a") as file:
        file.write(f"{os.getpid()} {time.monotonic()} {what}\n")


class StampingFinder:
    """Finds modules as Python does; stamps when one of IMPORTS begins and ends."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in IMPORTS:
            return None  # the next finder's turn
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        exec_module = spec.loader.exec_module

        def stamped(module):
            stamp(f"begin {name}")
            exec_module(module)
            stamp(f"end {name}")

        spec.loader.exec_module = stamped
        return spec


def stamp_calls(module, name):
    """Have it stamped when the function `name` of `module` begins and ends."""
    function = getattr(module, name)

    def stamped(*arguments, **options):
        stamp(f"begin {name}")
        value = function(*arguments, **options)
        stamp(f"end {name}")
        return value

    setattr(module, name, stamped)


def end_after(kind, name):
    """Have the first call of the method `name` of a class stamped; then end."""
    method = getattr(kind, name)

    def last(*arguments):
        method(*arguments)
        stamp(f"end {name}")
        os._exit(0)

    setattr(kind, name, last)


def stamp_first_step(trainer_class):
    """Have the first training step of `trainer_class` stamped when it is done."""
    run_batch = trainer_class._run_batch

    def first_run_batch(self, source, targets):
        loss = run_batch(self, source, targets)
        loss.item()  # waits for an accelerator, should the step run on one
        stamp("done")
        trainer_class._run_batch = run_batch
        return loss

    trainer_class._run_batch = first_run_batch


stamp("begin process")
sys.meta_path.insert(0, StampingFinder)
