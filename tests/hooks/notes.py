"""Each rank writes down what it did, in a file of the folder that it runs in."""

import builtins
import re
from pathlib import Path

import torch.distributed as dist

from . import replace, write


def at_the_start(script, name, facts):
    """NAME.RANK.json: what `facts()` returns as the training begins."""

    def train(inner, *arguments):
        write(name, facts())
        inner(*arguments)

    replace(script["Trainer"], "train", train)


def note_device(script):
    """device.RANK.json: for which local rank it asked a device, of how many."""
    facts = {}

    def note(set_device, name, local_rank, nprocs=1):
        facts.update(local_rank=local_rank, nprocs=nprocs)
        return set_device(name, local_rank, nprocs)

    replace(script["utils"], "set_device", note)
    at_the_start(script, "device", lambda: facts)


def note_store(script):
    """store.RANK.json: the host whose store it is connected to."""
    hosts = []

    def note(inner, host, *rest, **options):
        hosts.append(host)
        return inner(host, *rest, **options)

    replace(dist, "TCPStore", note)
    at_the_start(script, "store", lambda: hosts[-1])


def note_lines(script):
    """noted.RANK.json: the N of each planted `passed.append(N)` that it passed."""
    builtins.passed = []

    def train(inner, *arguments):
        inner(*arguments)
        write("noted", builtins.passed)

    if "Trainer" in script:
        replace(script["Trainer"], "train", train)
    else:
        replace(script, "main", train)


def note_memory(script):
    """memory.RANK.json: the bytes that loading a snapshot takes, at its peak."""

    def kilobytes(key):  # proc_pid_status(5)
        status = Path("/proc/self/status").read_text()
        return int(re.search(rf"{key}:\s+(\d+) kB", status)[1])

    def load(inner, *arguments):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = kilobytes("VmRSS")
        inner(*arguments)
        taken = kilobytes("VmHWM") - before
        write("memory", {"load": taken * 1024})

    replace(script["Trainer"], "_load_snapshot", load)
