"""Train with a schedule, clipping, accuracy, workers, a log. Parent: multinode.py

torchrun --standalone --nproc-per-node=2 -m variants.real_job 20 5
On each of two machines, type --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST in
place of --standalone. HOST is the name of one of the two, the same on both.
"""

import math
import os
import threading
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


def schedule(optimizer, steps_per_epoch, epochs_run, total_epochs):
    """The learning rate changes in each step: it rises, then it follows a cosine."""
    steps_run = epochs_run * steps_per_epoch
    total_steps = total_epochs * steps_per_epoch

    def factor(step):
        warm_up = min(1, 10 * (step + 1) / total_steps)  # for a tenth of the steps
        cosine = math.cos(math.pi * step / total_steps)
        return warm_up * (1 + cosine) / 2

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor, steps_run - 1)


def write_log(path, rows):
    """Write a row for each epoch to a file that spreadsheets can read."""
    if dist.get_rank() == 0:  # one rank writes
        with open(path, "w") as file:
            print("epoch,learning rate,train loss,held-out loss,accuracy", file=file)
            for row in rows:
                print(*row, sep=",", file=file)


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
        self.model = model
        self.ddp_model = torch.nn.parallel.DistributedDataParallel(self.model)
        self.loss_fn = loss_fn.to(device)  # it may hold class weights
        self.optimizer = optimizer
        self.train_data = train_data
        self.eval_data = eval_data
        self.save_every = save_every
        self.snapshot_path = snapshot_path
        self.epochs_run = 0
        self.log = []
        self._load_snapshot()

    def train(self, total_epochs):
        self._print(utils.describe_run(self.train_data, self.eval_data, self.device))
        self._print(utils.progress(self.epochs_run, total_epochs, self.snapshot_path))
        steps = len(self.train_data)
        self.scheduler = schedule(self.optimizer, steps, self.epochs_run, total_epochs)
        for epoch in range(self.epochs_run, total_epochs):
            lr = self.scheduler.get_last_lr()[0]  # in the epoch's first step
            start = time.perf_counter()
            train_loss = self._run_epoch(epoch)
            samples_per_s = len(self.train_data.dataset) / (time.perf_counter() - start)
            held_out_loss, accuracy = self._evaluate()
            self.epochs_run = epoch + 1
            self._print(
                f"epoch {self.epochs_run}/{total_epochs} | train loss {train_loss:.6f}"
                f" | held-out loss {held_out_loss:.6f} | {samples_per_s:,.0f} samples/s"
                f" | accuracy {accuracy:.6f} | gradient norm {self.norm.item():.3f}"
            )
            self.log.append([self.epochs_run, lr, train_loss, held_out_loss, accuracy])
            write_log(f"{self.snapshot_path}.csv", self.log)
            # Ends the run at NaN, which must not be saved.
            losses = train_loss, held_out_loss
            utils.check_state(losses, self.model, self.snapshot_path)
            if self.epochs_run % self.save_every == 0 or epoch == total_epochs - 1:
                self._save_snapshot()

    def _run_epoch(self, epoch):
        # Order and dropout follow from the epoch, so they are the same after a resume.
        self.train_data.sampler.set_epoch(epoch)
        self.train_data.dataset.set_epoch(epoch)
        utils.seed(epoch * dist.get_world_size() + dist.get_rank())  # per rank
        self.model.train()
        loss_sum = torch.zeros((), device=self.device)
        self.norm = torch.zeros_like(loss_sum)  # the largest of the epoch
        for source, targets in self.train_data:
            source = source.to(self.device, non_blocking=self.train_data.pin_memory)
            targets = targets.to(self.device, non_blocking=self.train_data.pin_memory)
            loss_sum += self._run_batch(source, targets)
        dist.all_reduce(loss_sum, dist.ReduceOp.AVG)  # averages over ranks, in place
        # .item() waits for the device. In each step, it would slow the training down.
        return loss_sum.item() / len(self.train_data)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.ddp_model(source)  # self.model, but backward() averages gradients
        loss = self.loss_fn(output, targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.norm = torch.maximum(self.norm, norm)  # as it was before it was clipped
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach()

    @torch.no_grad()
    def _evaluate(self):
        self.model.eval()
        for buffer in self.model.buffers():  # BatchNorm's differ by rank: take 0's
            dist.broadcast(buffer, src=0)  # rank 0 sends
        loss_sum = torch.zeros((), device=self.device)
        correct = torch.zeros((), device=self.device)
        for source, targets in self.eval_data:
            source = source.to(self.device, non_blocking=self.eval_data.pin_memory)
            targets = targets.to(self.device, non_blocking=self.eval_data.pin_memory)
            output = self.model(source)
            loss_sum += self.loss_fn(output, targets) * len(source)  # sizes may differ
            correct += (output.argmax(1) == targets).sum()
        dist.all_reduce(loss_sum)  # adds up over ranks, in place; waits for every rank
        dist.all_reduce(correct)
        samples = len(self.eval_data.dataset)
        return loss_sum.item() / samples, correct.item() / samples

    def _print(self, text):
        if dist.get_rank() == 0:  # one rank prints
            print(text, flush=True)

    def _save_snapshot(self):
        snapshot = {
            "MODEL_STATE": self.model.state_dict(),
            "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "EPOCHS_RUN": self.epochs_run,
            "LOG": self.log,
        }
        if dist.get_rank() == 0:  # one rank writes
            utils.save_atomically(snapshot, self.snapshot_path)
        self._print(f"epoch {self.epochs_run} saved to {self.snapshot_path}")

    def _load_snapshot(self):
        snapshot = utils.read_snapshot(self.snapshot_path)
        # Without a shared disk, some machines have no snapshot, or an older one.
        epochs = utils.gather(snapshot["EPOCHS_RUN"] if snapshot else -1)  # -1: none
        newest = epochs.index(max(epochs))  # all load this rank's snapshot
        if len(set(epochs)) > 1:
            self._print(f"epochs saved, by rank: {epochs}. All take rank {newest}'s")
        if max(epochs) >= 0:  # a rank has one; files of equal epochs may differ
            snapshot = utils.broadcast_snapshot(self.snapshot_path, newest)
        if snapshot is None:
            return
        utils.check_snapshot(snapshot, self.model, self.optimizer, self.snapshot_path)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]
        self.log = snapshot.get("LOG", [])  # other scripts save none


def load_digits():
    """Handwritten digits: (1437 samples to train on, 360 that are held out).

    A sample: 64 pixels, of shape (64,), and a class from 0 to 9. They are those of
    scikit-learn. Without it they are made up: 10 random images, with much noise.
    """
    generator = torch.Generator().manual_seed(0)
    try:
        from sklearn import datasets  # here, because you may not have it

        images, digits = datasets.load_digits(return_X_y=True)
        source = torch.tensor(images).float() / 16
        targets = torch.tensor(digits)
    except ImportError:
        targets = torch.randint(10, (1797,), generator=generator)
        source = torch.rand(10, 64, generator=generator)[targets]
        source += 0.3 * torch.randn(1797, 64, generator=generator)
    order = torch.randperm(1797, generator=generator)
    data = [(source[i], targets[i]) for i in order]
    return NoisyDataset(data[:1437], 0.1), data[1437:]


class NoisyDataset(torch.utils.data.Dataset):
    """`data` with new noise on the source each time, from torch's global generator."""

    def __init__(self, data, deviation):
        self.data = data
        self.deviation = deviation

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        source, target = self.data[index]
        noise = self.deviation * torch.randn(source.shape)
        return source + noise, target


class SeededDataset(torch.utils.data.Dataset):
    """`data`, whose random numbers follow from the epoch and from the sample alone."""

    def __init__(self, data):
        self.data = data
        # In shared memory, so that workers that live on see the next epoch's number.
        self.epoch = torch.tensor(0).share_memory_()

    def set_epoch(self, epoch):
        self.epoch.fill_(epoch)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        with torch.random.fork_rng(devices=[]):  # without workers, dropout draws here
            # torch.manual_seed, which also seeds accelerators, takes 0.5 ms.
            torch.default_generator.manual_seed(int(self.epoch) * len(self) + index)
            return self.data[index]


def end_with_rank(worker):
    """PyTorch ends a worker whose parent dies, but here the fork server is that."""
    rank = torch.multiprocessing.parent_process()
    threading.Thread(target=exit_after, args=[rank], daemon=True).start()


def exit_after(process):
    process.join()
    os._exit(1)


def load_train_objs():
    """Your data, model (on the CPU) and loss go here.

    A sample is (source, target). A batch has its samples along dimension 0, and the
    loss is their mean. A snapshot holds the model and the optimizer: keep all else that
    training changes inside the model.
    """
    utils.seed(0)  # the same weights in each run and on each rank
    train_set, eval_set = load_digits()
    model = torch.nn.Linear(64, 10)
    loss_fn = torch.nn.CrossEntropyLoss()
    return SeededDataset(train_set), eval_set, model, loss_fn


def make_optimizer(model):
    """Your optimizer goes here, for all parameters. They are on the device by now."""
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def prepare_dataloader(dataset, batch_size, sampler, device, drop_last=False):
    torch.multiprocessing.set_forkserver_preload(["torch"])
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last,
        generator=torch.Generator().manual_seed(dist.get_rank()),  # not dropout's
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="forkserver",  # a fork beside gloo's threads may hang
        worker_init_fn=end_with_rank,
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
    sampler = torch.utils.data.DistributedSampler(train_set, drop_last=True)  # shuffles
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
