"""What tests ask about a script: its code, its task, and the file of its own tests."""

import ast
import functools
from pathlib import Path

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


OF_THE_TRUNKS_TASK = [name for name in SCRIPTS if task_of(name) == "single_gpu.py"]


def own_tests(name):
    """The file of the tests that are about this script alone."""
    folder = "variants" if name in SCRIPTS else "mingpt"
    return f"tests/{folder}/test_{Path(name).stem}.py"
