"""Train in bfloat16 or float16 with float32 weights. Parent: multigpu.py

python -m variants.mixed_precision 50 10
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


def choose_dtype(precision, device):
    """What `--precision` means on all ranks. Two scales would spoil the gradients."""
    if precision == "auto":
        all_have_it = torch.tensor(int(has_bfloat16(device)), device=device)
        dist.all_reduce(all_have_it, dist.ReduceOp.MIN)
        precision = "bf16" if all_have_it.item() else "fp16"
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def has_bfloat16(device):
    """Whether `device` computes in bfloat16 itself. Older GPUs only imitate it."""
    if device.type not in ("cuda", "xpu"):
        return True
    return torch.get_device_module(device).is_bf16_supported(including_emulation=False)


def describe_precision(trainer):
    dtypes = {str(weight.dtype) for weight in trainer.model.parameters()}
    kept = " and ".join(sorted(dtypes))
    scale = trainer.scaler.get_scale()
    return f"autocast to {trainer.dtype}, weights in {kept}, loss scale {scale:g}"


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
        precision: str,
        clip: float,
    ):
        self.device = device
        self.model = model
        self.ddp_model = torch.nn.parallel.DistributedDataParallel(self.model)
        self.loss_fn = loss_fn.to(device)  # it may hold class weights
        self.optimizer = optimizer
        self.dtype = choose_dtype(precision, device)
        self.clip = clip
        scaling = self.dtype == torch.float16  # bfloat16 has the range of float32
        self.scaler = torch.GradScaler(device.type, enabled=scaling)
        self.train_data = train_data
        self.eval_data = eval_data
        self.save_every = save_every
        self.snapshot_path = snapshot_path
        self.epochs_run = 0
        self._load_snapshot()

    def train(self, total_epochs):
        self._print(utils.describe_run(self.train_data, self.eval_data, self.device))
        self._print(utils.progress(self.epochs_run, total_epochs, self.snapshot_path))
        self._print(describe_precision(self))
        for epoch in range(self.epochs_run, total_epochs):
            start = time.perf_counter()
            train_loss = self._run_epoch(epoch)
            samples_per_s = len(self.train_data.dataset) / (time.perf_counter() - start)
            held_out_loss = self._evaluate()
            self.epochs_run = epoch + 1
            self._print(
                f"epoch {self.epochs_run}/{total_epochs} | train loss {train_loss:.6f}"
                f" | held-out loss {held_out_loss:.6f} | {samples_per_s:,.0f} samples/s"
                f" | skipped steps {self.skipped:.0f}"
            )
            # Ends the run at NaN, which must not be saved.
            losses = train_loss, held_out_loss
            losses = [held_out_loss] if self.skipped else losses  # it moved no weight
            utils.check_state(losses, self.model, self.snapshot_path)
            if self.epochs_run % self.save_every == 0 or epoch == total_epochs - 1:
                self._save_snapshot()

    def _run_epoch(self, epoch):
        # Order and dropout follow from the epoch, so they are the same after a resume.
        self.train_data.sampler.set_epoch(epoch)
        utils.seed(epoch * dist.get_world_size() + dist.get_rank())  # per rank
        self.model.train()
        self.skipped = torch.zeros((), device=self.device)
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
        with torch.autocast(self.device.type, self.dtype):
            output = self.ddp_model(source)
            loss = self.loss_fn(output, targets)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)  # what is clipped must not be scaled
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        if self.scaler.is_enabled():
            self.skipped += ~norm.isfinite()  # on the device, without .item()
        self.scaler.step(self.optimizer)
        self.scaler.update()
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
            with torch.autocast(self.device.type, self.dtype):
                output = self.model(source)
                loss_sum += self.loss_fn(output, targets) * len(source)
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
            "SCALER_STATE": self.scaler.state_dict(),
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
        if snapshot.get("SCALER_STATE"):  # only a run in float16 has saved one
            self.scaler.load_state_dict(snapshot["SCALER_STATE"])


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
        precision=args.precision,
        clip=args.clip,
    )
    trainer.train(args.total_epochs)
    del trainer  # ends threads of gloo, which may hang or abort the exit
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = utils.make_parser(__doc__)
    parser.add_argument("--nprocs", type=utils.positive_int, help="processes to start")
    text = "what autocast computes in (auto: bf16 if all devices have it, else fp16)"
    names = ["auto", "bf16", "fp16"]
    parser.add_argument("--precision", choices=names, default="auto", help=text)
    text = "scale gradients of a larger norm down to this one (default: inf)"
    parser.add_argument("--clip", type=float, default="inf", help=text)
    args = parser.parse_args()
    world_size = utils.choose_nprocs(args.device, args.nprocs)
    store = dist.TCPStore("localhost", 0, is_master=True)  # free port; ranks meet here
    utils.spawn(main, (world_size, store.port, args), world_size)  # main(rank, *these)
