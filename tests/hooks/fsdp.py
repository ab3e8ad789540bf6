"""Models to shard, what a rank holds of them, and what happens while it saves."""

import ctypes
import os
import re
import resource
import signal
import threading
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
    """Lists in a list, a block that is used twice, a container without a forward."""

    def __init__(self):
        super().__init__()
        first = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh())
        twice = torch.nn.Linear(30, 30)
        list_in_list = torch.nn.ModuleList([first, twice])
        container = torch.nn.ModuleDict({"lists": torch.nn.ModuleList()})
        container["lists"].append(torch.nn.Linear(30, 2))
        self.blocks = torch.nn.ModuleList([list_in_list, twice, container])
        self.scale = torch.nn.Parameter(torch.ones(2, 1))
        self.register_buffer("shift", torch.randn(3))

    def forward(self, source):
        (first, twice), _, container = self.blocks
        hidden = twice(first(source)).tanh()
        hidden = twice(hidden).tanh()
        (last,) = container["lists"]
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


def own_options(script):
    """Rank 1 has a rate and a count of steps that must not count."""

    def make_optimizer(inner, model):
        optimizer = inner(model)
        if os.environ["RANK"] == "1":
            optimizer.param_groups[0]["lr"] = 0.0
            for state in optimizer.state.values():
                state["step"] += 100
        return optimizer

    replace(script, "make_optimizer", make_optimizer)


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

    "whole": the block, and what of the model is still whole, at each call of
    `fully_shard`. "parts": of weights, gradients and optimizer state, after training.
    "mapped": whether the snapshot is read from the disk where it is used. "moved": the
    modules that were moved as a whole. "gathered": the device of a gathered weight.
    """
    whole = []
    facts = {"whole": [], "mapped": False, "moved": []}

    def to(inner, module, *arguments):
        facts["moved"].append(type(module).__name__)
        return inner(module, *arguments)

    def shard(inner, model, *arguments):
        whole.extend(model.parameters())
        inner(model, *arguments)
        facts["shapes"] = [list(weight.shape) for weight in model.parameters()]
        facts["whole"].append(["", nbytes(whole)])
        whole.clear()

    def fully_shard(inner, block, **options):
        facts["whole"].append([type(block).__name__, nbytes(whole)])
        return inner(block, **options)

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
        facts["gathered"] = script["gather"](weights[0]).device.type
        write("held", facts)

    if "shard" in script:
        replace(script, "shard", shard)
        replace(script, "fully_shard", fully_shard)
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


class Counting(torch.optim.SGD):
    """It counts its steps with a number that is no tensor."""

    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["count"] = state.get("count", 0) + 1


def counting(script):
    def make_optimizer(inner, model):
        return Counting(model.parameters(), **inner(model).defaults)

    replace(script, "make_optimizer", make_optimizer)


def in_second_save(script):
    """SIGKILL comes to the last rank or to rank 0 in the second save: KILLED says when.

    `parts`: before the last rank writes its own. `pointer`: before the file that names
    the folder is replaced. `old`: after that, before the old folder is removed.
    `error`: instead of a kill, this file cannot be replaced. A bias is frozen, as well.
    """

    @changes_objects
    def freeze(train_set, eval_set, model, loss_fn):
        model.bias.requires_grad_(False)
        return train_set, eval_set, model, loss_fn

    freeze(script)
    moment = os.environ["KILLED"]
    called = {
        "parts": (dcp.FileSystemWriter, "write_data"),
        "pointer": (os, "replace"),
        "error": (os, "replace"),
        "old": (script["shutil"], "rmtree"),
    }
    # The first save removes no folder.
    call_to_hit = 1 if moment == "old" else 2
    calls = []

    def die(inner, *arguments, **options):
        calls.append(1)
        is_last_rank = dist.get_rank() == dist.get_world_size() - 1
        is_hit = moment != "parts" or is_last_rank
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


class Experts(torch.nn.Module):
    """Two blocks: a rank uses one of them, and the next rank the other."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(20, 1) for _ in range(2))

    def forward(self, source):
        block = self.blocks[dist.get_rank() % 2]
        return block(source)


@changes_objects
def experts(train_set, eval_set, _, loss_fn):
    return train_set, eval_set, Experts(), loss_fn


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
