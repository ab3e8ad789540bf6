"""Each rank writes to rank.RANK which local rank it asked a device for, of how many."""

import json
import pathlib

from hooks import rank, replace

import utils

facts = {}


def note(get_device, name, local_rank, nprocs):
    facts["local_rank"], facts["nprocs"] = local_rank, nprocs
    return get_device(name, local_rank, nprocs)


class Trainer:
    def train(self):
        pathlib.Path(f"rank.{rank()}").write_text(json.dumps(facts))
        super().train()


replace(utils, "get_device", note)
