"""torch cannot open a snapshot: the system says ERRNO."""

import os

import torch


def load(path, **_options):
    number = int(os.environ["ERRNO"])
    raise OSError(number, os.strerror(number), path)


torch.load = load
