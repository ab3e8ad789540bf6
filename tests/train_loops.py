"""Scripts that use variants/train_loop.py: `python train_loops.py CASE`.

Each case writes what its test in tests/test_train_loop.py looks at into this folder.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset

import utils
from variants.train_loop import (
    BestCheckpoints,
    Callback,
    EarlyStopping,
    LearningRateSchedule,
    ProgressBar,
    TerminateOnNaN,
    TrainLoop,
)


def make_loop(kind=TrainLoop, batch_size=32, criterion=F.mse_loss, **options):
    """The trunk's task, with a model that also has dropout and buffers if asked."""
    torch.manual_seed(0)
    train_set = utils.MyTrainDataset(2048)
    model = options.pop("model", None) or torch.nn.Linear(20, 1)
    return kind(
        model,
        DataLoader(train_set, batch_size, shuffle=True, drop_last=True),
        DataLoader(utils.MyTrainDataset(512, seed=1), batch_size),
        None,
        torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9),
        criterion,
        **options,
    )


def note(name, value):
    """Write a value of this rank's into a file of its own."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    Path(f"{name}.{rank}.json").write_text(json.dumps(value))


# What comes back


def comes_back(gpu_mode):
    """Two calls of `fit`, in the second of which the training goes on."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 1))
    bests = BestCheckpoints()
    loop = make_loop(gpu_mode=gpu_mode, model=model, callbacks=[bests])
    loop.test_loader = DataLoader(utils.MyTrainDataset(100, seed=2), 32)
    loop.fit(2)
    returned = loop.fit(4)
    parameters = [x for group in loop.optimizer.param_groups for x in group["params"]]
    facts = {
        "the same model": returned is model,
        "the same parameters": all(
            x is y for x, y in zip(parameters, model.parameters(), strict=True)
        ),
        "momentum": len(loop.optimizer.state),
        "metrics": loop.metrics,
        "best": bests.state["best"],
        "group": dist.is_initialized(),
        "training": model.training,
    }
    Path("facts.json").write_text(json.dumps(facts))
    torch.save(model.state_dict(), "model.pt")


def again():
    """`fit` is called twice, and then a second loop's, with the same launcher."""
    loop = make_loop(gpu_mode="ddp", callbacks=[LearningRateSchedule(halve)])
    loop.fit(1)
    loop.fit(2)
    make_loop(gpu_mode="ddp", snapshot_path="other.pt").fit(1)


# Random numbers


class Draws(Callback):
    """A random number after each epoch, on every rank."""

    every_rank = True

    def on_epoch_end(self, loop):
        note("random", torch.rand(1).item())


def dropout(gpu_mode, precision):
    """Two epochs at once, and one by one."""
    for path, *until in (("whole.pt", 2), ("resumed.pt", 1, 2)):
        for epochs in until:
            torch.manual_seed(0)
            linear = torch.nn.Linear(20, 1)
            model = torch.nn.Sequential(torch.nn.Dropout(0.1), linear)
            options = {"callbacks": [Draws()], "snapshot_path": path}
            options |= {"gpu_mode": gpu_mode, "precision": precision}
            make_loop(model=model, **options).fit(epochs)


class Sees(torch.nn.Linear):
    def forward(self, x):
        if self.training:
            note("seen", x.sum().item())
        return super().forward(x)


def workers():
    """Nothing but the noise that a worker draws, from a loader with a generator."""
    data = utils.NoisyDataset([(torch.zeros(20), torch.zeros(1))] * 128, 1.0)
    options = {"num_workers": 1, "generator": torch.Generator().manual_seed(7)}
    for path, *until in (("whole.pt", 2), ("resumed.pt", 1, 2)):
        for epochs in until:
            torch.manual_seed(0)
            loop = make_loop(model=Sees(20, 1), gpu_mode="ddp", snapshot_path=path)
            loop.train_loader = DataLoader(data, 32, shuffle=True, **options)
            loop.fit(epochs)


# Override


class MyLoop(TrainLoop):
    def init_ddp_connection(self, proc_rank, world_size):
        store = dist.FileStore(os.path.abspath("store"), world_size)
        dist.init_process_group(
            "gloo", store=store, rank=proc_rank, world_size=world_size
        )
        note("connection", [proc_rank, world_size])

    def configure_ddp(self, model, device_ids):
        ddp_model = super().configure_ddp(model, device_ids)
        self.sent = []
        ddp_model.register_comm_hook(self.sent, count_and_send)
        note("device_ids", device_ids)
        return ddp_model

    def _run_epoch(self, epoch):
        result = super()._run_epoch(epoch)
        note("sent", [self.step, len(self.sent)])
        return result


def count_and_send(sent, bucket):
    sent.append(bucket.buffer().numel())
    tensor = bucket.buffer().div_(dist.get_world_size())
    future = dist.all_reduce(tensor, async_op=True).get_future()
    return future.then(lambda x: x.value()[0])


def override(accumulate):
    make_loop(MyLoop, gpu_mode="ddp", accumulate=int(accumulate)).fit(1)


# Callbacks


class Rates(Callback):
    """The learning rate of each epoch, on every rank."""

    every_rank = True

    def on_epoch_end(self, loop):
        (group,) = loop.optimizer.param_groups
        self.rates = [*getattr(self, "rates", []), group["lr"]]
        note("rates", self.rates)


class Calls(Callback):
    """How often each hook is called, where it is called."""

    def __init__(self):
        self.calls = {"start": 0, "batch": 0, "end": 0}

    def on_epoch_start(self, loop):
        self.calls["start"] += 1

    def on_batch_end(self, loop):
        self.calls["batch"] += 1

    def on_epoch_end(self, loop):
        self.calls["end"] += 1
        note("calls", self.calls)


def halve(epochs):
    return 0.5**epochs


def schedule(gpu_mode, *until):
    for epochs in map(int, until):
        make_loop(
            gpu_mode=gpu_mode,
            batch_size=64 if gpu_mode == "single" else 32,
            callbacks=[LearningRateSchedule(halve), Rates(), Calls(), ProgressBar()],
        ).fit(epochs)


def stops_early():
    """The learning rate is 0 from the third epoch on, so that nothing gets better."""
    callbacks = [LearningRateSchedule(only_two_epochs), EarlyStopping(2), Rates()]
    make_loop(gpu_mode="ddp", callbacks=callbacks, save_every=100).fit(20)


def only_two_epochs(epochs):
    return float(epochs < 2)


def lost(output, targets):
    """A loss that is no number on rank 1, once the model has learned something."""
    loss = F.mse_loss(output, targets)
    rank = dist.get_rank() if dist.is_initialized() else 1
    return loss * float("nan") if rank == 1 and loss < 0.5 else loss


def is_lost():
    callbacks = [TerminateOnNaN(), BestCheckpoints(2), Calls()]
    make_loop(gpu_mode="ddp", criterion=lost, callbacks=callbacks).fit(20)


def bests():
    make_loop(gpu_mode="ddp", callbacks=[BestCheckpoints(2), Bad()]).fit(5)


def best(epochs):
    make_loop(callbacks=[BestCheckpoints()]).fit(int(epochs))


class Bad(Callback):
    """Training goes wrong from the fourth epoch on."""

    every_rank = True

    def on_epoch_start(self, loop):
        if loop.epochs_run == 3:
            for parameter in loop.model.parameters():
                parameter.data += 1


# Precision


class Watched(torch.nn.Linear):
    def forward(self, x):
        output = super().forward(x)
        note("dtype", [str(output.dtype), str(self.weight.dtype), self.training])
        return output


def precision(kind, gpu_mode="ddp", clip=None):
    torch.manual_seed(0)
    model = Watched(20, 1)
    clip = clip and float(clip)
    loop = make_loop(gpu_mode=gpu_mode, model=model, precision=kind, clip=clip)
    loop.fit(2)
    torch.save(model.state_dict(), "model.pt")


# A loss over the batch of a machine


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(20, 8)
        self.log_temperature = torch.nn.Parameter(torch.zeros(()))

    def forward(self, source):
        encoded = F.normalize(self.linear(source), dim=-1)
        other = F.normalize(self.linear(source.flip(-1)), dim=-1)
        return torch.stack([encoded * self.log_temperature.exp(), other], dim=1)


def info_nce(output, targets):
    one, other = output.unbind(1)
    return F.cross_entropy(one @ other.T, torch.arange(len(one)))


def node(gpu_mode, num_nodes, node_rank, num_gpus, batch_size, epochs):
    """One of several machines, as each would type it."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    double = [(x.double(), y.double()) for x, y in utils.MyTrainDataset(500)]
    model = Encoder()
    TrainLoop(
        model,
        DataLoader(double, int(batch_size), shuffle=True, drop_last=True),
        DataLoader(Subset(double, range(50)), 8),
        None,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        info_nce,
        gpu_mode,
        snapshot_path=f"node{node_rank}.pt",
    ).fit(int(epochs), int(num_nodes), int(node_rank), int(num_gpus))
    torch.save(model.state_dict(), f"model{node_rank}.pt")


# The variants


def as_gradient_accumulation():
    make_loop(gpu_mode="ddp", accumulate=4).fit(5)


def as_mixed_precision():
    make_loop(gpu_mode="ddp", precision="bf16").fit(5)


def as_ddp2():
    torch.manual_seed(0)
    train_set, held_out = utils.load_views()
    model = utils.Encoder(20, 8)
    TrainLoop(
        model,
        DataLoader(train_set, 32, shuffle=True, drop_last=True),
        DataLoader(held_out, 32),
        None,
        torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9),
        utils.info_nce,
        "ddp2",
    ).fit(5)


def unsendable():
    make_loop(gpu_mode="ddp", criterion=lambda x, y: F.mse_loss(x, y)).fit(1)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
