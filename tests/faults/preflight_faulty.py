"""For one host's Python: what it says of itself is wrong, and what it computes as well.

Another torch version, a clock that is 100 s ahead (these hosts share the real one), and
a wrong product and sum. To be copied to a folder on PYTHONPATH as sitecustomize.py.
"""

import time

import torch
import torch.distributed as dist

real_time = time.time
all_reduce, matmul = dist.all_reduce, torch.Tensor.__matmul__


def wrong_time():
    return real_time() + 100


def wrong_all_reduce(tensor, *arguments, **options):
    all_reduce(tensor, *arguments, **options)
    default, wrong = options.get("group") is None, (torch.float32, torch.bfloat16)
    if tensor.dtype == wrong[default]:  # in a second group: float32
        tensor[77] += 1


def wrong_matmul(one, other):
    return matmul(one, other) + 1


time.time = wrong_time
torch.__version__ = "1.2.3"
dist.all_reduce = wrong_all_reduce
torch.Tensor.__matmul__ = wrong_matmul
