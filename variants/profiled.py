"""Show what each rank spends the time of a step on. Parent: multigpu.py

python -m variants.profiled 50 10
"""

import itertools
import json
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.profiler import profile, record_function, schedule
from torch.utils.data import DataLoader

import utils  # its docstring explains the words: rank, DDP, backend, snapshot

PARTS = "data", "forward", "backward", "exposed communication", "optimizer", "rest"
WAIT = 5  # steps without the profiler
WARM_UP = 2  # steps with it, which are not counted
ACTIVE = 5  # steps that are measured


def ddp_setup(rank, world_size, port, device, timeout=timedelta(minutes=5)):
    dist.init_process_group(
        dist.get_default_backend_for_device(device),  # gloo on CPUs, NCCL on GPUs
        store=dist.TCPStore("localhost", port),  # connects to the store in __main__
        rank=rank,  # the number of this process, from 0 on
        world_size=world_size,  # how many processes
        timeout=timeout,  # how long a rank waits for the others
        device_id=None if device.type == "cpu" else device,  # without it, NCCL guesses
    )


class CpuEvent:
    """A moment, as torch.Event is one on an accelerator."""

    def record(self):
        self.seconds = time.perf_counter()

    def elapsed_time(self, end):
        return (end.seconds - self.seconds) * 1e3


def exposed_ms(events, on_cpu):
    """Milliseconds in which messages are under way while nothing computes.

    events: what the profiler saw, with its times in microseconds.
    """
    if on_cpu:  # DDP waits in backward(), once autograd has computed the gradients
        messages = [event for event in events if event.name == "backward"]
        work = [event for event in events if "evaluate_function" in event.name]
    else:  # kernels: the GPU's messages are some as well
        on_gpu = [event for event in events if event.device_type.name != "CPU"]
        kernels = [event for event in on_gpu if not event.is_user_annotation]
        messages = [kernel for kernel in kernels if "nccl" in kernel.name]
        work = [kernel for kernel in kernels if "nccl" not in kernel.name]
    last = max(event.time_range.end for event in events)
    exposed = torch.zeros(int(last))  # in each microsecond
    for event in messages:
        span = event.time_range
        exposed[int(span.start) : int(span.end)] = True
    for event in work:
        span = event.time_range
        exposed[int(span.start) : int(span.end)] = False
    return exposed.sum().item() / 1e3


class StepProfile:
    """Measures ACTIVE steps: what each rank spends the time of a step on."""

    def __init__(self, model, device, path):
        self.model = model
        self.device = device
        self.path = path
        self.marks = []  # (part, the moment at which it begins)
        self.summary = f"no profile: it takes {WAIT + WARM_UP + ACTIVE} steps"
        steps = schedule(wait=WAIT, warmup=WARM_UP, active=ACTIVE, repeat=1)
        self.profiler = profile(schedule=steps, on_trace_ready=self._report)
        self.profiler.start()

    def mark(self, part):
        """From here on, the step is in `part`."""
        self.span = record_function(part)  # also ends the span before it
        self.span.__enter__()
        on_cpu = self.device.type == "cpu"
        now = CpuEvent() if on_cpu else torch.Event(self.device, enable_timing=True)
        now.record()
        self.marks.append((part, now))

    def step(self):
        self.profiler.step()
        if not 0 < self.profiler.step_num - WAIT - WARM_UP < ACTIVE:
            self.marks.clear()  # of steps that are not measured
        self.mark("data")

    def _report(self, profiler):
        on_cpu = self.device.type == "cpu"
        if not on_cpu:
            torch.accelerator.synchronize()
        ms = dict.fromkeys(PARTS, 0)  # of a step
        for (part, begin), (_, end) in itertools.pairwise(self.marks):
            if part in ms:
                ms[part] += begin.elapsed_time(end) / ACTIVE
        ms["exposed communication"] = exposed_ms(profiler.events(), on_cpu) / ACTIVE
        ms["backward"] -= ms["exposed communication"]
        ms["step"] = sum(ms.values())
        ranks = utils.gather(ms)
        self.summary = "share of a step".ljust(21)
        for rank in range(len(ranks)):
            self.summary += f"rank {rank}".rjust(18)
        for part in ms:
            self.summary += f"\n{part:21}"
            for its_ms in ranks:
                share = its_ms[part] / its_ms["step"]
                self.summary += f" {its_ms[part]:9.2f} ms {share:4.0%}"
        if self.path:  # for Perfetto
            profiler.export_chrome_trace(f"{self.path}.{dist.get_rank()}.json")
        if self.path and dist.get_rank() == 0:  # for cluster/predict.py
            weights = self.model.parameters()
            size = sum(weight.numel() for weight in weights if weight.requires_grad)
            with open(f"{self.path}.json", "w") as file:
                json.dump({"ms": ranks, "parameters": size}, file)


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
        trace: str | None,
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
        self.profile = StepProfile(self.model, device, trace)
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
        self._print(self.profile.summary)

    def _run_epoch(self, epoch):
        # Order and dropout follow from the epoch, so they are the same after a resume.
        self.train_data.sampler.set_epoch(epoch)
        utils.seed(epoch * dist.get_world_size() + dist.get_rank())  # per rank
        self.model.train()
        loss_sum = torch.zeros((), device=self.device)
        self.profile.mark("data")
        for source, targets in self.train_data:
            self.profile.mark("rest")
            source = source.to(self.device, non_blocking=self.train_data.pin_memory)
            targets = targets.to(self.device, non_blocking=self.train_data.pin_memory)
            loss_sum += self._run_batch(source, targets)
            self.profile.step()
        self.profile.mark("between steps")
        dist.all_reduce(loss_sum, dist.ReduceOp.AVG)  # averages over ranks, in place
        # .item() waits for the device. In each step, it would slow the training down.
        return loss_sum.item() / len(self.train_data)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        self.profile.mark("forward")
        output = self.ddp_model(source)  # self.model, but backward() averages gradients
        loss = self.loss_fn(output, targets)
        self.profile.mark("backward")
        loss.backward()
        self.profile.mark("optimizer")
        self.optimizer.step()
        self.profile.mark("rest")
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
        trace=args.trace,
    )
    trainer.train(args.total_epochs)
    del trainer  # ends threads of gloo, which may hang or abort the exit
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = utils.make_parser(__doc__)
    parser.add_argument("--nprocs", type=utils.positive_int, help="processes to start")
    parser.add_argument(
        "--trace",
        type=utils.writable_path,
        help="also write files that begin with this, rank 0's trace to TRACE.0.json",
    )
    args = parser.parse_args()
    world_size = utils.choose_nprocs(args.device, args.nprocs)
    store = dist.TCPStore("localhost", 0, is_master=True)  # free port; ranks meet here
    utils.spawn(main, (world_size, store.port, args), world_size)  # main(rank, *these)
