"""How fast mingpt trains a GPT, beside transformers and a plain loop.

    python -m benchmarks.gpt                    speed, means and processes
    python -m benchmarks.gpt --device cuda      GPT-2 124M on a GPU, with a profile
    python -m benchmarks.gpt --startup          from the command to the first step

All versions train the same model from the same weights on the same batches, with the
same learning rates. They take turns, in a new order each round. Each has processes of
its own, because some means hold for a whole process. If the losses of a version are not
those of the first one, there is no result.

The versions:

- plain loop: an eager loop in the style of nanoGPT, with PyTorch's attention kernel and
  AdamW as they are by default;
- transformers: the same loop with GPT2LMHeadModel, its `sdpa` attention, and the fused
  AdamW, which is the default of its Trainer;
- mingpt: the Trainer of mingpt/train.py, with all that it does between two evaluations.

Timed are the steps alone: no start, compilation, evaluation or saving on any side.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import math
import multiprocessing
import os
import random
import re
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

import utils
from benchmarks import gpt_startup, report
from mingpt import batches, data, model, options, train
from mingpt.report import peak_flops

# preset: of mingpt.model; batch_size: of a process, (on a CPU, on a GPU).
CONFIGURATIONS = {
    "a": {"preset": "nano", "batch_size": (12, 12)},
    "b": {"preset": "mini", "batch_size": (8, 64)},
    "c": {"preset": "gpt2", "batch_size": (1, 32), "vocab_size": 50304},
}
# What the mean loss of a turn may differ by from that of the first version.
TOLERANCE = {"fp32": 0.005, "bf16": 0.05}
START = "spawn"  # how processes start
STATUS = Path("/proc/self/status")


class Version(NamedTuple):
    """One way to train. `without`, `more`: of MEANS and MORE, for mingpt alone."""

    kind: str  # plain, transformers or mingpt
    precision: str
    compiled: bool = False
    fused: bool = False  # AdamW, of a plain loop; mingpt's is fused
    without: frozenset = frozenset()
    more: str = ""

    @property
    def name(self):
        kind = {"plain": "plain loop"}.get(self.kind, self.kind)
        compiled = ", compiled" if self.compiled else ""
        return f"{kind}, {self.precision}{compiled}"


class Setting(NamedTuple):
    """What all versions that are compared have in common."""

    configuration: str
    device: str
    threads: int
    batch_size: int
    steps: int  # in a turn
    total: int  # in all turns: the learning rate falls until then
    folder: str  # for tokens, and for snapshots that nobody writes


class Turn(NamedTuple):
    """What a process reports of a turn."""

    seconds: float
    loss: float  # the mean of its steps
    peak_bytes: float  # of this process until now


# The means


def unfused_adamw(adamw, *arguments, fused, **options):
    return adamw(*arguments, **options)


def kernel_attention(q, k, v, dropout):
    """What mingpt.model.attention computes, by PyTorch's kernel on each device."""
    causal = q.size(2) > 1
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)


def switch_off_fused():
    torch.optim.AdamW = functools.partial(unfused_adamw, torch.optim.AdamW)


def switch_off_attention():
    model.attention = kernel_attention


def switch_off_tanh():
    options.compile_options = lambda device: None


def switch_off_memory():
    options.keep_memory = lambda: None


# {means: (what it is, the function that takes it away)}. Those without a function are
# options of mingpt.train.
MEANS = {
    "compile": ("torch.compile", None),
    "bf16": ("autocast to bf16", None),
    "attention": ("attention written out, in bf16", switch_off_attention),
    "tanh": ("GELU's tanh made of exp, compiled", switch_off_tanh),
    "fused": ("fused AdamW", switch_off_fused),
    "memory": ("glibc keeps memory", switch_off_memory),
}
# Two of them are nothing alone: each needs another one.
NEEDS = {"attention": "bf16", "tanh": "compile"}


def more_options(**more):
    ours = options.compile_options
    options.compile_options = lambda device: {**(ours(device) or {}), **more}


def contract():
    more_options(**{"cpp.enable_floating_point_contract_flag": "fast"})


def autotune():
    more_options(max_autotune=True)


def huge_pages():
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"  # read when torch first allocates much


def norms_in_bf16():
    def forward(self, x):
        weight, bias = self.weight.bfloat16(), self.bias.bfloat16()
        with torch.autocast(x.device.type, enabled=False):
            shape = self.normalized_shape
            return F.layer_norm(x.bfloat16(), shape, weight, bias, self.eps)

    torch.nn.LayerNorm.forward = forward


def bias_apart():
    def forward(self, x):
        y = F.linear(x, self.weight)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    torch.nn.Linear.forward = forward


# What was tried and is not in mingpt: {name: the function that puts it in}.
MORE = {
    "FMA instructions in compiled code": contract,
    "max_autotune": autotune,
    "huge pages": huge_pages,
    "layer norms in bf16": norms_in_bf16,
    "biases added outside of the products": bias_apart,
}


# In the process of a version


def work(pipe, version, setting):
    """Train: a number of steps for each number that comes through `pipe`, until None.

    A negative number: so many steps under the profiler.
    """
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        sys.argv = ["train", *arguments(version, setting)]
        args = options.parse(options.make_parser(train.__doc__))
        train.load_train_objs = load_train_objs
        if setting.device == "cpu":
            torch.set_num_threads(setting.threads)
        for name in sorted(version.without):
            if MEANS[name][1]:
                MEANS[name][1]()
        if version.more:
            MORE[version.more]()
        if version.kind == "mingpt":
            train.Trainer = type("Trainer", (TurnTrainer,), {"pipe": pipe})
            train.main(args)
        else:
            serve(pipe, PlainLoop(version, args))


def arguments(version, setting):
    """What one would type after `python -m mingpt.train`."""
    compiled = version.kind == "mingpt" and "compile" not in version.without
    typed = {
        "preset": CONFIGURATIONS[setting.configuration]["preset"],
        "device": setting.device,
        "batch-size": setting.batch_size,
        "accumulate": 1,
        "steps": setting.total,
        "eval-every": setting.steps,
        "lr": 3e-4,  # low, so that rounding does not lead the losses apart
        "warmup": 0.5,
        "precision": "fp32" if "bf16" in version.without else version.precision,
        "compile": "on" if compiled else "off",
        "cache": os.path.join(setting.folder, "tokens"),
        "snapshot-path": os.path.join(setting.folder, "none.pt"),
    }
    return [str(x) for name, value in typed.items() for x in (f"--{name}", value)]


def load_train_objs(args):
    """As that of mingpt.train. GPT-2's vocabulary gets tokens: pairs of characters."""
    corpus = data.prepare(args.data, args.tokenizer, args.cache, args.val_fraction)
    preset = {x["preset"]: x for x in CONFIGURATIONS.values()}[args.preset]
    if "vocab_size" in preset:
        pairs = [
            (x[:-1:2].astype("uint16") * corpus.vocab_size + x[1::2])
            % preset["vocab_size"]
            for x in (corpus.train, corpus.val)
        ]
        corpus = dataclasses.replace(
            corpus, train=pairs[0], val=pairs[1], vocab_size=preset["vocab_size"]
        )
    torch.manual_seed(args.seed)
    gpt, make_optimizer = options.load_model(args, corpus.vocab_size)
    gpt.before = resident_bytes() - sum(x.nbytes for x in gpt.parameters())
    return corpus, gpt, make_optimizer


def serve(pipe, contestant):
    """Do the turns that are asked for, and report each of them."""
    while (steps := receive(pipe)) is not None:
        if steps < 0:
            pipe.send(profile(contestant, -steps))
            continue
        wait(contestant.device)
        start = time.perf_counter()
        loss = contestant.run(steps)
        wait(contestant.device)
        seconds = time.perf_counter() - start
        peak = peak_bytes(contestant.device, contestant.before)
        pipe.send(Turn(seconds, loss, peak))


def receive(pipe):
    """The next number; None if the process that compares has ended, in some way."""
    with contextlib.suppress(EOFError):
        return pipe.recv()


def wait(device):
    if device.type != "cpu":
        torch.accelerator.synchronize()


class TurnTrainer(train.Trainer):
    """mingpt.train's Trainer; its steps come in turns, and nothing is evaluated."""

    def train(self):
        self.before = self.model.before
        self.progress = train.report.Progress(self)
        serve(self.pipe, self)

    def run(self, steps):
        self.progress.begin()
        return self._run_steps()[0]


class PlainLoop:
    """The step of nanoGPT, eager, or compiled as nanoGPT does."""

    def __init__(self, version, args):
        corpus, gpt, _ = load_train_objs(args)
        self.version, self.args, self.done = version, args, 0
        self.before = gpt.before
        self.device = utils.get_device(args.device)
        dtype = options.DTYPES[args.precision]
        self.autocast = torch.autocast(
            self.device.type, dtype, enabled=dtype != torch.float32
        )
        block_size = gpt.config.block_size
        self.blocks = batches.Blocks(corpus.train, block_size)
        length, batch_size = len(corpus.train), args.batch_size
        self.sampler = batches.StepSampler(length, block_size, batch_size, args.seed)
        if version.kind == "transformers":
            gpt = as_transformers(gpt)
        else:
            model.attention = kernel_attention
        self.model = gpt.to(self.device)
        matrices = [x for x in gpt.parameters() if x.dim() >= 2]
        others = [x for x in gpt.parameters() if x.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": args.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        fused = {"fused": True} if version.fused else {}
        self.optimizer = torch.optim.AdamW(
            groups, lr=args.lr, betas=(0.9, 0.95), **fused
        )
        if version.compiled:
            self.model = torch.compile(self.model)

    def run(self, steps):
        self.model.train()
        loss_sum = torch.zeros((), device=self.device)
        batch = self.batch()
        for _ in range(steps):
            source, targets = batch
            scale = train.lr_scale(self.done, self.args.steps, self.args.warmup)
            for group in self.optimizer.param_groups:
                group["lr"] = self.args.lr * scale
            with self.autocast:
                loss = self.loss(source, targets)
            self.done += 1
            batch = self.batch()  # while an accelerator computes
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            loss_sum += loss.detach()
        return loss_sum.item() / steps

    def loss(self, source, targets):
        if self.version.kind == "transformers":
            # These labels are where they belong: it would shift them by one token.
            labels = {"labels": targets, "shift_labels": targets}
            return self.model(source, **labels, use_cache=False).loss
        return self.model(source, targets)[1]

    def batch(self):
        """What mingpt.train takes in this step."""
        batch = self.blocks.__getitems__(self.sampler.starts(self.done))
        if self.device.type == "cpu":
            return batch
        return [x.pin_memory().to(self.device, non_blocking=True) for x in batch]


def as_transformers(gpt):
    """GPT2LMHeadModel with the weights of `gpt`, by way of a folder."""
    import transformers

    from mingpt.gpt2_weights import save_gpt2

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        save_gpt2(gpt, folder)
        return transformers.GPT2LMHeadModel.from_pretrained(
            folder, attn_implementation="sdpa"
        )


def resident_bytes():
    """What this process holds in memory, not counting pages of files."""
    return memory("VmRSS") - memory("RssFile") if STATUS.exists() else math.nan


def peak_bytes(device, before):
    """The peak of what training takes. On a GPU, it is what torch has allocated."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated()
    peak = memory("VmHWM") - memory("RssFile") if STATUS.exists() else math.nan
    return peak - before


def memory(key):
    """A number of proc_pid_status(5) in bytes."""
    return int(re.search(rf"{key}:\s+(\d+) kB", STATUS.read_text())[1]) * 1024


# Of the names that the profiler gives to operations, and to kernels on a GPU.
PROFILE = {
    "attention": r"flash|fmha|sdpa|attention|\bbmm\b",
    "matrix products": r"\b(add)?mm\b|gemm|cutlass|nvjet|xmma|cublas",
    "optimizer and clipping": r"adam|Optimizer|multi_tensor|_foreach|norm_?\b",
}


def profile(contestant, steps):
    """{what: its share of the time}; idle is when the GPU waits, or all else."""
    from torch.profiler import ProfilerActivity

    contestant.run(steps)  # the first steps differ
    on_gpu = contestant.device.type != "cpu"
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
    wait(contestant.device)
    start = time.perf_counter()
    with torch.profiler.profile(activities=activities) as profiler:
        contestant.run(steps)
        wait(contestant.device)
        seconds = time.perf_counter() - start
    shares = dict.fromkeys([*PROFILE, "elementwise and all else"], 0.0)
    for event in profiler.key_averages():
        if on_gpu and event.device_type != torch.autograd.DeviceType.CUDA:
            continue  # it only starts kernels
        took = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        what = [x for x, names in PROFILE.items() if re.search(names, event.key)]
        shares[(what or list(shares)[-1:])[0]] += took / 1e6 / seconds
    shares["idle"] = 1 - sum(shares.values())
    return shares


# In the process that compares


class Contestant:
    """A version, in `nprocs` processes."""

    def __init__(self, version, setting, nprocs=1):
        context = multiprocessing.get_context(START)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        environment = dict(os.environ)
        self.processes, self.pipes = [], []
        for rank in range(nprocs):
            if nprocs > 1:  # as torchrun does
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                os.environ |= {"WORLD_SIZE": str(nprocs), "MASTER_PORT": str(port)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1"}
            os.environ["OMP_NUM_THREADS"] = str(setting.threads)
            mine, its = context.Pipe()
            process = context.Process(
                target=work, args=(its, version, setting), daemon=False
            )
            process.start()
            its.close()
            self.processes.append(process)
            self.pipes.append(mine)
        os.environ.clear()
        os.environ |= environment

    def turn(self, steps):
        """What `work` does with this number: a list with what each process reports."""
        for pipe in self.pipes:
            pipe.send(steps)
        try:
            return [pipe.recv() for pipe in self.pipes]
        except (EOFError, ConnectionError):  # its process has said why
            sys.exit("gpt.py: error: a process has ended: see above")

    def end(self):
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # it has ended already
                pipe.send(None)
            pipe.close()
        for process in self.processes:
            process.join(60)
            process.kill()


@contextlib.contextmanager
def contestants(versions, setting):
    """{name: Contestant}; versions: {name: (Version, number of processes)}."""
    with contextlib.ExitStack() as stack:
        found = {}
        for name, (version, nprocs) in versions.items():
            found[name] = Contestant(version, setting, nprocs)
            stack.callback(found[name].end)
        yield found


def race(versions, setting, rounds):
    """{name: [Turn of each round]}; that of a round is the slowest of its processes.

    versions: {name: (Version, number of processes)}.
    """
    turns = {name: [] for name in versions}
    shuffle = random.Random(0).shuffle
    with contestants(versions, setting) as found:
        for number in range(rounds + 1):
            order = list(found)
            shuffle(order)
            for name in order:
                its = found[name].turn(setting.steps)
                if number > 0:  # round 0 compiles and warms up
                    seconds = max(turn.seconds for turn in its)
                    peak = max(turn.peak_bytes for turn in its)
                    turns[name].append(Turn(seconds, its[0].loss, peak))
    check_losses(versions, turns)
    return turns


def check_losses(versions, turns):
    """End with one line and status 1 if a version does not train as the first one."""
    (base, theirs), *others = turns.items()
    nprocs = versions[base][1]
    for name, its in others:
        version, its_nprocs = versions[name]
        if its_nprocs != nprocs:
            continue  # its batch is another one
        apart = max(abs(x.loss - y.loss) for x, y in zip(its, theirs, strict=True))
        if not apart <= tolerance(version):  # written so that nan fails too
            sys.exit(
                f"gpt.py: error: the loss of {name} is {apart:.4f} off that of {base}"
            )


def tolerance(version):
    return TOLERANCE["fp32" if "bf16" in version.without else version.precision]


# What is printed


def header(setting):
    """What stands above a table."""
    config = model.PRESETS[CONFIGURATIONS[setting.configuration]["preset"]]
    threads = f", {setting.threads} threads" if setting.device == "cpu" else ""
    print(
        f"\n({setting.configuration}) {config['n_layer']} layers, {config['n_head']}"
        f" heads, {config['n_embd']} wide, {config['block_size']} tokens,"
        f" batch {setting.batch_size}, {setting.device}{threads}"
    )


def print_rows(rows):
    """rows: lists of cells, the first of them the headings."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for first, *cells in rows:
        line = "".join(
            f"  {x:>{width}}" for x, width in zip(cells, widths[1:], strict=True)
        )
        print(f"{first:{widths[0]}}{line}")
    sys.stdout.flush()


def ratio(turns, name, base):
    """How much faster `name` is than `base`, in each round."""
    pairs = zip(turns[name], turns[base], strict=True)
    return report.spread([y.seconds / x.seconds for x, y in pairs], ".2f")


def speed(setting, args):
    """Print the table of one configuration."""
    on_cpu = setting.device == "cpu"
    versions = [Version("plain", "bf16"), Version("transformers", "bf16", True, True)]
    if on_cpu:
        versions.insert(0, Version("plain", "fp32"))
        versions += [Version("mingpt", "fp32")]
    else:
        versions.insert(1, Version("plain", "bf16", compiled=True))
    if setting.configuration != "c":  # in which each takes much memory
        versions.insert(-1, Version("transformers", "bf16", fused=True))
        versions.insert(-1, Version("transformers", "fp32", fused=True))
    versions += [Version("mingpt", "bf16")]
    if not has_transformers():
        versions = [x for x in versions if x.kind != "transformers"]
    turns = race({x.name: (x, 1) for x in versions}, setting, args.rounds)
    header(setting)
    rows = [["", "tokens/s", f"/ {versions[0].name}", "MFU", "peak MB", "loss"]]
    torch.set_num_threads(setting.threads)
    for version in versions:
        its = turns[version.name]
        tokens = [tokens_per_turn(setting) / x.seconds for x in its]
        flops, _ = peak_flops(torch.device(setting.device), dtype_of(version))
        mfu = statistics.median(tokens) * flops_per_token(setting) / flops
        rows.append(
            [
                version.name,
                report.spread(tokens, ",.0f"),
                ratio(turns, version.name, versions[0].name),
                f"{mfu:.0%}",
                f"{its[-1].peak_bytes / 1e6:,.0f}",
                f"{its[-1].loss:.4f}",
            ]
        )
    print_rows(rows)
    ours = versions[-1].name
    for other in versions[1:-1]:
        if other.precision == versions[-1].precision:
            print(f"{ours} / {other.name}: {ratio(turns, ours, other.name)}")


def dtype_of(version):
    return options.DTYPES["fp32" if "bf16" in version.without else version.precision]


def tokens_per_turn(setting):
    preset = CONFIGURATIONS[setting.configuration]["preset"]
    block_size = model.PRESETS[preset]["block_size"]
    return setting.steps * setting.batch_size * block_size


@functools.cache
def flops_per_token(setting):
    configuration = CONFIGURATIONS[setting.configuration]
    vocab_size = configuration.get("vocab_size", 100)  # about that of the manual
    sizes = model.PRESETS[configuration["preset"]]
    with torch.device("meta"):
        config = model.GPTConfig(vocab_size=vocab_size, **sizes)
        return model.GPT(config).flops_per_token()


def means(setting, args):
    """Print what each means gives alone, and what its absence costs; and the others."""
    everything = frozenset(MEANS)
    ours = Version("mingpt", "bf16")
    none = ours._replace(without=everything)
    alone = {"none of them": none}
    but_one = {"all": ours}
    for name, (text, _) in MEANS.items():
        its = {name, NEEDS.get(name, name)}
        with_it = f"{text}, with {MEANS[NEEDS[name]][0]}" if name in NEEDS else text
        alone[f"only {with_it}"] = ours._replace(without=everything - its)
        # What needs the one that is left out has no effect without it.
        but_one[f"all but {text}"] = ours._replace(without=frozenset({name}))
    tried = {"all": ours}
    tried |= {f"all and {name}": ours._replace(more=name) for name in MORE}
    header(setting)
    for versions in (alone, but_one, tried):
        base = next(iter(versions))
        pairs = {name: (version, 1) for name, version in versions.items()}
        turns = race(pairs, setting, args.rounds)
        rows = [["", "ms a step", f"speed / {base}", "peak MB"]]
        for name, its in turns.items():
            ms = [1e3 * x.seconds / setting.steps for x in its]
            peak = f"{its[-1].peak_bytes / 1e6:,.0f}"
            row = [name, report.spread(ms, ",.1f"), ratio(turns, name, base), peak]
            rows.append(row)
        print_rows(rows)
        print()


def processes(setting, args):
    """Print what each of two processes does, beside a process alone."""
    header(setting)
    rows = [["", "tokens/s alone", "tokens/s of two", "efficiency"]]
    for precision in ("fp32", "bf16"):
        version = Version("mingpt", precision)
        versions = {"one": (version, 1), "two": (version, 2)}
        turns = race(versions, setting, args.rounds)
        one, two = (
            [n * tokens_per_turn(setting) / x.seconds for x in turns[name]]
            for n, name in ((1, "one"), (2, "two"))
        )
        rows.append(
            [
                version.name,
                report.spread(one, ",.0f"),
                report.spread(two, ",.0f"),
                ratio(turns, "two", "one"),
            ]
        )
    print_rows(rows)


def print_profile(setting, args):
    """Print where the time of mingpt's steps goes."""
    version = Version("mingpt", "bf16")
    with contestants({"": (version, 1)}, setting) as found:
        found[""].turn(setting.steps)
        [shares] = found[""].turn(-setting.steps)
    header(setting)
    print(f"{version.name}: shares of the time of a step")
    print_rows([["", "share"], *([x, f"{y:.1%}"] for x, y in shares.items())])


def has_transformers():
    return all(map(importlib.util.find_spec, ("transformers", "safetensors")))


PARTS = {
    "speed": speed,
    "means": means,
    "processes": processes,
    "profile": print_profile,
}


def parse_args():
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpt",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = utils.fail
    parser.add_argument("--device", default="auto")
    for name, text in (
        ("speed", "compare the versions"),
        ("means", "each means of mingpt alone, and all but one"),
        ("processes", "two processes of one thread each beside one"),
        ("profile", "where the time of mingpt's steps goes"),
        ("startup", "from the command to the first step"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=f"only {text}")
    parser.add_argument(
        "--configuration",
        nargs="+",
        choices=list(CONFIGURATIONS),
        help="a, b and c on a CPU, c on a GPU (default)",
    )
    cores = sorted({1, os.cpu_count()})
    parser.add_argument(
        "--threads",
        nargs="+",
        type=utils.positive_int,
        default=cores,
        help=f"of each process on a CPU ({' '.join(map(str, cores))})",
    )
    for name, text in (
        ("rounds", "how often each version has its turn (default: 7)"),
        ("steps", "in a turn (default: 2 in c on a CPU, 10 elsewhere)"),
        ("batch-size", "of a process"),
    ):
        parser.add_argument(f"--{name}", type=utils.positive_int, help=text)
    args = parser.parse_args()
    args.rounds = args.rounds or 7
    return args


def make_setting(name, threads, device, args, folder):
    on_cpu = device == "cpu"
    steps = args.steps or (2 if on_cpu and name == "c" else 10)
    batch_size = args.batch_size or CONFIGURATIONS[name]["batch_size"][not on_cpu]
    total = (args.rounds + 2) * steps  # the profiler's steps as well
    return Setting(name, device, threads, batch_size, steps, total, folder)


def main(args):
    device = utils.device_type(args.device, distributed=False)
    names = args.configuration or (list(CONFIGURATIONS) if device == "cpu" else ["c"])
    threads = args.threads if device == "cpu" else [1]
    parts = [part for part in PARTS if getattr(args, part)]
    if args.startup:
        gpt_startup.main(args.rounds)
        return
    if not parts:
        parts = ["speed", "profile"]
        parts[1:1] = ["means", "processes"] if device == "cpu" else []
    packages = ["torch", *["transformers"] * has_transformers()]
    report.print_setting(*packages)
    if device != "cpu":
        print(f"device    {torch.get_device_module(device).get_device_name()}")
    print(f"plan      {args.rounds} rounds after 1 to warm up")
    if not has_transformers():
        print("          without transformers and safetensors: they are not installed")
    print("\nmedian (lower .. upper quartile) of the rounds", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        data.prepare(cache=os.path.join(folder, "tokens"))
        for part in parts:
            one = "b" if "b" in names else names[0]  # for all parts but speed
            for name in names if part == "speed" else [one]:
                for count in threads if part == "speed" else threads[:1]:
                    setting = make_setting(name, count, device, args, folder)
                    PARTS[part](setting, args)


if __name__ == "__main__":
    main(parse_args())
