"""Hooks: what tests put into a copy of a rung, to watch it or to make it fail.

A hook is a module of this folder. `proofs.launch.plant(name, folder, hooks=["probe"])`
copies the folder beside the copied rung and attaches the hook just before the rung's
`if __name__ == "__main__":`, in every process. A hook may have

- a class `Trainer`, which is put in front of the rung's: it overrides `__init__`,
  `train()`, `_run_epoch(epoch)`, `_run_batch(source, targets)`, `_evaluate()`,
  `_save_snapshot()` or `_load_snapshot()`, and calls the rung's by `super()`;
- functions `around_NAME(inner, *arguments)`: each is called instead of the rung's
  function NAME (`load_train_objs`, `main`, ...), which it gets as `inner`.

Those are the names of the rung contract, so that a hook fits any rung. For what stands
in `utils` or in torch a hook calls `replace`. Settings come from the environment.
"""

import functools
import importlib
import os
import time
from pathlib import Path


def attach(rung, *names):
    """Attach hooks to a rung. rung: the globals of its script."""
    for name in names:
        hook = importlib.import_module(f"hooks.{name}")
        if hasattr(hook, "Trainer"):
            bases = (hook.Trainer, rung["Trainer"])
            rung["Trainer"] = type("Trainer", bases, {"__module__": rung["__name__"]})
        for key, around in list(vars(hook).items()):
            if key.startswith("around_"):
                function = key.removeprefix("around_")
                rung[function] = surround(rung[function], around)


def replace(owner, name, around):
    """`owner.NAME(...)` calls `around(inner, ...)`; owner: a module or a class."""
    setattr(owner, name, surround(getattr(owner, name), around))


def surround(inner, around):
    @functools.wraps(inner)  # spawned processes look a function up by its name
    def surrounded(*arguments, **options):
        return around(inner, *arguments, **options)

    return surrounded


def rank():
    """This process' rank, or 0 where there is no process group."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def began(pid):
    """When a process began, as time.time() counts; OSError if it has ended."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(after_name[19])  # since the machine was started: proc_pid_stat(5)
    uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - (uptime - ticks / os.sysconf("SC_CLK_TCK"))
