"""Other models for any script: each changes what `load_train_objs` returns."""

import functools

import torch
from torch import nn

from . import replace


def changes_objects(change):
    """The hook that puts what `change` makes of the objects in their place."""

    @functools.wraps(change)
    def hook(script):
        replace(script, "load_train_objs", lambda load: change(*load()))

    return hook


def to_double(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor


def double(data):
    return [tuple(map(to_double, sample)) for sample in data]


@changes_objects
def float64(train_set, eval_set, model, loss_fn):
    """Rounding hides nothing, and autocast leaves it alone."""
    return double(train_set), double(eval_set), model.double(), loss_fn


class RunningMean(nn.Module):
    """Subtracts the mean of what it has seen: training reads this buffer."""

    def __init__(self, features):
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))

    def forward(self, source):
        if self.training:
            self.mean.lerp_(source.mean(0), 0.1)
        return source - self.mean


def in_front(script, layer):
    """The script's model, with `layer(features)` before it."""

    @changes_objects
    def change(train_set, eval_set, model, loss_fn):
        source, _ = eval_set[0]
        model = nn.Sequential(layer(len(source)), model)
        return train_set, eval_set, model, loss_fn

    change(script)
    # The names of layers change with it.
    plan = script.get("PLAN", {})  # of tensor_parallel.py
    script["PLAN"] = {f"1.{name}": style for name, style in plan.items()}
    if "blocks_of" in script:  # of fsdp.py
        replace(script, "blocks_of", lambda inner, model: inner(model[1]))


def batch_norm(script):
    in_front(script, nn.BatchNorm1d)


def running_mean(script):
    in_front(script, RunningMean)


class Weighted(nn.Module):
    """A loss whose weights must have been moved, to whatever device."""

    def __init__(self, loss_fn):
        super().__init__()
        self.loss_fn = loss_fn
        self.moved = False

    def _apply(self, *arguments):  # Module.to calls it
        self.moved = True
        return super()._apply(*arguments)

    def forward(self, *arguments):
        assert self.moved
        return self.loss_fn(*arguments)


@changes_objects
def weighted_loss(train_set, eval_set, model, loss_fn):
    return train_set, eval_set, model, Weighted(loss_fn)
