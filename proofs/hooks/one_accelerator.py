"""This machine says that it has one accelerator."""

import torch

torch.accelerator.device_count = lambda: 1
