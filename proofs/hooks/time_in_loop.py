"""Each rank of docs/hangs/hang.py says how long it was in its loop."""

import time

import torch.distributed as dist


def around_train(train, fault):
    start = time.monotonic()
    try:
        return train(fault)
    finally:
        took_s = time.monotonic() - start
        print(f"rank {dist.get_rank()} was in the loop for {took_s:.2f} s\n", end="")
