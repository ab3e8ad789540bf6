"""Average weights every few steps, for slow links. Parent: multinode.py

torchrun --standalone --nproc-per-node=2 -m variants.diloco 50 10
On each of two machines, type --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST in
place of --standalone. HOST is the name of one of the two, the same on both.
"""

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


def flat(params):
    """All numbers of the parameters, in one dimension."""
    return torch.cat([param.detach().flatten() for param in params])


class OuterOptimizer:
    """Moves all ranks together, by the mean of what each has moved by itself.

    It is the outer part of algorithm 1 in https://arxiv.org/abs/2311.08105.
    """

    def __init__(self, model, lr, momentum):
        self.lr = lr
        self.beta = momentum
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), src=0)  # as DDP does
        self.params = []  # also those that are unfrozen later
        for param in model.parameters():
            if param.is_floating_point() or param.is_complex():  # others never train
                self.params.append(param)
        self.start = flat(self.params)
        self.momentum = torch.zeros_like(self.start)

    @torch.no_grad()
    def step(self):
        moved = self.start - flat(self.params)
        dist.all_reduce(moved, dist.ReduceOp.AVG)
        self.momentum *= self.beta
        self.momentum += moved
        self.start -= self.lr * (moved + self.beta * self.momentum)  # Nesterov's
        sizes = [param.numel() for param in self.params]
        parts = self.start.split(sizes)
        for i, param in enumerate(self.params):
            param.copy_(parts[i].view_as(param))

    def load(self, momentum):
        """Go on from the weights that the model has now."""
        self.start = flat(self.params)
        self.momentum.copy_(momentum)


def average_state(optimizer, device):
    """All ranks go on with one state, as one snapshot lets them do."""
    for state in optimizer.state.values():
        for value in state.values():
            # On a GPU, Adam counts its steps on the CPU: all ranks count alike.
            if isinstance(value, torch.Tensor) and value.device == device:
                dist.all_reduce(value, dist.ReduceOp.AVG)


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
        local_steps: int,
        outer_lr: float,
        outer_momentum: float,
    ):
        self.device = device
        self.model = model
        self.outer = OuterOptimizer(self.model, outer_lr, outer_momentum)
        self.loss_fn = loss_fn.to(device)  # it may hold class weights
        self.optimizer = optimizer
        self.train_data = train_data
        self.eval_data = eval_data
        self.save_every = save_every
        self.snapshot_path = snapshot_path
        self.local_steps = local_steps
        self.epochs_run = 0
        self._load_snapshot()

    def train(self, total_epochs):
        self._print(utils.describe_run(self.train_data, self.eval_data, self.device))
        self._print(utils.progress(self.epochs_run, total_epochs, self.snapshot_path))
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
            # Ends the run at NaN, which must not be saved.
            losses = train_loss, held_out_loss
            utils.check_state(losses, self.model, self.snapshot_path)
            if self.epochs_run % self.save_every == 0 or epoch == total_epochs - 1:
                self._save_snapshot()

    def _run_epoch(self, epoch):
        # Order and dropout follow from the epoch, so they are the same after a resume.
        self.train_data.sampler.set_epoch(epoch)
        utils.seed(epoch * dist.get_world_size() + dist.get_rank())  # per rank
        self.model.train()
        loss_sum = torch.zeros((), device=self.device)
        for step, (source, targets) in enumerate(self.train_data, start=1):
            source = source.to(self.device, non_blocking=self.train_data.pin_memory)
            targets = targets.to(self.device, non_blocking=self.train_data.pin_memory)
            loss_sum += self._run_batch(source, targets)
            if step % self.local_steps == 0 or step == len(self.train_data):
                self.outer.step()
        average_state(self.optimizer, self.device)
        dist.all_reduce(loss_sum, dist.ReduceOp.AVG)  # averages over ranks, in place
        # .item() waits for the device. In each step, it would slow the training down.
        return loss_sum.item() / len(self.train_data)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = self.loss_fn(output, targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

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
            "OUTER_MOMENTUM": self.outer.momentum,
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
        self.outer.load(snapshot.get("OUTER_MOMENTUM", torch.zeros(())))
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


def prepare_dataloader(dataset, batch_size, sampler, device, drop_last=False):
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last,
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
        local_steps=args.local_steps,
        outer_lr=args.outer_lr,
        outer_momentum=args.outer_momentum,
    )
    trainer.train(args.total_epochs)
    del trainer  # ends threads of gloo, which may hang or abort the exit
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = utils.make_parser(__doc__)
    parser.add_argument(
        "--local-steps",
        type=utils.positive_int,
        default=1,
        help="that a rank makes by itself before all average (default: 1)",
    )
    parser.add_argument(
        "--outer-lr",
        type=float,
        default=1.0,
        help="of the mean movement that all ranks make (default: 1)",
    )
    parser.add_argument(
        "--outer-momentum",
        type=float,
        default=0.0,
        help="of the movements before that is added (default: 0)",
    )
    args = parser.parse_args()
    main(args)
