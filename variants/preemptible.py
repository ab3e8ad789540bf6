"""Told to stop, save inside the epoch; resume at that step. Parent: multinode.py

torchrun --standalone --nproc-per-node=2 -m variants.preemptible 50 10
"""

import functools
import gc
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader, DistributedSampler

import utils


def ddp_setup():
    dist.init_process_group(timeout=timedelta(minutes=5))


class ResumableSampler(DistributedSampler):
    start = 0  # how many of this rank's samples are trained already

    def __iter__(self):
        return iter(list(super().__iter__())[self.start :])


class Trainer:
    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable,
        make_optimizer: Callable,
        train_data: DataLoader,
        eval_data: DataLoader,
        device: torch.device,
        save_every: int,
        snapshot_path: str,
    ):
        self.device = device
        self.model = model.to(device)
        self.ddp_model = torch.nn.parallel.DistributedDataParallel(self.model)
        self.loss_fn = loss_fn
        self.optimizer = make_optimizer(self.model.parameters())
        self.train_data = train_data
        self.eval_data = eval_data
        self.save_every = save_every
        self.snapshot_path = snapshot_path
        self.epochs_run = 0
        self.samples_run = 0  # of the epoch that is under way, by all ranks together
        sigterm = self.sigterm = torch.zeros(1)
        signal.signal(signal.SIGTERM, lambda *_: sigterm.fill_(1))
        self.cpu_group = dist.new_group(timeout=timedelta(minutes=5), backend="gloo")
        self._load_snapshot()

    def train(self, total_epochs):
        if dist.get_rank() == 0:
            utils.print_run(self, total_epochs, dist.get_world_size())
            print(f"{self.samples_run} samples of the next epoch are trained already")
        for epoch in range(self.epochs_run, total_epochs):
            start = time.perf_counter()
            train_loss, samples = self._run_epoch(epoch)
            samples_per_s = samples / (time.perf_counter() - start)
            eval_loss, _ = self._evaluate()
            self.epochs_run = epoch + 1
            self.samples_run = 0
            if dist.get_rank() != 0:  # one rank prints and saves
                continue
            utils.print_epoch(self, total_epochs, train_loss, eval_loss, samples_per_s)
            if self.epochs_run % self.save_every == 0 or epoch == total_epochs - 1:
                self._save_snapshot()

    def _run_epoch(self, epoch):
        # Order and random numbers follow from the epoch: a resumed run repeats them.
        self.train_data.sampler.set_epoch(epoch)
        self.train_data.sampler.start = self.samples_run // dist.get_world_size()
        torch.manual_seed(epoch * dist.get_world_size() + dist.get_rank())
        self.model.train()
        loss_sum, samples = torch.zeros((), device=self.device), 0
        for source, targets in self.train_data:
            stop = self.sigterm.clone()
            dist.all_reduce(stop, group=self.cpu_group)
            if stop:
                if dist.get_rank() == 0:
                    self._save_snapshot()
                    print(f"preempted {self.samples_run} samples later", flush=True)
                    open(f"{self.snapshot_path}.preempted", "w").close()
                dist.barrier(self.cpu_group)  # or torchrun ends those who still save
                os._exit(75)  # EX_TEMPFAIL: try again. No clean-up: SIGKILL is near.
            torch.manual_seed(hash((epoch, self.samples_run, dist.get_rank())))
            source = source.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
            loss = self._run_batch(source, targets)
            loss_sum.add_(loss, alpha=len(source))
            samples += len(source)
            self.samples_run += len(source) * dist.get_world_size()
        return self._mean(loss_sum, samples)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.ddp_model(source)
        loss = self.loss_fn(output, targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def _evaluate(self):
        self.model.eval()
        loss_sum, samples = torch.zeros((), device=self.device), 0
        for source, targets in self.eval_data:
            source = source.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
            loss = self.loss_fn(self.model(source), targets)
            loss_sum.add_(loss, alpha=len(source))
            samples += len(source)
        return self._mean(loss_sum, samples)

    def _mean(self, loss_sum, samples):
        total = torch.tensor([loss_sum, samples], device=self.device)
        dist.all_reduce(total)
        loss_sum, samples = total.tolist()
        return loss_sum / (samples or float("nan")), samples

    def _save_snapshot(self):
        snapshot = {
            "MODEL_STATE": self.model.state_dict(),
            "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "EPOCHS_RUN": self.epochs_run,
            "SAMPLES_RUN": self.samples_run,
        }
        utils.save_atomically(snapshot, self.snapshot_path)
        print(f"epoch {self.epochs_run} saved to {self.snapshot_path}", flush=True)

    def _load_snapshot(self):
        snapshot = utils.read_snapshot(self.snapshot_path)
        data = utils.to_tensor(snapshot).to(self.device)
        done = snapshot["EPOCHS_RUN"] * len(self.train_data.dataset)
        done += snapshot.get("SAMPLES_RUN", 0)  # other rungs save none
        mine = torch.tensor([done, len(data)], device=self.device)
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(found, mine)
        newest = int(torch.stack(found)[:, 0].argmax())  # disks may differ
        data.resize_(int(found[newest][1]))
        dist.broadcast(data, src=newest)
        snapshot = utils.from_tensor(data)
        if "MODEL_STATE" not in snapshot:
            return
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]
        self.samples_run = snapshot.get("SAMPLES_RUN", 0)


def load_train_objs():
    """Your data, model, loss (a mean over the batch) and kind of optimizer go here."""
    torch.manual_seed(0)
    train_set = utils.MyTrainDataset(2048)
    eval_set = utils.MyTrainDataset(512, seed=1)
    model = torch.nn.Linear(20, 1)
    make_optimizer = functools.partial(torch.optim.SGD, lr=0.001, momentum=0.9)
    return train_set, eval_set, model, F.mse_loss, make_optimizer


def prepare_dataloader(dataset, batch_size, sampler, drop_last=False):
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last,
        pin_memory=torch.accelerator.is_available(),
    )


@record  # or torchrun could not show the traceback
def main(args):
    rank, local_rank, world_size = utils.torchrun_env()
    train_set, eval_set, model, loss_fn, make_optimizer = load_train_objs()
    utils.check_run(args, train_set, eval_set, model, world_size=world_size)
    device = utils.get_device(local_rank)
    ddp_setup()
    # Whole batches only, so that every step averages over equally many samples.
    sampler = ResumableSampler(train_set, drop_last=True)
    train_data = prepare_dataloader(train_set, args.batch_size, sampler, drop_last=True)
    sampler = range(rank, len(eval_set), world_size)
    eval_data = prepare_dataloader(eval_set, args.batch_size, sampler)
    Trainer(
        model,
        loss_fn,
        make_optimizer,
        train_data,
        eval_data,
        device,
        args.save_every,
        args.snapshot_path,
    ).train(args.total_epochs)
    gc.collect()  # the DDP model goes before its process group, or the exit may hang
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = utils.make_parser(__doc__)
    args = parser.parse_args()
    main(args)
