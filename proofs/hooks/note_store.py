"""Each rank writes to store.RANK the host whose store it is connected to."""

import pathlib

import torch.distributed as dist
from hooks import rank, replace


class Trainer:
    def train(self):
        pathlib.Path(f"store.{rank()}").write_text(hosts[-1])
        super().train()


hosts = []


def note(store, host, *rest, **options):
    hosts.append(host)
    return store(host, *rest, **options)


replace(dist, "TCPStore", note)
