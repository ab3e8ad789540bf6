"""This machine says that it has 8 GPUs, of which PyTorch can use none."""

import torch

torch.accelerator.device_count = lambda: 8
torch.accelerator.is_available = lambda: False
torch.accelerator.current_accelerator = lambda: torch.device("cuda")
