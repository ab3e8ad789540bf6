"""For one host's Python: a product takes ten times as long.

To be copied to a folder on PYTHONPATH as sitecustomize.py.
"""

import torch

matmul = torch.Tensor.__matmul__


def slow_matmul(one, other):
    for _ in range(9):
        matmul(one, other)
    return matmul(one, other)


torch.Tensor.__matmul__ = slow_matmul
