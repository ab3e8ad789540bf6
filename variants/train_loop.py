"""A framework in one file: it spawns, shares out the data, trains, returns the model.
Made of: single_gpu.py, multigpu.py, multinode.py, variants/gradient_accumulation.py,
variants/mixed_precision.py, variants/ddp2.py

python -m variants.train_loop 50 10 --gpu-mode ddp
torchrun --standalone --nproc-per-node=2 -m variants.train_loop 50 10 --gpu-mode ddp
"""

import contextlib
import functools
import gc
import inspect
import math
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

import utils


@dataclass(eq=False)
class TrainLoop:
    """Train a model on one device, or on many without another change of your script."""

    model: torch.nn.Module
    train_loader: DataLoader  # of pairs of tensors: source, targets
    val_loader: DataLoader
    test_loader: DataLoader | None  # for one evaluation at the end
    optimizer: torch.optim.Optimizer
    criterion: torch.nn.Module  # or a function: of (output, targets), a mean
    gpu_mode: str = "single"  # or "dp", "ddp", "ddp2"
    callbacks: tuple = ()
    accumulate: int = 1  # pieces of a batch, which is one step all the same
    precision: str = "fp32"  # or "bf16", "fp16"
    clip: float | None = None  # the largest norm of the gradients
    device_name: str = "auto"  # or "cpu", "cuda"
    snapshot_path: str = "snapshot.pt"
    save_every: int = 1

    def init_ddp_connection(self, proc_rank, world_size):
        """Make the process group of "ddp" and "ddp2". Override it to do it your way."""
        backend = dist.get_default_backend_for_device(self.device)
        # torchrun and srun have said where the store is. Otherwise `fit` has made one.
        store = utils.find_store(self.store_at)
        timeout = timedelta(minutes=5)
        dist.init_process_group(
            backend, store=store, rank=proc_rank, world_size=world_size, timeout=timeout
        )

    def configure_ddp(self, model, device_ids):
        """Wrap the model, which is on its device. Override it to set DDP's options."""
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=device_ids)

    def fit(self, num_epochs, num_nodes=1, node_rank=0, num_gpus=None):
        """Train, or resume, until `num_epochs` are finished; return the trained model.

        "ddp" and "ddp2" start `num_gpus` processes on each machine (default: one per
        accelerator, or 2 on the CPU), unless torchrun or srun has started this one.
        """
        self.total_epochs, self.nprocs, self.store_at = num_epochs, 1, None
        if self.gpu_mode in ("single", "dp"):
            utils.check_loop(self)
            self._run(0, None, 1)
        elif utils.find_launcher():
            rank, local_rank, world_size = utils.torchrun_env()
            self.nprocs = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
            utils.check_loop(self, world_size, num_gpus)
            self._run(rank, local_rank, world_size)
        else:
            self.nprocs = num_gpus or utils.device_count(self.device_name) or 2
            utils.check_loop(self, num_nodes * self.nprocs, self.nprocs)
            self._spawn(num_nodes, node_rank)
        return self.model.eval()  # ready for use, in every mode

    def _spawn(self, num_nodes, node_rank):
        """Train in new processes. Their memory is not shared: files go and come."""
        address, port = utils.find_master() if num_nodes > 1 else ("localhost", 0)
        store = dist.TCPStore(address, port, is_master=node_rank == 0)
        self.store_at = address, store.port
        with tempfile.TemporaryDirectory() as folder:
            # All in one file, or the optimizer would lose the parameters of the model.
            utils.save_loop(self, f"{folder}/loop.pt")
            ranks = folder, num_nodes * self.nprocs, node_rank * self.nprocs
            torch.multiprocessing.spawn(run_process, ranks, nprocs=self.nprocs)
            snapshot, self.metrics = torch.load(f"{folder}/trained.pt")
        self._restore(snapshot)

    def _run(self, rank, local_rank, world_size):
        """What each process does, from its first line to its last."""
        self.rank, self.world_size = rank, world_size
        nprocs = self.nprocs if self.store_at else 1
        self.device = utils.get_device(self.device_name, local_rank, nprocs)
        self.model.to(self.device)
        # Momentum that an earlier `fit` has left follows the model to its device.
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        self.parallel_model = self._wrap()
        self.train_data = self._share_out(self.train_loader, train=True)
        self.eval_data = self._share_out(self.val_loader)
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)
        scaling = self.dtype == torch.float16  # bfloat16 has the range of float32
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=scaling)
        self.epochs_run, self.stop, self.metrics = 0, False, {}
        self._load_snapshot()
        self._train()
        if self.test_loader:
            test_loss = self._evaluate(self._share_out(self.test_loader))
            self.metrics["test loss"] = test_loss
            self._print(f"test loss {test_loss:.6f}")
        self.parallel_model = None  # before its process group, or the exit may hang
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _wrap(self):
        """The model as the training step calls it. `self.model` stays as it is."""
        if self.gpu_mode == "single":
            return self.model
        on_cpu = self.device.type == "cpu"
        if self.gpu_mode == "dp":  # it would take GPUs even if this run is on the CPU
            return self.model if on_cpu else torch.nn.DataParallel(self.model)
        self.init_ddp_connection(self.rank, self.world_size)
        if self.gpu_mode == "ddp2":
            self.node, _ = dist.new_subgroups(self.nprocs, timeout=timedelta(minutes=5))
        return self.configure_ddp(self.model, None if on_cpu else [self.device.index])

    def _share_out(self, loader, train=False):
        """The same loader, but this rank gets only its share of the samples."""
        if train:
            shuffle, whole = isinstance(loader.sampler, RandomSampler), loader.drop_last
            sampler = DistributedSampler(
                loader.dataset, self.world_size, self.rank, shuffle, drop_last=whole
            )
            if self.gpu_mode == "ddp2":  # a machine takes what one process of it would
                nprocs, nodes = self.nprocs, self.world_size // self.nprocs
                sampler.rank = self.rank % nprocs * nodes + self.rank // nprocs
        else:  # whole batches, for a loss that compares samples; and none is repeated
            n, size = len(loader.dataset), loader.batch_size
            sampler = [i for i in range(n) if i // size % self.world_size == self.rank]
        # A loader keeps each of its arguments as an attribute of the same name.
        names = set(inspect.signature(DataLoader).parameters)
        names -= {"sampler", "shuffle", "batch_sampler"}
        options = {name: getattr(loader, name) for name in names}
        return DataLoader(sampler=sampler, **options)

    def _train(self):
        self._print(utils.describe_run(self))
        for epoch in range(self.epochs_run, self.total_epochs):
            if self.stop:
                self._print("a callback has ended the training")
                break
            self._call("on_epoch_start")
            start = time.perf_counter()
            train_loss, samples = self._run_epoch(epoch)
            samples_per_s = samples / (time.perf_counter() - start)
            held_out_loss = self._evaluate(self.eval_data)
            self.metrics = {"train loss": train_loss, "held-out loss": held_out_loss}
            done = self.epochs_run = epoch + 1
            self._print(utils.describe_epoch(self, self.metrics, samples_per_s))
            self._call("on_epoch_end")
            self.stop = any(self._sum(float(self.stop)))  # one rank: all ranks
            due = done % self.save_every == 0 or done == self.total_epochs or self.stop
            if due and math.isfinite(train_loss + held_out_loss):
                self._save_snapshot()

    def _run_epoch(self, epoch):
        # Order and random numbers follow from the epoch: a resumed run repeats them.
        self.train_data.sampler.set_epoch(epoch)
        default = torch.manual_seed(epoch * self.world_size + self.rank)
        if self.train_data.generator:  # it seeds the loader's workers
            self.train_data.generator.manual_seed(default.initial_seed())
        self.model.train()
        return self._mean_loss(self.train_data, self._run_batch)

    def _mean_loss(self, data, run_batch):
        """The mean over the samples of all ranks, and how many they are."""
        loss_sum, samples = torch.zeros((), device=self.device), 0
        pinned = data.pin_memory
        for self.step, (source, targets) in enumerate(data, start=1):
            source = source.to(self.device, non_blocking=pinned)
            targets = targets.to(self.device, non_blocking=pinned)
            loss = run_batch(source, targets)
            loss_sum.add_(loss, alpha=len(source))
            samples += len(source)
        loss_sum, samples = self._sum(loss_sum, samples)
        return loss_sum / samples, samples

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        batch_loss, size = 0, math.ceil(len(source) / self.accumulate)
        no_sync = getattr(self.parallel_model, "no_sync", contextlib.nullcontext)
        for start in range(0, len(source), size):
            micro = slice(start, start + size)
            share = len(source[micro]) / len(source)  # the last may be shorter
            last = start + size >= len(source)
            # DDP decides in the forward pass whether backward sends the gradients.
            with contextlib.nullcontext() if last else no_sync():
                loss = self._loss(source[micro], targets[micro]) * share
                self.scaler.scale(loss).backward()
            batch_loss += loss.detach()
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._call("on_batch_end")
        return batch_loss

    def _loss(self, source, targets):
        training = self.model.training
        with torch.autocast(self.device.type, self.dtype, enabled=bool(self.dtype)):
            output = (self.parallel_model if training else self.model)(source)
            if training and self.gpu_mode == "ddp2":
                output = Gather.apply(output, self.node)
                targets = Gather.apply(targets, self.node)
            return self.criterion(output, targets)

    @torch.no_grad()
    def _evaluate(self, data):
        self.model.eval()
        if dist.is_initialized():
            for buffer in self.model.buffers():  # ranks' differ, and rank 0's are saved
                dist.broadcast(buffer, src=0)
        return self._mean_loss(data, self._loss)[0]

    def _sum(self, *values):
        total = torch.tensor(values, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(total)
        return total.tolist()

    def _print(self, text):
        if self.rank == 0:  # one rank prints
            utils.say(text)

    def _call(self, hook):
        for callback in self.callbacks:
            if self.rank == 0 or callback.every_rank:
                getattr(callback, hook)(self)

    def snapshot(self):
        return {
            "MODEL_STATE": self.model.state_dict(),
            "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "EPOCHS_RUN": self.epochs_run,
            "SCALER_STATE": self.scaler.state_dict(),
            "CALLBACK_STATES": {type(x).__name__: x.state for x in self.callbacks},
            "STOPPED": self.stop,
        }

    def _save_snapshot(self):
        if self.rank == 0:  # one rank writes
            utils.save_atomically(self.snapshot(), self.snapshot_path)
        self._print(f"epoch {self.epochs_run} saved to {self.snapshot_path}")

    def _load_snapshot(self):
        snapshot = utils.read_snapshot(self.snapshot_path)
        if dist.is_initialized():
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, utils.identify(self.snapshot_path))
            newest, differences = utils.compare(found)
            if differences:  # machines may have disks of their own
                self._print(differences)
                snapshot = utils.broadcast_snapshot(snapshot, newest, self.device)
        if snapshot.get("SCALER_STATE"):  # only a run in float16 has saved one
            self.scaler.load_state_dict(snapshot["SCALER_STATE"])
        if snapshot["EPOCHS_RUN"] > 0:
            self._restore(snapshot)

    def _restore(self, snapshot):
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]
        self.stop = snapshot.get("STOPPED", False)
        states = snapshot.get("CALLBACK_STATES", {})
        for callback in self.callbacks:  # without a state, it begins anew
            callback.state.update(states.get(type(callback).__name__, {}))


def run_process(local_rank, folder, world_size, first_rank):
    loop = torch.load(f"{folder}/loop.pt", map_location="cpu", weights_only=False)
    loop._run(first_rank + local_rank, local_rank, world_size)
    if local_rank == 0:
        torch.save((loop.snapshot(), loop.metrics), f"{folder}/trained.pt")


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mine, group):
        ctx.group = group
        parts = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(parts, mine, group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        parts = torch.stack(gradient.chunk(ctx.group.size()))
        dist.all_reduce(parts, group=ctx.group)  # each rank's loss has used all parts
        return parts[ctx.group.rank()], None


class Callback:
    """It runs on global rank 0, unless `every_rank`. `loop.stop = True` stops all."""

    every_rank = False
    state = functools.cached_property(lambda self: {})  # goes into the snapshot

    def on_epoch_start(self, loop): ...
    def on_batch_end(self, loop): ...
    def on_epoch_end(self, loop): ...


class LearningRateSchedule(Callback):
    """Before each epoch: the first learning rate times `factor(epochs finished)`."""

    every_rank = True  # each has an optimizer, and all must take the same step

    def __init__(self, factor):
        self.factor = factor

    def on_epoch_start(self, loop):
        for group in loop.optimizer.param_groups:
            initial = group.setdefault("initial_lr", group["lr"])
            group["lr"] = initial * self.factor(loop.epochs_run)


class EarlyStopping(Callback):
    """Stop after `patience` epochs in which the held-out loss has not fallen."""

    def __init__(self, patience=3):
        self.patience, self.state = patience, {"best": math.inf, "waited": 0}

    def on_epoch_end(self, loop):
        loss, state = loop.metrics["held-out loss"], self.state
        state["waited"] = 0 if loss < state["best"] else state["waited"] + 1
        state["best"] = min(state["best"], loss)
        loop.stop |= state["waited"] >= self.patience


class TerminateOnNaN(Callback):
    """Stop when a loss is not finite. To ask once an epoch costs no time."""

    def on_epoch_end(self, loop):
        loop.stop |= not all(map(math.isfinite, loop.metrics.values()))


class BestCheckpoints(Callback):
    """Keep the snapshots of the `k` epochs with the lowest held-out loss."""

    def __init__(self, k=1, path="best.{}.pt"):
        self.k, self.path, self.state = k, path, {"best": []}

    def on_epoch_end(self, loop):
        best, loss = self.state["best"], loop.metrics["held-out loss"]
        best[:] = [x for x in best if os.path.exists(x[1])]  # a kill may lose some
        if math.isfinite(loss):
            best.append([loss, self.path.format(loop.epochs_run)])
            utils.save_atomically(loop.snapshot(), best[-1][1])
        best.sort()
        while len(best) > self.k:
            os.remove(best.pop()[1])


class ProgressBar(Callback):
    """Steps done in this epoch. To show their loss, Python would wait for the GPU."""

    def on_batch_end(self, loop):
        end = "\n" if loop.step == len(loop.train_data) else ""
        print(f"\r{loop.step}/{len(loop.train_data)}", end=end, file=sys.stderr)


def main(args):
    torch.manual_seed(0)
    train_set = utils.MyTrainDataset(2048)
    model = torch.nn.Linear(20, 1)
    TrainLoop(
        model,
        DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True),
        DataLoader(utils.MyTrainDataset(512, seed=1), args.batch_size),
        DataLoader(utils.MyTrainDataset(512, seed=2), args.batch_size),
        torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9),
        torch.nn.functional.mse_loss,
        args.gpu_mode,
        device_name=args.device,
        snapshot_path=args.snapshot_path,
        save_every=args.save_every,
    ).fit(args.total_epochs, num_gpus=args.nprocs)


if __name__ == "__main__":
    parser = utils.make_parser(__doc__)
    parser.add_argument("--gpu-mode", default="single", help="or dp, ddp, ddp2")
    parser.add_argument("--nprocs", type=utils.positive_int, help=utils.NPROCS)
    main(parser.parse_args())
