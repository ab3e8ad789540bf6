"""For real_job.py: each rank notes what it did in the file noted.RANK.json.

    rates, norms    of each step: the learning rate, and the gradient's norm after it
    images          of each sample that it trained on: the sum of its pixels
    children        after each epoch's training: the processes that this rank has
    logged          how often it wrote to the log

The loss is LOSS_TIMES as large, and HELD_OUT samples are held out.
"""

import json
import os
import pathlib

import torch
from hooks import rank, replace
from torch.utils.data import Subset

import utils

noted = {"rates": [], "norms": [], "images": [], "children": [], "logged": 0}


def around_load_train_objs(load_train_objs):
    train_set, eval_set, model, loss_fn, make_optimizer = load_train_objs()
    eval_set = Subset(eval_set, range(int(os.environ.get("HELD_OUT", len(eval_set)))))
    times = float(os.environ.get("LOSS_TIMES", 1))
    return train_set, eval_set, model, lambda *x: times * loss_fn(*x), make_optimizer


class Trainer:
    def train(self):
        super().train()
        pathlib.Path(f"noted.{rank()}.json").write_text(json.dumps(noted))

    def _run_epoch(self, epoch):
        result = super()._run_epoch(epoch)
        tasks = pathlib.Path("/proc/self/task").glob("*/children")
        pids = [pid for task in tasks for pid in task.read_text().split()]
        noted["children"].append(sorted(pids))
        return result

    def _run_batch(self, source, targets):
        noted["images"] += source.double().sum(1).tolist()
        noted["rates"].append(self.optimizer.param_groups[0]["lr"])
        loss = super()._run_batch(source, targets)
        norms = [x.grad.norm() for x in self.model.parameters()]
        noted["norms"].append(torch.stack(norms).norm().item())
        return loss


def note_row(log_row, *arguments):
    noted["logged"] += 1
    log_row(*arguments)


replace(utils, "log_row", note_row)
