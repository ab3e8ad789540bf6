"""The command line of mingpt.train, its checks, and what "auto" means on this device.

What is wrong ends the program with one line and exit status 2, before a file changes.
"""

import argparse
import ctypes
import dataclasses
import functools
import importlib.util
import os
import shutil
import socket
import sys

import torch
import torch.distributed as dist

import utils
from mingpt import batches, data
from mingpt import model as gpt2

# What goes with the sizes in mingpt.model.PRESETS: how to train a model of that size.
# batch_size is what one process takes in a step, in windows of block_size tokens. For
# gpt2, 8 processes take 524,288 tokens, as GPT-2's reproductions do.
TRAINING = {
    "nano": {"batch_size": 12, "steps": 2000, "lr": 3e-3},
    "mini": {"batch_size": 64, "steps": 5000, "lr": 1e-3},
    "gpt2": {"batch_size": 64, "accumulate": 4, "steps": 20000, "lr": 6e-4},
    "gpt2-medium": {"batch_size": 64, "accumulate": 8, "steps": 20000, "lr": 3e-4},
    "gpt2-large": {"batch_size": 64, "accumulate": 16, "steps": 20000, "lr": 2.5e-4},
    "gpt2-xl": {"batch_size": 64, "accumulate": 32, "steps": 20000, "lr": 2e-4},
}
SIZES = {
    "n_layer": "the number of layers",
    "n_head": "the number of attention heads in each layer",
    "n_embd": "the width: how many numbers stand for a token",
    "block_size": "the most tokens that the model sees at once",
}
DTYPES = {"fp32": torch.float32, **utils.DTYPES}


def make_parser(doc):
    """The command line of mingpt.train; `doc` is its docstring."""
    parser = utils.make_parser(doc, by_epochs=False)
    parser.add_argument(
        "--data",
        nargs="+",
        default=["python-docs"],
        metavar="TEXT",
        help="files, folders or globs, or what every Python carries: python-docs (the"
        " default) or python-source",
    )
    data.add_options(parser)
    parser.add_argument(
        "--preset",
        choices=list(TRAINING),
        help="the size of the model and how to train it (default: nano)",
    )
    parser.add_argument(
        "--model",
        default="mingpt.model",
        metavar="MODULE",
        help="the module with GPT, GPTConfig and make_optimizer: mingpt.model (the"
        " default), mingpt.modern, or your own",
    )
    parser.add_argument(
        "--init-from",
        metavar="PATH",
        help="start from GPT-2 weights in Hugging Face's format, a file or a folder",
    )
    for name, what in SIZES.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(
            option,
            f"--{name}",
            type=utils.positive_int,
            help=f"{what} (default: the preset's)",
        )
    parser.add_argument(
        "--dropout", type=fraction, default=0.0, help="between 0 (the default) and 1"
    )
    parser.add_argument(
        "--checkpoint",
        action="store_true",
        help="compute activations again in the backward pass: slower, less memory",
    )
    parser.add_argument(
        "--steps",
        type=utils.positive_int,
        help="the step after which the training ends, and the schedule of the learning"
        " rate (default: the preset's)",
    )
    parser.add_argument(
        "--eval-every",
        type=utils.positive_int,
        metavar="STEPS",
        help="after so many steps, evaluate, print a sample and save (default: ten"
        " times in all)",
    )
    parser.add_argument(
        "--accumulate",
        type=utils.positive_int,
        help="micro-batches that a process cuts its batch into (default: the preset's)",
    )
    parser.add_argument(
        "--lr",
        type=utils.positive_float,
        help="the highest learning rate (default: the preset's)",
    )
    parser.add_argument(
        "--warmup",
        type=fraction,
        default=0.05,
        help="the share of the steps in which the learning rate rises (default: 0.05);"
        " then it falls to a tenth, along a cosine",
    )
    parser.add_argument(
        "--weight-decay",
        type=not_negative,
        default=0.1,
        help="of matrices and embeddings (default: 0.1)",
    )
    parser.add_argument(
        "--clip",
        type=utils.positive_float,
        default=1.0,
        help="scale gradients of a larger norm down to this one (default: 1)",
    )
    parser.add_argument(
        "--seed",
        type=seed,
        default=0,
        help="of the first weights, the order of the text and the dropout (default: 0)",
    )
    parser.add_argument(
        "--precision",
        choices=["auto", *DTYPES],
        default="auto",
        help="fp32, bf16, fp16 (with a scaled loss), or auto: bf16 where the device"
        " computes faster in it (the default)",
    )
    parser.add_argument(
        "--compile",
        choices=["auto", "on", "off"],
        default="auto",
        help="torch.compile: auto (the default) uses it where there is a compiler",
    )
    parser.add_argument(
        "--tensorboard", metavar="FOLDER", help="log there for TensorBoard as well"
    )
    return parser


def seed(text):
    """`text` as an int of 0 or more."""
    return 0 if text == "0" else utils.positive_int(text)


def fraction(text):
    value = not_negative(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text} is not below 1")
    return value


def not_negative(text):
    try:
        return 0.0 if float(text) == 0 else utils.positive_float(text)
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number from 0 on"
        ) from None


def torchrun_env():
    """Rank, local rank and world size; (0, None, 1) if python starts this process."""
    return utils.torchrun_env() if "RANK" in os.environ else (0, None, 1)


def parse(parser):
    """The arguments, with the preset's values for those that were not typed."""
    args = parser.parse_args()
    for name, value in TRAINING[args.preset or "nano"].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.accumulate = args.accumulate or 1
    args.eval_every = args.eval_every or max(1, args.steps // 10)
    if args.batch_size % args.accumulate:
        utils.fail(
            f"--batch-size {args.batch_size} cannot be cut into {args.accumulate} equal"
            " micro-batches (--accumulate)"
        )
    if args.init_from and args.model != "mingpt.model":
        utils.fail(f"--init-from: GPT-2's weights do not fit {args.model}")
    if args.tensorboard:
        try:
            from torch.utils import tensorboard  # noqa: F401
        except ImportError:
            utils.fail("--tensorboard needs a package: pip install tensorboard")
    return args


def load_model(args, vocab_size):
    """The model that `args` describe, and its module's make_optimizer."""
    try:
        module = importlib.import_module(args.model)
    except ModuleNotFoundError as error:
        utils.fail(f"--model {args.model}: {error}")
    typed = {name: getattr(args, name) for name in SIZES if getattr(args, name)}
    if args.init_from:
        model = load_gpt2(args, typed, vocab_size)
    else:
        sizes = {**gpt2.PRESETS[args.preset or "nano"], **typed}
        check_module(args.model, module, {"vocab_size", *sizes})
        config = module.GPTConfig(vocab_size=vocab_size, **sizes)
        if config.n_embd % config.n_head:
            utils.fail(
                f"--n-embd {config.n_embd} cannot be cut into --n-head {config.n_head}"
                " equal heads"
            )
        config.dropout, config.checkpoint = args.dropout, args.checkpoint
        model = module.GPT(config)
    make_optimizer = functools.partial(
        module.make_optimizer, lr=args.lr, weight_decay=args.weight_decay
    )
    if not args.model.startswith("mingpt."):
        check_model(args.model, model, make_optimizer)
    return model, make_optimizer


def check_module(name, module, sizes):
    """End with one line if a model of somebody's own lacks what the Trainer calls."""
    for part in ("GPT", "GPTConfig", "make_optimizer"):
        if not hasattr(module, part):
            utils.fail(f"--model {name}: the module has no {part}")
    if not dataclasses.is_dataclass(module.GPTConfig):
        utils.fail(f"--model {name}: GPTConfig is no dataclass")
    fields = {x.name for x in dataclasses.fields(module.GPTConfig)}
    if missing := {*sizes, "dropout", "checkpoint"} - fields:
        utils.fail(f"--model {name}: GPTConfig lacks {', '.join(sorted(missing))}")
    for method in ("generate", "flops_per_token"):
        if not hasattr(module.GPT, method):
            utils.fail(f"--model {name}: GPT has no method {method}")


def check_model(name, model, make_optimizer):
    """The same for what the module makes: a model with a loss, and an optimizer."""
    if not hasattr(model, "config"):
        utils.fail(f"--model {name}: GPT does not keep its config as self.config")
    if not all("initial_lr" in x for x in make_optimizer(model).param_groups):
        utils.fail(
            f'--model {name}: make_optimizer gives its parameter groups no "initial_lr"'
        )
    tokens, targets = torch.tensor([[0], [0]]), torch.tensor([[0], [-1]])
    try:
        with torch.no_grad():
            _, loss = model.eval()(tokens, targets)
        fits = loss.dim() == 0 and loss.isfinite()
    except Exception as error:
        said = str(error).partition("\n")[0]
        utils.fail(f"--model {name}: {type(error).__name__}: {said} ({TRIED})")
    if not fits:
        utils.fail(f"--model {name}: the loss is {loss}, not a finite number ({TRIED})")
    model.train()


# How check_model finds it.
TRIED = "tried with the targets [[0], [-1]], where -1 is a token that does not count"


def load_gpt2(args, typed, vocab_size):
    """GPT-2 with the weights of --init-from, which must fit what else was typed."""
    try:
        from mingpt import gpt2_weights
    except ModuleNotFoundError as error:
        utils.fail(f"--init-from needs a package: pip install {error.name}")
    model = gpt2_weights.load_gpt2(args.init_from, args.dropout, args.checkpoint)
    if args.preset:
        typed = {**gpt2.PRESETS[args.preset], **typed}
    for name, value in typed.items():
        there = getattr(model.config, name)
        if there != value:
            utils.fail(f"{args.init_from} has {name} {there}, not {value}")
    if model.config.vocab_size != vocab_size:
        utils.fail(
            f"{args.init_from} has a vocabulary of {model.config.vocab_size} tokens,"
            f" and --tokenizer {args.tokenizer} has {vocab_size}: give the"
            " tokenizer.json that belongs to it"
        )
    return model


def check_run(args, corpus, model, make_optimizer, world_size):
    """End with one line and exit status 2 if this run cannot work; change no file."""
    block_size = model.config.block_size
    data.check_length(corpus, block_size)
    if os.path.isfile(args.snapshot_path):
        check_configuration(args, corpus, model)
    windows = batches.count_windows(len(corpus.train), block_size)
    windows = range(windows), range(len(corpus.val))
    objects = model, None, lambda _: make_optimizer(model)
    utils.check_run(args, *windows, *objects, world_size=world_size)


def configuration(args, corpus, model):
    """What a snapshot must have been saved with, so that a run can go on from it.

    The text may be another one, which is said.
    """
    return {
        "model": args.model,
        "seed": args.seed,
        "config": dataclasses.asdict(model.config),
        "tokenizer": corpus.tokenizer.state(),
        "text": [corpus.checksum, len(corpus.train)],  # and where it is split
    }


def check_configuration(args, corpus, model):
    """The same for the snapshot: if it does not fit, name the fields that differ."""
    other = "choose another --snapshot-path"
    try:
        saved = utils.read_snapshot(args.snapshot_path, mmap=True)["CONFIGURATION"]
    except KeyError:
        utils.fail(f"{args.snapshot_path} is not what mingpt.train saves: {other}")
    except Exception:
        return  # utils.check_run says what is wrong with it
    now = configuration(args, corpus, model)
    tokenizers = saved.pop("tokenizer"), now.pop("tokenizer")
    texts = saved.pop("text", None), now.pop("text")
    saved |= saved.pop("config")
    now |= now.pop("config")
    different = [
        f"{name} {saved.get(name)}, not {value}"
        for name, value in now.items()
        if saved.get(name) != value and name != "checkpoint"  # changes no result
    ]
    if different:
        what = ", ".join(different)
        utils.fail(f"{args.snapshot_path} was saved with {what}: {other}")
    if tokenizers[0] != tokenizers[1]:
        utils.fail(f"{args.snapshot_path} belongs to another vocabulary: {other}")
    if texts[0] != texts[1] and os.environ.get("RANK", "0") == "0":
        utils.say(
            f"{args.snapshot_path} was trained on another text, or on another part of"
            " this one: it may know the text that validates it now"
        )


# What each rank may have of its own.
OF_ONE_RANK = (
    "data",
    "tokenizer",
    "cache",
    "init_from",
    "snapshot_path",
    "tensorboard",
)


def compare_ranks(args, corpus):
    """End with one line and exit status 2 if the ranks do not train the same.

    They would train on in silence otherwise: each machine reads a text of its own.
    """
    mine = {x: y for x, y in vars(args).items() if x not in OF_ONE_RANK}
    mine |= {"text": corpus.checksum, "host": socket.gethostname()}
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    for rank, other in enumerate(found):
        for name, value in found[0].items():
            if name != "host" and other[name] != value:
                utils.fail(
                    f"{name} is {other[name]} on rank {rank} ({other['host']}) and"
                    f" {value} on rank 0 ({found[0]['host']}): all need the same"
                )


def settle(args, device):
    """Put what this device does in place of `--precision auto` and `--compile auto`."""
    if args.precision == "auto":
        if device.type == "cuda":
            args.precision = "bf16" if utils.has_bfloat16(device) else "fp16"
        else:
            args.precision = "bf16" if device.type == "cpu" and has_amx() else "fp32"
    if args.compile == "auto":
        args.compile = "on" if can_compile(device) else "off"
    if device.type == "cpu":
        keep_memory()
    return DTYPES[args.precision]


def compile_options(device):
    """What torch.compile should do otherwise than by default.

    On CPUs, the tanh in GELU is as exact and faster if it is made of other operations.
    """
    option = "cpp.use_decompose_tanh"
    known = device.type == "cpu" and option in torch._inductor.list_options()
    return {option: True} if known else None


def keep_memory():
    """Let glibc keep what is freed: each step needs as much memory as the one before.

    Otherwise the kernel gets it back after each step, and fills it with zeros again.
    https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)  # musl has none
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD, in bytes
        # M_MMAP_THRESHOLD. Up to 2.34, glibc takes no more than 32 MB.
        mallopt(-3, 2**30) or mallopt(-3, 2**25)


def has_amx():
    """Whether this processor multiplies matrices of bfloat16 faster than of float32."""
    return getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()


def can_compile(device):
    """Whether torch.compile finds what it needs: Triton, or for CPUs a C++ compiler."""
    if device.type == "cpu":
        return sys.platform != "win32" and any(map(shutil.which, ("g++", "clang++")))
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
