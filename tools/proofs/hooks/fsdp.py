"""What a rank of variants/fsdp.py holds, and what happens while it saves."""

import ctypes
import os
import resource
import signal
import threading

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hooks import replace, write
from hooks.models import again, changes_objects
from torch.distributed.tensor import DTensor


def nbytes(tensors):
    """The bytes of this rank's parts, and of what is whole."""
    return sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in tensors)


def held(script):
    """held.RANK.json: the bytes of weights, gradients and momentum after training.

    And of the group that saves: backend, time-out in seconds, whether DCP has it.
    """
    groups = []

    def save(inner, *arguments, process_group=None, **options):
        groups.append(process_group)
        return inner(*arguments, process_group=process_group, **options)

    replace(dcp, "async_save", save)

    def train(inner, self, *arguments):
        inner(self, *arguments)
        weights = list(self.model.parameters())
        states = [x for y in self.optimizer.state.values() for x in y.values()]
        gradients = [x.grad for x in weights]
        group = self.saver.group
        options = group._get_backend(torch.device("cpu")).options
        facts = [dist.get_backend(group), options._timeout.total_seconds()]
        facts.append(groups == [group])
        write("held", [*facts, *(nbytes(x) for x in (weights, gradients, states))])

    replace(script["Trainer"], "train", train)


def in_second_save(script):
    """SIGKILL comes to the last rank or to rank 0 in the second save: KILLED says when.

    `parts`: before the last rank writes its own. `pointer`: before the file that names
    the folder is replaced. `old`: after that, before the old folder is removed.
    `error`: instead of a kill, this file cannot be replaced. A bias is frozen, as well.
    """

    @changes_objects
    def freeze(train_set, eval_set, model, loss_fn, optimizer):
        model[0].bias.requires_grad_(False)
        return train_set, eval_set, model, loss_fn, optimizer

    freeze(script)
    moment = os.environ["KILLED"]
    owner, name = {
        "parts": (dcp.FileSystemWriter, "write_data"),
        "pointer": (os, "replace"),
        "error": (os, "replace"),
        "old": (script["shutil"], "rmtree"),
    }[moment]
    calls = []

    def die(inner, *arguments, **options):
        calls.append(1)
        if name == "rmtree":
            os.fspath(arguments[0])  # Python 3.11's takes None, too
        mine = moment != "parts" or dist.get_rank() == dist.get_world_size() - 1
        if len(calls) == 2 and mine:
            if moment == "error":
                raise OSError("planted")
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(*arguments, **options)

    replace(owner, name, die)


def changed_while_saving(script):
    """The weights change, in place, before the thread that saves them writes a byte."""
    changed = threading.Event()

    def save(inner, self):
        inner(self)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(100)
        changed.set()

    def write_data(inner, *arguments):
        changed.wait()
        return inner(*arguments)

    replace(script["Trainer"], "_save_snapshot", save)
    replace(dcp.FileSystemWriter, "write_data", write_data)


class Experts(torch.nn.Module):
    """Two blocks: a rank uses one of them, and the next rank the other."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(20, 1) for _ in range(2))

    def forward(self, x):
        return self.blocks[dist.get_rank() % 2](x)


@changes_objects
def experts(train_set, eval_set, _, loss_fn, optimizer):
    model = Experts()
    return train_set, eval_set, model, loss_fn, again(optimizer, model)


def limited(script):
    """From the start of main on, this process gets LIMIT_MB more memory, no more."""

    def main(inner, *arguments):
        ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: what is freed goes
        with open("/proc/self/status") as status:
            (line,) = (x for x in status if x.startswith("VmData:"))
        limit = int(line.split()[1]) * 1024 + int(os.environ["LIMIT_MB"]) * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        inner(*arguments)

    replace(script, "main", main)
