"""Average gradients without DDP, in buckets as DDP does. Parent: multigpu.py

python -m variants.ddp_by_hand 50 10 --bucket-mb 25
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import utils  # its docstring explains the words: rank, DDP, backend, snapshot


def ddp_setup(rank, world_size, port, device, timeout=timedelta(minutes=5)):
    dist.init_process_group(
        dist.get_default_backend_for_device(device),  # gloo on CPUs, NCCL on GPUs
        store=dist.TCPStore("localhost", port),  # connects to the store in __main__
        rank=rank,  # the number of this process, from 0 on
        world_size=world_size,  # how many processes
        timeout=timeout,  # how long a rank waits for the others
        device_id=None if device.type == "cpu" else device,  # without it, NCCL guesses
    )


def broadcast_model(model):
    """Every rank starts with the parameters and the buffers of rank 0."""
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor, src=0)


def pack(parameters):
    """One message: gradients, then a 1 for each parameter that has one, else a 0.

    The parameters have one dtype, and so has the message, which is one-dimensional.
    """
    grads = []
    used = []
    for parameter in parameters:
        is_used = parameter.grad is not None  # by this rank's batch
        grad = parameter.grad if is_used else torch.zeros_like(parameter)
        grads.append(grad.flatten())
        used.append(parameter.new_full((1,), is_used))
    return torch.cat(grads + used)


def unpack(message, parameters):
    """Give the parameters the gradients of a message that `pack` has made."""
    sizes = [parameter.numel() for parameter in parameters]
    *grads, used = message.split([*sizes, len(parameters)])
    for i, parameter in enumerate(parameters):
        if parameter.grad is not None or used[i] > 0:  # else no rank has used it
            grad = torch.empty_like(parameter)  # in the same order of memory
            parameter.grad = grad.copy_(grads[i].view_as(parameter))


def average_gradients(parameters):
    """The plainest way: after backward(), one message for each gradient."""
    for parameter in parameters:
        message = pack([parameter])
        dist.all_reduce(message, dist.ReduceOp.AVG)
        unpack(message, [parameter])


class Buckets:
    """The same in fewer messages, which leave while backward() still runs."""

    def __init__(self, parameters, bucket_mb):
        self.buckets = []
        filling = {}  # {dtype: its last bucket}
        for parameter in reversed(parameters):  # backward() begins with the last layer
            bucket = filling.get(parameter.dtype, [])
            size = sum(other.nbytes for other in bucket)
            if not bucket or size >= bucket_mb * 2**20:
                bucket = []
                filling[parameter.dtype] = bucket
                self.buckets.append(bucket)
            bucket.append(parameter)
            parameter.register_post_accumulate_grad_hook(self._arrived)
        self.arrived = set()  # parameters whose gradients are computed
        self.sent = []  # (bucket, its message, the all-reduce that is under way)

    def _arrived(self, parameter):
        if parameter in self.arrived:
            raise RuntimeError("a second backward() in one step")
        self.arrived.add(parameter)
        # A bucket waits for those before it, so that all ranks send in one order.
        for bucket in self.buckets[len(self.sent) :]:
            if not self.arrived.issuperset(bucket):
                break
            self._send(bucket)

    def _send(self, bucket):
        message = pack(bucket)
        work = dist.all_reduce(message, dist.ReduceOp.AVG, async_op=True)
        self.sent.append((bucket, message, work))

    def wait(self):
        """After backward(): send what this batch has not used, and wait for all."""
        for bucket in self.buckets[len(self.sent) :]:
            self._send(bucket)
        for bucket, message, work in self.sent:
            work.wait()
            unpack(message, bucket)
        self.arrived = set()
        self.sent = []


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
        bucket_mb: int | None,
    ):
        self.device = device
        self.model = model
        broadcast_model(self.model)
        weights = self.model.parameters()
        self.trained = [weight for weight in weights if weight.requires_grad]
        self.buckets = Buckets(self.trained, bucket_mb) if bucket_mb else None
        self.loss_fn = loss_fn.to(device)  # it may hold class weights
        self.optimizer = optimizer
        self.train_data = train_data
        self.eval_data = eval_data
        self.save_every = save_every
        self.snapshot_path = snapshot_path
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
        for source, targets in self.train_data:
            source = source.to(self.device, non_blocking=self.train_data.pin_memory)
            targets = targets.to(self.device, non_blocking=self.train_data.pin_memory)
            loss_sum += self._run_batch(source, targets)
        dist.all_reduce(loss_sum, dist.ReduceOp.AVG)  # averages over ranks, in place
        # .item() waits for the device. In each step, it would slow the training down.
        return loss_sum.item() / len(self.train_data)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = self.loss_fn(output, targets)
        loss.backward()
        if self.buckets:
            self.buckets.wait()
        else:
            average_gradients(self.trained)
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
        }
        if dist.get_rank() == 0:  # one rank writes
            utils.save_atomically(snapshot, self.snapshot_path)
        self._print(f"epoch {self.epochs_run} saved to {self.snapshot_path}")

    def _load_snapshot(self):
        snapshot = utils.read_snapshot(self.snapshot_path)
        if snapshot is None:
            return
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


def prepare_dataloader(dataset, batch_size, sampler, device, drop_last=False):
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last,
        pin_memory=device.type == "cuda",  # unpinned, each copy makes the CPU wait
    )


def main(rank, world_size, port, args):
    train_set, eval_set, model, loss_fn = load_train_objs()
    device = utils.set_device(args.device, rank, world_size)  # CPU threads are shared
    ddp_setup(rank, world_size, port, device)
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
        bucket_mb=args.bucket_mb,
    )
    trainer.train(args.total_epochs)
    del trainer  # ends threads of gloo, which may hang or abort the exit
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = utils.make_parser(__doc__)
    parser.add_argument("--nprocs", type=utils.positive_int, help="processes to start")
    parser.add_argument(
        "--bucket-mb",
        type=utils.positive_int,
        help="bucket size (default: none, each gradient is sent alone after backward)",
    )
    args = parser.parse_args()
    world_size = utils.choose_nprocs(args.device, args.nprocs)
    store = dist.TCPStore("localhost", 0, is_master=True)  # free port; ranks meet here
    utils.spawn(main, (world_size, store.port, args), world_size)  # main(rank, *these)
