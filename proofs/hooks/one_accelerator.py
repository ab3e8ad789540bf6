"""This machine says that it has one GPU; to use it fails with MESSAGE."""

import os

import torch
from hooks.accelerators import plant


def set_device_index(_index):
    raise RuntimeError(os.environ["MESSAGE"])


plant("cuda", 1)
torch.accelerator.set_device_index = set_device_index
