"""A job that is large enough to be measured, and what an epoch of it takes each rank.

The job is the script's own, or that of the module TASK, but its model has a body in
front: four hidden layers of WIDTH, which pause for PAUSE_S in forward, and twice as
long in backward. There are TRAIN_SAMPLES samples. The figures of the last epoch go to
measured.RANK.json. Nothing is saved.

With GIVE_BACK set, no process keeps memory for later. Without it, how much glibc keeps
is a matter of chance. With it, training is slower.
"""

import ctypes
import gc
import importlib
import os
import re
import time
from pathlib import Path

import torch
import torch._dynamo  # noqa: F401  DDP and optimizers import it: not for their training
import torch.distributed as dist
from torch.distributed.tensor import parallel
from torch.utils.data import Subset

from . import Noted, replace, write

CLONE_NEWNET = 0x40000000  # setns(2)
M_MMAP_THRESHOLD = -3  # mallopt(3)
PAUSE_S = float(os.environ.get("PAUSE_S", 0))
NETWORKS = os.environ["NETWORKS"].split()
STATUS = Path("/proc/self/status")
LIBC = ctypes.CDLL(None, use_errno=True)

before = 0  # bytes of memory before there is a model


class Trainer:
    def _run_epoch(self, epoch):
        meet()
        sent_before = sent_bytes()
        begin_peak(self.device)
        meet()
        began = time.perf_counter()
        computed_before = time.thread_time()
        loss = super()._run_epoch(epoch)  # ends when all ranks have ended
        self.figures = {
            "weights": sum(weight.numel() for weight in self.model.parameters()),
            "loss": loss,
            "seconds": time.perf_counter() - began,
            "computes": time.thread_time() - computed_before,  # in the main thread
            "peak_bytes": peak_bytes(self.device),
        }
        meet()
        self.figures["sent_bytes"] = sent_bytes() - sent_before
        return loss

    def train(self, *arguments):
        super().train(*arguments)
        write("measured", self.figures)

    def _save_snapshot(self):
        self.model.state_dict()  # FSDP2 takes back what an evaluation has gathered


def meet():
    if dist.is_initialized():
        dist.barrier()


def around_load_train_objs(load_train_objs):
    global before
    if "TASK" in os.environ:
        task = importlib.import_module(os.environ["TASK"])
        load_train_objs = task.load_train_objs
    train_set, eval_set, model, loss_fn = load_train_objs()
    gc.collect()
    before = memory("VmRSS")
    torch.manual_seed(0)
    source, _ = train_set[0]
    blocks = make_body(inputs=source.shape[-1], width=int(os.environ["WIDTH"]))
    if isinstance(model, torch.nn.Sequential):
        for index, block in enumerate(blocks):
            model.insert(index, block)
    else:  # not a module around the model: a script may use what its own model has
        model.body = torch.nn.Sequential(*blocks)
        model.register_forward_pre_hook(through_body)
    samples = int(os.environ["TRAIN_SAMPLES"])
    again = [index % len(train_set) for index in range(samples)]
    return Noted(Subset(train_set, again)), eval_set, model, loss_fn


def around_make_optimizer(make_optimizer, model):
    if "TASK" in os.environ:
        make_optimizer = importlib.import_module(os.environ["TASK"]).make_optimizer
    return make_optimizer(model)


def make_body(inputs, width):
    """Four hidden layers, and one that returns as many numbers as went in."""
    blocks = []
    size = inputs
    for _ in range(4):
        layer = torch.nn.Linear(size, width)
        blocks.append(torch.nn.Sequential(layer, torch.nn.ReLU(), Device()))
        size = width
    return [*blocks, torch.nn.Linear(width, inputs)]


def its_plan(script):
    """Of tensor_parallel.py: it cuts the hidden layers. And fsdp.py's blocks."""
    script["blocks_of"] = lambda model: [
        layer for layer in model if [*layer.parameters()]
    ]
    script["PLAN"] = {
        "0.0": parallel.ColwiseParallel(),
        "1.0": parallel.RowwiseParallel(),
        "2.0": parallel.ColwiseParallel(),
        "3.0": parallel.RowwiseParallel(),
    }


class Pause(torch.autograd.Function):
    @staticmethod
    def forward(context, source):
        time.sleep(PAUSE_S)
        return source.view_as(source)

    @staticmethod
    def backward(context, grad):
        time.sleep(2 * PAUSE_S)
        return grad


class Device(torch.nn.Module):
    """Sleeps, as if a device computed: the CPU is free to send."""

    def forward(self, source):
        return Pause.apply(source) if PAUSE_S and self.training else source


def through_body(model, inputs):
    source, *rest = inputs
    return model.body(source), *rest


def in_its_network(init_process_group, *arguments, **options):
    """This rank's sockets are made in its network, one of NETWORKS.

    Only those that carry tensors: its connection to the store is there already.
    """
    if NETWORKS:
        if "store" not in options:  # as torch does it
            store, rank, world_size = next(dist.rendezvous("env://"))
            options |= {"store": store, "rank": rank, "world_size": world_size}
        network = NETWORKS[options["rank"] % len(NETWORKS)]
        with open(network) as file:
            if LIBC.setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns", network)
    init_process_group(*arguments, **options)


def sent_bytes():
    """What the cards of this rank's network have sent, shared among its ranks."""
    if not dist.is_initialized():
        return 0
    if not NETWORKS:
        return float("nan")
    _, _, *cards = Path("/proc/thread-self/net/dev").read_text().splitlines()
    total = 0
    for card in cards:
        _, _, numbers = card.partition(":")
        total += int(numbers.split()[8])  # after eight columns of what has come
    return total * len(NETWORKS) / dist.get_world_size()


def memory(key):
    """A number of proc_pid_status(5) in bytes, not counting pages of files."""
    if not STATUS.exists():
        return float("nan")
    kilobytes = dict(re.findall(r"(\w+):\s+(\d+) kB", STATUS.read_text()))
    return 1024 * (int(kilobytes[key]) - int(kilobytes["RssFile"]))


def begin_peak(device):
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
    elif STATUS.exists():
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device):
    """The peak of what training takes; of an accelerator, what torch has allocated."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated()
    return memory("VmHWM") - before


if "GIVE_BACK" in os.environ and hasattr(LIBC, "mallopt"):
    LIBC.malloc_trim(0)  # what it has kept so far
    LIBC.mallopt(M_MMAP_THRESHOLD, 2**16)  # each tensor gets pages of its own
replace(dist, "init_process_group", in_its_network)
