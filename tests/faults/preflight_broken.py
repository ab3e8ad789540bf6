"""Instead of multiplying, rank 1 fails and rank 2 hangs.

To be copied to a folder on PYTHONPATH as sitecustomize.py.
"""

import os

RANK = os.environ.get("RANK", "0")  # a launcher has none

if RANK != "0":
    import time

    import torch

    def no_matmul(one, other):
        if RANK == "2":
            time.sleep(1000)
        raise RuntimeError("planted")

    torch.Tensor.__matmul__ = no_matmul
