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
PRESETS = {
    "nano": (4, 4, 128, 64, 12, 1, 2000, 3e-3),
    "mini": (6, 6, 384, 256, 64, 1, 5000, 1e-3),
    "gpt2": (12, 12, 768, 1024, 64, 4, 20000, 6e-4),
    "gpt2-medium": (24, 16, 1024, 1024, 64, 8, 20000, 3e-4),
    "gpt2-large": (36, 20, 1280, 1024, 64, 16, 20000, 2.5e-4),
    "gpt2-xl": (48, 25, 1600, 1024, 64, 32, 20000, 2e-4),
}
PRESETS = {k: dict(zip([*SIZES, *STEPS], x, strict=True)) for k, x in PRESETS.items()}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_parser(doc):
    """The command line of mingpt.train; `doc` is its docstring."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = utils.error
    add = parser.add_argument
    text = "files, folders, globs or python-docs (the default)"
    add("--data", nargs="+", default=["python-docs"], metavar="TEXT", help=text)
    data.add_options(parser)
    text = "the size of the model and how to train it (default: nano)"
    add("--preset", choices=list(PRESETS), default="nano", help=text)
    text = "the module with GPT, GPTConfig, make_optimizer (default: mingpt.model)"
    add("--model", default="mingpt.model", metavar="MODULE", help=text)
    text = "start from GPT-2 weights in Hugging Face's format, a file or a folder"
    add("--init-from", metavar="PATH", help=text)
    for name, text in {**SIZES, **STEPS}.items():
        option, text = name.replace("_", "-"), f"{text} (default: the preset's)"
        kind = float if name == "lr" else utils.positive_int
        add(f"--{option}", f"--{name}", type=kind, help=text)
    text = "the share of the steps in which the learning rate rises (default: 0.05)"
    add("--warmup", type=fraction, default=0.05, help=text)
    add("--weight-decay", type=float, default=0.1, help="of matrices (default: 0.1)")
    text = "scale gradients of a larger norm down to this one (default: 1)"
    add("--clip", type=float, default=1.0, help=text)
    add("--dropout", type=fraction, default=0.0, help="between 0 (default) and 1")
    text = "compute activations again in the backward pass: slower, less memory"
    add("--checkpoint", action="store_true", help=text)
    text = "leave each rank a part of the model: it may be larger than a device"
    add("--shard", action="store_true", help=text)
    text = "neighbouring ranks that share out each layer and a batch (default: 1)"
    add("--split", type=utils.positive_int, default=1, metavar="RANKS", help=text)
    text = "of the first weights, the order of the text and the dropout (default: 0)"
    add("--seed", type=int, default=0, help=text)
    text = "steps between evaluations, samples and snapshots (default: a tenth)"
    add("--eval-every", type=utils.positive_int, metavar="STEPS", help=text)
    text = "auto (the default): bf16 where the device computes faster in it"
    add("--precision", choices=["auto", *DTYPES], default="auto", help=text)
    text = "torch.compile: auto (the default) uses it where there is a compiler"
    add("--compile", choices=["auto", "on", "off"], default="auto", help=text)
    names = "--snapshot-path", "--snapshot_path"
    text = "where to save to and resume from (default: mingpt.pt)"
    add(*names, type=utils.writable_path, default="mingpt.pt", help=text)
    add("--device", default="auto", help="such as cpu (default: the accelerator)")
    return parser


def fraction(text):
    """`text` as a float from 0 on and below 1."""
    if not 0 <= float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 on and below 1")
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


def settle(args, device):
    """Put what this device does in place of `--precision auto` and `--compile auto`."""
    if args.precision == "auto":
        args.precision = "fp32"
        if device.type == "cuda":
            native = torch.cuda.is_bf16_supported(including_emulation=False)
            args.precision = "bf16" if native else "fp16"
        elif device.type == "cpu" and bf16_is_faster(**torch.cpu.get_capabilities()):
            args.precision = "bf16"
    if args.compile == "auto":
        args.compile = "on" if can_compile(device) else "off"


def bf16_is_faster(cpu_name="", amx_bf16=False, avx512_bf16=False, **others):
    """Whether a CPU multiplies matrices faster in bfloat16 (benchmarks/README.md)."""
    return amx_bf16 or (avx512_bf16 and "AMD" in cpu_name)  # not Intel's AVX512_BF16


def can_compile(device):
    """Whether torch.compile finds a compiler and, for a GPU from Volta on, Triton."""
    if device.type == "cpu":
        return sys.platform != "win32" and any(map(shutil.which, ("g++", "clang++")))
    triton = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    found = triton and any(map(shutil.which, ("gcc", "clang")))
    return found and torch.cuda.get_device_capability(device) >= (7, 0)


def compile_options(device):
    """On CPUs, the tanh in GELU is as exact and faster if made of other operations."""
    option = "cpp.use_decompose_tanh"
    known = device.type == "cpu" and option in torch._inductor.list_options()
    return {option: True} if known else None
