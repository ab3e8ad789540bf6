"""Train a GPT on real text. Parent: multinode.py

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
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader

import utils
from mingpt import batches, data, options, report


def ddp_setup(device):
    backend = dist.get_default_backend_for_device(device)  # gloo on CPUs, NCCL on GPUs
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    place = {} if "RANK" in os.environ else alone  # python starts one rank
    dist.init_process_group(backend, timeout=timedelta(minutes=5), **place)


class Trainer:
    def __init__(
        self,
        model: torch.nn.Module,
        make_optimizer: Callable,
        train_data: DataLoader,
        eval_data: DataLoader,
        device: torch.device,
        corpus: data.Corpus,
        args,
    ):
        self.device = device
        self.dtype = options.DTYPES[args.precision]
        scaling = self.dtype == torch.float16  # bfloat16 has the range of float32
        self.scaler = torch.amp.GradScaler(device.type, enabled=scaling)
        self.model = model.to(device)
        if args.compile == "on":
            how = options.compile_options(device)
            self.model.compile(dynamic=False, options=how)
        self.ddp_model, self.no_sync = self.model, contextlib.nullcontext
        if dist.get_world_size() > 1:  # one rank has no other to average with
            self.ddp_model = torch.nn.parallel.DistributedDataParallel(self.model)
            self.no_sync = self.ddp_model.no_sync
        self.optimizer = make_optimizer(self.model)
        self.train_data = train_data
        self.eval_data = eval_data
        self.corpus = corpus
        self.args = args
        self.snapshot_path = args.snapshot_path
        self.steps_run = 0
        self.windows_run = 0  # by all ranks together
        sigterm = self.sigterm = torch.zeros(1)
        signal.signal(signal.SIGTERM, lambda *_: sigterm.fill_(1))
        self.cpu_group = dist.new_group(timeout=timedelta(minutes=5), backend="gloo")
        self.writer, self.writing = ThreadPoolExecutor(1), None
        self._load_snapshot()

    def train(self):
        self._print(report.describe_run(self))
        self.progress = report.Progress(self)
        while self.steps_run < self.args.steps:
            start = time.perf_counter()
            train_loss, tokens = self._run_steps()
            tokens_per_s = tokens / (time.perf_counter() - start)
            metrics = {"train loss": train_loss, **self._evaluate()}
            self._print(report.describe_steps(self, metrics, tokens_per_s))
            self._log({**metrics, "tokens/s": tokens_per_s})
            self._print(self._sample())
            self._save_snapshot()
        self._finish_writing()

    def _run_steps(self):
        self.progress.begin()
        # Windows and random numbers follow from the step: a resumed run repeats them.
        self.train_data.sampler.set_start(self.windows_run)
        self.model.train()
        loss_sum, tokens = torch.zeros((), device=self.device), 0
        every, to_go = self.args.eval_every, self.args.steps - self.steps_run
        steps = min(every - self.steps_run % every, to_go)
        endless = batches.prefetch(self.train_data, self.device)
        for source, targets in itertools.islice(endless, steps):
            self._stop_if_told()
            torch.manual_seed(hash((self.args.seed, self.steps_run, dist.get_rank())))
            loss = self._run_batch(source, targets)
            loss_sum.add_(loss, alpha=source.numel())
            tokens += source.numel()
            self.steps_run += 1
            self.windows_run += len(source) * dist.get_world_size()
            self.progress.step(loss, source.numel() * dist.get_world_size())
        loss_sum, tokens = self._sum(loss_sum, tokens)
        return loss_sum / tokens, tokens

    def _stop_if_told(self):
        """Save and end, all ranks after the same step, if SIGTERM came to one."""
        stop = self.sigterm.clone()
        dist.all_reduce(stop, group=self.cpu_group)
        if stop:
            self._save_snapshot()
            self._finish_writing()
            self._print(f"preempted after step {self.steps_run}")
            dist.barrier(self.cpu_group)  # or torchrun ends the rank that saves
            open(f"{self.snapshot_path}.preempted", "w").close()
            os._exit(75)  # EX_TEMPFAIL: try again. No clean-up: SIGKILL is near.

    def _run_batch(self, source, targets):
        scale = lr_scale(self.steps_run, self.args.steps, self.args.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * scale
        self.optimizer.zero_grad()
        loss = self._accumulate(source, targets)
        self.scaler.unscale_(self.optimizer)  # what is clipped must not be scaled
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def _accumulate(self, source, targets):
        """Add up the gradients of the micro-batches. Return the mean loss."""
        batch_loss, pieces = 0, self.args.accumulate
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
        for buffer in self.model.buffers():  # ranks' differ, and rank 0's are saved
            dist.broadcast(buffer, src=0)
        loss_sum, tokens = torch.zeros((), device=self.device), 0
        for source, targets in batches.prefetch(self.eval_data, self.device):
            with self._autocast():
                _, loss = self.model(source, targets)
            counted = (targets >= 0).sum()  # the last window is padded
            loss_sum += loss * counted
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
        options = {"temperature": 0.8, "generator": generator}
        tokens = self.model.generate(start.to(self.device), 200, **options)
        return self.corpus.tokenizer.decode(tokens[0].tolist())

    def _sum(self, *values):
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.cpu_group)
        return total.tolist()

    def _print(self, text):
        if dist.get_rank() == 0:  # one rank prints
            utils.say(text)

    def _log(self, metrics):
        if dist.get_rank() == 0:  # one rank writes
            report.log(self, metrics)

    def _save_snapshot(self):
        snapshot = {
            "MODEL_STATE": self.model.state_dict(),
            "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "SCALER_STATE": self.scaler.state_dict(),
            "STEPS_RUN": self.steps_run,
            "WINDOWS_RUN": self.windows_run,
            "CONFIGURATION": options.configuration(self.args, self.corpus, self.model),
        }
        if dist.get_rank() == 0:  # one rank writes
            self._finish_writing()
            # A copy, because training goes on while the writer writes.
            snapshot = utils.map_tensors(lambda x: x.cpu().clone(), snapshot)
            writing = utils.save_atomically, snapshot, self.snapshot_path
            self.writing = self.writer.submit(*writing)
        self._print(f"saving step {self.steps_run} to {self.snapshot_path}")

    def _finish_writing(self):
        """Wait for the snapshot that is being written, if there is one."""
        try:
            if self.writing:
                self.writing.result()
        except OSError as error:  # a full disk, say
            utils.fail(error.strerror)

    def _load_snapshot(self):
        snapshot = utils.read_snapshot(self.snapshot_path)
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, utils.identify(self.snapshot_path))
        newest, differences = utils.compare(found)
        if differences:  # machines may have disks of their own
            self._print(differences)
            snapshot = utils.broadcast_snapshot(snapshot, newest, self.device)
        if "MODEL_STATE" not in snapshot:
            return
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        if self.scaler.is_enabled() and snapshot["SCALER_STATE"]:
            self.scaler.load_state_dict(snapshot["SCALER_STATE"])
        self.steps_run = snapshot["STEPS_RUN"]
        self.windows_run = snapshot["WINDOWS_RUN"]


def lr_scale(step, steps, warmup):
    """What the learning rate is multiplied by at a step, which counts from 0.

    It rises in a line for a share `warmup` of the steps, and falls to a tenth along a
    cosine, as in GPT-3's training (Brown et al., 2020, appendix B).
    """
    rising = warmup * steps
    if step < rising:
        return min(1, (step + 1) / rising)
    return 0.55 + 0.45 * math.cos(math.pi * (step - rising) / (steps - rising))


def load_train_objs(args):
    """Your text, model and kind of optimizer go here."""
    corpus = data.prepare(args.data, args.tokenizer, args.cache, args.val_fraction)
    torch.manual_seed(args.seed)
    model, make_optimizer = options.load_model(args, corpus.vocab_size)
    return corpus, model, make_optimizer


def prepare_dataloader(dataset, batch_size, sampler, device, drop_last=False):
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last,
        collate_fn=batches.take,
        pin_memory=device.type not in ("cpu", "mps"),  # MPS cannot pin
    )


@record  # or torchrun could not show the traceback
def main(args):
    rank, local_rank, world_size = options.torchrun_env()
    corpus, model, make_optimizer = load_train_objs(args)
    options.check_run(args, corpus, model, make_optimizer, world_size)
    device = utils.get_device(args.device, local_rank)
    options.settle(args, device)
    ddp_setup(device)
    options.compare_ranks(args, corpus)
    block_size = model.config.block_size
    train_set = batches.Blocks(corpus.train, block_size)
    eval_set = batches.Blocks(corpus.val, block_size)
    sampler = batches.StepSampler(
        len(corpus.train), block_size, args.batch_size, args.seed, rank, world_size
    )
    train_data = prepare_dataloader(train_set, args.batch_size, sampler, device)
    sampler = batches.eval_starts(
        len(corpus.val), block_size, args.batch_size, rank, world_size
    )
    eval_data = prepare_dataloader(eval_set, args.batch_size, sampler, device)
    Trainer(
        model,
        make_optimizer,
        train_data,
        eval_data,
        device,
        corpus,
        args,
    ).train()
    gc.collect()  # the DDP model goes before its process group, or the exit may hang
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = options.make_parser(__doc__)
    args = options.parse(parser)
    main(args)
