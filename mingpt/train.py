"""Train a GPT on real text.

python -m mingpt.train
torchrun --standalone --nproc-per-node=2 -m mingpt.train
torchrun --nproc-per-node=8 -m mingpt.train --preset gpt2 --data mytext.txt
"""

import contextlib
import gc
import itertools
import math
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import utils
from mingpt import batches, checks, data, loading, options, report, split
from variants.fsdp import shard


def ddp_setup(device):
    backend = dist.get_default_backend_for_device(device)  # gloo on CPUs, NCCL on GPUs
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    place = {} if "RANK" in os.environ else alone  # python starts one rank
    if not dist.is_backend_available(backend):
        backend = "gloo"  # Windows has no NCCL: one rank does without
    if backend != "gloo":
        place["device_id"] = device  # or NCCL guesses
    dist.init_process_group(backend, timeout=timedelta(minutes=5), **place)


class Trainer:
    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        train_data: DataLoader,
        eval_data: DataLoader,
        device: torch.device,
        corpus: data.Corpus,
        args,
    ):
        self.device = device
        self.steps = args.steps
        self.eval_every = args.eval_every
        self.accumulate = args.accumulate
        self.warmup = args.warmup
        self.clip = args.clip
        self.seed = args.seed
        self.snapshot_path = args.snapshot_path
        self.configuration = checks.configuration(args, corpus, model.config)
        self.dtype = options.DTYPES[args.precision]
        scaling = self.dtype == torch.float16  # bfloat16 has the range of float32
        self.scaler = torch.amp.GradScaler(device.type, enabled=scaling)
        # Ranks that split layers are one replica: they share batch and random numbers.
        self.split, self.replica = args.split, dist.get_rank() // args.split
        self.replicas = dist.get_world_size() // args.split
        self.model = model if args.shard or args.split > 1 else model.to(device)
        if args.compile == "on":
            # Or threads add up an embedding's gradient in the order in which they come.
            torch.use_deterministic_algorithms(device.type == "cpu", warn_only=True)
            self.model.compile(dynamic=False, options=options.compile_options(device))
        self.optimizer = optimizer
        self.train_data, self.eval_data = train_data, eval_data
        self.corpus = corpus
        self.steps_run = self.steps_saved = self.windows_run = 0  # windows: all ranks'
        self.sigterm = torch.zeros(1)
        self.cpu_group = dist.new_group(timeout=timedelta(minutes=5), backend="gloo")
        self.writer, self.writing = ThreadPoolExecutor(1), None
        self._load_snapshot()
        data_group = None  # all ranks
        if args.shard:  # also what was loaded
            self._shard()
        elif args.split > 1:
            data_group = split.cut(model, optimizer, args.split, device)
        self.ddp_model, self.no_sync = self.model, contextlib.nullcontext
        # One replica has no other to average with. A sharded model averages by itself.
        if self.replicas > 1 and not args.shard:
            self.ddp_model = DistributedDataParallel(model, process_group=data_group)
            self.no_sync = self.ddp_model.no_sync
        flag = self.sigterm.numpy()  # torch.compile may trace what is done to tensors
        signal.signal(signal.SIGTERM, lambda *_: flag.fill(1))

    def _shard(self):
        """Leave this rank a part of the model and of its optimizer."""
        mesh = dist.init_device_mesh(self.device.type, (dist.get_world_size(),))
        half = None if self.dtype == torch.float32 else self.dtype  # to send less
        policy = MixedPrecisionPolicy(half, reduce_dtype=half and torch.float32)
        optimizers = getattr(self.optimizer, "optimizers", [self.optimizer])
        shard(self.model, mesh, *optimizers, mp_policy=policy)
        register_fsdp_forward_method(self.model, "generate")  # it calls no forward

    def train(self):
        while self.steps_run < self.steps:
            start = time.perf_counter()
            train_loss, tokens = self._run_steps()
            tokens_per_s = tokens / (time.perf_counter() - start)
            metrics = {"train loss": train_loss, **self._evaluate()}
            line = [f"step {self.steps_run}/{self.steps}"]
            line += [f"{name} {value:.4f}" for name, value in metrics.items()]
            self._print(" | ".join([*line, f"{tokens_per_s:,.0f} tokens/s"]))
            self._check_finite(metrics["val loss"])
            if dist.get_rank() == 0:  # one rank writes
                row = {**metrics, "tokens/s": tokens_per_s}
                report.log(self.snapshot_path, self.steps_run, row)
            self._save_snapshot()
            self._print(self._sample())
        self._finish_writing()

    def _run_steps(self):
        # Windows and random numbers follow from the step: a resumed run repeats them.
        self.train_data.sampler.start = self.windows_run
        self.model.train()
        loss_sum, tokens = torch.zeros((), device=self.device), 0
        every, total = self.eval_every, self.steps
        steps = min(every - self.steps_run % every, total - self.steps_run)
        for source, targets in itertools.islice(self.train_data, steps):
            self._stop_if_told()
            torch.manual_seed(hash((self.seed, self.steps_run, self.replica)))
            source = source.to(self.device, non_blocking=self.train_data.pin_memory)
            targets = targets.to(self.device, non_blocking=self.train_data.pin_memory)
            loss = self._run_batch(source, targets)
            loss_sum += loss * source.numel()
            tokens += source.numel()
            self.steps_run += 1
            self.windows_run += len(source) * self.replicas
            if self.steps_run % every and self.steps_run % max(1, every // 20) == 0:
                (loss,) = self._sum(loss / self.replicas)  # waits for the GPU
                self._print(f"step {self.steps_run}/{total} | loss {loss:.4f}")
        loss_sum, tokens = self._sum(loss_sum, tokens)
        return loss_sum / tokens, tokens

    def _stop_if_told(self):
        """Save and end, all ranks after the same step, if SIGTERM came to one."""
        stop = self.sigterm.clone()
        dist.all_reduce(stop, group=self.cpu_group)
        if stop:
            self._check_finite()
            self._save_snapshot()
            self._finish_writing()
            self._print(f"preempted after step {self.steps_run}")
            dist.barrier(self.cpu_group)  # or torchrun ends the rank that saves
            open(f"{self.snapshot_path}.preempted", "w").close()
            os._exit(75)  # EX_TEMPFAIL: try again. No clean-up: SIGKILL is near.

    def _run_batch(self, source, targets):
        scale = lr_scale(self.steps_run, self.steps, self.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * scale
        self.optimizer.zero_grad()
        loss = self._accumulate(source, targets)
        self.scaler.unscale_(self.optimizer)  # what is clipped must not be scaled
        clip = (split if self.split > 1 else torch.nn.utils).clip_grad_norm_
        clip(list(self.model.parameters()), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def _accumulate(self, source, targets):
        """Add up the gradients of the micro-batches. Return the mean loss."""
        batch_loss, pieces = 0, self.accumulate
        pairs = zip(source.chunk(pieces), targets.chunk(pieces), strict=True)
        for number, (source, targets) in enumerate(pairs, 1):
            # DDP decides in the forward pass whether backward sends the gradients.
            with contextlib.nullcontext() if number == pieces else self.no_sync():
                with self._autocast():
                    _, loss = self.ddp_model(source, targets)
                loss = loss / pieces
                self.scaler.scale(loss).backward()
            batch_loss += loss.detach()
        return batch_loss

    @torch.no_grad()
    def _evaluate(self):
        self.model.eval()
        for buffer in self.model.buffers():  # BatchNorm's differ; rank 0's are saved
            dist.broadcast(whole := buffer.contiguous(), src=0)
            buffer.copy_(whole)  # contiguous() may have copied it
        loss_sum, tokens = torch.zeros((), device=self.device), 0
        for source, targets in self.eval_data:
            source = source.to(self.device, non_blocking=self.eval_data.pin_memory)
            targets = targets.to(self.device, non_blocking=self.eval_data.pin_memory)
            with self._autocast():
                _, loss = self.model(source, targets)
            counted = (targets >= 0).sum()  # the last window is padded
            loss_sum += (loss * counted).where(counted > 0, 0)  # of none, it is NaN
            tokens += counted
        loss_sum, tokens = self._sum(loss_sum, tokens)
        bits_per_byte = loss_sum / math.log(2) / self.corpus.val_bytes
        return {"val loss": loss_sum / tokens, "bits per byte": bits_per_byte}

    def _autocast(self):
        enabled = self.dtype != torch.float32
        return torch.autocast(self.device.type, self.dtype, enabled=enabled)

    def _sample(self):
        """What the model writes by now: the same on every rank, so that none waits."""
        generator = torch.Generator(self.device).manual_seed(self.steps_run)
        start = torch.tensor(self.corpus.val[None, :1].astype("int64"))
        start = start.to(self.device)
        tokens = self.model.generate(start, 200, temperature=0.8, generator=generator)
        return self.corpus.tokenizer.decode(tokens[0].tolist())

    def _sum(self, *values):
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.cpu_group)
        return (total / self.split).tolist()  # each replica counts once

    def _print(self, text):
        if dist.get_rank() == 0:  # one rank prints
            print(text, flush=True)

    def _check_finite(self, loss=0.0):
        """End with one line, nothing saved, if the loss or a weight is not finite."""
        self._finish_writing()
        finite = all(x.isfinite().all() for x in self.model.parameters())
        if any(self._sum(not (finite and math.isfinite(loss)))):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun ends the others
            what = f"step {self.steps_run}: the loss or a weight is not finite"
            stays = f"{self.snapshot_path} stays at step {self.steps_saved}"
            utils.error(f"{what}: {stays}")

    def _save_snapshot(self):
        path, self.steps_saved = self.snapshot_path, self.steps_run
        snapshot = {
            "MODEL_STATE": self.model.state_dict(keep_vars=True),  # with their `cut`
            "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "SCALER_STATE": self.scaler.state_dict(),
            "STEPS_RUN": self.steps_run,
            "WINDOWS_RUN": self.windows_run,
            "CONFIGURATION": self.configuration,
        }
        # A copy, because the next steps change the weights while it is written.
        snapshot = copy_to_cpu(snapshot, {})
        if dist.get_rank() == 0:  # one rank writes
            self.writing = self.writer.submit(utils.save_atomically, snapshot, path)
        self._print(f"saving step {self.steps_run} to {path}")

    def _finish_writing(self):
        """Wait for the snapshot that is being written, if there is one."""
        if self.writing:
            self.writing.result()  # or the error that the writer met

    def _load_snapshot(self):
        path = self.snapshot_path
        snapshot = utils.read_snapshot(path, counter="STEPS_RUN")
        steps = [None] * dist.get_world_size()
        dist.all_gather_object(steps, (snapshot or {}).get("STEPS_RUN", 0))
        newest = steps.index(max(steps))  # all load this rank's snapshot
        if len(set(steps)) > 1:
            self._print(f"steps saved, by rank: {steps}. All take rank {newest}'s")
        if max(steps) > 0:
            snapshot = utils.broadcast_snapshot(path, newest)
        if snapshot is None:
            return
        checks.check_snapshot(snapshot, self.configuration, path)
        utils.check_snapshot(snapshot, self.model, self.optimizer, path)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        if self.scaler.is_enabled() and snapshot["SCALER_STATE"]:
            self.scaler.load_state_dict(snapshot["SCALER_STATE"])
        self.steps_run = self.steps_saved = snapshot["STEPS_RUN"]
        self.windows_run = snapshot["WINDOWS_RUN"]


def copy_to_cpu(value, copies):
    """`value`, all tensors in its dicts and lists copied. Tied ones stay tied.

    All ranks gather what is in parts, one tensor at a time. Rank 0 has the copies.
    """
    if isinstance(value, torch.Tensor):
        whole = part = value
        if isinstance(value, DTensor):
            whole, part = value.full_tensor(), value.to_local()
        elif hasattr(value, "cut"):
            whole = split.whole(value.detach(), *value.cut)
        if dist.get_rank() > 0:
            return None
        place = part.data_ptr(), value.dtype, value.shape, value.stride()
        return copies.setdefault(place, whole.detach().to("cpu", copy=True))
    if isinstance(value, dict):
        return {name: copy_to_cpu(x, copies) for name, x in value.items()}
    return [copy_to_cpu(x, copies) for x in value] if isinstance(value, list) else value


def lr_scale(step, steps, warmup):
    """What the learning rate is multiplied by at a step, which counts from 0.

    It rises in a line for a share `warmup` of the steps, and falls to a tenth along a
    cosine, as in GPT-3's training (Brown et al., 2020, appendix B).
    """
    rising = warmup * steps
    if step < rising:
        return min(1, (step + 1) / rising)
    return 0.55 + 0.45 * math.cos(math.pi * (step - rising) / (steps - rising))


def load_train_objs(args, device):
    """Your text, model and optimizer go here."""
    corpus = data.prepare(args.data, args.tokenizer, args.cache, args.val_fraction)
    torch.manual_seed(args.seed % 2**64)
    model, optimizer = loading.load_model(args, corpus.vocab_size, device)
    return corpus, model, optimizer


def prepare_dataloader(dataset, batch_size, sampler, device):
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=tuple,  # a batch is in one piece already
        pin_memory=device.type == "cuda",
    )


@record  # or torchrun could not show the traceback
def main(args):
    alone = "RANK" not in os.environ  # python starts this process
    rank, local_rank, world_size = (0, None, 1) if alone else utils.torchrun_env()
    device = utils.set_device(args.device, local_rank)
    options.settle(args, device)
    corpus, model, optimizer = load_train_objs(args, device)
    ddp_setup(device)
    checks.check_ranks(args, corpus)
    split.check(args, model, optimizer)
    sizes = model.config.block_size, args.batch_size
    if len(corpus.train) <= model.config.block_size:
        utils.error(f"a text of {len(corpus.train)} tokens has no whole block")
    place = args.seed, rank // args.split, world_size // args.split
    sampler = batches.StepSampler(len(corpus.train), *sizes, *place)
    train_set = batches.Blocks(corpus.train, model.config.block_size)
    train_data = prepare_dataloader(train_set, args.batch_size, sampler, device)
    sampler = batches.eval_starts(len(corpus.val), *sizes, *place[1:])
    eval_set = batches.Blocks(corpus.val, model.config.block_size)
    eval_data = prepare_dataloader(eval_set, args.batch_size, sampler, device)
    trainer = Trainer(model, optimizer, train_data, eval_data, device, corpus, args)
    trainer._print(report.describe_run(args, corpus, model, device, trainer.steps_run))
    trainer.train()
    if args.shard:  # its mesh holds the process group
        vars(optimizer.param_groups[0]["params"][0].device_mesh).clear()
    del trainer, model, optimizer  # or gloo's threads outlive main: exits hang or abort
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = options.make_parser(__doc__)
    args = options.parse(parser)
    try:
        main(args)
    except SystemExit as end:  # of utils.error, while gloo's threads run
        sys.stdout.flush()
        os._exit(end.code)  # or they may abort it
