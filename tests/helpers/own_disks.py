"""Start ranks on disks of their own, as on several machines.

torchrun does not start them, because its exit status would hide theirs.
"""

import contextlib
import random
import socket

import torch

from tools.run.launch import environment
from tools.run.processes import Program
from tools.scripts import ROOT


def launch_on_own_disks(script, *arguments, cwd, nprocs=2, hooks=(), **env):
    """[Done of each rank]. Each rank is a fork in a folder of its own, `cwd`/RANK.

    As on machines with one process each, all local ranks are 0, unless `env` sets them.
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
    """A free port, from a range that no process gets when it asks for any port."""
    while True:
        number = random.randrange(20000, 30000)
        with contextlib.suppress(OSError), socket.create_server(("", number)):
            return number
