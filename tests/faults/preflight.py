"""The fault that FAULT names, in each Python of one host or one launcher.

To be copied to a folder on PYTHONPATH as sitecustomize.py.
"""

import os
import time

FAULT = os.environ.get("FAULT")
RANK = os.environ.get("RANK", "0")  # a launcher has none

if FAULT == "clock":  # ahead of the clock that all hosts here share
    real_time = time.time
    time.time = lambda: real_time() + 100
elif FAULT:
    import torch
    import torch.distributed as dist

    all_reduce, send, matmul = dist.all_reduce, dist.send, torch.Tensor.__matmul__

    def wrong_all_reduce(tensor, *arguments, **options):
        all_reduce(tensor, *arguments, **options)
        default, wrong = options.get("group") is None, (torch.float32, torch.bfloat16)
        if tensor.dtype == wrong[default]:  # in a second group: float32
            tensor[77] += 1

    def slow_send(tensor, peer):
        if tensor.numel() > 1:  # not the answer to a message
            time.sleep(0.7)
        send(tensor, peer)

    def no_matmul(one, other):
        if RANK == "2":
            time.sleep(1000)
        raise RuntimeError("planted")

    if FAULT == "wrong":
        torch.__version__ = "1.2.3"
        dist.all_reduce = wrong_all_reduce
        torch.Tensor.__matmul__ = lambda one, other: matmul(one, other) + 1
    elif FAULT == "slow card" and os.environ.get("LOCAL_RANK") == "1":
        dist.send = slow_send
    elif FAULT == "no matmul" and RANK != "0":
        torch.Tensor.__matmul__ = no_matmul
