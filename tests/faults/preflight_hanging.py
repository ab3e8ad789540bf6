"""Instead of multiplying, each process says that it is there, and hangs.

To be copied to a folder on PYTHONPATH as sitecustomize.py.
"""

import os

if "RANK" in os.environ:  # not a launcher
    import time

    import torch

    def hang(one, other):
        print("here", flush=True)
        time.sleep(1000)

    torch.Tensor.__matmul__ = hang
