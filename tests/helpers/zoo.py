"""The zoo: models, losses and optimizers that readers bring, for every script.

torchrun --standalone --nproc-per-node=2 -m tests.helpers.zoo SCRIPTS CASES

Runs these cases, and writes outcomes.json; names are joined by commas. It computes in
float64, where rounding hides nothing.
"""

import random
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.nn import Buffer, Linear, Sequential, Tanh
from torch.nn.utils import parametrizations

import single_gpu
import utils
from tests.helpers.scripts import exceptions_of
from tools.prove import cases
from tools.scripts import SCRIPTS, ancestry

BF16 = torch.bfloat16
F64 = torch.float64


class Net(nn.Module):
    """A function of named parts, which are modules, parameters or buffers."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.function(self, *inputs)


class Draws(nn.Dropout):
    """Dropout that also draws from `random` and from NumPy, as a reader's data may."""

    def forward(self, source):
        if self.training:
            source = source * (random.random() + numpy.random.rand())
        return super().forward(source)


class Output:
    def __init__(self, tensor):
        self.tensor = tensor


# Models


def weight(*shape, **kind):
    return nn.Parameter(torch.randn(shape, **kind))


def cast(dtype):
    return Net(lambda net, source: source.to(dtype))


def mlp(*more):
    first = Linear(20, 12, bias=False)
    last = Linear(12, 1, bias=False)
    return Sequential(first, *more, Tanh(), last)


def twice(module):
    return Sequential(Linear(20, 20), module, Linear(20, 20), module, Linear(20, 1))


def tied():
    first = Linear(20, 20)
    second = Linear(20, 20)
    second.weight = first.weight
    return Sequential(first, Tanh(), second, Linear(20, 1))


def sometimes(used):
    """The bias is used in steps for which `used(number of the step)` is true."""

    def forward(net, source):
        net.step += net.training
        output = net.layer(source)
        return output + net.bias.sum() if used(net.step) else output

    step = Buffer(torch.tensor(0))
    return Net(forward, layer=Linear(20, 1), bias=weight(3), step=step)


def heads(scale):
    """The second head serves the training loss alone."""

    def forward(net, source):
        output = net.head(source)
        if not net.training:
            return output
        return torch.cat([output, scale * net.second(source)], 1)

    return Net(forward, head=Linear(20, 1), second=Linear(20, 1))


def lstm():
    def forward(net, source):
        output, _ = net.lstm(source.view(-1, 5, 4))
        return output[:, -1]

    return Net(forward, lstm=nn.LSTM(4, 1, batch_first=True))


def encoder():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return Net(
        lambda net, source: net.layers(source.view(-1, 5, 4))[:, 0, :1],
        layers=nn.TransformerEncoder(layer, 2),
    )


def scalar():
    return Net(
        lambda net, source: net.factor * source.sum(1, keepdim=True), factor=weight()
    )


def complex_weight():
    return Net(
        lambda net, source: ((source + 0j) @ net.matrix).real,
        matrix=weight(20, 1, dtype=torch.complex128),
    )


def in_an_object():
    """Its output is an object, in which only the loss finds the tensor."""
    return Net(lambda net, source: Output(net.layer(source)), layer=Linear(20, 1))


def sparse():
    return Net(
        lambda net, source: net.bag((source > 0).long()),
        bag=nn.EmbeddingBag(2, 1, sparse=True),
    )


MODELS = {
    "MLP": mlp,
    "repeated block": lambda: twice(Linear(20, 20)),
    "tied across blocks": tied,
    "BatchNorm": lambda: mlp(nn.BatchNorm1d(12)),
    "random numbers": lambda: mlp(Draws(0.3)),
    "weight_norm": lambda: mlp(parametrizations.weight_norm(Linear(12, 12))),
    "spectral_norm": lambda: mlp(parametrizations.spectral_norm(Linear(12, 12))),
    "LSTM": lstm,
    "TransformerEncoder": encoder,
    "scalar": scalar,
    "complex": complex_weight,
    "bfloat16": lambda: Sequential(cast(BF16), mlp().to(BF16), cast(F64)),
    "frozen": lambda: Sequential(Linear(20, 8).requires_grad_(False), Linear(8, 1)),
    "unused on one rank": lambda: sometimes(lambda step: utils.get_rank() == 0),
    "unused on all ranks": lambda: sometimes(lambda step: False),
    "unused in the last step": lambda: sometimes(lambda step: step != 6),
}


# Losses, and models for them


def sum_of_losses():
    def forward(_, outputs, targets):
        heads = outputs.split(1, dim=1)
        return sum(F.mse_loss(output, targets) for output in heads)

    return Net(forward)


def of_classes(**options):
    return Net(
        lambda net, output, targets: net.loss_fn(output, targets[:, 0].long()),
        loss_fn=nn.CrossEntropyLoss(**options),
    )


def four_classes():
    return Linear(20, 4)


def with_a_parameter():
    return Net(
        lambda net, output, targets: F.mse_loss(net.factor * output, targets),
        factor=weight(),
    )


def of_an_object():
    return Net(lambda net, output, targets: F.mse_loss(output.tensor, targets))


LOSSES = {
    "output in an object": (in_an_object, of_an_object),
    "two losses": (lambda: heads(1), sum_of_losses),
    "one head overflows": (lambda: heads(1e200), sum_of_losses),
    "class weights": (
        four_classes,
        lambda: of_classes(weight=torch.tensor([0.1, 1, 2, 0.5])),
    ),
    "ignore_index": (four_classes, lambda: of_classes(ignore_index=3)),
    "loss with a parameter": (mlp, with_a_parameter),
}


# Optimizers

OF_PYTORCH = ["SGD", "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW"]
OF_PYTORCH += ["Adamax", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop"]


def momentum(parameters):
    return optim.SGD(parameters, 0.05, momentum=0.9)


def groups(parameters):
    """A group for each parameter, in reverse order, with a rate of its own."""
    settings = []
    for parameter in reversed(parameters):
        settings.append({"params": [parameter], "lr": 1 / len(parameter)})
    return optim.Adam(settings)


OPTIMIZERS = {
    "fused": partial(optim.Adam, lr=0.01, fused=True),
    "fused SGD": partial(optim.SGD, lr=0.01, fused=True),
    "groups": groups,
    "some parameters": lambda parameters: optim.SGD(parameters[:1], 0.01),
    **{name: partial(getattr(optim, name), lr=0.01) for name in OF_PYTORCH},
}


class Case(NamedTuple):
    """The functions that make its model, its optimizer and its loss."""

    model: Callable = mlp
    optimizer: Callable = momentum
    loss: Callable = nn.MSELoss


CASES = {
    **{name: Case(model) for name, model in MODELS.items()},
    **{name: Case(model, loss=loss) for name, (model, loss) in LOSSES.items()},
    **{name: Case(optimizer=make) for name, make in OPTIMIZERS.items()},
    "SparseAdam": Case(sparse, partial(optim.SparseAdam, lr=0.01)),
}
MLP = mlp, nn.MSELoss
NOT_MLP = [name for name, case in CASES.items() if (case.model, case.loss) != MLP]


class Data(list):
    def set_epoch(self, epoch):
        """Do nothing. real_job.py calls it, whose own samples are random."""


def brought_by_reader(case):
    """{name: the function of that name in a script}: what a reader brings."""
    make_model, make_optimizer, make_loss = CASES[case]
    losses = []

    def load_train_objs():
        torch.manual_seed(utils.get_rank())
        model = make_model()
        losses[:] = [make_loss()]
        torch.manual_seed(0)
        source = torch.randn(91, 20)
        targets = (torch.randint(13, (91, 1)) // 4).double()
        data = list(zip(source, targets, strict=True))
        return Data(data[:72]), data[72:], model, *losses

    def optimizer_of(model):
        return make_optimizer([*model.parameters(), *losses[0].parameters()])

    return {"load_train_objs": load_train_objs, "make_optimizer": optimizer_of}


NAMES = sorted(SCRIPTS, key=lambda name: len(ancestry(name)))  # parents first


def blocks_of(model):
    return [child for child in model.children() if [*child.parameters()]]


def evaluate(seen, loss_fn):
    """The mean loss over the samples of all ranks, as in all scripts but ddp2.py."""
    loss_sum = 0
    samples = 0
    for batches in utils.gather(seen):
        for output, targets in batches:
            loss_sum += loss_fn(output, targets).item() * len(output)
            samples += len(output)
    return loss_sum / samples, 0


REPLACED = {
    "variants/fsdp.py": {"blocks_of": blocks_of},
    "variants/sharded_snapshot.py": {"blocks_of": blocks_of},
    "variants/ddp2.py": {"evaluate_retrieval": evaluate},
    "variants/real_job.py": {"prepare_dataloader": single_gpu.prepare_dataloader},
}
WAITS = "a rank waits for the other until gloo's time-out"
HANGS = dict.fromkeys(["fsdp", "sharded_snapshot", "preemptible"], WAITS)
HANGS["diloco"] = "gloo aborts: the ranks send different states"
OF_AN_MLP = "its PLAN names the layers of an MLP"
# {(script, case): why it is not run}
NOT_RUN = {
    **{(f"variants/{name}.py", "unused on one rank"): HANGS[name] for name in HANGS},
    **{("variants/tensor_parallel.py", case): OF_AN_MLP for case in NOT_MLP},
}

if __name__ == "__main__":
    torch.set_default_dtype(F64)
    # All runs here share the mesh that PyTorch keeps, so that nobody may empty it.
    utils.forget_meshes = lambda model: None
    names, chosen = [words.split(",") for words in sys.argv[1:]]
    alone_first = [name for name in names if exceptions_of(name).own_numbers]
    makers = {case: brought_by_reader(case) for case in chosen}
    cases.run_cases(makers, names, REPLACED, NOT_RUN, alone_first)
