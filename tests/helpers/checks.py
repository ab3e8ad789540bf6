"""What the tests of many scripts look at, and compare."""

import importlib
import json
import re
import runpy

import torch
from torch.testing import assert_close
from torch.utils._pytree import tree_map

from tests.hooks.models import float64
from tools.run.launch import run_script
from tools.run.results import load, same_bits, weights
from tools.scripts import ROOT, calls

# With the fixture `standin`: variables for a program whose accelerator it is.
STANDIN = {"PYTHONPATH": ROOT / "tests" / "standin"}


def observed(log):
    """Variables with which each rank of a program notes its threads of gloo at its end.

    It must be `real`: forks show none. Without such threads, each writes "[]" to a file
    of the folder `log`, which is made.
    """
    log.mkdir()
    observer = ROOT / "tests" / "observer"
    return {"PYTHONPATH": f"{observer}:{ROOT}", "THREADS_LOG": log}


def hooks_to_compare(name):
    """With these hooks, its numbers are another script's: autocast leaves float64."""
    return (float64,) if "autocast" in calls(name) else ()


def noted(folder, name="noted", ranks=2):
    """[what each rank has noted]: `write` in tests/hooks/__init__.py writes the files.

    There must be one of each rank, and no other.
    """
    files = sorted(folder.glob(f"{name}.*.json"))
    expected = [folder / f"{name}.{rank}.json" for rank in range(ranks)]
    assert files == expected, files
    return [json.loads(file.read_text()) for file in files]


def replicas(facts):
    """One rank of each replica. Ranks that share a batch are one, and do the same."""
    found = {}
    for rank in facts:
        first = found.setdefault(rank["replica"], rank)
        for key in ("replicas", "orders", "evaluated", "random"):
            assert rank[key] == first[key], f"{key} of ranks of one replica"
    assert sorted(found) == list(range(facts[0]["replicas"]))
    return list(found.values())


def import_script(name):
    """A script as a module, such as "variants/fsdp.py".

    A test calls it, because an import at the top of its file would make all its tests
    fail if the script cannot be imported.
    """
    return importlib.import_module(name.removesuffix(".py").replace("/", "."))


def objects_of(name):
    """A script's training and held-out data, model, loss function and optimizer."""
    script = runpy.run_path(ROOT / name)
    objects = script["load_train_objs"]()
    return *objects, script["make_optimizer"](objects[2])


def stack(samples):
    """(source, targets) of all samples."""
    source, targets = zip(*samples, strict=True)
    return torch.stack(source), torch.stack(targets)


def help_of(name, folder):
    """What `--help` prints, with a space for each line break and indentation."""
    done = run_script(ROOT / name, "--help", cwd=folder)
    return " ".join(done.stdout.split())


# Ranks add up numbers in another order than one process does, so that the last bits
# differ. Losses are printed with six decimals.


def assert_same_losses(found, expected):
    assert_close(found, expected, rtol=1e-6, atol=2e-6)


def assert_same_weights(place, other):
    """Of two snapshots, each at a place as of `load`."""
    assert_close(weights(place), weights(other), rtol=0, atol=1e-6)


def assert_same_snapshot(place, other):
    """Bit for bit."""
    assert same_bits(load(place), load(other))


def shape_of(snapshot):
    """Keys, types and shapes of all that is in a snapshot, without the values."""

    def shape(leaf):
        is_tensor = isinstance(leaf, torch.Tensor)
        return (leaf.dtype, leaf.shape) if is_tensor else type(leaf)

    return tree_map(shape, snapshot)


def fence(page, text):
    """The Python code of a page, such as docs/predict.md, that has this text in it."""
    fences = re.findall("(?s)```python\n(.*?)```", (ROOT / page).read_text())
    (code,) = [fence for fence in fences if text in fence]
    return code
