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
import os

import torch

from utils import get_rank

from . import write

noted = collections.defaultdict(list)


class Watch(torch.overrides.TorchFunctionMode):
    waits = 0
    ASKING = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__")

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = options or {}
        if function is torch.zeros:
            noted["zeros"].append(str(options.get("device")))
        Watch.waits += getattr(function, "__name__", "") in self.ASKING
        return function(*arguments, **options)


class Trainer:
    def train(self, *arguments):
        self.model.register_forward_hook(self._note_dtype("outputs"))
        self.loss_fn.register_forward_hook(self._note_dtype("losses"))
        super().train(*arguments)

    def _note_dtype(self, name):
        def note(_, inputs, result):
            found = f"{self.model.training} {result.dtype}"
            if found not in noted[name]:
                noted[name] = sorted([*noted[name], found])

        return note

    def _evaluate(self):
        held_out_loss = super()._evaluate()
        write("noted", noted)
        return held_out_loss

    def _run_epoch(self, epoch):
        with Watch():
            return super()._run_epoch(epoch)

    def _run_batch(self, source, targets):
        step = len(noted["scales"]) + 1
        if "SPOILED" in os.environ:
            at_step, of_rank, factor = os.environ["SPOILED"].split()
            if (int(at_step), int(of_rank)) == (step, get_rank()):
                source = source * float(factor)
        before = Watch.waits
        loss = super()._run_batch(source, targets)
        noted["waits"].append(Watch.waits - before)
        noted["scales"].append(self.scaler.get_scale())
        sums = []
        norms = []
        for weight in self.model.parameters():
            sums.append(weight.detach().double().sum().item())
            norms.append(weight.grad.norm())
        noted["weights"].append(sums)
        noted["norms"].append(torch.stack(norms).norm().item())
        return loss


def around_has_bfloat16(has_bfloat16, device):
    return os.environ.get("LACKING") != str(get_rank()) and has_bfloat16(device)
