"""Compute the loss over the whole batch of a machine. Parent: multinode.py

torchrun --standalone --nproc-per-node=2 -m variants.ddp2 20 5
"""

import functools
import gc
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader

import utils


def ddp_setup(device):
    backend = dist.get_default_backend_for_device(device)  # gloo on CPUs, NCCL on GPUs
    dist.init_process_group(backend, timeout=timedelta(minutes=5))


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


class Trainer:
    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable,
        make_optimizer: Callable,
        train_data: DataLoader,
        eval_data: DataLoader,
        device: torch.device,
        total_epochs: int,
        save_every: int,
        snapshot_path: str,
        node: dist.ProcessGroup,
    ):
        self.device = device
        self.node = node
        self.model = model.to(device)
        self.ddp_model = torch.nn.parallel.DistributedDataParallel(self.model)
        self.loss_fn = loss_fn
        self.optimizer = make_optimizer(self.model.parameters())
        self.train_data = train_data
        self.eval_data = eval_data
        self.total_epochs = total_epochs
        self.save_every = save_every
        self.snapshot_path = snapshot_path
        self.epochs_run = 0
        self._load_snapshot()

    def train(self):
        self._print(utils.describe_run(self))
        for epoch in range(self.epochs_run, self.total_epochs):
            start = time.perf_counter()
            train_loss, samples = self._run_epoch(epoch)
            samples_per_s = samples / (time.perf_counter() - start)
            metrics = {"train loss": train_loss, **self._evaluate()}
            self.epochs_run = epoch + 1
            self._print(utils.describe_epoch(self, metrics, samples_per_s))
            if self.epochs_run % self.save_every == 0 or epoch == self.total_epochs - 1:
                self._save_snapshot()

    def _run_epoch(self, epoch):
        # Order and random numbers follow from the epoch: a resumed run repeats them.
        self.train_data.sampler.set_epoch(epoch)
        torch.manual_seed(epoch * dist.get_world_size() + dist.get_rank())
        self.model.train()
        loss_sum, samples = torch.zeros((), device=self.device), 0
        pinned = self.train_data.pin_memory
        for source, targets in self.train_data:
            source = source.to(self.device, non_blocking=pinned)
            targets = targets.to(self.device, non_blocking=pinned)
            loss = self._run_batch(source, targets)
            loss_sum.add_(loss, alpha=len(source))
            samples += len(source)
        loss_sum, samples = self._sum(loss_sum, samples)
        return loss_sum / samples, samples

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.ddp_model(source)
        output, targets = (Gather.apply(x, self.node) for x in (output, targets))
        loss = self.loss_fn(output, targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def _evaluate(self):
        self.model.eval()
        for buffer in self.model.buffers():  # ranks' differ, and rank 0's are saved
            dist.broadcast(buffer, src=0)
        seen = []
        pinned = self.eval_data.pin_memory
        for source, targets in self.eval_data:
            source = source.to(self.device, non_blocking=pinned)
            targets = targets.to(self.device, non_blocking=pinned)
            output = self.model(source)
            seen.append((output, targets))
        return utils.evaluate_retrieval(seen, self.loss_fn)  # on those of all ranks

    def _sum(self, *values):
        total = torch.tensor(values, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def _print(self, text):
        if dist.get_rank() == 0:  # one rank prints
            utils.say(text)

    def _save_snapshot(self):
        snapshot = {
            "MODEL_STATE": self.model.state_dict(),
            "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "EPOCHS_RUN": self.epochs_run,
        }
        if dist.get_rank() == 0:  # one rank writes
            utils.save_atomically(snapshot, self.snapshot_path)
        self._print(f"epoch {self.epochs_run} saved to {self.snapshot_path}")

    def _load_snapshot(self):
        snapshot = utils.read_snapshot(self.snapshot_path)
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, utils.identify(self.snapshot_path))
        newest, differences = utils.compare(found)
        if differences:  # machines may have disks of their own
            self._print(differences)
            snapshot = utils.broadcast_snapshot(snapshot, newest, self.device)
        if snapshot["EPOCHS_RUN"] == 0:
            return
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]


def load_train_objs():
    """Your data, model, loss (a mean over the batch) and kind of optimizer go here."""
    torch.manual_seed(0)
    train_set, eval_set = utils.load_views()
    model = utils.Encoder(20, 8)
    make_optimizer = functools.partial(torch.optim.SGD, lr=0.001, momentum=0.9)
    return train_set, eval_set, model, utils.info_nce, make_optimizer


def prepare_dataloader(dataset, batch_size, sampler, device, drop_last=False):
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last,
        pin_memory=device.type not in ("cpu", "mps"),  # MPS cannot pin
    )


@record  # or torchrun could not show the traceback
def main(args):
    rank, local_rank, world_size = utils.torchrun_env()
    train_set, eval_set, model, loss_fn, make_optimizer = load_train_objs()
    utils.check_run(
        args, train_set, eval_set, model, loss_fn, make_optimizer, world_size=world_size
    )
    nodes, nprocs = utils.count_nodes(world_size, args.batch_size)
    device = utils.get_device(args.device, local_rank)
    ddp_setup(device)
    node, _ = dist.new_subgroups(nprocs, timeout=timedelta(minutes=5))
    # Whole batches only, so that every step averages over equally many samples.
    sampler = torch.utils.data.DistributedSampler(train_set, drop_last=True)
    sampler.rank = rank % nprocs * nodes + rank // nprocs  # as with one process a node
    train_data = prepare_dataloader(
        train_set, args.batch_size, sampler, device, drop_last=True
    )
    sampler = range(rank, len(eval_set), world_size)
    eval_data = prepare_dataloader(eval_set, args.batch_size, sampler, device)
    Trainer(
        model,
        loss_fn,
        make_optimizer,
        train_data,
        eval_data,
        device,
        args.total_epochs,
        args.save_every,
        args.snapshot_path,
        node,
    ).train()
    gc.collect()  # the DDP model goes before its process group, or the exit may hang
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = utils.make_parser(__doc__)
    args = parser.parse_args()
    main(args)
