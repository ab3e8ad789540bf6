"""Shard a model that is too large for one device. Parent: multinode.py

torchrun --standalone --nproc-per-node=2 -m variants.fsdp 10 5
On two machines, --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST, no --standalone.
"""

import gc
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import DataLoader

import utils

KINDS = [x for x in vars(dcp.metadata).values() if isinstance(x, type)]
torch.serialization.add_safe_globals([*KINDS, dcp.filesystem._StorageInfo])


def ddp_setup(device, timeout=timedelta(minutes=5)):
    backend = dist.get_default_backend_for_device(device)  # gloo on CPUs, NCCL on GPUs
    dist.init_process_group(backend, timeout=timeout)


def shard(model, optimizer, mesh):
    """Leave this rank a part of each parameter, in `model` and in `optimizer`."""
    lists = [x for x in model.modules() if isinstance(x, torch.nn.ModuleList)]
    lists += [model] if isinstance(model, torch.nn.Sequential) else []
    if not lists:
        utils.error("the model has no list of blocks that could be sharded")
    number = {x: i for i, x in enumerate(model.parameters())}
    for part in reversed([model, *(x for blocks in lists for x in blocks)]):
        fully_shard(part, mesh=mesh)  # whole only while it computes
    parts = list(model.parameters())
    if len(parts) != len(number):
        utils.error("two blocks share a weight: they must be one block")
    for group in optimizer.param_groups:  # or it would train the old parameters
        group["params"] = [parts[number[x]] for x in group["params"]]


def map_tensors(value, change, name=""):
    """A copy of nested dicts, each tensor replaced by `change(its name, tensor)`."""
    if isinstance(value, dict):
        return {k: map_tensors(x, change, f"{name}.{k}") for k, x in value.items()}
    return change(name, value) if isinstance(value, torch.Tensor) else value


def to_meta(_, tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


class Saver:
    """Writes snapshots while training goes on: a folder with a part of each rank."""

    def __init__(self):
        self.group = dist.new_group(timeout=timedelta(minutes=5), backend="gloo")
        self.thread, self.saving, self.folders = ThreadPoolExecutor(), None, {}

    def save(self, snapshot, path):
        self.finish()
        tensors, name = {}, [os.urandom(4).hex()]  # a new name: no other job has it
        map_tensors(snapshot, tensors.setdefault)
        dist.broadcast_object_list(name)
        folder = f"{os.path.realpath(path)}.{name[0]}"
        written = dcp.async_save(  # copies, because the next steps change the tensors
            tensors, checkpoint_id=folder, process_group=self.group
        )
        snapshot = map_tensors(snapshot, to_meta) | {"PARTS": name[0]}
        self.saving = self.thread.submit(self._commit, snapshot, path, folder, written)

    def _commit(self, snapshot, path, folder, written):
        written.result()  # waits until all ranks have written
        if dist.get_rank() == 0:  # one rank writes the file that names the folder
            snapshot["LIST"] = dcp.FileSystemReader(folder).read_metadata()
            snapshot["LIST"].storage_meta = None  # a path, which is not needed
            utils.save_atomically(snapshot, path)
            shutil.rmtree(self.folders.get(path, ""), ignore_errors=True)
            print(f"epoch {snapshot['EPOCHS_RUN']} saved to {path}")
        self.folders[path] = folder

    def finish(self):
        if self.saving:
            self.saving.result()  # or the error that the thread met


class Reader(dcp.FileSystemReader):
    """DCP's, without its own list of parts: that is a pickle, which can run code."""

    def read_metadata(self, *_, **__):
        return self.parts


def fill_in(snapshot, path, likes):
    """Read the tensors, each sharded like the one of its name in `likes`."""
    missing = {}

    def fill(name, tensor):
        like = likes.get(name, likes.get(name.rpartition(".")[0]))
        if like is None or like.shape != tensor.shape:
            like = torch.empty(tensor.shape)  # such as the step of Adam
        if tensor.is_meta:
            return missing.setdefault(name, torch.empty_like(like, dtype=tensor.dtype))
        if isinstance(like, DTensor):  # the snapshot of another script is whole
            return distribute_tensor(tensor, like.device_mesh, like.placements)
        return tensor

    snapshot |= map_tensors(snapshot, fill)
    folder = f"{os.path.realpath(path)}.{snapshot.pop('PARTS', None)}"
    if missing:
        reader = Reader(folder)
        reader.parts = snapshot.pop("LIST")
        try:
            dcp.load(missing, storage_reader=reader)
        except (Exception, dcp.CheckpointException) as reason:
            utils.error(f"{reader.path} is not whole: {str(reason).splitlines()[-1]}")
    return {path: folder}


def put_together(path, new_path):
    """Write a snapshot in one piece, such as all other scripts load."""
    snapshot = utils.read_snapshot(path)
    fill_in(snapshot, path, {})
    utils.save_atomically(snapshot, new_path)


class Trainer:
    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        train_data: DataLoader,
        eval_data: DataLoader,
        device: torch.device,
        save_every: int,
        snapshot_path: str,
    ):
        self.device = device
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        shard(model, optimizer, mesh)  # before it moves: no device holds all of it
        self.model = model.to(device)
        self.loss_fn = loss_fn.to(device)  # class weights move, too
        self.optimizer = optimizer
        self.train_data = train_data
        self.eval_data = eval_data
        self.save_every = save_every
        self.snapshot_path = snapshot_path
        self.epochs_run = 0
        self.saver = Saver()
        self._load_snapshot()

    def train(self, total_epochs):
        self._print(utils.describe_run(self, total_epochs))
        for epoch in range(self.epochs_run, total_epochs):
            start = time.perf_counter()
            train_loss = self._run_epoch(epoch)
            samples_per_s = len(self.train_data.dataset) / (time.perf_counter() - start)
            held_out_loss = self._evaluate()
            self.epochs_run = epoch + 1
            self._print(
                f"epoch {self.epochs_run}/{total_epochs} | train loss {train_loss:.6f}"
                f" | held-out loss {held_out_loss:.6f} | {samples_per_s:,.0f} samples/s"
            )
            utils.check_finite(held_out_loss, self)  # or NaN replaces the snapshot
            if self.epochs_run % self.save_every == 0 or epoch == total_epochs - 1:
                self._save_snapshot()
        self.saver.finish()

    def _run_epoch(self, epoch):
        # Order and random numbers follow from the epoch: a resumed run repeats them.
        self.train_data.sampler.set_epoch(epoch)
        torch.manual_seed(epoch * dist.get_world_size() + dist.get_rank())
        self.model.train()
        loss_sum = torch.zeros((), device=self.device)
        for source, targets in self.train_data:
            source = source.to(self.device, non_blocking=self.train_data.pin_memory)
            targets = targets.to(self.device, non_blocking=self.train_data.pin_memory)
            loss_sum += self._run_batch(source, targets)
        dist.all_reduce(loss_sum, dist.ReduceOp.AVG)
        # .item() waits for the device. In each step, it would slow the training down.
        return loss_sum.item() / len(self.train_data)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = self.loss_fn(output, targets)
        loss.backward()
        if any(x.grad is None for x in self.model.parameters() if x.requires_grad):
            raise RuntimeError("a parameter has no gradient: do all ranks use it?")
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def _evaluate(self):
        self.model.eval()
        for buffer in self.model.buffers():  # BatchNorm's differ; rank 0's are saved
            dist.broadcast(whole := buffer.contiguous(), src=0)
            buffer.copy_(whole)  # contiguous() may have copied it
        batches = torch.tensor(len(self.eval_data), device=self.device)
        dist.all_reduce(batches, dist.ReduceOp.MAX)
        loss_sum = torch.zeros((), device=self.device)
        for source, targets in self.eval_data:
            source = source.to(self.device, non_blocking=self.eval_data.pin_memory)
            targets = targets.to(self.device, non_blocking=self.eval_data.pin_memory)
            output = self.model(source)
            loss_sum += self.loss_fn(output, targets) * len(source)
        for _ in range(batches.item() - len(self.eval_data)):
            self.model(source)  # all ranks must gather equally often
        dist.all_reduce(loss_sum)
        return loss_sum.item() / len(self.eval_data.dataset)

    def _print(self, text):
        if dist.get_rank() == 0:  # one rank prints
            print(text, flush=True)

    def _save_snapshot(self):
        snapshot = {
            "MODEL_STATE": self.model.state_dict(),
            "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "EPOCHS_RUN": self.epochs_run,
        }
        self.saver.save(snapshot, self.snapshot_path)

    def _load_snapshot(self):
        snapshot = utils.read_snapshot(self.snapshot_path)
        epochs = [None] * dist.get_world_size()  # of each rank's snapshot
        dist.all_gather_object(epochs, snapshot["EPOCHS_RUN"] if snapshot else -1)
        newest = epochs.index(max(epochs))  # all load this rank's snapshot
        if len(set(epochs)) > 1:
            self._print(f"epochs saved, by rank: {epochs}. All take rank {newest}'s")
        if max(epochs) >= 0:
            snapshot = utils.broadcast_snapshot(self.snapshot_path, newest)
        if snapshot is None:
            return
        utils.check_snapshot(snapshot, self.model, self.optimizer, self.snapshot_path)
        likes = {f".MODEL_STATE.{k}": x for k, x in self.model.state_dict().items()}
        params = [x for group in self.optimizer.param_groups for x in group["params"]]
        likes |= {f".OPTIMIZER_STATE.state.{i}": x for i, x in enumerate(params)}
        self.saver.folders = fill_in(snapshot, self.snapshot_path, likes)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]


def load_train_objs():
    """Your data, model, loss (a mean over the batch) and optimizer go here."""
    torch.manual_seed(0)
    train_set = utils.MyTrainDataset(2048)
    eval_set = utils.MyTrainDataset(512, seed=1)
    sizes = (20, 32), (32, 32), (32, 1)
    model = torch.nn.Sequential(*[torch.nn.Linear(*size) for size in sizes])
    # `model.to(device)` keeps these parameters, on CPUs and GPUs. (On XLA it does not.)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    return train_set, eval_set, model, torch.nn.MSELoss(), optimizer


def prepare_dataloader(dataset, batch_size, sampler, device, drop_last=False):
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last,
        pin_memory=device.type == "cuda",
    )


@record  # or torchrun could not show the traceback
def main(args):
    rank, local_rank, world_size = utils.torchrun_env()
    train_set, eval_set, model, loss_fn, optimizer = load_train_objs()
    device = utils.set_device(args.device, local_rank)
    ddp_setup(device)
    utils.check_data(train_set, eval_set, args.batch_size)
    # Whole batches only, so that every step averages over equally many samples.
    sampler = torch.utils.data.DistributedSampler(train_set, drop_last=True)
    train_data = prepare_dataloader(
        train_set, args.batch_size, sampler, device, drop_last=True
    )
    sampler = range(rank, len(eval_set), world_size)  # each sample once
    eval_data = prepare_dataloader(eval_set, args.batch_size, sampler, device)
    Trainer(
        model,
        loss_fn,
        optimizer,
        train_data,
        eval_data,
        device,
        args.save_every,
        args.snapshot_path,
    ).train(args.total_epochs)
    vars(next(model.parameters()).device_mesh).clear()  # caches keep it, and its group
    del model, optimizer  # or the exit may hang
    gc.collect()
    dist.destroy_process_group()  # once the Trainer is gone


if __name__ == "__main__":
    parser = utils.make_parser(__doc__)
    args = parser.parse_args()
    main(args)
