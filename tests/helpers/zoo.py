"""The zoo: models, losses and optimizers that readers bring, for every script.

torchrun --standalone --nproc-per-node=2 -m tests.helpers.zoo [SCRIPTS] [CASES]

Runs the cases named, or all, and writes outcomes.json; names are joined by commas. It
computes in float64, where rounding hides nothing.
"""

import functools
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn import Buffer, Linear, Sequential, Tanh
from torch.nn.utils import parametrizations, weight_norm
from torch.optim.swa_utils import AveragedModel

import single_gpu
import utils
from tools.prove import cases
from tools.scripts import SCRIPTS, ancestry, definition

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


class Net(nn.Module):
    """A function of named parts, which are modules, parameters or buffers."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.function(self, *inputs)


class Counts(Linear):
    """Its state is more than tensors."""

    count = 0

    def forward(self, x):
        self.count += self.training
        return super().forward(x)

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


class Both(optim.Optimizer):
    """One parameter is SGD's, the others are Adam's."""

    def __init__(self, params):
        self.both = (
            optim.SGD(params[:1], 0.05, momentum=0.9),
            optim.Adam(params[1:], 0.01),
        )
        super().__init__([x.param_groups[0] for x in self.both], {})

    def step(self, closure=None):
        for optimizer, group in zip(self.both, self.param_groups, strict=True):
            optimizer.param_groups, optimizer.state = [group], self.state
            optimizer.step(closure)


def weight(*shape, **kind):
    return nn.Parameter(torch.randn(shape, **kind))


def cast(dtype):
    return Net(lambda _, x: x.to(dtype))


def mlp(*more):
    first, last = Linear(20, 12, bias=False), Linear(12, 1, bias=False)
    return Sequential(first, *more, Tanh(), last)


def twice(module):
    return Sequential(Linear(20, 20), module, Linear(20, 20), module, Linear(20, 1))


def tied():
    first, second = Linear(20, 20), Linear(20, 20)
    second.weight = first.weight
    return Sequential(first, Tanh(), second, Linear(20, 1))


def averaged():
    def forward(self, x):
        if self.training:
            self.average.update_parameters(self.a)
        return (self.a if self.training else self.average)(x)

    net = mlp()
    return Net(forward, a=net, average=AveragedModel(net).requires_grad_(False))


def sometimes(used):
    def forward(self, x):
        self.batch += self.training
        return self.a(x) + (self.k.sum() if used(self.batch) else 0)

    return Net(forward, a=Linear(20, 1), k=weight(3), batch=Buffer(torch.tensor(0)))


def heads(scale):
    """The second head serves the training loss alone."""

    def forward(self, x):
        y = self.a(x)
        return torch.cat([y, scale * self.b(x)], 1) if self.training else y

    return Net(forward, a=Linear(20, 1), b=Linear(20, 1))


def encoder():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    layers = nn.TransformerEncoder(layer, 2)
    return Net(lambda m, x: m.a(x.view(-1, 5, 4))[:, 0, :1], a=layers)


def odd_buffers():
    return Net(
        lambda m, x: m.a(x * m.mask * m.column) * m.turn.real + m.n,
        a=Linear(20, 1),
        mask=Buffer(torch.rand(20) > 0.3),
        column=Buffer(torch.randn(20, 2)[:, 0]),
        turn=Buffer(torch.randn((), dtype=torch.complex128)),
        n=Buffer(torch.arange(1)),
    )


def of_classes(**options):
    loss_fn = nn.CrossEntropyLoss(**options)
    return Net(lambda m, y, targets: m.a(y, targets[:, 0].long()), a=loss_fn)


def sum_of_losses():
    def loss(_, y, targets):
        losses = {i: F.mse_loss(x, targets) for i, x in enumerate(y.split(1, 1))}
        return sum(losses.values())

    return Net(loss)


MODELS = {
    "MLP": mlp,
    "shared ReLU": lambda: twice(nn.ReLU()),
    "repeated block": lambda: twice(Linear(20, 20)),
    "nested blocks": lambda: Sequential(Sequential(mlp()), Linear(1, 1)),
    "tied across blocks": tied,
    "tied in the root": lambda: Net(
        lambda m, x: (x @ m.k).tanh() @ m.l[:, :1], k=(k := weight(20, 20)), l=k
    ),
    "BatchNorm": lambda: mlp(nn.BatchNorm1d(12)),
    "dropout": lambda: mlp(nn.Dropout(0.3)),
    "weight_norm": lambda: mlp(weight_norm(Linear(12, 12))),
    "new weight_norm": lambda: mlp(parametrizations.weight_norm(Linear(12, 12))),
    "spectral_norm": lambda: mlp(parametrizations.spectral_norm(Linear(12, 12))),
    "LSTM": lambda: Net(
        lambda m, x: m.a(x.view(-1, 5, 4))[0][:, -1], a=nn.LSTM(4, 1, batch_first=True)
    ),
    "TransformerEncoder": encoder,
    "channels_last": lambda: Sequential(
        nn.Unflatten(1, (5, 2, 2)), nn.Conv2d(5, 1, 2), nn.Flatten()
    ).to(memory_format=torch.channels_last),
    "scalar": lambda: Net(lambda m, x: m.k * x.sum(1, True), k=weight()),
    "zero-size": lambda: Net(
        lambda m, x: m.a(x) + m.k.sum(), a=Linear(20, 1), k=weight(0, 3)
    ),
    "complex": lambda: Net(
        lambda m, x: ((x + 0j) @ m.k).real, k=weight(20, 1, dtype=torch.complex128)
    ),
    "bfloat16": lambda: Sequential(cast(BF16), mlp().to(BF16), cast(F64)),
    "float32": lambda: Sequential(cast(F32), mlp().to(F32), cast(F64)),
    "mixed dtypes": lambda: Sequential(
        Linear(20, 8), cast(F32), Linear(8, 1).to(F32), cast(F64)
    ),
    "mixed in the root": lambda: Net(
        lambda m, x: m.b(m.a(x).float()).double(),
        a=Linear(20, 8),
        b=Linear(8, 1).float(),
    ),
    "odd buffers": odd_buffers,
    "frozen": lambda: Sequential(Linear(20, 8).requires_grad_(False), Linear(8, 1)),
    "unused on one rank": lambda: sometimes(lambda batch: utils.get_rank() == 0),
    "unused on all ranks": lambda: sometimes(lambda batch: False),
    "unused in the last step": lambda: sometimes(lambda batch: batch != 6),
    "average of the weights": averaged,
    "extra state": lambda: Counts(20, 1),
}
LOSSES = {
    "dict of losses": (lambda: heads(1), sum_of_losses),
    "one head overflows": (lambda: heads(1e200), sum_of_losses),
    "class weights": (
        lambda: Linear(20, 4),
        lambda: of_classes(weight=torch.tensor([0.1, 1, 2, 0.5])),
    ),
    "ignore_index": (lambda: Linear(20, 4), lambda: of_classes(ignore_index=3)),
    "loss with a parameter": (
        mlp,
        lambda: Net(lambda m, y, x: F.mse_loss(m.k * y, x), k=weight()),
    ),
}
OPTIMIZERS = {
    "amsgrad": lambda p: optim.Adam(p, 0.01, amsgrad=True),
    "fused": lambda p: optim.Adam(p, 0.01, fused=True),
    "fused SGD": lambda p: optim.SGD(p, 0.01, fused=True),
    "foreach": lambda p: optim.Adam(p, 0.01, foreach=True),
    "tensor as rate": lambda p: optim.Adam(p, torch.tensor(0.01)),
    "groups": lambda p: optim.Adam(
        [{"params": [x], "lr": 1 / len(x)} for x in p[::-1]]
    ),
    "some parameters": lambda p: optim.SGD(p[:1], 0.01),
    "two in one": Both,
}
OPTIMIZERS |= {
    name: lambda p, kind=kind: kind(p, lr=0.01)
    for name, kind in vars(optim).items()
    if isinstance(kind, type) and optim.Optimizer in kind.__mro__[1:]
}


def momentum(parameters):
    return optim.SGD(parameters, 0.05, momentum=0.9)


def sparse():
    bag = nn.EmbeddingBag(2, 1, sparse=True)
    return Net(lambda m, x: m.a((x > 0).long()), a=bag)


CASES = {name: (model, momentum, nn.MSELoss) for name, model in MODELS.items()}
CASES |= {name: (model, momentum, loss) for name, (model, loss) in LOSSES.items()}
NOT_MLP = [name for name in [*CASES, "SparseAdam"] if name != "MLP"]
CASES |= {name: (mlp, make, nn.MSELoss) for name, make in OPTIMIZERS.items()}
CASES["SparseAdam"] = sparse, OPTIMIZERS["SparseAdam"], nn.MSELoss


class Data(list):
    def set_epoch(self, epoch):
        """Nothing: its samples are not random, as those of real_job.py."""


def objects(case):
    """What the `load_train_objs` of a script returns."""
    make_model, make_optimizer, make_loss = CASES[case]
    torch.manual_seed(utils.get_rank())
    model, loss_fn = make_model(), make_loss()
    optimizer = make_optimizer([*model.parameters(), *loss_fn.parameters()])
    torch.manual_seed(0)
    source, targets = torch.randn(91, 20), (torch.randint(13, (91, 1)) // 4).double()
    data = list(zip(source, targets, strict=True))
    return Data(data[:72]), data[72:], model, loss_fn, optimizer


NAMES = [x for x in SCRIPTS if definition(x, "Trainer")]
NAMES.sort(key=lambda name: len(ancestry(name)))  # parents first
# PyTorch keeps one mesh for all runs here, which must not be emptied.
KEEP_MESH = {"vars": lambda mesh: {}, "forget_meshes": lambda model: None}


def evaluate(seen, loss_fn):
    """The mean over the samples of all ranks, as other scripts than ddp2.py have it."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, seen)
    pairs = sum(parts, [])
    losses = [loss_fn(*pair).item() * len(pair[0]) for pair in pairs]
    return sum(losses) / sum(len(output) for output, _ in pairs), 0


REPLACED = {
    "variants/fsdp.py": KEEP_MESH,
    "variants/sharded_snapshot.py": KEEP_MESH,
    "variants/tensor_parallel.py": KEEP_MESH,
    "variants/ddp2.py": {"evaluate_retrieval": evaluate},
    "variants/real_job.py": {"prepare_dataloader": single_gpu.prepare_dataloader},
}
# One rank would wait for the other until gloo's time-out.
WAIT = "variants/fsdp.py", "variants/sharded_snapshot.py", "variants/preemptible.py"

if __name__ == "__main__":
    torch.set_default_dtype(F64)
    named = [x.split(",") for x in sys.argv[1:]]
    names, of_cases = *named, *[NAMES, CASES][len(named) :]
    makers = {case: functools.partial(objects, case) for case in of_cases}
    left_out = [(name, "unused on one rank") for name in WAIT]
    left_out += [("variants/tensor_parallel.py", x) for x in NOT_MLP]  # of its PLAN
    cases.take(makers, names, REPLACED, left_out, alone_first=["variants/real_job.py"])
