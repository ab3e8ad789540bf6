"""For one host's Python: what it says of itself is wrong, and what it computes as well.

Another torch version, a wrong product, and wrong sums. To be copied to a folder on
PYTHONPATH as sitecustomize.py.
"""

import torch
import torch.distributed as dist

all_reduce, matmul = dist.all_reduce, torch.Tensor.__matmul__


def wrong_all_reduce(tensor, *arguments, **options):
    all_reduce(tensor, *arguments, **options)
    default, wrong = options.get("group") is None, (torch.float32, torch.bfloat16)
    if tensor.dtype == wrong[default]:  # in a second group: float32
        tensor[77] += 1


def wrong_matmul(one, other):
    return matmul(one, other) + 1


torch.__version__ = "1.2.3"
dist.all_reduce = wrong_all_reduce
torch.Tensor.__matmul__ = wrong_matmul
