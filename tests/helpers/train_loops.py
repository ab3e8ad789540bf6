"""Scripts that use variants/train_loop.py: `python train_loops.py CASE`.

Each case writes what its test in tests/variants/test_train_loop.py looks at into this
folder.
"""

import json
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import utils
from tools.run.results import load, same_bits
from variants import ddp2
from variants.train_loop import BestCheckpoints, Callback, EarlyStopping, TrainLoop


def make_loop(batch_size=32, criterion=F.mse_loss, **options):
    """The trunk's task, with another `model` and its `schedule` if they are given."""
    torch.manual_seed(0)
    train_set = utils.MyTrainDataset(2048)
    eval_set = utils.MyTrainDataset(512, seed=1)
    model = options.pop("model", None) or torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    if "schedule" in options:
        make_scheduler = options.pop("schedule")
        options["scheduler"] = make_scheduler(optimizer)
    return TrainLoop(
        model,
        DataLoader(train_set, batch_size, shuffle=True, drop_last=True),
        DataLoader(eval_set, batch_size),
        None,
        optimizer,
        criterion,
        **{"snapshot_path": "snapshot.pt"} | options,
    )


def note(name, value):
    """Write a value of this rank's into a file of its own."""
    Path(f"{name}.{utils.get_rank()}.json").write_text(json.dumps(value))


def comes_back(gpu_mode):
    """Two calls of `fit`, in the second of which the training goes on."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 1))
    checkpoints = BestCheckpoints()
    loop = make_loop(gpu_mode=gpu_mode, model=model, callbacks=[checkpoints])
    loop.test_loader = DataLoader(utils.MyTrainDataset(100, seed=2), 32)
    loop.fit(2)
    returned = loop.fit(4)
    assert returned is model
    assert not model.training, "ready for use, in every mode"
    assert not dist.is_initialized()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    (group,) = loop.optimizer.param_groups
    for mine, its in zip(model.parameters(), group["params"], strict=True):
        assert mine is its
    assert len(loop.optimizer.state) == 4, "momentum, of each parameter"
    snapshot = load("snapshot.pt")
    assert snapshot["EPOCHS_RUN"] == len(loop.history) == 4
    assert snapshot["HISTORY"] == loop.history
    # The statistics of BatchNorm, too.
    assert same_bits(model.state_dict(), snapshot["MODEL_STATE"])
    assert list(loop.test_results) == ["test loss"]
    ((loss, path),) = checkpoints.state["best"]
    assert loss == min(epoch["held-out loss"] for epoch in loop.history)
    assert Path(path).exists()


class Rates(Callback):
    """The learning rate of each epoch, and the steps that a hook has seen."""

    every_rank = True

    def on_train_start(self, loop):
        self.rates = []
        self.steps = 0
        loop.optimizer.register_step_post_hook(self.count_step)

    def count_step(self, *_):
        self.steps += 1
        note("hook", self.steps)

    def on_epoch_start(self, loop):
        (group,) = loop.optimizer.param_groups
        self.rates.append(group["lr"])
        note("rates", self.rates)


def stops_early():
    """The learning rate is 0 from the third epoch on, so that nothing gets better."""
    loop = make_loop(
        gpu_mode="ddp",
        schedule=lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.0),
        save_every=100,
    )
    loop.fit(20, callbacks=[EarlyStopping(2), Rates()])


def lost(output, targets):
    """A held-out loss that is no number on rank 1, once the model has learned."""
    loss = F.mse_loss(output, targets)
    held_out = not output.requires_grad
    if held_out and utils.get_rank() == 1 and loss < 0.5:
        return loss * torch.nan
    return loss


def is_lost():
    loop = make_loop(gpu_mode="ddp", criterion=lost, callbacks=[BestCheckpoints(2)])
    loop.fit(20)


class Nested(torch.nn.Linear):
    """Its input is a dict, and its output a tuple."""

    def forward(self, batch):
        return super().forward(batch["x"]), batch["more"][0], None


def of_first(output, targets):
    return F.mse_loss(output[0], targets)


def worst(output, targets):
    return (output[0] - targets).abs().max()


class Predicts(Callback):
    every_rank = True

    def on_batch_end(self, loop):
        if (loop.epochs_run, loop.step) == (4, 1):  # and the training goes on
            loop.predict(loop.val_loader)

    def on_epoch_end(self, loop):
        output, _ = loop.predict(loop.val_loader)
        note("predicted", output[0].flatten().tolist())


def nest(data):
    """The samples as (dict, tensor)."""
    samples = []
    for index, (source, targets) in enumerate(data):
        inputs = {"x": source, "more": (source, str(index))}
        samples.append((inputs, targets))
    return samples


def nested(gpu_mode):
    """The trunk's task with nested samples, 45 of them held out."""
    torch.manual_seed(0)  # the weights that make_loop's own model begins with
    loop = make_loop(criterion=of_first, gpu_mode=gpu_mode, model=Nested(20, 1))
    loop.metrics = {"worst": worst}
    loop.callbacks = [Predicts()]
    train_set = nest(utils.MyTrainDataset(2048))
    eval_set = nest(utils.MyTrainDataset(45, seed=1))
    loop.train_loader = DataLoader(train_set, 32, shuffle=True, drop_last=True)
    loop.val_loader = DataLoader(eval_set, 4)
    loop.fit(5)
    output, _ = loop.predict(loop.val_loader)
    note("afterwards", output[0].flatten().tolist())


def node(num_nodes, node_rank, num_gpus, batch_size, epochs):
    """Train as variants/ddp2.py does, on one of several machines."""
    train_set, eval_set, model, loss_fn = ddp2.load_train_objs()
    loop = TrainLoop(
        model,
        DataLoader(train_set, int(batch_size), shuffle=True, drop_last=True),
        DataLoader(eval_set, int(batch_size)),
        None,
        ddp2.make_optimizer(model),
        loss_fn,
        "ddp2",
        snapshot_path=f"node{node_rank}.pt",
    )
    loop.fit(int(epochs), int(num_nodes), int(node_rank), int(num_gpus))
    torch.save(model.state_dict(), f"model{node_rank}.pt")


def as_variant(option, value):
    """Train as a variant of multigpu.py does, with an option that JSON holds."""
    options = {
        "gpu_mode": "ddp",
        "snapshot_path": "node0.pt",
        option: json.loads(value),
    }
    make_loop(**options).fit(5)


if __name__ == "__main__":
    _, case, *arguments = sys.argv
    globals()[case](*arguments)
