"""The command line of mingpt.train, and what "auto" means here."""

import argparse
import importlib.util
import shutil
import sys

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
GPT2 = {"block_size": 1024, "batch_size": 64, "steps": 20_000}
PRESETS = {
    "nano": {
        "n_layer": 4,
        "n_head": 4,
        "n_embd": 128,
        "block_size": 64,
        "batch_size": 12,
        "accumulate": 1,
        "steps": 2000,
        "lr": 3e-3,
    },
    "mini": {
        "n_layer": 6,
        "n_head": 6,
        "n_embd": 384,
        "block_size": 256,
        "batch_size": 64,
        "accumulate": 1,
        "steps": 5000,
        "lr": 1e-3,
    },
    "gpt2": {
        **GPT2,
        "n_layer": 12,
        "n_head": 12,
        "n_embd": 768,
        "accumulate": 4,
        "lr": 6e-4,
    },
    "gpt2-medium": {
        **GPT2,
        "n_layer": 24,
        "n_head": 16,
        "n_embd": 1024,
        "accumulate": 8,
        "lr": 3e-4,
    },
    "gpt2-large": {
        **GPT2,
        "n_layer": 36,
        "n_head": 20,
        "n_embd": 1280,
        "accumulate": 16,
        "lr": 2.5e-4,
    },
    "gpt2-xl": {
        **GPT2,
        "n_layer": 48,
        "n_head": 25,
        "n_embd": 1600,
        "accumulate": 32,
        "lr": 2e-4,
    },
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
        type=fraction,
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
    add("--dropout", type=fraction, default=0.0, help="between 0 (default) and 1")
    add(
        "--checkpoint",
        action="store_true",
        help="compute activations again in the backward pass: slower, less memory",
    )
    add(
        "--shard",
        action="store_true",
        help="leave each rank a part of the model: it may be larger than a device",
    )
    add(
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
        help="auto (the default): bf16 where the device computes faster in it",
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


def fraction(text):
    """`text` as a float from 0 on and below 1."""
    if not 0 <= float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 on and below 1")
    return float(text)


def positive(text):
    """`text` as a float above 0."""
    if not float(text) > 0:  # so that nan is refused, too
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return float(text)


def parse(parser):
    """The arguments, with the preset's values for those that were not typed."""
    args = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # a sample may have any character
    for name, value in PRESETS[args.preset].items():
        if getattr(args, name) is None and not (args.init_from and name in SIZES):
            setattr(args, name, value)
    args.eval_every = args.eval_every or max(1, args.steps // 10)
    if args.init_from and args.model != "mingpt.model":
        utils.error(f"--init-from: GPT-2's weights do not fit {args.model}")
    if args.batch_size % args.accumulate:
        utils.error(f"--batch-size {args.batch_size}: no multiple of --accumulate")
    return args


def fast_precision(device):
    """What `--precision auto` means on this device."""
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return "bf16" if native else "fp16"
    if device.type == "cpu" and bf16_is_faster(**torch.cpu.get_capabilities()):
        return "bf16"
    return "fp32"


def bf16_is_faster(cpu_name="", amx_bf16=False, avx512_bf16=False, **others):
    """Whether a CPU multiplies matrices faster in bfloat16 (benchmarks/README.md)."""
    return amx_bf16 or (avx512_bf16 and "AMD" in cpu_name)  # not Intel's AVX512_BF16


def can_compile(device):
    """Whether torch.compile finds a compiler and, for a GPU from Volta on, Triton."""
    if device.type == "cpu":
        compiler = shutil.which("g++") or shutil.which("clang++")
        return compiler is not None and sys.platform != "win32"
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    compiler = shutil.which("gcc") or shutil.which("clang")
    return compiler is not None and torch.cuda.get_device_capability(device) >= (7, 0)


def compile_options(device):
    """On CPUs, the tanh in GELU is as exact and faster if made of other operations."""
    option = "cpp.use_decompose_tanh"
    if device.type == "cpu" and option in torch._inductor.list_options():
        return {option: True}
    return None
