"""What a person sees of a run: its lines, metrics.csv, and TensorBoard."""

import re
import shutil
import sys
import time

import torch
import torch.distributed as dist

import utils

# Dense operations per second in 16 bits, as the makers' data sheets have them, by words
# of the name that torch.cuda.get_device_name() gives.
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "T4": 65e12,
    "V100": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
SLOWER = r"\b(Laptop|MIG|D)\b"  # devices with the name of a faster one


def peak_flops(device, dtype):
    """(operations per second that `device` can do in `dtype`, how we know)."""
    if device.type == "cuda" and dtype != torch.float32:
        name = torch.cuda.get_device_name(device)
        for part, flops in PEAK_FLOPS.items():
            if re.search(rf"\b{part}\b", name) and not re.search(SLOWER, name):
                return flops, f"{part}, data sheet"
    return measure_flops(device, dtype), "measured"


def measure_flops(device, dtype, seconds=0.1):
    """The most operations per second that a product of two square matrices reaches."""
    # On a GPU, smaller matrices take less time than it takes to start and to wait.
    size = 1024 if device.type == "cpu" else 8192
    x = torch.randn(size, size, device=device).to(dtype)
    wait = torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        x @ x
        wait()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def describe_run(trainer):
    """What is about to run, in a few lines."""
    args, config = trainer.args, trainer.model.config
    world_size, device = dist.get_world_size(), trainer.device.type
    tokens = world_size * args.batch_size * config.block_size
    passes = args.steps * tokens / len(trainer.corpus.train)
    parameters = sum(x.numel() for x in trainer.model.parameters())
    compiled = "compiled" if args.compile == "on" else "not compiled"
    accumulated = f" in {args.accumulate} micro-batches" * (args.accumulate > 1)
    path, done = trainer.snapshot_path, trainer.steps_run
    if done >= args.steps:
        plan = (
            f"nothing to do: {path} has finished {done} of {args.steps} steps. To start"
            " afresh, delete it or choose another --snapshot-path"
        )
    elif done:
        plan = f"resuming from {path}: {done} of {args.steps} steps are finished"
        rates = {group["initial_lr"] for group in trainer.optimizer.param_groups}
        if args.lr not in rates:  # the optimizer's state has brought its own
            saved = ", ".join(f"{rate:g}" for rate in sorted(rates))
            plan += f"\nthe learning rate stays {saved}, as saved, not {args.lr:g}"
    else:
        plan = f"starting with step 1: no step is finished in {path}"
    return (
        f"text: {trainer.corpus.description}\n"
        f"model: {args.model}, {parameters / 1e6:.2f} M parameters, {config.n_layer}"
        f" layers, {config.n_head} heads, {config.n_embd} wide, blocks of"
        f" {config.block_size} tokens, vocabulary {config.vocab_size}\n"
        f"run: {world_size} x {device}, {args.precision}, {compiled}, batch"
        f" {args.batch_size} blocks each{accumulated}: {tokens:,} tokens a step,"
        f" {args.steps} steps, {passes:.2g} passes over the text\n{plan}"
    )


def describe_steps(trainer, metrics, tokens_per_s):
    """How the steps went that have just finished; `metrics`: {name: number}."""
    line = f"step {trainer.steps_run}/{trainer.args.steps}"
    for name, value in metrics.items():
        line += f" | {name} {value:.4f}"
    return f"{CLEAR}{line} | {tokens_per_s:,.0f} tokens/s"


# A terminal's line is written over: back to its start, and what stands there goes.
CLEAR = "\r\x1b[K" if sys.stdout.isatty() else ""


class Progress:
    """A line on the way to the next evaluation: loss, tokens/s, MFU and time left.

    MFU is the share of the device's peak that the model's own operations come to
    (Chowdhery et al., "PaLM", 2022, appendix B).
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self.every = max(1, trainer.args.eval_every // 20)
        self.first = True
        self.flops, self.source = peak_flops(trainer.device, trainer.dtype)

    def begin(self):
        """Start the clock: what came before, an evaluation perhaps, is no training."""
        self.started, self.tokens = time.perf_counter(), 0

    def step(self, loss, tokens):
        """After each step, on each rank. tokens: of this step, by all ranks."""
        trainer, steps = self.trainer, self.trainer.args.steps
        self.tokens += tokens
        evaluates = trainer.steps_run % trainer.args.eval_every == 0
        if trainer.steps_run % self.every or evaluates:
            if self.first:  # in which torch.compile may work for a minute
                self.begin()
            self.first = False
            return
        world_size = dist.get_world_size()
        (loss,) = trainer._sum(loss / world_size)  # which waits for the device
        speed = self.tokens / (time.perf_counter() - self.started)
        mfu = trainer.model.flops_per_token() * speed / world_size / self.flops
        left = round((steps - trainer.steps_run) * tokens / speed)  # seconds
        line = (
            f"step {trainer.steps_run}/{steps} | loss {loss:.4f}"
            f" | {left // 60} min {left % 60:02} s left | {speed:,.0f} tokens/s"
            f" | MFU {mfu:.0%} of {self.flops / 1e12:.3g} TFLOP/s ({self.source})"
        )
        if CLEAR and dist.get_rank() == 0:
            width = shutil.get_terminal_size().columns - 1
            print(f"{CLEAR}{line[:width]}", end="", flush=True)
        elif not CLEAR:
            trainer._print(line)
        self.begin()


def log(trainer, metrics):
    """Write the metrics of this step to the CSV file, and to TensorBoard if asked."""
    path = metrics_path(trainer.snapshot_path)
    try:
        utils.log_row(path, trainer.steps_run, metrics, unit="step")
    except OSError as error:  # a full disk, say
        utils.fail(error.strerror)
    if trainer.args.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(trainer.args.tensorboard) as writer:
            for name, value in metrics.items():
                writer.add_scalar(name, value, trainer.steps_run)


def metrics_path(snapshot_path):
    """`mingpt.pt` has its metrics in `mingpt.metrics.csv`."""
    return f"{snapshot_path.removesuffix('.pt')}.metrics.csv"
