"""Look at scripts and at what their runs have left, and compare it."""

import importlib
import json
import re
import runpy

import torch
from torch.testing import assert_close

from tests.hooks.models import float64
from tools.run.launch import run_script
from tools.run.results import load, same_bits, weights
from tools.scripts import ROOT, calls

# A program with these variables has the stand-in as its accelerator. The test that
# starts it needs the fixture `standin`.
STANDIN = {"PYTHONPATH": ROOT / "tests" / "standin"}


def observed(log):
    """Variables with which each rank of a program lists gloo's threads when it ends.

    Each rank writes the list to a file in `log`, a new folder: "[]" if no thread is
    left. The program must be `real`, because forks show none.
    """
    log.mkdir()
    observer = ROOT / "tests" / "observer"
    return {"PYTHONPATH": f"{observer}:{ROOT}", "THREADS_LOG": log}


def assert_no_gloo_thread(log):
    """None of two ranks that were `observed` has left one."""
    assert [file.read_text() for file in log.iterdir()] == ["[]", "[]"]


def hooks_to_compare(name):
    """The hooks with which a script's numbers may be compared with another script's.

    autocast leaves float64 alone.
    """
    return (float64,) if "autocast" in calls(name) else ()


def noted(folder, name="noted", ranks=2):
    """[what each rank has noted], from the files of `write` in tests/hooks/__init__.py.

    There must be one file of each rank, and no other.
    """
    files = sorted(folder.glob(f"{name}.*.json"))
    expected = [folder / f"{name}.{rank}.json" for rank in range(ranks)]
    assert files == expected, files
    return [json.loads(file.read_text()) for file in files]


def replicas(facts):
    """The facts of one rank of each replica.

    Ranks that share a batch are one replica, and must have done the same.
    """
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
    """Two snapshots have the same weights; `load` says where a snapshot may be."""
    assert_close(weights(place), weights(other), rtol=0, atol=1e-6)


def assert_same_snapshot(place, other):
    """Two snapshots are the same, bit for bit."""
    assert same_bits(load(place), load(other))


def fence(page, text):
    """The Python code of a page, such as docs/predict.md, that has this text in it."""
    fences = re.findall("(?s)```python\n(.*?)```", (ROOT / page).read_text())
    (code,) = [fence for fence in fences if text in fence]
    return code
