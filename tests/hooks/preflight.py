"""For cluster/preflight.py: what is wrong with a host, or with one of its cards."""

import os
import time

import torch
import torch.distributed as dist

from . import replace


def clock(_):
    """It is ahead of the clock that all hosts here share."""
    replace(time, "time", lambda inner: inner() + 100)


def wrong(_):
    """Another torch, which multiplies wrongly. So do all-reduces, in each group."""

    def all_reduce(inner, tensor, *arguments, **options):
        inner(tensor, *arguments, **options)
        in_default_group = options.get("group") is None
        wrong_dtype = torch.bfloat16 if in_default_group else torch.float32
        if tensor.dtype == wrong_dtype:
            tensor[77] += 1

    def matmul(inner, *matrices):
        return inner(*matrices) + 1

    torch.__version__ = "1.2.3"
    replace(dist, "all_reduce", all_reduce)
    replace(torch.Tensor, "__matmul__", matmul)


def slow_card(_):
    def send(inner, tensor, peer):
        if tensor.numel() > 1:  # not the answer to a message
            time.sleep(0.7)
        inner(tensor, peer)

    if os.environ.get("LOCAL_RANK") == "1":
        replace(dist, "send", send)


def no_matmul(_):
    """Rank 1 fails, and rank 2 hangs. A launcher has no rank."""
    rank = os.environ.get("RANK", "0")

    def matmul(*_):
        if rank == "2":
            time.sleep(1000)  # until it is ended
        raise RuntimeError("planted")

    if rank != "0":
        replace(torch.Tensor, "__matmul__", matmul)
