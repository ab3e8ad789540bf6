"""Other models for any script: each changes what `load_train_objs` returns."""

import functools
import inspect

import torch
from hooks import replace

import utils


def changes_objects(change):
    """The hook that puts what `change` makes of the objects in their place."""

    @functools.wraps(change)
    def hook(script):
        replace(script, "load_train_objs", lambda load: change(*load()))

    return hook


def again(optimizer, model):
    """The same optimizer for the parameters of another model."""
    taken = inspect.signature(type(optimizer)).parameters  # AdamW has more defaults
    settings = {k: v for k, v in optimizer.defaults.items() if k in taken}
    return type(optimizer)(model.parameters(), **settings)


@changes_objects
def norm_in_front(train_set, eval_set, model, loss_fn, optimizer):
    """BatchNorm in front, whose statistics are buffers, one of them a strided one."""
    norm = torch.nn.BatchNorm1d(len(eval_set[0][0]))
    norm.running_mean = torch.stack([norm.running_mean] * 2, dim=1)[:, 0]
    model = torch.nn.Sequential(norm, model)
    return train_set, eval_set, model, loss_fn, again(optimizer, model)


def batch_norm(script):
    """The names of layers change with it."""
    norm_in_front(script)
    script["PLAN"] = {f"1.{name}": x for name, x in script.get("PLAN", {}).items()}


class Weighted(torch.nn.Module):
    """A loss whose weights must have been moved, to whatever device."""

    def __init__(self, loss_fn):
        super().__init__()
        self.loss_fn, self.moved = loss_fn, False

    def _apply(self, *arguments):  # Module.to calls it
        self.moved = True
        return super()._apply(*arguments)

    def forward(self, *arguments):
        assert self.moved
        return self.loss_fn(*arguments)


@changes_objects
def weighted_loss(train_set, eval_set, model, loss_fn, optimizer):
    return train_set, eval_set, model, Weighted(loss_fn), optimizer


@changes_objects
def large_model(_, eval_set, _model, loss_fn, optimizer):
    """64 samples, and a model of nine million weights."""
    layers = [torch.nn.Linear(*x) for x in ((20, 3000), (3000, 3000), (3000, 1))]
    model, train_set = torch.nn.Sequential(*layers), utils.MyTrainDataset(64)
    return train_set, eval_set, model, loss_fn, again(optimizer, model)
