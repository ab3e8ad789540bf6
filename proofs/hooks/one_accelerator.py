"""This machine says that it has one GPU; to use it fails with MESSAGE."""

import os

import torch


def set_device_index(_index):
    raise RuntimeError(os.environ["MESSAGE"])


torch.accelerator.device_count = lambda: 1
torch.accelerator.is_available = lambda: True
torch.accelerator.current_accelerator = lambda check_available=False: torch.device(
    "cuda"
)
torch._C._get_accelerator = torch.accelerator.current_accelerator
torch.accelerator.set_device_index = set_device_index
