"""Six steps with one collective each, and a fault in rank 1: slow, skip or mismatch.

torchrun --standalone --nproc-per-node=2 docs/it_hangs/hang.py slow
"""

import os
import pickle
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace  # private: it may change


def train(fault):
    """Returns the seconds that this rank worked, without those it waited."""
    work_s = 0.0
    for step in range(6):
        start = time.perf_counter()
        gradient = torch.ones(2)  # stands for the forward and the backward pass
        if fault == "slow":
            time.sleep(0.3)
        work_s += time.perf_counter() - start
        if step == 3 and fault == "skip":
            save()  # this rank alone thinks that it is done
            break
        if step == 3 and fault == "mismatch":
            dist.broadcast(gradient, src=1)
        else:
            dist.all_reduce(gradient)
    return work_s


def save():
    time.sleep(60)  # a large model and a slow disk


def name_the_slowest(work_s, took_s):
    """All ranks call this at the end of an epoch, say, and rank 0 prints."""
    mine = torch.tensor([work_s])
    each = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(each, mine)
    if dist.get_rank() == 0:
        print(f"it took {took_s:.2f} s, waiting included")
        for rank, worked in enumerate(each):
            print(f"rank {rank} worked for {worked.item():.2f} s")
        print(f"the slowest is rank {int(torch.cat(each).argmax())}")


def keep_record(rank, world_size):
    """Write to trace_RANK, once a second, which collectives this rank has called."""
    group = {"name": "0", "desc": "default_pg", "ranks": str([*range(world_size)])}
    while True:
        time.sleep(1)
        trace = pickle.loads(_dump_fr_trace(includeStackTraces=False))
        trace["pg_config"] = {"0": group}  # gloo does not fill it in
        with open(f"trace_{rank}.tmp", "wb") as file:
            pickle.dump(trace, file)
        os.replace(f"trace_{rank}.tmp", f"trace_{rank}")


def main(fault):
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    # A thread of its own goes on while the rank waits in a collective.
    threading.Thread(target=keep_record, args=(rank, world_size), daemon=True).start()
    start = time.perf_counter()
    work_s = train(fault if rank == 1 else None)
    name_the_slowest(work_s, time.perf_counter() - start)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
