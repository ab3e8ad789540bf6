"""What benchmarks/chaos.py trains: multinode.py, which notes its steps.

    torchrun ... -m benchmarks.chaos_job 50 10

STEPS is the file that rank 0 appends to: a line [BEGAN, NOW, STEP] after each
step; with -1 for STEP when its process has imported all, with -2 and -3 before and
after it saves. Each line has 64 bytes.
"""

import functools
import io
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch

import multinode
import utils

STEP_S = 0.02  # that each step takes longer
SAVE_S = 0.8  # between the halves of a snapshot, so that a kill can hit the save
save = torch.save


def began(pid):
    """When a process began, as time.time() counts; OSError if it has ended."""
    # Its fields from the third on: proc_pid_stat(5)
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(stat[19])  # since the machine was started
    uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - (uptime - ticks / os.sysconf("SC_CLK_TCK"))


BEGAN = began("self")


def note(step):
    if os.environ["RANK"] == "0":
        line = json.dumps([BEGAN, time.time(), step])
        # In one system call and one page of memory (64 divides a page, and Linux
        # copies page by page): neither a kill nor a reader finds half a line.
        with open(os.environ["STEPS"], "ab", buffering=0) as log:
            log.write(line.ljust(63).encode() + b"\n")


class Trainer(multinode.Trainer):
    def _run_epoch(self, epoch):
        self.step = epoch * len(self.train_data)
        return super()._run_epoch(epoch)

    def _run_batch(self, source, targets):
        time.sleep(STEP_S)
        loss = super()._run_batch(source, targets)
        note(self.step)
        self.step += 1
        return loss


def save_slowly(snapshot, file):
    whole = io.BytesIO()
    save(snapshot, whole)
    data = whole.getvalue()
    half = len(data) // 2
    note(-2)
    file.write(data[:half])
    file.flush()
    time.sleep(SAVE_S)
    file.write(data[half:])
    note(-3)


if __name__ == "__main__":
    note(-1)
    torch.save = save_slowly
    multinode.Trainer = Trainer
    # So that the others notice a kill within the patience of chaos.py.
    soon = timedelta(seconds=20)
    multinode.ddp_setup = functools.partial(multinode.ddp_setup, timeout=soon)
    args = utils.make_parser(multinode.__doc__).parse_args()
    # Without @record: torchrun's SIGTERM may come before a worker has written its
    # error.json to the end. Then torchrun ends instead of restarting (torch 2.10 to
    # 2.13, `ProcessFailure.__post_init__`).
    multinode.main.__wrapped__(args)
