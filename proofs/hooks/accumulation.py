"""Each rank writes what DDP sent to the file sent.RANK.json, in float64 if DOUBLE=1.

steps         for each step: the bytes of each all-reduce of gradients
first         the gradients in each all-reduce of the first step, before it
used          the gradient that the optimizer used in the first step
weights       after the last step
"""

import json
import os

import torch
from hooks import rank
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

noted = {"steps": [], "first": [], "used": []}


def around_load_train_objs(load_train_objs):
    train_set, eval_set, model, *rest = load_train_objs()
    if os.environ.get("DOUBLE"):
        model = model.double()
        train_set, eval_set = (
            [(source.double(), targets.double()) for source, targets in data]
            for data in (train_set, eval_set)
        )
    return train_set, eval_set, model, *rest


def flat(tensors):
    return torch.cat([x.detach().flatten() for x in tensors]).tolist()


def count(_, bucket):
    noted["steps"][-1].append(bucket.buffer().nbytes)
    if len(noted["steps"]) == 1:
        noted["first"].append(flat(bucket.gradients()))
    return allreduce_hook(None, bucket)


class Trainer:
    def __init__(self, *arguments):
        super().__init__(*arguments)
        if hasattr(self, "ddp_model"):
            self.ddp_model.register_comm_hook(None, count)

    def _run_batch(self, source, targets):
        noted["steps"].append([])
        loss = super()._run_batch(source, targets)
        noted["used"] = noted["used"] or flat(x.grad for x in self.model.parameters())
        return loss

    def train(self):
        super().train()
        noted["weights"] = flat(self.model.parameters())
        with open(f"sent.{rank()}.json", "w") as file:
            json.dump(noted, file)
