"""Each rank writes down what it did, in a file of the folder that it runs in."""

import re
import sys
from pathlib import Path

import torch.distributed as dist

from . import replace, write


def at_the_start(script, name, facts):
    """NAME.RANK.json: what `facts()` returns as the training begins."""

    def train(inner, *arguments):
        write(name, facts())
        inner(*arguments)

    replace(script["Trainer"], "train", train)


def note_each(script, method, name, fact):
    """NAME.RANK.json: what `fact(trainer, ...)` is before each call of a method."""
    facts = []

    def around(inner, *arguments):
        facts.append(fact(*arguments))
        write(name, facts)
        return inner(*arguments)

    replace(script["Trainer"], method, around)


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
    """lines.RANK.json: the lines of the Trainer's `train` as it ran them, then all."""
    code = script["Trainer"].train.__code__
    passed = []

    def trace(frame, event, _):
        if frame.f_code is not code:
            return None
        if event == "line":
            passed.append(frame.f_lineno)
        return trace

    def train(inner, *arguments):
        sys.settrace(trace)
        inner(*arguments)
        sys.settrace(None)
        lines = {line for _, _, line in code.co_lines() if line}
        write("lines", [passed, [*lines - {code.co_firstlineno}]])

    replace(script["Trainer"], "train", train)


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
