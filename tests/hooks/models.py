"""Other models for any script: each changes what `load_train_objs` returns."""

import functools

import torch
from hooks import replace

import utils


def changes_objects(change):
    """The hook that puts what `change` makes of the objects in their place."""

    @functools.wraps(change)
    def hook(script):
        replace(script, "load_train_objs", lambda load: change(*load()))

    return hook


@changes_objects
def norm_in_front(train_set, eval_set, model, loss_fn):
    """BatchNorm in front, whose statistics are buffers."""
    source, _ = eval_set[0]
    norm = torch.nn.BatchNorm1d(len(source))
    return train_set, eval_set, torch.nn.Sequential(norm, model), loss_fn


def batch_norm(script):
    """The names of layers change with it."""
    norm_in_front(script)
    plan = script.get("PLAN", {})  # of tensor_parallel.py
    script["PLAN"] = {f"1.{name}": style for name, style in plan.items()}
    if "blocks_of" in script:  # of fsdp.py
        replace(script, "blocks_of", lambda inner, model: inner(model[1]))


class Weighted(torch.nn.Module):
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


@changes_objects
def large_model(_, eval_set, _model, loss_fn):
    """64 samples, and a model of nine million weights."""
    train_set = utils.MyTrainDataset(64)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 3000), torch.nn.Linear(3000, 3000), torch.nn.Linear(3000, 1)
    )
    return train_set, eval_set, model, loss_fn
