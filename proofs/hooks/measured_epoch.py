"""A job that is large enough to be measured, and what an epoch of it takes each rank.

The job is the rung's own, or that of the module TASK, but its model has a body in front
of it: four hidden layers of WIDTH. There are TRAIN_SAMPLES samples. The first epoch
warms up, the last one is measured. Nothing is evaluated, saved or printed.

With GIVE_BACK set, no process keeps memory for later. Without it, how much glibc keeps
is a matter of chance. With it, training is slower.

The figures go to measured.RANK.json: see `figures`.
"""

import ctypes
import gc
import importlib
import itertools
import json
import os
import re
import time
from pathlib import Path

import torch
import torch._dynamo  # noqa: F401  DDP and optimizers import it: not for their training
import torch.distributed as dist
from hooks import rank, replace
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import Dataset

CLONE_NEWNET = 0x40000000  # setns(2)
M_MMAP_THRESHOLD = -3  # mallopt(3)
NETWORKS = os.environ["NETWORKS"].split()
STATUS = Path("/proc/self/status")
LIBC = ctypes.CDLL(None, use_errno=True)

figures = {
    "weights": 0,  # how many the model has
    "loss": float("nan"),  # the mean of the epoch
    "seconds": 0.0,  # from the first step to the last; all ranks begin together
    "sent_bytes": 0.0,  # by this rank: see `sent_bytes`
    "peak_bytes": float("nan"),  # of this rank: see `peak_bytes`
}
before = 0  # bytes of memory before there is a model
payload = 0  # bytes that DDP has given to its all-reduces


class Trainer:
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        if not NETWORKS and hasattr(self, "ddp_model"):
            self.ddp_model.register_comm_hook(None, counted)

    def _run_epoch(self, epoch):
        meet()
        sent = sent_bytes()
        begin_peak(self.device)
        meet()
        began = time.perf_counter()
        loss, samples = super()._run_epoch(epoch)  # ends when all ranks have ended
        figures["seconds"] = time.perf_counter() - began
        figures["peak_bytes"] = peak_bytes(self.device)
        meet()
        figures["sent_bytes"] = sent_bytes() - sent
        figures["loss"] = loss
        return loss, samples

    def train(self):
        super().train()
        with open(f"measured.{rank()}.json", "w") as file:
            json.dump(figures, file)

    def _evaluate(self):
        return {}

    def _print(self, text):
        pass

    def _save_snapshot(self):
        pass


class Repeated(Dataset):
    """The samples of `data` again and again, `size` of them in all."""

    def __init__(self, data, size):
        self.data, self.size = data, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.data[index % len(self.data)]


def around_load_train_objs(load_train_objs):
    global before
    if "TASK" in os.environ:
        load_train_objs = importlib.import_module(os.environ["TASK"]).load_train_objs
    train_set, eval_set, model, *rest = load_train_objs()
    gc.collect()
    before = resident_bytes()
    torch.manual_seed(0)
    inputs, width = train_set[0][0].shape[-1], int(os.environ["WIDTH"])
    layers = []
    for sizes in itertools.pairwise([inputs, *[width] * 4]):
        layers += [torch.nn.Linear(*sizes), torch.nn.ReLU()]
    model.body = torch.nn.Sequential(*layers, torch.nn.Linear(width, inputs))
    # Not a module around the model: a rung may use what its own model has.
    model.register_forward_pre_hook(through_body)
    figures["weights"] = sum(x.numel() for x in model.parameters())
    train_set = Repeated(train_set, int(os.environ["TRAIN_SAMPLES"]))
    return train_set, eval_set, model, *rest


def through_body(model, inputs):
    source, *rest = inputs
    return model.body(source), *rest


def meet():
    if dist.is_initialized():
        dist.barrier()


# Bytes


def in_its_network(init_process_group, *arguments, **options):
    """This rank's sockets are made in its network, one of NETWORKS.

    Only those that carry tensors: its connection to the store is there already.
    """
    if NETWORKS:
        if "store" not in options:  # as torch does it
            store, number, world_size = next(dist.rendezvous("env://"))
            options |= {"store": store, "rank": number, "world_size": world_size}
        network = NETWORKS[options["rank"] % len(NETWORKS)]
        with open(network) as file:
            if LIBC.setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns", network)
    init_process_group(*arguments, **options)


def counted(_, bucket):
    """What DDP does without a hook, and the bytes are counted."""
    global payload
    payload += bucket.buffer().nbytes
    return default_hooks.allreduce_hook(None, bucket)


def sent_bytes():
    """What the cards of this rank's network have sent, shared among its ranks.

    Without NETWORKS, what DDP has given to its all-reduces.
    """
    if not NETWORKS or not dist.is_initialized():
        return payload
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
    total = sum(int(line.partition(":")[2].split()[8]) for line in lines)
    return total * len(NETWORKS) / dist.get_world_size()


# Memory


def memory(key):
    """A number of proc_pid_status(5) in bytes."""
    return int(re.search(rf"{key}:\s+(\d+) kB", STATUS.read_text())[1]) * 1024


def resident_bytes():
    """What this process holds in memory, not counting pages of files."""
    return memory("VmRSS") - memory("RssFile") if STATUS.exists() else float("nan")


def begin_peak(device):
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
    elif STATUS.exists():
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device):
    """The peak of what training takes: weights, gradients, buckets, activations, ...

    On an accelerator it is what torch has allocated there.
    """
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated()
    if not STATUS.exists():
        return float("nan")
    return memory("VmHWM") - memory("RssFile") - before


if "GIVE_BACK" in os.environ and hasattr(LIBC, "mallopt"):
    LIBC.malloc_trim(0)  # what it has kept so far
    LIBC.mallopt(M_MMAP_THRESHOLD, 2**16)  # each tensor gets pages of its own
replace(dist, "init_process_group", in_its_network)
