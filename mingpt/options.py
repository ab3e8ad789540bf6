"""The command line of mingpt.train, and the Configuration that it stands for."""

import argparse
import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass

import torch

import utils
from mingpt import data

SIZES = {
    "n_layer": "layers",
    "n_head": "attention heads of a layer",
    "n_embd": "the width: how many numbers stand for a token",
    "block_size": "the most tokens that the model sees at once",
}
STEPS = {
    "batch_size": "blocks of tokens that one process takes in a step",
    "accumulate": "micro-batches that a process cuts its batch into",
    "steps": "when to stop; the learning rate has its lowest value then",
    "lr": "the highest learning rate",
}
# Those that are called gpt2 have the sizes of GPT-2. For gpt2, 8 processes take 524,288
# tokens in a step, as GPT-2's reproductions do.
PRESETS = {
    # the order of SIZES and STEPS: layers, heads, width, block, batch, accumulate, ...
    "nano": (4, 4, 128, 64, 12, 1, 2000, 3e-3),
    "mini": (6, 6, 384, 256, 64, 1, 5000, 1e-3),
    "gpt2": (12, 12, 768, 1024, 64, 4, 20_000, 6e-4),
    "gpt2-medium": (24, 16, 1024, 1024, 64, 8, 20_000, 3e-4),
    "gpt2-large": (36, 20, 1280, 1024, 64, 16, 20_000, 2.5e-4),
    "gpt2-xl": (48, 25, 1600, 1024, 64, 32, 20_000, 2e-4),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Configuration:
    """What a run does. The fields have the names of the options, but for `module`."""

    # The text
    data: list[str]
    tokenizer: str
    cache: str
    val_fraction: float

    # The model
    module: str  # that of --model
    init_from: str | None
    n_layer: int | None  # None, as the other sizes: that of `init_from`
    n_head: int | None
    n_embd: int | None
    block_size: int | None
    dropout: float
    checkpoint: bool

    # The optimizer
    lr: float
    warmup: float
    weight_decay: float
    clip: float

    # What a rank has of the model
    shard: bool
    split: int

    # The run
    device: torch.device
    precision: str  # one of DTYPES
    compile: bool
    seed: int
    steps: int
    batch_size: int
    accumulate: int
    eval_every: int
    snapshot_path: str

    @property
    def dtype(self):
        return DTYPES[self.precision]


def make_parser(doc):
    """The command line of mingpt.train; `doc` is its docstring."""
    parser = data.new_parser(doc)
    add = parser.add_argument
    add(
        "--data",
        nargs="+",
        default=["python-docs"],
        metavar="TEXT",
        help="files, folders, globs or python-docs (the default)",
    )
    data.add_options(parser)
    add(
        "--preset",
        choices=PRESETS,
        default="nano",
        help="the size of the model and how to train it (default: nano)",
    )
    add(
        "--model",
        dest="module",
        default="mingpt.model",
        metavar="MODULE",
        help="the module with GPT, GPTConfig, make_optimizer (default: mingpt.model)",
    )
    add(
        "--init-from",
        metavar="PATH",
        help="start from GPT-2 weights in Hugging Face's format, a file or a folder",
    )
    for name, text in (SIZES | STEPS).items():
        add(
            f"--{name.replace('_', '-')}",
            f"--{name}",
            type=positive if name == "lr" else utils.positive_int,
            help=f"{text} (default: the preset's)",
        )
    add(
        "--warmup",
        type=data.fraction,
        default=0.05,
        help="the share of the steps in which the learning rate rises (default: 0.05)",
    )
    add("--weight-decay", type=float, default=0.1, help="of matrices (default: 0.1)")
    add(
        "--clip",
        type=positive,
        default=1.0,
        help="scale gradients of a larger norm down to this one (default: 1)",
    )
    add("--dropout", type=data.fraction, default=0.0, help="between 0 (default) and 1")
    add(
        "--checkpoint",
        action="store_true",
        help="compute activations again in the backward pass: slower, less memory",
    )
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument(
        "--shard",
        action="store_true",
        help="leave each rank a part of the model: it may be larger than a device",
    )
    parts.add_argument(
        "--split",
        type=utils.positive_int,
        default=1,
        metavar="RANKS",
        help="neighbouring ranks that share out each layer and a batch (default: 1)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="of the first weights, the order of the text and the dropout (default: 0)",
    )
    add(
        "--eval-every",
        type=utils.positive_int,
        metavar="STEPS",
        help="steps between evaluations, samples and snapshots (default: a tenth)",
    )
    add(
        "--precision",
        choices=["auto", *DTYPES],
        default="auto",
        help="auto (the default): bf16 or fp16 on a GPU, else fp32",
    )
    add(
        "--compile",
        choices=["auto", "on", "off"],
        default="auto",
        help="torch.compile: auto (the default) uses it where there is a compiler",
    )
    add(
        "--snapshot-path",
        "--snapshot_path",
        type=utils.writable_path,
        default="mingpt.pt",
        help="where to save to and resume from (default: mingpt.pt)",
    )
    add("--device", default="auto", help="such as cpu (default: the accelerator)")
    return parser


def positive(text):
    """`text` as a float above 0."""
    if not float(text) > 0:  # so that nan is refused, too
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return float(text)


def resolve(args):
    """The Configuration that typed arguments mean on this machine.

    A preset gives the values that were not typed, and "auto" follows from the device.
    """
    chosen = dict(vars(args))
    preset = PRESETS[chosen.pop("preset")]
    for name, value in zip(SIZES | STEPS, preset, strict=True):
        is_given = args.init_from and name in SIZES
        if chosen[name] is None and not is_given:
            chosen[name] = value
    if args.eval_every is None:
        chosen["eval_every"] = max(1, chosen["steps"] // 10)
    if args.init_from and args.module != "mingpt.model":
        utils.error(f"--init-from: GPT-2's weights do not fit {args.module}")
    if chosen["batch_size"] % chosen["accumulate"]:
        utils.error(f"--batch-size {chosen['batch_size']}: no multiple of --accumulate")
    local_rank = None  # python starts one rank
    if "RANK" in os.environ:
        _, local_rank, _ = utils.torchrun_env()
    device = utils.set_device(args.device, local_rank)
    chosen["device"] = device
    if args.precision == "auto":
        chosen["precision"] = fast_precision(device)
    if args.compile == "auto":
        chosen["compile"] = can_compile(device)
    else:
        chosen["compile"] = args.compile == "on"
    return Configuration(**chosen)


def fast_precision(device):
    """What `--precision auto` means on this device."""
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return "bf16" if native else "fp16"
    return "fp32"


def can_compile(device):
    """Whether torch.compile finds a compiler and, for a GPU from Volta on, Triton."""
    if device.type == "cpu":
        compiler = shutil.which("g++") or shutil.which("clang++")
        return compiler is not None and sys.platform != "win32"
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    compiler = shutil.which("gcc") or shutil.which("clang")
    return compiler is not None and torch.cuda.get_device_capability(device) >= (7, 0)
