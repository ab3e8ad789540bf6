"""Save at SIGTERM, resume at the same step. Parent: multinode.py

torchrun --standalone --nproc-per-node=2 -m variants.preemptible 50 10
On each of two machines, type --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST in
place of --standalone. HOST is the name of one of the two, the same on both.
"""

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader

import utils  # its docstring explains the words: rank, DDP, backend, snapshot


def ddp_setup(device, timeout=timedelta(minutes=5)):  # torchrun's environ has the rest
    dist.init_process_group(
        dist.get_default_backend_for_device(device),  # gloo on CPUs, NCCL on GPUs
        timeout=timeout,  # how long a rank waits for the others
        device_id=None if device.type == "cpu" else device,  # without it, NCCL guesses
    )


class ResumableSampler(torch.utils.data.DistributedSampler):
    """An epoch begins after the first `start` samples of this rank."""

    start = 0  # how many of this rank's samples are trained already

    def __iter__(self):
        samples = list(super().__iter__())
        return iter(samples[self.start :])

    def __len__(self):
        return super().__len__() - self.start


class Trainer:
    ask_every = 10  # steps. Each question costs a message to every rank and back.

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
        self.model = model
        self.ddp_model = torch.nn.parallel.DistributedDataParallel(self.model)
        self.loss_fn = loss_fn.to(device)  # it may hold class weights
        self.optimizer = optimizer
        self.train_data = train_data
        self.eval_data = eval_data
        self.save_every = save_every
        self.snapshot_path = snapshot_path
        self.epochs_run = 0
        self.samples_run = 0  # of the epoch that is under way, by all ranks together
        flag = torch.zeros(1)
        signal.signal(signal.SIGTERM, lambda *_: flag.fill_(1))  # holds no Trainer
        self.sigterm = flag
        self.cpu_group = dist.new_group(timeout=timedelta(minutes=5), backend="gloo")
        self._load_snapshot()

    def train(self, total_epochs):
        self._print(utils.describe_run(self.train_data, self.eval_data, self.device))
        self._print(utils.progress(self.epochs_run, total_epochs, self.snapshot_path))
        self._print(f"{self.samples_run} samples of the next epoch are trained already")
        for epoch in range(self.epochs_run, total_epochs):
            start = time.perf_counter()
            train_loss = self._run_epoch(epoch)
            samples = len(self.train_data.sampler) * dist.get_world_size()
            samples_per_s = samples / (time.perf_counter() - start)
            held_out_loss = self._evaluate()
            self.epochs_run = epoch + 1
            self.samples_run = 0
            self._print(
                f"epoch {self.epochs_run}/{total_epochs} | train loss {train_loss:.6f}"
                f" | held-out loss {held_out_loss:.6f} | {samples_per_s:,.0f} samples/s"
            )
            # Ends the run at NaN, which must not be saved.
            losses = train_loss, held_out_loss
            utils.check_state(losses, self.model, self.snapshot_path)
            if self.epochs_run % self.save_every == 0 or epoch == total_epochs - 1:
                self._save_snapshot()

    def _run_epoch(self, epoch):
        # Order and dropout follow from the epoch, so they are the same after a resume.
        self.train_data.sampler.set_epoch(epoch)
        self.train_data.sampler.start = self.samples_run // dist.get_world_size()
        utils.seed(epoch * dist.get_world_size() + dist.get_rank())  # per rank
        self.model.train()
        loss_sum = torch.zeros((), device=self.device)
        for step, (source, targets) in enumerate(self.train_data):
            if step % self.ask_every == 0:
                self._stop_if_told()
            utils.seed(hash((epoch, self.samples_run, dist.get_rank())))
            source = source.to(self.device, non_blocking=self.train_data.pin_memory)
            targets = targets.to(self.device, non_blocking=self.train_data.pin_memory)
            loss_sum += self._run_batch(source, targets)
            self.samples_run += len(source) * dist.get_world_size()
        dist.all_reduce(loss_sum, dist.ReduceOp.AVG)  # averages over ranks, in place
        # .item() waits for the device. In each step, it would slow the training down.
        return loss_sum.item() / max(1, len(self.train_data))

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.ddp_model(source)  # self.model, but backward() averages gradients
        loss = self.loss_fn(output, targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _stop_if_told(self):
        """Save and end, all ranks at the same step, if SIGTERM came to one."""
        stop = self.sigterm.clone()
        dist.all_reduce(stop, group=self.cpu_group)
        if stop:
            utils.check_state([], self.model, self.snapshot_path)
            self._save_snapshot()
            self._print(f"preempted after {self.samples_run} samples of the epoch")
            dist.barrier(self.cpu_group)  # or torchrun ends the rank that saves
            open(f"{self.snapshot_path}.preempted", "w").close()
            os._exit(75)  # EX_TEMPFAIL: try again. No clean-up: SIGKILL is near.

    @torch.no_grad()
    def _evaluate(self):
        self.model.eval()
        for buffer in self.model.buffers():  # BatchNorm's differ by rank: take 0's
            dist.broadcast(buffer, src=0)  # rank 0 sends
        loss_sum = torch.zeros((), device=self.device)
        for source, targets in self.eval_data:
            source = source.to(self.device, non_blocking=self.eval_data.pin_memory)
            targets = targets.to(self.device, non_blocking=self.eval_data.pin_memory)
            output = self.model(source)
            loss_sum += self.loss_fn(output, targets) * len(source)  # sizes may differ
        dist.all_reduce(loss_sum)  # adds up over ranks, in place; waits for every rank
        return loss_sum.item() / len(self.eval_data.dataset)

    def _print(self, text):
        if dist.get_rank() == 0:  # one rank prints
            print(text, flush=True)

    def _save_snapshot(self):
        snapshot = {
            "MODEL_STATE": self.model.state_dict(),
            "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "EPOCHS_RUN": self.epochs_run,
            "SAMPLES_RUN": self.samples_run,
        }
        if dist.get_rank() == 0:  # one rank writes
            utils.save_atomically(snapshot, self.snapshot_path)
        self._print(f"epoch {self.epochs_run} saved to {self.snapshot_path}")

    def _load_snapshot(self):
        snapshot = utils.read_snapshot(self.snapshot_path)
        # Without a shared disk, some machines have no snapshot, or an older one.
        done = (-1, 0)  # (epochs, samples of the one under way)
        if snapshot:  # other scripts save no SAMPLES_RUN
            done = snapshot["EPOCHS_RUN"], snapshot.get("SAMPLES_RUN", 0)
        epochs = utils.gather(done)
        newest = epochs.index(max(epochs))  # all load this rank's snapshot
        if len(set(epochs)) > 1:
            self._print(f"epochs saved, by rank: {epochs}. All take rank {newest}'s")
        if max(epochs) >= (0, 0):  # a rank has one; files of equal epochs may differ
            snapshot = utils.broadcast_snapshot(self.snapshot_path, newest)
        if snapshot is None:
            return
        self.samples_run = snapshot.pop("SAMPLES_RUN", 0)
        utils.check_snapshot(snapshot, self.model, self.optimizer, self.snapshot_path)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]


def load_train_objs():
    """Your data, model (on the CPU) and loss go here.

    A sample is (source, target). A batch has its samples along dimension 0, and the
    loss is their mean. A snapshot holds the model and the optimizer: keep all else that
    training changes inside the model.
    """
    utils.seed(0)  # the same weights in each run and on each rank
    train_set = utils.MyTrainDataset(2048)
    eval_set = utils.MyTrainDataset(512, seed=1)
    model = torch.nn.Linear(20, 1)
    return train_set, eval_set, model, torch.nn.MSELoss()


def make_optimizer(model):
    """Your optimizer goes here, for all parameters. They are on the device by now."""
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def ignore_sigterm(worker):  # torchrun sends it to the workers of a DataLoader, too
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def prepare_dataloader(dataset, batch_size, sampler, device, drop_last=False):
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last,
        worker_init_fn=ignore_sigterm,
        pin_memory=device.type == "cuda",  # unpinned, each copy makes the CPU wait
    )


@record  # else torchrun shows no traceback
def main(args):
    rank, local_rank, world_size = utils.torchrun_env()  # local: on its machine
    train_set, eval_set, model, loss_fn = load_train_objs()
    device = utils.set_device(args.device, local_rank)  # torchrun limits CPU threads
    ddp_setup(device)
    model.to(device)  # before the optimizer, which holds the parameters
    optimizer = make_optimizer(model)
    utils.check_optimizer(optimizer, model)
    utils.check_data(train_set, eval_set, args.batch_size)
    # Whole batches only, so that every step averages over equally many samples.
    sampler = ResumableSampler(train_set, drop_last=True)
    train_data = prepare_dataloader(
        train_set, args.batch_size, sampler, device, drop_last=True
    )
    sampler = range(rank, len(eval_set), world_size)  # each sample once
    eval_data = prepare_dataloader(eval_set, args.batch_size, sampler, device)
    trainer = Trainer(
        model=model,
        loss_fn=loss_fn,
        optimizer=optimizer,
        train_data=train_data,
        eval_data=eval_data,
        device=device,
        save_every=args.save_every,
        snapshot_path=args.snapshot_path,
    )
    trainer.train(args.total_epochs)
    del trainer  # ends threads of gloo, which may hang or abort the exit
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = utils.make_parser(__doc__)
    args = parser.parse_args()
    main(args)
