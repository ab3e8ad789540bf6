"""Steps per second of the Trainer of single_gpu.py beside other training loops.

    python -m benchmarks.loop

All of them train the same model with the same optimizer on the same batches, and must
end with the same weights. Accelerate, Lightning Fabric and Lightning's Trainer take
part where they are installed. Timed is the training epoch alone: no start-up,
evaluation, printing or saving on any side.
"""

import copy
import gc
import logging
import os
import sys
import tempfile
import time
import warnings

import torch
from torch.utils.data import RandomSampler

import single_gpu
import utils
from benchmarks import report

BATCH_SIZE = 32
EPOCHS = 3  # in a turn
TOLERANCE = 1e-6  # largest difference between weights that counts as the same


class BareLoop:
    """The least that trains at all: it does not even add up the losses."""

    name, package = "bare loop", "torch"

    def __init__(self, train_objs, device):
        train_objs = copy.deepcopy(train_objs)
        train_set, _, model, self.loss_fn, self.optimizer = train_objs
        self.model, self.device, self.epochs_run = model.to(device), device, 0
        self.sampler = RandomSampler(train_set, generator=torch.Generator())
        self.loader = single_gpu.prepare_dataloader(
            train_set, BATCH_SIZE, self.sampler, device, drop_last=True
        )
        self.prepare()

    def prepare(self):
        pass

    def turn(self):
        """Train for EPOCHS more epochs; return the seconds that they took."""
        self.seconds = 0.0
        for _ in range(EPOCHS):
            self.start_clock()
            self.run_epoch()
            self.stop_clock()
        return self.seconds

    def start_clock(self):
        self.started = time.perf_counter()

    def stop_clock(self):
        self.epochs_run += 1
        torch.get_device_module(self.device).synchronize()  # it may still be at work
        self.seconds += time.perf_counter() - self.started

    def seed(self):
        """What Trainer._run_epoch of single_gpu.py does first, done by all."""
        self.sampler.generator.manual_seed(self.epochs_run)
        torch.manual_seed(self.epochs_run)
        self.model.train()

    def run_epoch(self):
        self.seed()
        for source, targets in self.loader:
            source = source.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
            self.optimizer.zero_grad()
            loss = self.loss_fn(self.model(source), targets)
            loss.backward()
            self.optimizer.step()


class SingleGpu(BareLoop):
    """`Trainer._run_epoch` as it is: it seeds itself and adds up the losses."""

    name = "single_gpu.py"

    def prepare(self):
        objects = self.model, self.loss_fn, self.optimizer, self.loader, None
        with tempfile.TemporaryDirectory() as folder:  # which has nothing to resume
            where = self.device, 1, os.path.join(folder, "none.pt")
            self.trainer = single_gpu.Trainer(*objects, *where)

    def run_epoch(self):
        self.trainer._run_epoch(self.epochs_run)


class Accelerate(BareLoop):
    """The loop that its documentation shows; its loader moves the batches."""

    name, package = "Accelerate", "accelerate"

    def prepare(self):
        from accelerate import Accelerator

        self.framework = Accelerator(cpu=self.device.type == "cpu")
        self.model, self.optimizer, self.loader = self.framework.prepare(
            self.model, self.optimizer, self.loader
        )

    def run_epoch(self):
        self.seed()
        for source, targets in self.loader:
            self.optimizer.zero_grad()
            loss = self.loss_fn(self.model(source), targets)
            self.framework.backward(loss)
            self.optimizer.step()


class Fabric(Accelerate):
    """The same loop is what Fabric's documentation shows."""

    name, package = "Lightning Fabric", "lightning"

    def prepare(self):
        from lightning import fabric

        setup = fabric.Fabric(accelerator=self.device.type, devices=1)
        setup.launch()
        self.model, self.optimizer = setup.setup(self.model, self.optimizer)
        self.loader, self.framework = setup.setup_dataloaders(self.loader), setup


class LightningTrainer(BareLoop):
    """Timed from hook to hook: neither the start of `fit` nor what is between epochs.

    `barebones` is its own mode for such measurements: without logging and the like.
    """

    name, package = "Lightning Trainer", "lightning"

    def prepare(self):
        import lightning

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        ours = self

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.model = ours.model

            def configure_optimizers(self):
                return ours.optimizer  # the same in every round: momentum stays

            def on_train_epoch_start(self):
                ours.start_clock()
                ours.seed()

            def training_step(self, batch, batch_idx):
                source, targets = batch
                return ours.loss_fn(self.model(source), targets)

            def on_train_epoch_end(self):
                ours.stop_clock()

        self.module = Module()

    def turn(self):
        from lightning import Trainer

        self.seconds, where = 0.0, {"accelerator": self.device.type, "devices": 1}
        trainer = Trainer(**where, max_epochs=EPOCHS, barebones=True)
        trainer.fit(self.module, self.loader)
        return self.seconds


def check_weights(first, *others):
    """End with one line and exit status 1 if not all have trained the same."""
    for other in others:
        pairs = zip(first.model.parameters(), other.model.parameters(), strict=True)
        apart = max((x - y).abs().max().item() for x, y in pairs)
        if not apart <= TOLERANCE:  # written so that nan fails too
            sys.exit(
                f"loop.py: error: after {other.epochs_run} epochs the weights of"
                f" {other.name} are {apart:.1e} off those of the {first.name}"
            )


def main(args):
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="lightning")  # advice, such as on workers
    kinds = (BareLoop, SingleGpu, Accelerate, Fabric, LightningTrainer)
    kinds = [x for x in kinds if report.is_installed(x.package)]
    device = utils.set_device("auto")
    train_objs = single_gpu.load_train_objs()
    trained = [kind(train_objs, device) for kind in kinds]
    steps = EPOCHS * len(trained[0].loader)
    report.print_setting(
        f"{args.rounds} rounds, {steps} steps of {BATCH_SIZE} samples each, on"
        f" {device.type}, 1 thread",
        *dict.fromkeys(kind.package for kind in kinds),
    )
    gc.freeze()  # nobody searches the modules of the others for garbage
    turns = report.take_turns({x.name: x.turn for x in trained}, args.rounds)
    check_weights(*trained)
    speed = {"steps/s": (",.0f", lambda seconds: steps / seconds)}
    report.print_table("", turns, **speed)


if __name__ == "__main__":
    rounds = 60, "how often each loop has its turn"
    main(report.make_parser(__doc__, rounds=rounds).parse_args())
