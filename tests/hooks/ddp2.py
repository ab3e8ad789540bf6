"""For ddp2.py: with 3 samples held out; noted.RANK.json has its group.

These are the ranks of the group in which this rank gathers, and its time-out.
"""

import torch.distributed as dist

from . import write


def around_load_train_objs(load_train_objs):
    train_set, eval_set, *rest = load_train_objs()
    return train_set, eval_set[:3], *rest


class Trainer:
    def train(self, *arguments):
        super().train(*arguments)
        ranks = dist.get_process_group_ranks(self.node)
        options = self.node._get_backend(self.device).options
        write("noted", [ranks, options._timeout.total_seconds()])
