"""Train a GPT on real text.

python -m mingpt.train
torchrun --standalone --nproc-per-node=2 -m mingpt.train
torchrun --nproc-per-node=8 -m mingpt.train --preset gpt2 --data mytext.txt
"""

import gc
import importlib
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
from torch.utils.data import DataLoader

import utils
from mingpt import batches, checks, data, loading, options, report
from mingpt.split import Split, check_split
from mingpt.strategy import Sharded, Strategy, change_tensors


def ddp_setup(device):
    backend = dist.get_default_backend_for_device(device)  # gloo on CPUs, NCCL on GPUs
    if not dist.is_backend_available(backend):
        backend = "gloo"  # Windows has no NCCL: one rank does without
    # torchrun says in the environment where the ranks meet. Python starts one rank.
    alone = {}
    if "RANK" not in os.environ:
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(
        backend,
        timeout=timedelta(minutes=5),
        device_id=None if backend == "gloo" else device,  # else NCCL guesses
        **alone,
    )


class Trainer:
    ask_every = 10  # steps. Each question costs a message to every rank and back.

    def __init__(
        self,
        configuration: options.Configuration,
        corpus: data.Corpus,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        train_data: DataLoader,
        eval_data: DataLoader,
    ):
        self.run = configuration
        self.device = configuration.device
        self.corpus = corpus
        self.model = model
        self.optimizer = optimizer
        self.strategy = strategy
        self.train_data = train_data
        self.eval_data = eval_data
        self.must_match = checks.must_match(configuration, corpus, model)
        # bfloat16 has the range of float32.
        is_fp16 = configuration.precision == "fp16"
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=is_fp16)
        self.steps_run = 0
        self.steps_saved = 0
        self.windows_run = 0  # by all ranks together
        # For what is no tensor of the device, such as the number of tokens, or SIGTERM.
        self.cpu_group = dist.new_group(timeout=timedelta(minutes=5), backend="gloo")
        self.writer = ThreadPoolExecutor(max_workers=1)
        self.writing = None
        self._load_snapshot()
        self.wrapped_model = strategy.wrap(model)
        self.sigterm = torch.zeros(1)
        flag = self.sigterm.numpy()  # torch.compile may trace what is done to tensors
        signal.signal(signal.SIGTERM, lambda *_: flag.fill(1))

    def train(self):
        self._print(
            f"{self.steps_run} of {self.run.steps} steps are finished"
            f" in {self.run.snapshot_path}"
        )
        while self.steps_run < self.run.steps:
            start = time.perf_counter()
            train_loss, tokens = self._run_steps()
            tokens_per_s = tokens / (time.perf_counter() - start)
            metrics = {"train loss": train_loss} | self._evaluate()
            line = f"step {self.steps_run}/{self.run.steps}"
            for name, value in metrics.items():
                line += f" | {name} {value:.4f}"
            self._print(f"{line} | {tokens_per_s:,.0f} tokens/s")
            self._check_weights(metrics["val loss"])
            if dist.get_rank() == 0:  # one rank writes
                metrics["tokens/s"] = tokens_per_s
                report.log(self.run.snapshot_path, self.steps_run, metrics)
            self._save_snapshot()
            self._print(self._sample())
        self._finish_writing()

    def _run_steps(self):
        # Windows and random numbers follow from the step: a resumed run repeats them.
        sampler = self.train_data.sampler
        sampler.start = self.windows_run
        self.model.train()
        loss_sum = torch.zeros((), device=self.device)
        tokens = 0
        eval_every = self.run.eval_every
        until_evaluation = eval_every - self.steps_run % eval_every
        steps = min(until_evaluation, self.run.steps - self.steps_run)
        train_data = self._on_device(self.train_data)
        show_every = max(1, eval_every // 20)
        for source, targets in itertools.islice(train_data, steps):
            if self.steps_run % self.ask_every == 0:
                self._stop_if_told()
            utils.seed(hash((sampler.seed, self.steps_run, sampler.replica)))
            loss = self._run_batch(source, targets)
            loss_sum += loss * source.numel()
            tokens += source.numel()
            self.steps_run += 1
            self.windows_run += len(source) * sampler.replicas
            if self.steps_run % show_every == 0 and self.steps_run % eval_every:
                (loss,) = self._sum(loss / sampler.replicas)  # waits for the GPU
                self._print(f"step {self.steps_run}/{self.run.steps} | loss {loss:.4f}")
        loss_sum, tokens = self._sum(loss_sum, tokens)
        return loss_sum / tokens, tokens

    def _on_device(self, loader):
        """Yield (source, targets) for each batch of a loader."""
        for batch in loader:
            yield [x.to(self.device, non_blocking=loader.pin_memory) for x in batch]

    def _stop_if_told(self):
        """Save and end, all ranks after the same step, if SIGTERM came to one."""
        stop = self.sigterm.clone()
        dist.all_reduce(stop, group=self.cpu_group)
        if stop:
            self._check_weights()
            self._save_snapshot()
            self._finish_writing()
            self._print(f"preempted after step {self.steps_run}")
            dist.barrier(self.cpu_group)  # or torchrun ends the rank that saves
            open(f"{self.run.snapshot_path}.preempted", "w").close()
            os._exit(75)  # EX_TEMPFAIL: try again. No clean-up: SIGKILL is near.

    def _run_batch(self, source, targets):
        scale = lr_scale(self.steps_run, self.run.steps, self.run.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * scale
        self.optimizer.zero_grad()
        loss = self._accumulate(source, targets)
        self.scaler.unscale_(self.optimizer)  # what is clipped must not be scaled
        self.strategy.clip_grad_norm_(self.model, self.run.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def _accumulate(self, source, targets):
        """Add up the gradients of the micro-batches. Return the mean loss."""
        sources = source.chunk(self.run.accumulate)
        targets = targets.chunk(self.run.accumulate)
        batch_loss = 0
        for number, micro_batch in enumerate(zip(sources, targets, strict=True), 1):
            is_last = number == self.run.accumulate
            with self.strategy.micro_batch(self.wrapped_model, is_last):
                with self._autocast():
                    _, loss = self.wrapped_model(*micro_batch)
                loss = loss / self.run.accumulate
                self.scaler.scale(loss).backward()
            batch_loss += loss.detach()
        return batch_loss

    @torch.no_grad()
    def _evaluate(self):
        self.model.eval()
        for buffer in self.model.buffers():  # BatchNorm's differ; rank 0's are saved
            dist.broadcast(buffer, src=0)
        loss_sum = torch.zeros((), device=self.device)
        tokens = 0
        for source, targets in self._on_device(self.eval_data):
            with self._autocast():
                _, loss = self.model(source, targets)
            counted = (targets >= 0).sum()  # the last window is padded
            # The mean loss of no token is NaN. An `if` would wait for the GPU.
            loss_sum += (loss * counted).where(counted > 0, 0)
            tokens += counted
        loss_sum, tokens = self._sum(loss_sum, tokens)
        return {
            "val loss": loss_sum / tokens,
            "bits per byte": loss_sum / math.log(2) / self.corpus.val_bytes,
        }

    def _autocast(self):
        enabled = self.run.dtype != torch.float32
        return torch.autocast(self.device.type, self.run.dtype, enabled=enabled)

    def _sample(self):
        """What the model writes by now: the same on every rank, so that none waits."""
        generator = torch.Generator(self.device).manual_seed(self.steps_run)
        start = torch.tensor([[int(self.corpus.val[0])]], device=self.device)
        tokens = self.model.generate(start, 200, temperature=0.8, generator=generator)
        return self.corpus.tokenizer.decode(tokens[0].tolist())

    def _sum(self, *values):
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.cpu_group)
        return (total / self.strategy.replica_size).tolist()  # each replica counts once

    def _print(self, text):
        if dist.get_rank() == 0:  # one rank prints
            print(text, flush=True)

    def _check_weights(self, *losses):
        """End with one line, nothing saved, if `utils.what_is_wrong` finds a fault."""
        self._finish_writing()
        wrong = utils.what_is_wrong(losses, self.strategy.named_weights(self.model))
        if wrong:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun ends the others
            utils.error(
                f"step {self.steps_run}: {wrong}:"
                f" {self.run.snapshot_path} stays at step {self.steps_saved}"
            )

    def _save_snapshot(self):
        snapshot = {
            # With keep_vars, tied weights are one object.
            "MODEL_STATE": self.model.state_dict(keep_vars=True),
            "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "SCALER_STATE": self.scaler.state_dict(),
            "STEPS_RUN": self.steps_run,
            "WINDOWS_RUN": self.windows_run,
            "CONFIGURATION": self.must_match,
        }
        # A copy, because the next steps change the weights while it is written.
        snapshot = change_tensors(
            snapshot, self.model, self.optimizer, self.strategy.whole_of
        )
        if dist.get_rank() == 0:  # one rank writes
            self.writing = self.writer.submit(
                utils.save_atomically, snapshot, self.run.snapshot_path
            )
        self.steps_saved = self.steps_run
        self._print(f"saving step {self.steps_run} to {self.run.snapshot_path}")

    def _finish_writing(self):
        """Wait for the snapshot that is being written, if there is one."""
        if self.writing:
            self.writing.result()  # or the error that the writer met

    def _load_snapshot(self):
        path = self.run.snapshot_path
        snapshot = utils.read_snapshot(path)
        steps = utils.gather(snapshot["STEPS_RUN"] if snapshot else 0)
        newest = steps.index(max(steps))  # all load this rank's snapshot
        if len(set(steps)) > 1:
            self._print(f"steps saved, by rank: {steps}. All take rank {newest}'s")
        if max(steps) > 0:
            snapshot = utils.broadcast_snapshot(path, newest)
        if snapshot is None:
            return
        checks.check_snapshot(snapshot, self.must_match, path)
        snapshot = change_tensors(
            snapshot, self.model, self.optimizer, self.strategy.part_of
        )
        utils.check_snapshot(snapshot, self.model, self.optimizer, path)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        if snapshot["SCALER_STATE"]:
            self.scaler.load_state_dict(snapshot["SCALER_STATE"])
        self.steps_run = snapshot["STEPS_RUN"]
        self.steps_saved = self.steps_run
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


def load_train_objs(configuration):
    """Your text and model go here."""
    corpus = data.prepare(
        configuration.data,
        configuration.tokenizer,
        configuration.cache,
        configuration.val_fraction,
    )
    utils.seed(configuration.seed % 2**64)
    model = loading.load_model(configuration, corpus.vocab_size)
    return corpus, model


def choose_strategy(configuration, model):
    """What a rank has of the model: all of it, or a part of each weight or layer."""
    if configuration.split > 1:
        check_split(configuration, model)
        return Split(configuration.split)
    if configuration.shard:
        return Sharded(configuration.dtype)
    return Strategy()


def make_optimizer(configuration, model):
    """The optimizer of the model's module, for what this rank has of the model."""
    module = importlib.import_module(configuration.module)
    return module.make_optimizer(model, configuration.lr, configuration.weight_decay)


def prepare_dataloader(tokens, block_size, batch_size, sampler, device):
    return DataLoader(
        batches.Blocks(tokens, block_size),
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=tuple,  # a batch is in one piece already
        pin_memory=device.type == "cuda",
    )


def load_batches(configuration, corpus, block_size, replica_size):
    """The batches of this rank: (those to train on, those to validate on).

    Ranks that split layers are one replica: `replica_size` of them share each batch.
    """
    if len(corpus.train) <= block_size:
        utils.error(f"a text of {len(corpus.train)} tokens has no whole block")
    batch_size = configuration.batch_size
    device = configuration.device
    replica = dist.get_rank() // replica_size
    replicas = dist.get_world_size() // replica_size
    steps = batches.StepSampler(
        len(corpus.train), block_size, batch_size, configuration.seed, replica, replicas
    )
    starts = batches.eval_starts(
        len(corpus.val), block_size, batch_size, replica, replicas
    )
    return (
        prepare_dataloader(corpus.train, block_size, batch_size, steps, device),
        prepare_dataloader(corpus.val, block_size, batch_size, starts, device),
    )


@record  # else torchrun shows no traceback
def main(configuration):
    sys.stdout.reconfigure(errors="backslashreplace")  # a sample may have any character
    device = configuration.device
    corpus, model = load_train_objs(configuration)
    ddp_setup(device)
    checks.check_ranks(configuration, corpus)

    strategy = choose_strategy(configuration, model)
    train_data, eval_data = load_batches(
        configuration, corpus, model.config.block_size, strategy.replica_size
    )
    if dist.get_rank() == 0:  # one rank prints
        size = strategy.replica_size
        print(report.describe_run(configuration, corpus, model, size), flush=True)

    strategy.distribute(model, device)
    optimizer = make_optimizer(configuration, model)
    trainer = Trainer(
        configuration=configuration,
        corpus=corpus,
        model=model,
        optimizer=optimizer,
        strategy=strategy,
        train_data=train_data,
        eval_data=eval_data,
    )
    trainer.train()
    utils.forget_meshes(model)
    # These hold gloo's threads, which may abort or hang the exit.
    del trainer, strategy, model, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    configuration = options.resolve(options.make_parser(__doc__).parse_args())
    try:
        main(configuration)
    except SystemExit as end:  # of utils.error, while gloo's threads run
        sys.stdout.flush()
        os._exit(end.code)  # or they may abort it
