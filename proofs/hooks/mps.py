"""This machine says that it is a Mac. A Trainer that is given MPS says so and ends."""

import sys

import torch
from hooks.accelerators import plant

plant("mps", 1)
torch.accelerator.set_device_index = lambda index: None


class Trainer:
    def __init__(self, *arguments):
        device = next(x for x in arguments if isinstance(x, torch.device))
        if device.type == "mps":
            assert not arguments[3].pin_memory and not arguments[4].pin_memory
            sys.exit("it trains on mps")
        super().__init__(*arguments)
