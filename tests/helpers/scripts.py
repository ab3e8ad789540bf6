"""What tests ask about a script: its code, its task, and the file of its own tests."""

import ast
import functools
from pathlib import Path
from typing import NamedTuple

from tools.scripts import SCRIPTS, tree


def definition(path, name):
    """The code of a file's function or class, without comments; "" without it."""
    body = tree(path).body
    found = [node for node in body if getattr(node, "name", "") == name]
    return "\n".join(map(ast.unparse, found))


@functools.cache
def task_of(name):
    """The script from which `name` has its data, model, loss and optimizer."""
    parent = SCRIPTS[name]
    for function in ("load_train_objs", "make_optimizer"):
        if not parent or definition(name, function) != definition(parent, function):
            return name
    return task_of(parent)


SAME_TASK_AS_SINGLE_GPU = [name for name in SCRIPTS if task_of(name) == "single_gpu.py"]


# Texts that tests replace: the model of the scripts of the root, and of those in parts
MODEL = "    model = torch.nn.Linear(20, 1)\n"
LAYERS = """\
    layers = torch.nn.Linear(20, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)
    model = torch.nn.Sequential(*layers)
"""


class Exceptions(NamedTuple):
    """In what a script is unlike the others, as far as tests of all scripts ask."""

    own_numbers: bool = False  # with any model they differ from its parent's
    waits: bool = False  # for the device, inside of a step
    leaves: str = ""  # what follows "snapshot.pt" in the names of more files: a pattern


EXCEPTIONS = {
    "variants/real_job.py": Exceptions(
        own_numbers=True,  # its learning rate changes in each step
        leaves=r"\.csv",  # its log
    ),
    "variants/sharded_snapshot.py": Exceptions(
        waits=True,  # a thread saves while steps go on
        leaves=r"\.5\.\w{8}",  # the folder of parts
    ),
}


def exceptions_of(name):
    return EXCEPTIONS.get(name, Exceptions())


def own_tests(name):
    """The file of the tests that are about this script alone."""
    folder = "variants" if name in SCRIPTS else "mingpt"
    return f"tests/{folder}/test_{Path(name).stem}.py"
