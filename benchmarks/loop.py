"""Steps per second of the Trainer of single_gpu.py beside other training loops.

    python -m benchmarks.loop

Every contestant trains the same model with the same optimizer on the same batches in
the same order. They take turns, in a new order each round, so that a machine which
slows down or speeds up meanwhile does so for all of them alike.

Timed is the training epoch alone, from before the random numbers are seeded until the
last step is done: no start-up, evaluation, printing or saving on any side.
"""

import argparse
import copy
import gc
import importlib.util
import logging
import os
import random
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
TOLERANCE = 1e-6  # largest difference between weights that counts as the same


class Contestant:
    """One way to train; `seconds` is how long its epochs have taken in this round."""

    def __init__(self, train_objs, device):
        train_set, _, model, self.loss_fn, self.make_optimizer = train_objs
        self.model = copy.deepcopy(model).to(device)
        self.optimizer = self.make_optimizer(self.model.parameters())
        self.device = device
        self.sampler = RandomSampler(train_set, generator=torch.Generator())
        self.loader = single_gpu.prepare_dataloader(
            train_set, BATCH_SIZE, self.sampler, device, drop_last=True
        )
        self.epochs_run = 0
        self.seconds = 0.0
        self.prepare()

    def prepare(self):
        """Wrap the model, the optimizer and the loader as the contestant wants it."""

    def run(self, epochs):
        """Train for `epochs` more epochs; return the seconds they took."""
        self.seconds = 0.0
        for _ in range(epochs):
            self.start_clock()
            self.run_epoch()
            self.stop_clock()
        return self.seconds

    def seed(self):
        """What Trainer._run_epoch of single_gpu.py does first, done by all."""
        self.sampler.generator.manual_seed(self.epochs_run)
        torch.manual_seed(self.epochs_run)
        self.model.train()

    def start_clock(self):
        self.started = time.perf_counter()

    def stop_clock(self):
        if self.device.type != "cpu":  # an accelerator may still be at work
            torch.accelerator.synchronize()
        self.seconds += time.perf_counter() - self.started
        self.epochs_run += 1


class BareLoop(Contestant):
    """The least that trains at all: it does not even add up the losses."""

    name = "bare loop"

    def run_epoch(self):
        self.seed()
        for source, targets in self.loader:
            source = source.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
            self.optimizer.zero_grad()
            loss = self.loss_fn(self.model(source), targets)
            loss.backward()
            self.optimizer.step()


class SingleGpu(Contestant):
    """`Trainer._run_epoch` as it stands: it seeds itself and adds up the losses."""

    name = "single_gpu.py"

    def prepare(self):
        with tempfile.TemporaryDirectory() as folder:
            self.trainer = single_gpu.Trainer(
                self.model,
                self.loss_fn,
                self.make_optimizer,
                self.loader,
                eval_data=None,
                device=self.device,
                total_epochs=1,
                save_every=1,
                snapshot_path=os.path.join(folder, "none.pt"),  # nothing to resume
            )

    def run_epoch(self):
        self.trainer._run_epoch(self.epochs_run)


class Accelerate(Contestant):
    """The loop that its documentation shows; its loader moves the batches."""

    name = "Accelerate"

    def prepare(self):
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=self.device.type == "cpu")
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            self.model, self.optimizer, self.loader
        )

    def run_epoch(self):
        self.seed()
        for source, targets in self.loader:
            self.optimizer.zero_grad()
            loss = self.loss_fn(self.model(source), targets)
            self.accelerator.backward(loss)
            self.optimizer.step()


class Fabric(Contestant):
    """The loop that its documentation shows; its loader moves the batches."""

    name = "Lightning Fabric"

    def prepare(self):
        from lightning.fabric import Fabric

        self.fabric = Fabric(accelerator=self.device.type, devices=1)
        self.fabric.launch()
        self.model, self.optimizer = self.fabric.setup(self.model, self.optimizer)
        self.loader = self.fabric.setup_dataloaders(self.loader)

    def run_epoch(self):
        self.seed()
        for source, targets in self.loader:
            self.optimizer.zero_grad()
            loss = self.loss_fn(self.model(source), targets)
            self.fabric.backward(loss)
            self.optimizer.step()


class LightningTrainer(Contestant):
    """Timed from hook to hook, so that the start-up of `fit` is not counted.

    The clock runs from on_train_epoch_start to on_train_epoch_end of every epoch; what
    Lightning does between two epochs is not counted either. `barebones` is its own mode
    for such measurements: no logging, checkpoints, progress bar, summary, validation.
    """

    name = "Lightning Trainer"

    def prepare(self):
        import lightning

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        contestant = self

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.model = contestant.model

            def configure_optimizers(self):
                return contestant.optimizer  # the same in every round: momentum stays

            def on_train_epoch_start(self):
                contestant.start_clock()
                contestant.seed()

            def training_step(self, batch, batch_idx):
                source, targets = batch
                return contestant.loss_fn(self.model(source), targets)

            def on_train_epoch_end(self):
                contestant.stop_clock()

        self.module = Module()
        self.new_trainer = lightning.Trainer

    def run(self, epochs):
        self.seconds = 0.0
        trainer = self.new_trainer(
            accelerator=self.device.type, devices=1, max_epochs=epochs, barebones=True
        )
        trainer.fit(self.module, self.loader)
        return self.seconds


def parse_args():
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loop",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = utils.fail
    for name, default, text in (
        ("--rounds", 60, "how often every contestant has its turn"),
        ("--epochs", 3, "epochs in a turn"),
        ("--threads", 1, "threads of torch"),
    ):
        parser.add_argument(
            name, type=utils.positive_int, default=default, help=f"{text} ({default})"
        )
    return parser.parse_args()


def check_installed():
    """End with one line and exit status 2 if a framework is missing."""
    names = ("accelerate", "lightning")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        utils.fail(
            f"not installed: {', '.join(missing)}. Type: "
            "pip install -r benchmarks/requirements.txt"
        )


def check_weights(contestants):
    """End with one line and exit status 1 if not all have trained the same."""
    with torch.no_grad():
        first, *others = (
            [parameter.cpu() for parameter in contestant.model.parameters()]
            for contestant in contestants
        )
        for contestant, weights in zip(contestants[1:], others, strict=True):
            pairs = zip(first, weights, strict=True)
            apart = max((mine - its).abs().max().item() for mine, its in pairs)
            if not apart <= TOLERANCE:  # written so that nan fails too
                sys.exit(
                    f"loop.py: error: after {contestant.epochs_run} epochs the weights "
                    f"of {contestant.name} are {apart:.1e} off those of the bare loop"
                )


def measure(contestants, rounds, epochs):
    """Seconds of every contestant in each of `rounds` rounds: {name: [seconds]}."""
    seconds = {contestant.name: [] for contestant in contestants}
    shuffle = random.Random(0).shuffle
    for number in range(rounds + 1):
        order = list(contestants)
        shuffle(order)
        for contestant in order:
            gc.collect()  # nobody pays for the garbage of the one before
            took = contestant.run(epochs)
            if number > 0:  # round 0 warms up
                seconds[contestant.name].append(took)
        check_weights(contestants)
        gc.freeze()  # and nobody searches the modules of the others for garbage
    return seconds


def main(args):
    torch.set_num_threads(args.threads)
    device = utils.get_device("auto")
    train_objs = single_gpu.load_train_objs()
    kinds = (BareLoop, SingleGpu, Accelerate, Fabric, LightningTrainer)
    contestants = [kind(train_objs, device) for kind in kinds]
    if torch.get_num_threads() != args.threads:
        sys.exit("loop.py: error: a framework has changed the number of threads")
    steps = args.epochs * len(contestants[0].loader)
    report.print_setting("torch", "accelerate", "lightning")
    print(
        f"plan      {args.rounds} rounds after 1 to warm up; in each, all of them do"
        f"\n          {args.epochs} epochs = {steps:,} steps of {BATCH_SIZE} samples"
        f" on {device.type},\n          torch threads: {args.threads}\n",
        flush=True,
    )
    seconds = measure(contestants, args.rounds, args.epochs)
    bare = seconds[BareLoop.name]
    print("median (lower .. upper quartile) of the rounds")
    print(f"{'':18} {'steps/s':>26} {'speed / bare loop':>26}")
    for name, times in seconds.items():
        speeds = [steps / each for each in times]
        ratios = [base / each for base, each in zip(bare, times, strict=True)]
        cells = report.spread(speeds, ",.0f"), report.spread(ratios, ".3f")
        print(f"{name:18} {cells[0]:>26} {cells[1]:>26}")
    print(f"\nall weights agree with those of the bare loop to {TOLERANCE:g}")


if __name__ == "__main__":
    arguments = parse_args()
    check_installed()
    warnings.filterwarnings("ignore", module="lightning")  # advice, such as on workers
    main(arguments)
