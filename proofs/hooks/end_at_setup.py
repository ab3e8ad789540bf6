"""A rung under torchrun ends, with status 1, where it would join the process group."""

import sys


def around_ddp_setup(_ddp_setup, *_arguments):
    sys.exit("it would begin to train")
