"""The least that starts training processes: import torch, spawn, and do nothing.

It is what benchmarks.startup compares multigpu.py with, and is run by it.
"""

import argparse

import stamps  # the copy beside the copy of this script
import torch


def main(rank):
    stamps.stamp("done")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nprocs", type=int, default=2)
    torch.multiprocessing.spawn(main, nprocs=parser.parse_args().nprocs)
