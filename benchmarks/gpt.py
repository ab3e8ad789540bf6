"""How fast mingpt trains a GPT, beside a plain loop.

    python -m benchmarks.gpt                    a small GPT on a CPU
    python -m benchmarks.gpt --device cuda      GPT-2 124M on a GPU

All versions train the same model from the same weights on the same batches, with the
same learning rates, each in a process of its own. If their losses differ, there is no
result. The plain loop is in the style of nanoGPT, with AdamW as it is by default.
mingpt is the Trainer of mingpt/train.py. Timed are the steps alone: no start,
compilation, evaluation or saving.
MFU is the share of the GPU's peak that the model's own multiplications take (PaLM,
https://arxiv.org/abs/2204.02311, appendix B).
"""

import contextlib
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from typing import NamedTuple

import torch

import utils
from benchmarks import report
from mingpt import data, loading, options, train
from mingpt.model import make_optimizer

# What the mean loss of a turn may differ by from that of the first version.
TOLERANCE = {"fp32": 0.005, "bf16": 0.05}
# {in the name of a GPU: bfloat16 FLOP/s}: NVIDIA's and AMD's data sheets, not sparse.
PEAKS = {
    "H100 80GB HBM3": 989e12,
    "H100 PCIe": 756e12,
    "H200": 989e12,
    "A100": 312e12,
    "MI300X": 1307e12,
}


class Version(NamedTuple):
    kind: str  # plain loop or mingpt
    compiled: bool


class Turn(NamedTuple):
    seconds: float
    loss: float  # the mean of its steps
    tokens: int
    flops: float  # of the model, forward and backward


# In the process of a version


def flops_per_token(gpt):
    """Each weight is multiplied once, and twice backward; so are queries and keys."""
    matrices = [weight for weight in gpt.parameters() if weight.dim() == 2]
    weights = sum(matrix.numel() for matrix in matrices)
    attention = 2 * gpt.config.n_layer * gpt.config.block_size * gpt.config.n_embd
    return 6 * (weights - gpt.transformer.wpe.weight.numel() + attention)


def work(pipe, version, args):
    """Train a turn for each True that comes through `pipe`, until False comes."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        if args.vocab_size:
            load = loading.load_model
            loading.load_model = lambda typed, _: load(typed, args.vocab_size)
        train.Trainer = InTurns if version.kind == "mingpt" else PlainLoop
        train.Trainer.pipe = pipe
        train.Trainer.version = version
        sys.argv = ["train", *words(version, args)]
        typed = options.resolve(options.make_parser(train.__doc__).parse_args())
        if args.device == "cpu":
            torch.set_num_threads(1)
        train.main(typed)


def words(version, args):
    """What one would type after `python -m mingpt.train`."""
    compiled = "on" if version.kind == "mingpt" and version.compiled else "off"
    steps = (args.rounds + 1) * args.steps  # the learning rate falls until then
    return [
        f"--preset={args.preset}",
        f"--device={args.device}",
        f"--compile={compiled}",
        f"--batch-size={args.batch_size}",
        "--accumulate=1",
        f"--steps={steps}",
        f"--eval-every={args.steps}",
        f"--precision={args.precision}",
        "--warmup=0.5",
        "--lr=3e-4",  # low, so that rounding does not lead the losses apart
        f"--cache={args.folder}/tokens",
        f"--snapshot-path={args.folder}/none.pt",
    ]


class InTurns(train.Trainer):
    """mingpt.train's Trainer; its steps come in turns, and nothing is evaluated."""

    def __init__(self, model, **objects):
        self.flops = flops_per_token(model)
        super().__init__(model=model, **objects)

    def train(self):
        wait = torch.get_device_module(self.device).synchronize
        while self.pipe.recv():
            wait()
            start = time.perf_counter()
            loss, tokens = self._run_steps()
            wait()
            seconds = time.perf_counter() - start
            if self.device.type != "cpu":
                # The others need this memory in their turns.
                torch.get_device_module(self.device).empty_cache()
            self.pipe.send(Turn(seconds, loss, tokens, tokens * self.flops))


class PlainLoop(InTurns):
    """The step of nanoGPT, eager, or compiled as nanoGPT does."""

    def __init__(self, configuration, model, optimizer, train_data, **others):
        self.run = configuration
        self.device = configuration.device
        self.batches = iter(train_data)
        self.steps_run = 0
        self.lr = optimizer.defaults["lr"]
        self.flops = flops_per_token(model)
        self.model = model.to(self.device)
        decay = configuration.weight_decay
        self.optimizer = make_optimizer(self.model, self.lr, decay)
        for group in self.optimizer.param_groups:
            group["fused"] = None  # as it is by default
        if self.version.compiled:
            self.model.compile()

    def _run_steps(self):
        self.model.train()
        loss_sum = torch.zeros((), device=self.device)
        tokens = 0
        for source, targets in itertools.islice(self.batches, self.run.eval_every):
            source = source.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
            scale = train.lr_scale(self.steps_run, self.run.steps, self.run.warmup)
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr * scale
            with self._autocast():
                _, loss = self.model(source, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.run.clip)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            loss_sum += loss.detach()
            tokens += source.numel()
            self.steps_run += 1
        return loss_sum.item() / self.run.eval_every, tokens


# In the process that compares


@contextlib.contextmanager
def started(version, args):
    """A version in a process of its own: the function that has it do a turn."""
    context = multiprocessing.get_context("spawn")
    pipe, its = context.Pipe()
    process = context.Process(target=work, args=(its, version, args))
    process.start()
    its.close()

    def turn():
        pipe.send(True)
        return pipe.recv()

    try:
        yield turn
    finally:
        with contextlib.suppress(OSError):  # it has ended already
            pipe.send(False)
        process.join(60)
        process.kill()


def race(versions, args):
    """{name: [Turn of each round]} of {name: Version}; all train as the first"""
    with contextlib.ExitStack() as stack:
        do_turn = {}
        for name, version in versions.items():
            do_turn[name] = stack.enter_context(started(version, args))
        turns = report.take_turns(do_turn, args.rounds)
    base, *others = turns
    for name in others:
        pairs = zip(turns[name], turns[base], strict=True)
        apart = max(abs(turn.loss - other.loss) for turn, other in pairs)
        if not apart <= TOLERANCE[args.precision]:  # so that nan fails too
            sys.exit(f"gpt.py: error: the loss of {name} is {apart:.4f} off {base}'s")
    return turns


def main(args):
    args.device = utils.device_type(args.device, distributed=False)
    on_cpu = args.device == "cpu"
    args.preset = "mini" if on_cpu else "gpt2"
    args.batch_size = 8 if on_cpu else 32
    args.precision = "fp32" if on_cpu else "bf16"
    args.vocab_size = None if on_cpu else 50304  # None: the characters of the text
    device = "cpu" if on_cpu else torch.get_device_module().get_device_name()
    report.print_setting(
        f"{args.rounds} rounds of {args.steps} steps after 1 to warm up: {device},"
        f" preset {args.preset}, batch {args.batch_size}"
    )
    columns = {
        "tokens/s": (",.0f", lambda turn: turn.tokens / turn.seconds),
        "loss": (".4f", lambda turn: turn.loss),
    }
    peaks = [peak for name, peak in PEAKS.items() if name in device]
    if peaks:
        columns["MFU"] = ".0%", lambda turn: turn.flops / turn.seconds / peaks[0]
    with tempfile.TemporaryDirectory() as args.folder:
        data.prepare(cache=os.path.join(args.folder, "tokens"))
        versions = {
            "plain loop": Version("plain loop", False),
            "plain loop, compiled": Version("plain loop", True),
            "mingpt": Version("mingpt", True),
        }
        report.print_table(args.precision, race(versions, args), **columns)


if __name__ == "__main__":
    parser = report.make_parser(
        __doc__,
        rounds=(7, "how often each version has its turn"),
        steps=(10, "in a turn"),
    )
    parser.add_argument("--device", default="auto", help="as for mingpt.train (auto)")
    main(parser.parse_args())
