"""A rung ends, with status 1, where it would start processes or join their group."""

import sys

import torch
from hooks import replace


def end(*_arguments):
    sys.exit("it would begin to train")


around_ddp_setup = end
replace(torch.multiprocessing, "spawn", end)
