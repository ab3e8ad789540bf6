"""Models to shard, what a rank holds of them, and what happens while it saves."""

import ctypes
import os
import re
import resource
import signal
import threading
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hooks import replace, write
from hooks.models import changes_objects
from torch.distributed.tensor import DTensor

import utils

M_MMAP_THRESHOLD = -3  # mallopt(3)


class Blocks(torch.nn.Module):
    """A block that is used twice, and a parameter and a buffer in no block."""

    def __init__(self):
        super().__init__()
        first = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh())
        twice = torch.nn.Linear(30, 30)
        self.layers = torch.nn.ModuleList([first, twice, torch.nn.Linear(30, 2)])
        self.scale = torch.nn.Parameter(torch.ones(2, 1))
        self.register_buffer("shift", torch.randn(3))

    def forward(self, source):
        first, twice, last = self.layers
        hidden = twice(first(source)).tanh()
        hidden = twice(hidden).tanh()
        return last(hidden) @ self.scale + self.shift.sum()


def blocks(script):
    """Each rank draws other weights. Adagrad has its state before the first step."""

    @changes_objects
    def change(train_set, eval_set, _, loss_fn):
        torch.manual_seed(int(os.environ["RANK"]))
        return train_set, eval_set, Blocks(), loss_fn

    def make_optimizer(model):
        return torch.optim.Adagrad(
            model.parameters(), 0.1, lr_decay=0.1, initial_accumulator_value=1
        )

    change(script)
    script["make_optimizer"] = make_optimizer
    script["blocks_of"] = lambda model: model.layers


def nbytes(tensors):
    """The bytes of this rank's parts, and of what is whole."""
    total = 0
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        total += tensor.nbytes
    return total


def held(script):
    """held.RANK.json: what a rank holds of the model, in bytes.

    "moved": each module that goes to the device, with the bytes of it that are not in
    parts, and those that are left of the model as it was made. "left": these, after the
    last. "parts": of weights, gradients and optimizer state, after training. "mapped":
    whether the snapshot is read from the disk where it is used. "gathered": the device
    of a gathered weight.
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
        facts["left"] = left()
        inner(self, *arguments)
        weights = list(self.model.parameters())
        gradients = [weight.grad for weight in weights]
        states = []
        for state in self.optimizer.state.values():
            # A scalar is the number of steps.
            states += [value for value in state.values() if value.dim() > 0]
        facts["parts"] = [nbytes(weights), nbytes(gradients), nbytes(states)]
        facts["gathered"] = str(getattr(utils.join_parts(weights[0]), "device", None))
        write("held", facts)

    replace(script, "load_train_objs", load_train_objs)
    replace(utils, "check_snapshot", check_snapshot)
    replace(torch.nn.Module, "to", to)
    replace(script["Trainer"], "train", train)


def passes(script):
    """passes.RANK.json: if an evaluation's inputs were moved (accelerators:strict)."""

    def evaluate(inner, self):
        moved = []

        def note(_, inputs):
            (source,) = inputs
            moved.append(hasattr(source, "is_placed"))

        self.model.register_forward_pre_hook(note)
        loss = inner(self)
        write("passes", moved)
        return loss

    replace(script["Trainer"], "_evaluate", evaluate)


def in_second_save(script):
    """In the second save, SIGKILL comes to a rank: KILLED says when.

    `parts`: before the last rank writes its own. `metadata`: before rank 0 writes that
    all have written. `old`: after that, before the old folder is removed. `error`:
    instead of a kill, the last rank cannot write.
    """
    moment = os.environ["KILLED"]
    called = {
        "parts": (dcp.FileSystemWriter, "write_data"),
        "error": (dcp.FileSystemWriter, "write_data"),
        "metadata": (dcp.FileSystemWriter, "finish"),
        "old": (script["shutil"], "rmtree"),
    }
    # The first save removes no folder.
    call_to_hit = 1 if moment == "old" else 2
    calls = []

    def die(inner, *arguments, **options):
        calls.append(1)
        is_last_rank = dist.get_rank() == dist.get_world_size() - 1
        is_hit = is_last_rank or moment in (
            "metadata",
            "old",
        )  # rank 0 alone calls them
        if len(calls) == call_to_hit and is_hit:
            if moment == "error":
                raise OSError("planted")
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(*arguments, **options)

    replace(*called[moment], die)


def changed_while_saving(script):
    """The weights change, in place, before the thread that saves them writes a byte.

    group.RANK.json: the backend and the time-out of the group that this thread uses.
    """
    changed = threading.Event()

    def async_save(inner, *arguments, process_group, **options):
        backend = process_group._get_backend(torch.device("cpu"))
        timeout = backend.options._timeout
        is_own = process_group is not dist.group.WORLD
        name = dist.get_backend(process_group)
        write("group", [is_own, name, timeout.total_seconds()])
        return inner(*arguments, process_group=process_group, **options)

    def save(inner, self):
        inner(self)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(100)
        changed.set()

    def write_data(inner, *arguments):
        changed.wait()
        return inner(*arguments)

    replace(dist, "get_default_backend_for_device", lambda inner, device: "cpu:gloo")
    replace(dcp, "async_save", async_save)
    replace(script["Trainer"], "_save_snapshot", save)
    replace(dcp.FileSystemWriter, "write_data", write_data)


def limited(script):
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
