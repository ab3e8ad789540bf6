"""A framework in one file: it spawns, shares out the data, trains, returns the model.
Made of: single_gpu.py, multigpu.py, multinode.py, variants/gradient_accumulation.py,
variants/mixed_precision.py, variants/ddp2.py

python -m variants.train_loop 50 10 --gpu-mode ddp
torchrun --standalone --nproc-per-node=2 -m variants.train_loop 50 10 --gpu-mode ddp
"""

import contextlib
import copy
import functools
import gc
import inspect
import itertools
import math
import os
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

import utils

MODES = ("single", "dp", "ddp", "ddp2")
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
NUMBERS = itertools.count()  # of the calls of `fit` in this process


@dataclass(eq=False)
class TrainLoop:
    """Train a model on one device, or on many without another change of your script."""

    model: torch.nn.Module
    train_loader: DataLoader  # of (source, targets); of anything with your `get_loss`
    val_loader: DataLoader | None
    test_loader: DataLoader | None  # for one evaluation at the end
    optimizer: torch.optim.Optimizer
    criterion: torch.nn.Module  # or a function: of (output, targets), a mean
    gpu_mode: str = "single"  # or "dp", "ddp", "ddp2"
    callbacks: tuple = ()
    accumulate: int = 1  # pieces of a batch, which is one step all the same
    precision: str = "fp32"  # or "bf16", "fp16"
    clip: float | None = None  # the largest norm of the gradients
    device_name: str = "auto"  # or "cpu", "cuda"
    snapshot_path: str | None = None  # where to save to and resume from
    save_every: int = 1
    scheduler: lr_scheduler.LRScheduler | None = None
    scheduler_per_step: bool = False  # or once per epoch
    metrics: dict = field(default_factory=dict)  # {name: f(predictions, targets)}
    history: list = field(default_factory=list, init=False)  # a dict for each epoch
    epochs_run = 0
    stop = False  # a callback may set it
    test_results = None
    autocast = contextlib.nullcontext()

    def get_predictions(self, batch):
        """(output, targets) of a batch, which is on the device. Override it."""
        *inputs, targets = batch
        return self.model(*inputs), targets

    def get_loss(self, batch):
        """The mean loss of a batch, in training and evaluation. Override it."""
        found = self.gather(self.get_predictions(batch))
        return self.criterion(*found)

    def gather(self, values):
        """What all processes of the machine have, in the training of "ddp2"."""
        if self.gpu_mode != "ddp2" or not self.model.training:
            return values
        return nested(lambda x: Gather.apply(x, self.node), values)

    @torch.no_grad()
    def predict(self, loader):
        """(outputs, targets) of all samples. In `fit`, all ranks must call it."""
        training = self.model.training
        data = self._share_out(loader) if dist.is_initialized() else loader
        self.model.eval()
        with self.autocast:
            mine = [self.get_predictions(batch) for batch in self._batches(data)]
        self.model.train(training)
        mine = nested(torch.Tensor.cpu, mine)
        parts = utils.gather(mine)
        batches = []
        for row in itertools.zip_longest(*parts):  # a batch of each rank, as shared out
            batches += [batch for batch in row if batch is not None]
        return nested(lambda *tensors: torch.cat(tensors), *batches)

    def init_ddp_connection(self, proc_rank, world_size):
        """Make the process group of "ddp" and "ddp2". Override it to do it your way."""
        device = self.device
        if self.store_at:  # `fit` has made one
            store = dist.TCPStore(*self.store_at)
        else:  # a `fit` must not find the addresses that the one before has left
            store = dist.PrefixStore(f"fit {next(NUMBERS)}", launcher_store())
        dist.init_process_group(
            dist.get_default_backend_for_device(device),  # gloo on CPUs, NCCL on GPUs
            store=store,
            rank=proc_rank,
            world_size=world_size,
            timeout=timedelta(minutes=5),
            device_id=None if device.type == "cpu" else device,  # else NCCL guesses
        )

    def configure_ddp(self, model, device_ids):
        """Wrap the model, which is on its device. Override it to set DDP's options."""
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=device_ids)

    def fit(self, num_epochs, num_nodes=1, node_rank=0, num_gpus=None, callbacks=()):
        """Train, or resume, until `num_epochs` are finished; return the trained model.

        "ddp" and "ddp2" start `num_gpus` processes on each machine (default: one per
        accelerator, or 2 on the CPU), unless torchrun or srun has started this one.
        With 0, as `torch.cuda.device_count()` may say, any mode trains on the CPU.
        """
        self.callbacks = callbacks or self.callbacks or ()
        self.total_epochs = num_epochs
        if num_gpus == 0 and self.device_name == "auto":
            self.device_name = "cpu"
        if num_gpus in (0, -1):  # -1: all
            num_gpus = None
        self.nprocs = 1
        self.store_at = None
        if self.gpu_mode in ("single", "dp"):
            check(self, 1)
            self._run(0, None, 1)
        elif find_launcher():
            rank, local_rank, world_size = utils.torchrun_env()  # local: on its machine
            self.nprocs = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
            check(self, world_size)
            self._run(rank, local_rank, world_size)
        else:
            self.nprocs = utils.choose_nprocs(self.device_name, num_gpus)
            check(self, num_nodes * self.nprocs)
            self._spawn(num_nodes, node_rank)
        return self.model.eval()  # ready for use, in every mode

    def _spawn(self, num_nodes, node_rank):
        """Train in new processes. Their memory is not shared: files go and come."""
        address, port = "localhost", 0
        if num_nodes > 1:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=node_rank == 0)
        self.store_at = address, store.port
        with tempfile.TemporaryDirectory() as folder:
            # All in one file: the parameters of the optimizer stay those of the model.
            try:
                torch.save(self, f"{folder}/loop.pt")
            except Exception as reason:  # such as a lambda, or a parametrized module
                utils.error(f"gpu_mode {self.gpu_mode} cannot send this: {reason!r}")
            world_size = num_nodes * self.nprocs
            first_rank = node_rank * self.nprocs
            interrupt = signal.getsignal(signal.SIGINT)
            try:
                utils.spawn(run_process, (folder, world_size, first_rank), self.nprocs)
            finally:  # Ctrl-C does again what it did before
                signal.signal(signal.SIGINT, interrupt or signal.SIG_DFL)
            trained = torch.load(f"{folder}/trained.pt", "cpu", weights_only=False)
        snapshot, self.test_results = trained
        self._restore(snapshot)

    def _run(self, rank, local_rank, world_size):
        """What each process does, from its first line to its last."""
        self.rank = rank
        self.world_size = world_size
        nprocs = self.nprocs if self.store_at else 1
        self.device = utils.set_device(self.device_name, local_rank, nprocs)
        # A criterion that is a function has nothing to move.
        nested(lambda module: module.to(self.device), [self.model, self.criterion])
        self.optimizer.load_state_dict(self.optimizer.state_dict())  # moves momentum
        self.parallel_loss = self._wrap()
        train = self.train_loader
        val = self.val_loader or DataLoader([])
        held_out = val.dataset or train.dataset  # the check wants one
        utils.check_optimizer(self.optimizer, self.model)
        utils.check_data(train.dataset, held_out, train.batch_size)
        self.train_data = self._share_out(train, train=True)
        self.eval_data = self._share_out(val)
        dtype = PRECISIONS[self.precision]
        self.autocast = torch.autocast(self.device.type, dtype, enabled=bool(dtype))
        scaling = dtype == torch.float16  # bfloat16 has the range of float32
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=scaling)
        if self.snapshot_path:
            self._load_snapshot()
        self._train()
        if self.test_loader:
            test_data = self._share_out(self.test_loader)
            self.test_results = self._evaluate(test_data, "test loss")
            self._print(shown(self.test_results))
        self.parallel_loss = None  # before its process group, or the exit may hang
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _wrap(self):
        """`get_loss` as a training step calls it. `self.model` stays as it is."""
        if self.gpu_mode == "dp" and self.device.type == "cuda":  # it knows no other
            loop = copy.copy(self)
            loop.model = torch.nn.DataParallel(self.model)
            return loop.get_loss
        if self.gpu_mode in ("single", "dp"):
            return self.get_loss
        self.init_ddp_connection(self.rank, self.world_size)
        if self.gpu_mode == "ddp2":
            self.node, _ = dist.new_subgroups(self.nprocs, timeout=timedelta(minutes=5))
        step = torch.nn.Module()  # DDP acts before and after all of `get_loss`
        step.model = self.model
        step.forward = self.get_loss
        device_ids = None if self.device.type == "cpu" else [self.device.index]
        return self.configure_ddp(step, device_ids)

    def _share_out(self, loader, train=False):
        """The same loader, but this rank gets only its share of the samples."""
        if train:
            sampler = DistributedSampler(
                loader.dataset,
                num_replicas=self.world_size,
                rank=self.rank,
                shuffle=isinstance(loader.sampler, RandomSampler),
                drop_last=loader.drop_last,
            )
            if self.gpu_mode == "ddp2":  # a machine takes what one process of it would
                nodes = self.world_size // self.nprocs
                node_rank, local_rank = divmod(self.rank, self.nprocs)
                sampler.rank = local_rank * nodes + node_rank
        else:  # whole batches, for a loss that compares samples; and none is repeated
            samples = len(loader.dataset)
            sampler = []
            for sample in range(samples):
                batch = sample // loader.batch_size
                if batch % self.world_size == self.rank:
                    sampler.append(sample)
        # A loader keeps each of its arguments as an attribute of the same name.
        names = set(inspect.signature(DataLoader).parameters)
        names -= {"sampler", "shuffle", "batch_sampler"}
        options = {name: getattr(loader, name) for name in names}
        return DataLoader(sampler=sampler, **options)

    def _train(self):
        path = self.snapshot_path
        self._print(utils.describe_run(self.train_data, self.eval_data, self.device))
        self._print(utils.progress(self.epochs_run, self.total_epochs, path))
        self._call("on_train_start")
        for epoch in range(self.epochs_run, self.total_epochs):
            if self.stop:
                self._print("a callback has ended the training")
                break
            self._call("on_epoch_start")
            start = time.perf_counter()
            train_loss, samples = self._run_epoch(epoch)
            samples_per_s = samples / (time.perf_counter() - start)
            results = {"train loss": train_loss}
            if self.val_loader:
                results |= self._evaluate(self.eval_data, "held-out loss")
            self.history.append(results)
            done = epoch + 1
            self.epochs_run = done
            line = f"epoch {done}/{self.total_epochs} | {shown(results)}"
            self._print(f"{line} | {samples_per_s:,.0f} samples/s")
            self.loss = results.get("held-out loss", train_loss)
            losses = [self.loss]  # NaN must not replace the last good snapshot
            if not self.scaler.is_enabled():  # else a skipped step's may be infinite
                losses.append(train_loss)
            utils.check_state(losses, self.model, path or "no file")
            if self.scheduler and not self.scheduler_per_step:
                if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
                    self.scheduler.step(self.loss)
                else:
                    self.scheduler.step()
            self._call("on_epoch_end")
            [stops] = self._sum(float(self.stop))  # how many ranks want to stop
            self.stop = stops > 0
            due = done % self.save_every == 0 or done == self.total_epochs or self.stop
            if due and self.snapshot_path:
                self._save_snapshot()
        self._call("on_train_end")

    def _run_epoch(self, epoch):
        # Order and random numbers follow from the epoch: a resumed run repeats them.
        self.train_data.sampler.set_epoch(epoch)
        seed = epoch * self.world_size + self.rank
        utils.seed(seed)
        if self.train_data.generator:  # it seeds the loader's workers
            self.train_data.generator.manual_seed(seed)
        self.model.train()
        return self._mean_loss(self.train_data, self._run_batch)

    def _mean_loss(self, data, run_batch):
        """The mean over the samples of all ranks, and how many they are."""
        loss_sum = torch.zeros((), device=self.device)
        samples = 0
        for step, batch in enumerate(self._batches(data), start=1):
            self.step = step  # for callbacks
            size = min(data.batch_size, len(data.sampler) - samples)
            loss = run_batch(batch, size)
            loss_sum.add_(loss, alpha=size)
            samples += size
        loss_sum, samples = self._sum(loss_sum, samples)
        return loss_sum / samples, samples

    def _batches(self, data):
        device = next(self.model.parameters()).device

        def move(tensor):
            return tensor.to(device, non_blocking=tensor.is_pinned())

        for batch in data:
            yield nested(move, batch)

    def _run_batch(self, batch, samples):
        self.optimizer.zero_grad()
        batch_loss = 0
        size = math.ceil(samples / self.accumulate)
        no_sync = getattr(self.parallel_loss, "no_sync", contextlib.nullcontext)
        for start in range(0, samples, size):
            micro = slice(start, start + size)
            share = len(range(samples)[micro]) / samples  # the last may be shorter
            last = start + size >= samples
            part = batch
            if size < samples:
                part = nested(lambda tensor, rows=micro: tensor[rows], batch)
            # DDP decides in the forward pass whether backward sends the gradients.
            with contextlib.nullcontext() if last else no_sync():
                loss = self._loss(part) * share
                self.scaler.scale(loss).backward()
            batch_loss += loss.detach()
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scheduler and self.scheduler_per_step:
            self.scheduler.step()
        self._call("on_batch_end")
        return batch_loss

    def _loss(self, batch, _=None):
        get_loss = self.parallel_loss if self.model.training else self.get_loss
        with self.autocast:
            return get_loss(batch)

    @torch.no_grad()
    def _evaluate(self, data, name):
        self.model.eval()
        if dist.is_initialized():
            for buffer in self.model.buffers():  # ranks' differ; rank 0's are saved
                dist.broadcast(buffer, src=0)
        mean_loss, _ = self._mean_loss(data, self._loss)
        results = {name: mean_loss}
        if self.metrics:
            found = self.predict(data)
            for metric, function in self.metrics.items():
                results[metric] = float(function(*found))
        return results

    def _sum(self, *values):
        total = torch.tensor(values, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(total)
        return total.tolist()

    def _print(self, text):
        if self.rank == 0:  # one rank prints
            print(text, flush=True)

    def _call(self, hook):
        for callback in self.callbacks:
            if self.rank == 0 or callback.every_rank:
                getattr(callback, hook)(self)

    def snapshot(self):
        states = {}
        for callback in self.callbacks:
            states[callback.state_key] = callback.state_dict()
        return {
            "MODEL_STATE": self.model.state_dict(),
            "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "EPOCHS_RUN": self.epochs_run,
            "SCALER_STATE": self.scaler.state_dict(),
            "SCHEDULER_STATE": self.scheduler and self.scheduler.state_dict(),
            "CALLBACK_STATES": states,
            "HISTORY": self.history,
            "STOPPED": self.stop,
        }

    def _save_snapshot(self):
        if self.rank == 0:  # one rank writes
            utils.save_atomically(self.snapshot(), self.snapshot_path)
        self._print(f"epoch {self.epochs_run} saved to {self.snapshot_path}")

    def _load_snapshot(self):
        snapshot = utils.read_snapshot(self.snapshot_path)
        if dist.is_initialized():
            # Those of each rank's snapshot
            epochs = utils.gather(snapshot["EPOCHS_RUN"] if snapshot else -1)
            newest = epochs.index(max(epochs))  # all load this rank's snapshot
            if len(set(epochs)) > 1:
                self._print(f"epochs saved, by rank: {epochs}. All take {newest}'s")
            if max(epochs) >= 0:
                snapshot = utils.broadcast_snapshot(self.snapshot_path, newest)
        if snapshot is None:
            return
        utils.check_snapshot(snapshot, self.model, self.optimizer, self.snapshot_path)
        if snapshot.get("SCALER_STATE"):  # only a run in float16 has saved one
            self.scaler.load_state_dict(snapshot["SCALER_STATE"])
        self._restore(snapshot)

    def _restore(self, snapshot):
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]
        self.stop = snapshot.get("STOPPED", False)
        self.history = snapshot.get("HISTORY", [])
        if self.scheduler and snapshot.get("SCHEDULER_STATE"):
            self.scheduler.load_state_dict(snapshot["SCHEDULER_STATE"])
        states = snapshot.get("CALLBACK_STATES", {})
        for callback in self.callbacks:  # without a state, it begins anew
            callback.load_state_dict(states.get(callback.state_key, {}))


def find_launcher():
    """Whether torchrun or srun has started this rank; it then has torchrun's names."""
    env = os.environ
    # A batch script has SLURM_NTASKS, too. But it is in no step, as srun's tasks are.
    if "RANK" not in env and int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        if "MASTER_ADDR" not in env:
            command = ["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]]
            hosts = subprocess.check_output(command, text=True).split()
            env["MASTER_ADDR"] = hosts[0]
        # Steps of one job may run at once. They must not meet at one port.
        number = int(env["SLURM_JOB_ID"]) + 997 * int(env.get("SLURM_STEP_ID", 0))
        env.setdefault("MASTER_PORT", str(20000 + number % 10000))
        env["RANK"] = env["SLURM_PROCID"]
        env["LOCAL_RANK"] = env["SLURM_LOCALID"]
        env["WORLD_SIZE"] = env["SLURM_STEP_NUM_TASKS"]
        env["LOCAL_WORLD_SIZE"] = env["SLURM_STEP_TASKS_PER_NODE"].partition("(")[0]
    return "RANK" in env


@functools.cache  # the same store always
def launcher_store():
    meetings = dist.rendezvous("env://", timeout=timedelta(minutes=5))
    store, _, _ = next(meetings)
    return store


def check(loop, world_size):
    """End with one line and exit status 2 if `loop` cannot train in this way."""
    for name, known in ("gpu_mode", MODES), ("precision", PRECISIONS):
        value = getattr(loop, name)
        if value not in known:
            utils.error(f"{name} {value!r}: choose {', '.join(known)}")
    if loop.gpu_mode in ("single", "dp") and find_launcher():
        utils.error(f"{loop.gpu_mode} is one process: start one, or choose ddp")
    if loop.gpu_mode == "ddp2" and (loop.accumulate > 1 or world_size % loop.nprocs):
        utils.error("gpu_mode ddp2: accumulate is 1, and machines have equal num_gpus")
    samplers = (RandomSampler, torch.utils.data.SequentialSampler)
    for name in ("train_loader", "val_loader", "test_loader"):
        loader = getattr(loop, name)
        if loader is None and name != "train_loader":
            continue
        known = type(getattr(loader, "sampler", None)) in samplers
        if not known or not loader.batch_size:
            utils.error(f"{name}: a DataLoader with batch_size and shuffle is needed")


def run_process(local_rank, folder, world_size, first_rank):
    loop = torch.load(f"{folder}/loop.pt", map_location="cpu", weights_only=False)
    warnings.filterwarnings("ignore", "Seems like `optimizer.step")  # it is a copy
    loop._run(first_rank + local_rank, local_rank, world_size)
    if local_rank == 0:
        torch.save((loop.snapshot(), loop.test_results), f"{folder}/trained.pt")


def shown(results):
    return " | ".join(f"{name} {value:.6f}" for name, value in results.items())


def nested(change, *trees):
    """`change` of the tensors in dicts, lists and tuples; of several, one by one."""
    first = trees[0]
    if hasattr(first, "to"):
        return change(*trees)
    if isinstance(first, Mapping):
        changed = {}
        for key in first:
            changed[key] = nested(change, *[tree[key] for tree in trees])
        return type(first)(changed)
    if isinstance(first, (list, tuple)):
        changed = [nested(change, *parts) for parts in zip(*trees, strict=True)]
        if hasattr(first, "_fields"):  # a named tuple
            return type(first)(*changed)
        return type(first)(changed)
    if len(trees) > 1 and first is not None:  # the first batch's, not that of all
        utils.error(f"predict needs tensors of get_predictions, not {type(first)}")
    return first


class Gather(torch.autograd.Function):
    """From this rank's tensor, (size, ...), to that of the group, (ranks * size, ...).

    The gradient of a part goes back to the rank that the part comes from.
    """

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
    state_key = property(lambda self: type(self).__name__)  # there

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state.update(state)

    def on_train_start(self, loop): ...
    def on_epoch_start(self, loop): ...
    def on_batch_end(self, loop): ...
    def on_epoch_end(self, loop): ...
    def on_train_end(self, loop): ...


class EarlyStopping(Callback):
    """Stop after `patience` epochs in which the held-out loss has not fallen."""

    def __init__(self, patience=3):
        self.patience = patience
        self.state = {"best": math.inf, "waited": 0}

    def on_epoch_end(self, loop):
        state = self.state
        if loop.loss < state["best"]:
            state["best"] = loop.loss
            state["waited"] = 0
        else:
            state["waited"] += 1
        loop.stop |= state["waited"] >= self.patience


class BestCheckpoints(Callback):
    """Keep the snapshots of the `k` epochs with the lowest held-out loss."""

    def __init__(self, k=1, path="best.{}.pt"):
        self.k = k
        self.path = path
        self.state = {"best": []}  # lists of a loss and a path

    def on_epoch_end(self, loop):
        best = self.state["best"]
        # A kill may have lost some.
        best[:] = [pair for pair in best if os.path.exists(pair[1])]
        path = self.path.format(loop.epochs_run)
        best.append([loop.loss, path])
        if os.path.exists(path):  # of a run that was killed after this epoch
            os.remove(path)
        utils.save_atomically(loop.snapshot(), path)
        best.sort()
        while len(best) > self.k:
            _, worst = best.pop()
            os.remove(worst)


def main(args):
    utils.seed(0)  # the same weights in each run and on each rank
    train_set = utils.MyTrainDataset(2048)
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    size = args.batch_size
    loop = TrainLoop(
        model=model,
        train_loader=DataLoader(train_set, size, shuffle=True, drop_last=True),
        val_loader=DataLoader(utils.MyTrainDataset(512, seed=1), size),
        test_loader=DataLoader(utils.MyTrainDataset(512, seed=2), size),
        optimizer=optimizer,
        criterion=torch.nn.functional.mse_loss,
        gpu_mode=args.gpu_mode,
        device_name=args.device,
        snapshot_path=args.snapshot_path,
        save_every=args.save_every,
    )
    loop.fit(args.total_epochs, num_gpus=args.nprocs)


if __name__ == "__main__":
    parser = utils.make_parser(__doc__)
    parser.add_argument("--gpu-mode", default="single", help="or dp, ddp, ddp2")
    parser.add_argument("--nprocs", type=utils.positive_int, help="processes")
    main(parser.parse_args())
