"""For other hooks: this machine says that it has accelerators."""

import types

import torch


def plant(kind, count, available=True):
    """`count` accelerators of a `kind` such as "cuda", which can be used or not."""
    accelerator = torch.accelerator
    accelerator.device_count = lambda: count
    accelerator.is_available = lambda: available
    accelerator.current_accelerator = lambda check_available=False: torch.device(kind)
    torch._C._get_accelerator = accelerator.current_accelerator  # for process groups
    # Adam asks for it, also on the CPU.
    stream = types.SimpleNamespace(is_capturing=lambda: False)
    accelerator.current_stream = lambda: stream
