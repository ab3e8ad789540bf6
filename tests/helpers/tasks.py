"""Which scripts have the same task, so that their numbers can be compared."""

import functools

from tools.scripts import SCRIPTS, definition


@functools.cache
def task_of(name):
    """The script from which `name` has its data, model, loss and optimizer."""
    parent = SCRIPTS[name]
    for function in ("load_train_objs", "make_optimizer"):
        if not parent or definition(name, function) != definition(parent, function):
            return name
    return task_of(parent)


OF_THE_TRUNKS_TASK = [name for name in SCRIPTS if task_of(name) == "single_gpu.py"]
