"""Ranks on disks of their own, as on several machines, without torchrun.

Its own exit status would hide theirs.
"""

import contextlib
import random
import socket

import torch

from tools.run.launch import environment
from tools.run.processes import Program
from tools.scripts import ROOT


def launch_on_own_disks(script, *arguments, cwd, nprocs=2, hooks=(), **env):
    """[Done of each rank]. Each is a fork in a folder of its own, `cwd`/RANK.

    As of machines with one process each, its local rank is 0, if `env` sets no other.
    """
    store = torch.distributed.TCPStore("localhost", 0, is_master=True)
    env = environment(script, env) | {
        "WORLD_SIZE": nprocs,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks = []
    for rank in range(nprocs):
        its_own = {"RANK": rank, "LOCAL_RANK": 0, **env}
        words = ["python", ROOT / script, *arguments]
        ranks.append(Program(words, cwd / str(rank), hooks=hooks, **its_own))
    return [rank.finish() for rank in ranks]


def free_port():
    """A port that is free, and that no process is given when it asks for any."""
    while True:
        number = random.randrange(20000, 30000)
        with contextlib.suppress(OSError), socket.create_server(("", number)):
            return number
