"""A job that is large enough to be measured, and what an epoch of it takes each rank.

The job is the script's own, but its model has a body in front: four hidden layers of
WIDTH, which pause for PAUSE_S in forward, and twice as long in backward. The figures of
the last epoch go to measured.RANK.json. Nothing is saved.
"""

import ctypes
import json
import os
import time
from pathlib import Path

import torch
import torch._dynamo  # noqa: F401  DDP and optimizers import it: not for their training
import torch.distributed as dist
from torch.distributed.tensor import parallel

CLONE_NEWNET = 0x40000000  # setns(2)
LIBC = ctypes.CDLL(None, use_errno=True)
init_process_group = dist.init_process_group


def measure(script):
    """Make the job large, and write down what its last epoch takes."""
    figures = {}

    class Trainer(script["Trainer"]):
        def _run_epoch(self, epoch):
            meet()
            sent_before = sent_bytes()
            meet()
            began = time.perf_counter()
            computed_before = time.thread_time()
            loss = super()._run_epoch(epoch)  # ends when all ranks have ended
            sizes = [weight.numel() for weight in self.model.parameters()]
            figures["weights"] = sum(sizes)
            figures["seconds"] = time.perf_counter() - began
            # In the main thread
            figures["computes"] = time.thread_time() - computed_before
            meet()
            figures["sent_bytes"] = sent_bytes() - sent_before
            return loss

        def train(self, *arguments):
            super().train(*arguments)
            rank = dist.get_rank() if dist.is_initialized() else 0
            Path(f"measured.{rank}.json").write_text(json.dumps(figures))

        def _save_snapshot(self):
            self.model.state_dict()  # FSDP2 takes back what an evaluation has gathered

    its_objects = script["load_train_objs"]

    def load_train_objs():
        train_set, eval_set, model, loss_fn = its_objects()
        put_body_into(model, train_set)
        return train_set, eval_set, model, loss_fn

    script["Trainer"] = Trainer
    script["load_train_objs"] = load_train_objs
    dist.init_process_group = in_its_network


def cut_layers(script):
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


def meet():
    if dist.is_initialized():
        dist.barrier()


def put_body_into(model, train_set):
    torch.manual_seed(0)
    source, _ = train_set[0]
    blocks = make_body(inputs=source.shape[-1], width=int(os.environ["WIDTH"]))
    if isinstance(model, torch.nn.Sequential):
        for index, block in enumerate(blocks):
            model.insert(index, block)
    else:  # not a module around the model: a script may use what its own model has
        model.body = torch.nn.Sequential(*blocks)
        model.register_forward_pre_hook(through_body)


def make_body(inputs, width):
    """Four hidden layers, and one that returns as many numbers as went in."""
    blocks = []
    size = inputs
    for _ in range(4):
        layer = torch.nn.Linear(size, width)
        blocks.append(torch.nn.Sequential(layer, torch.nn.ReLU(), Device()))
        size = width
    return [*blocks, torch.nn.Linear(width, inputs)]


def pause_s():
    return float(os.environ.get("PAUSE_S", 0))


def networks():
    return os.environ["NETWORKS"].split()


class Pause(torch.autograd.Function):
    @staticmethod
    def forward(context, source):
        time.sleep(pause_s())
        return source.view_as(source)

    @staticmethod
    def backward(context, grad):
        time.sleep(2 * pause_s())
        return grad


class Device(torch.nn.Module):
    """Sleeps, as if a device computed: the CPU is free to send."""

    def forward(self, source):
        return Pause.apply(source) if pause_s() and self.training else source


def through_body(model, inputs):
    source, *rest = inputs
    return model.body(source), *rest


def in_its_network(*arguments, **options):
    """This rank's sockets are made in its network, one of NETWORKS.

    Only those that carry tensors: its connection to the store is there already.
    """
    if networks():
        if "store" not in options:  # as torch does it
            store, rank, world_size = next(dist.rendezvous("env://"))
            options |= {"store": store, "rank": rank, "world_size": world_size}
        network = networks()[options["rank"]]
        with open(network) as file:
            if LIBC.setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns", network)
    init_process_group(*arguments, **options)


def sent_bytes():
    """What the cards of this rank's network have sent; NaN if it has none."""
    if not networks():
        return float("nan")
    _, _, *cards = Path("/proc/thread-self/net/dev").read_text().splitlines()
    total = 0
    for card in cards:
        _, _, numbers = card.partition(":")
        total += int(numbers.split()[8])  # after eight columns of what has come
    return total
