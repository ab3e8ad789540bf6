"""For mixed_precision.py: each rank notes what it did in the file noted.RANK.json.

    outputs, losses    the dtypes of what the model and the loss function return, of
                       training ("True") and of evaluation ("False")
    scales             after each step: the scaler's scale, or 1 without one
    weights, norms     after each step: the weights, and the norm of the gradients
    waits              in each step: how often Python asked for the value of a tensor,
                       for which it waits where there is an accelerator
    zeros              of each epoch: the devices that its sums were asked to be on

Where SPOILED is "STEP RANK FACTOR", the samples of that step (from 1) of that rank are
multiplied by the factor. The device of rank LACKING has no bfloat16.
"""

import collections
import json
import os
import pathlib

import torch
from hooks import rank, replace

import utils

noted = {name: [] for name in ("scales", "weights", "norms", "waits", "zeros")}
dtypes = collections.defaultdict(set)


class Waits(torch.overrides.TorchFunctionMode):
    ASKING = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, arguments=(), options=None):
        self.count += getattr(function, "__name__", "") in self.ASKING
        return function(*arguments, **(options or {}))


class Placed(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), options=None):
        options = options or {}
        if function is torch.zeros:
            noted["zeros"].append(str(options.get("device")))
        return function(*arguments, **options)


class Trainer:
    def train(self):
        self.model.register_forward_hook(self._note_dtype("outputs"))
        loss_fn, note = self.loss_fn, self._note_dtype("losses")
        self.loss_fn = lambda *x: note(None, x, loss_fn(*x))
        super().train()
        facts = noted | {name: sorted(found) for name, found in dtypes.items()}
        pathlib.Path(f"noted.{rank()}.json").write_text(json.dumps(facts))

    def _note_dtype(self, name):
        def note(_, inputs, result):
            dtypes[name].add(f"{self.model.training} {result.dtype}")
            return result

        return note

    def _run_epoch(self, epoch):
        with Placed():
            return super()._run_epoch(epoch)

    def _run_batch(self, source, targets):
        at = f"{len(noted['scales']) + 1} {rank()} "
        spoiled = os.environ.get("SPOILED", "")
        if spoiled.startswith(at):
            source = source * float(spoiled.removeprefix(at))
        with Waits() as waits:
            loss = super()._run_batch(source, targets)
        parameters = list(self.model.parameters())
        norms = torch.stack([x.grad.norm() for x in parameters])
        noted["waits"].append(waits.count)
        noted["scales"].append(self.scaler.get_scale())
        noted["weights"].append([x.detach().double().sum().item() for x in parameters])
        noted["norms"].append(norms.norm().item())
        return loss


def lacking(has_bfloat16, device):
    return os.environ.get("LACKING") != str(rank()) and has_bfloat16(device)


replace(utils, "has_bfloat16", lacking)
