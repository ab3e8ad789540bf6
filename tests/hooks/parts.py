"""What a rank holds of a model in parts, and a limit of its memory."""

import ctypes
import os
import re
import resource
import weakref
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from . import replace, write

M_MMAP_THRESHOLD = -3  # mallopt(3)


def nbytes(tensors):
    """The bytes of this rank's parts, and of what is whole."""
    total = 0
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        total += tensor.nbytes
    return total


def note_held(script):
    """held.RANK.json: what a rank holds of the model, in bytes.

    "moved": each module that goes to the device, with the bytes of it that are not in
    parts, and those that are left of the model as it was made. "parts": of weights,
    gradients and optimizer state, after training. "mapped": whether the snapshot is
    read from the disk where it is used. "gathered": the device of a gathered weight.
    "wrapped": whether DDP is there.
    """
    made = []
    facts = {"moved": [], "mapped": False}

    def left():
        return nbytes([weight() for weight in made if weight() is not None])

    def to(inner, module, *arguments):
        weights = [part for part in module.parameters() if type(part) is not DTensor]
        moved = [type(module).__name__, nbytes(weights), left()]
        facts["moved"].append(moved)
        return inner(module, *arguments)

    def load_train_objs(inner):
        objects = inner()
        _, _, model, _ = objects
        made.extend(map(weakref.ref, model.parameters()))
        facts["shapes"] = [list(weight.shape) for weight in model.parameters()]
        return objects

    def check_snapshot(inner, *arguments):
        maps = Path("/proc/self/maps").read_text()
        facts["mapped"] = "snapshot.pt" in maps
        inner(*arguments)

    def train(inner, self, *arguments):
        inner(self, *arguments)
        weights = list(self.model.parameters())
        gradients = [weight.grad for weight in weights]
        states = []
        for state in self.optimizer.state.values():
            # A scalar is the number of steps.
            states += [value for value in state.values() if value.dim() > 0]
        facts["parts"] = [nbytes(weights), nbytes(gradients), nbytes(states)]
        gathered = script["utils"].join_parts(weights[0])
        facts["gathered"] = str(getattr(gathered, "device", None))
        facts["wrapped"] = "DistributedDataParallel" in str(vars(self))
        write("held", facts)

    replace(script, "load_train_objs", load_train_objs)
    replace(script["utils"], "check_snapshot", check_snapshot)
    replace(torch.nn.Module, "to", to)
    replace(script["Trainer"], "train", train)


def limit_memory(script):
    """From main on, this process gets LIMIT_MB more memory, but for its snapshot."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)

    def main(inner, *arguments):
        # From 64 KiB on, memory that is freed goes back to the system at once.
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
        status = Path("/proc/self/status").read_text()
        used = int(re.search(r"VmData:\s+(\d+) kB", status)[1]) * 2**10
        more = int(os.environ["LIMIT_MB"]) * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (used + more, most))
        inner(*arguments)

    def save(inner, *arguments):
        # The snapshot is put together on the CPU, where there is room, not on a device.
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        inner(*arguments)

    replace(script["Trainer"], "_save_snapshot", save)
    replace(script, "main", main)
