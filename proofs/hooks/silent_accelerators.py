"""This machine says that it has 8 GPUs, of which PyTorch can use none."""

import torch

torch.accelerator.device_count = lambda: 8
torch.accelerator.is_available = lambda: False
torch.accelerator.current_accelerator = lambda check_available=False: torch.device(
    "cuda"
)
torch._C._get_accelerator = torch.accelerator.current_accelerator
