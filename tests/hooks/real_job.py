"""For real_job.py: each rank notes what it did in the file noted.RANK.json.

    rates, norms    of each step: the learning rate, and the gradient's norm after it
    unclipped       of each step: the gradient's norm before it is clipped
    images          of each sample that it trained on: the sum of its pixels
    untouched       of each step: nothing has drawn from the epoch's random numbers
    workers         after each epoch's training: {process: how it was started}
    exits           the exit status of each of them
    preload         what their server has imported

The loss is LOSS_TIMES as large, 17 samples are held out, a third of them with wrong
labels, and each rank that writes the log does so in a file of its own:
snapshot.pt.csv.RANK.
"""

import collections
import multiprocessing.forkserver
import os

import torch

import utils

from . import write

noted = collections.defaultdict(list)
clip_grad_norm = torch.nn.utils.clip_grad_norm_


def note_and_clip(*arguments):
    norm = clip_grad_norm(*arguments)
    noted["unclipped"].append(norm.item())
    return norm


torch.nn.utils.clip_grad_norm_ = note_and_clip


def around_load_train_objs(load_train_objs):
    train_set, eval_set, model, loss_fn = load_train_objs()
    times = float(os.environ.get("LOSS_TIMES", 1))
    loss_fn.register_forward_hook(lambda module, batch, loss: times * loss)
    held_out = []
    for index, (image, digit) in enumerate(eval_set[:17]):
        if index % 3 == 0:
            digit = (digit + 1) % 10
        held_out.append((image, digit))
    return train_set, held_out, model, loss_fn


def around_write_log(write_log, path, rows):
    write_log(f"{path}.{utils.get_rank()}", rows)


class Trainer:
    def train(self, *arguments):
        super().train(*arguments)
        workers = torch.multiprocessing.active_children()
        # This ends the workers of both.
        self.train_data._iterator = None
        self.eval_data._iterator = None
        noted["exits"] = [worker.exitcode for worker in workers]
        noted["preload"] = multiprocessing.forkserver._forkserver._preload_modules
        write("noted", noted)

    def _run_epoch(self, epoch):
        result = super()._run_epoch(epoch)
        workers = torch.multiprocessing.active_children()
        how = {worker.pid: worker._start_method for worker in workers}
        noted["workers"].append(how)
        return result

    def _run_batch(self, source, targets):
        noted["images"] += source.double().sum(1).tolist()
        seeded = torch.Generator().manual_seed(torch.initial_seed())
        untouched = torch.equal(torch.get_rng_state(), seeded.get_state())
        noted["untouched"].append(untouched)
        noted["rates"].append(self.optimizer.param_groups[0]["lr"])
        loss = super()._run_batch(source, targets)
        norms = [weight.grad.norm() for weight in self.model.parameters()]
        noted["norms"].append(torch.stack(norms).norm().item())
        return loss
