"""Split each batch over the GPUs of one process. Parent: single_gpu.py

python -m variants.data_parallel 50 10
"""

import functools
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import utils


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
    ):
        self.device = device
        self.model = model.to(device)
        self.dp_model = self.model
        # It takes all CUDA GPUs, even in a run on the CPU, and can use no other kind.
        if device.type == "cuda" or not torch.accelerator.is_available():
            self.dp_model = torch.nn.DataParallel(self.model)
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
        self.train_data.sampler.generator.manual_seed(epoch)
        torch.manual_seed(epoch)
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
        output = self.dp_model(source)  # of the whole batch, on the first GPU
        loss = self.loss_fn(output, targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def _evaluate(self):
        self.model.eval()
        loss_sum, samples = torch.zeros((), device=self.device), 0
        pinned = self.eval_data.pin_memory
        for source, targets in self.eval_data:
            source = source.to(self.device, non_blocking=pinned)
            targets = targets.to(self.device, non_blocking=pinned)
            output = self.dp_model(source)
            loss = self.loss_fn(output, targets)
            loss_sum.add_(loss, alpha=len(source))
            samples += len(source)
        loss_sum, samples = self._sum(loss_sum, samples)
        return {"held-out loss": loss_sum / samples}

    def _sum(self, *values):
        total = torch.tensor(values, device=self.device)
        return total.tolist()

    def _print(self, text):
        utils.say(text)

    def _save_snapshot(self):
        snapshot = {
            "MODEL_STATE": self.model.state_dict(),
            "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "EPOCHS_RUN": self.epochs_run,
        }
        utils.save_atomically(snapshot, self.snapshot_path)
        self._print(f"epoch {self.epochs_run} saved to {self.snapshot_path}")

    def _load_snapshot(self):
        snapshot = utils.read_snapshot(self.snapshot_path)
        if snapshot["EPOCHS_RUN"] == 0:
            return
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]


def load_train_objs():
    """Your data, model, loss (a mean over the batch) and kind of optimizer go here."""
    torch.manual_seed(0)
    train_set = utils.MyTrainDataset(2048)
    eval_set = utils.MyTrainDataset(512, seed=1)
    model = torch.nn.Linear(20, 1)
    make_optimizer = functools.partial(torch.optim.SGD, lr=0.001, momentum=0.9)
    return train_set, eval_set, model, F.mse_loss, make_optimizer


def prepare_dataloader(dataset, batch_size, sampler, device, drop_last=False):
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last,
        pin_memory=device.type not in ("cpu", "mps"),  # MPS cannot pin
    )


def main(args):
    train_set, eval_set, model, loss_fn, make_optimizer = load_train_objs()
    utils.check_run(args, train_set, eval_set, model, loss_fn, make_optimizer)
    device = utils.get_device(args.device)
    # Whole batches only, so that every step averages over equally many samples.
    sampler = torch.utils.data.RandomSampler(train_set, generator=torch.Generator())
    train_data = prepare_dataloader(
        train_set, args.batch_size, sampler, device, drop_last=True
    )
    sampler = range(len(eval_set))
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
    ).train()


if __name__ == "__main__":
    parser = utils.make_parser(__doc__)
    args = parser.parse_args()
    main(args)
