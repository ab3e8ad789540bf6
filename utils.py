"""What no rung teaches: the data set, the command line, the device, the snapshot file.

The same for every rung. Whatever a lesson changes stands in the scripts, in sight.
"""

import argparse
import contextlib
import copy
import csv
import errno
import functools
import glob
import io
import itertools
import json
import logging
import math
import multiprocessing
import os
import pickle
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
import zipfile
import zlib
from datetime import timedelta

import torch
import torch.distributed as dist

# A gloo thread that outlives the training can abort or hang the process at exit. This
# module keeps the process group alive if it is imported, as DDP does, after the group
# is made (https://github.com/pytorch/pytorch/issues/190489): so it is imported before.
import torch.distributed.nn.functional
import torch.nn.functional as F
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

try:
    import fcntl
except ImportError:  # Windows, where nobody can remove a file that is open
    fcntl = None


class MyTrainDataset(Dataset):
    """A linear regression with known noise: `size` samples, 20 features and 1 target.

    A sample is a pair of float32 tensors of shapes (20,) and (1,). The weights are the
    same for every `seed`, so that `MyTrainDataset(n, seed=1)` is held-out data for
    `MyTrainDataset(m)`. `noise_floor` is the variance of the noise: the mean squared
    error that the true weights have on average, below which no model can learn to go.
    """

    noise_floor = 0.01

    def __init__(self, size, seed=0):
        weight = torch.randn(20, 1, generator=torch.Generator().manual_seed(2**31))
        generator = torch.Generator().manual_seed(seed)
        source = torch.randn(size, 20, generator=generator)
        noise = self.noise_floor**0.5 * torch.randn(size, 1, generator=generator)
        # A list of pairs: picking rows out of a tensor one by one takes twice as long.
        self.data = list(zip(source, source @ weight + noise, strict=True))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


def load_digits():
    """Handwritten digits: (1437 samples to train on, 360 that are held out).

    A sample is a pair: 64 pixels, float32 of shape (64,), and a class from 0 to 9,
    int64 of shape (). The digits are those that scikit-learn brings along. Without it
    they are made up: 10 images at random, with so much noise that the nearest image is
    still the right one. Each sample to train on gets new noise whenever it is taken.
    """
    generator = torch.Generator().manual_seed(0)
    try:
        from sklearn import datasets

        source, targets = map(torch.tensor, datasets.load_digits(return_X_y=True))
        source = source.float() / 16
    except ImportError:
        targets = torch.randint(10, (1797,), generator=generator)
        source = torch.rand(10, 64, generator=generator)[targets]
        source += 0.3 * torch.randn(1797, 64, generator=generator)
    order = torch.randperm(1797, generator=generator)
    train, held_out = (
        list(zip(source[some], targets[some], strict=True))
        for some in order.split([1437, 360])
    )
    return NoisyDataset(train, 0.1), held_out


def load_views():
    """Points that are seen twice: (2048 samples to train on, 512 that are held out).

    A sample is a pair: two noisy views of a point, float32 of shape (2, 20), and the
    number of the point, int64 of shape (). Points come from 64 families. Those of one
    family resemble each other.
    """
    generator = torch.Generator().manual_seed(0)
    families = 3 * torch.randn(64, 4, generator=generator)
    points = torch.randn(2560, 20, generator=generator)
    points[:, :4] = families.repeat(40, 1)
    # The noise is weak in the 8 directions that tell points apart. In the 12 others
    # there is nothing but noise. A rotation hides which is which.
    noise = torch.randn(2, 2560, 20, generator=generator)
    noise[..., :8] *= 0.2
    points[:, 8:] = 0
    rotation, _ = torch.linalg.qr(torch.randn(20, 20, generator=generator))
    views = ((points + noise) @ rotation).unbind()
    data = list(zip(torch.stack(views, 1), torch.arange(2560), strict=True))
    return data[:2048], data[2048:]


class Encoder(torch.nn.Module):
    """Puts views on a sphere, so that the two views of a point come close together.

    From shape (batch, 2, features) to (batch, 2, size). A product of two outputs is
    their cosine divided by the temperature. The temperature is learned: it is a
    parameter, and `log_scale` is the logarithm of 1 / temperature.
    """

    def __init__(self, features, size):
        super().__init__()
        self.linear = torch.nn.Linear(features, size)
        self.log_scale = torch.nn.Parameter(torch.tensor(10.0).log())

    def forward(self, source):
        return F.normalize(self.linear(source), dim=-1) * (self.log_scale / 2).exp()


def info_nce(output, targets):
    """The InfoNCE loss: each view has to find its partner in the batch; a mean.

    output: two views of each point, of shape (batch, 2, size). targets: the points'
    numbers, each of them once.
    """
    scores = output[:, 0] @ output[:, 1].T  # of each first view and each second view
    partners = (targets[:, None] == targets).to(scores.dtype)
    return (F.cross_entropy(scores, partners) + F.cross_entropy(scores.T, partners)) / 2


class NoisyDataset(Dataset):
    """`data` with noise of this deviation on the source, drawn as torchvision draws.

    The numbers come from torch's global generator: see `SeededDataset`.
    """

    def __init__(self, data, deviation):
        self.data, self.deviation = data, deviation

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        source, target = self.data[index]
        return source + self.deviation * torch.randn(source.shape), target


class SeededDataset(Dataset):
    """`data`, whose random numbers follow from the epoch and from the sample alone.

    The same numbers are drawn in any worker of any rank, and again in a run that
    resumes. `data` draws them from torch's global generator.
    """

    def __init__(self, data):
        self.data = data
        # In shared memory, so that workers that live on see the next epoch's number.
        self.epoch = torch.tensor(0).share_memory_()

    def set_epoch(self, epoch):
        self.epoch.fill_(epoch)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        with torch.random.fork_rng(devices=[]):  # without workers, dropout draws here
            # torch.manual_seed, which also seeds accelerators, takes 0.5 ms.
            torch.default_generator.manual_seed(int(self.epoch) * len(self) + index)
            return self.data[index]


def log_row(path, number, metrics, unit="epoch"):
    """Write the number of an epoch and its metrics as the last line of a CSV file.

    Lines of this epoch and of later ones go: a run that was killed may have logged more
    than it saved. The file is renamed into place, so that a kill tears no line. A file
    that is no such log is moved to `path`.old.
    """
    row, rows = {unit: str(number), **metrics}, []
    if os.path.exists(path):
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restval="")
            if unit in (reader.fieldnames or ()):
                rows = [x for x in reader if x[unit].isdecimal()]
            else:
                os.replace(path, f"{path}.old")
    rows = [x for x in rows if int(x[unit]) < number] + [row]
    names = dict.fromkeys(name for x in [row, *rows] for name in x if name)
    with replacing(path) as file:
        text = io.TextIOWrapper(file, newline="", write_through=True)
        writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        text.detach()


def fail(message):
    """End the program with one line on stderr and exit status 2: the input is bad."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # All processes of a machine find the same fault. The first says so, and while
        # the others wait, torchrun ends them; if it found none, they speak after all.
        time.sleep(5)
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr)
    sys.exit(BAD_INPUT)


if (
    multiprocessing.current_process().name != "MainProcess"
    and "RANK" not in os.environ  # where torchrun is, this is a DataLoader's worker
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    # A process of `mp.spawn` ends at once at Ctrl-C. gloo's threads are still there: an
    # exit in good order would wait for them, or abort.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


BAD_INPUT, PIPE_CLOSED = SAID = 2, 141  # exit statuses; a shell says 141 for SIGPIPE


def end_in_one_line(kind, error, traceback):
    """Python calls this for an error that ends the program, to print its traceback.

    Some errors need none: Ctrl-C, and a process of `mp.spawn` that has said already
    what is wrong, or need not say it.
    """
    killed_by = getattr(error, "signal_name", None)  # a process of `mp.spawn`
    if issubclass(kind, KeyboardInterrupt) or killed_by == "SIGINT":
        if os.environ.get("RANK", "0") == "0":
            print("stopped by Ctrl-C: the same command resumes", file=sys.stderr)
    elif kind.__name__ == "ProcessExitedException" and error.exit_code in SAID:
        os._exit(error.exit_code)
    else:
        sys.__excepthook__(kind, error, traceback)


def say(text):
    """Print a line at once. If its reader has gone (`| head`), end without a word."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os._exit(PIPE_CLOSED)


def typed(launcher):
    """The command that runs this script by `launcher`, with the arguments as typed."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    script = ["-m", spec.name] if spec else [sys.argv[0]]
    return shlex.join([*launcher.split(), *script, *sys.argv[1:]])


def positive_int(text):
    """`text` as an int of 1 or more, else the error that argparse makes a line of."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def positive_float(text):
    """`text` as a float above 0, else the error that argparse makes a line of."""
    with contextlib.suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


NPROCS = "processes to start (default: one per accelerator, or 2 on the CPU)"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PRECISION = {
    "choices": ["auto", *DTYPES],
    "default": "auto",
    "help": "what autocast computes in: bf16 (bfloat16), fp16 (float16 with a scaled "
    "loss), or auto (bf16 if all devices have it, else fp16; this is the default)",
}
CLIP = {
    "type": positive_float,
    "default": math.inf,
    "metavar": "MAX_NORM",
    "help": "scale gradients of a larger norm down to this one (default: leave them)",
}


def make_parser(doc, by_epochs=True):
    """The command line that all rungs share; `doc` is the script's docstring.

    A script that counts steps says by_epochs=False and adds its own options.
    """
    sys.excepthook = end_in_one_line
    # spawn would warn that it ends the other processes when one has failed.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    # The lines that are commands say which launcher it is. A copy may have none.
    launchers = {line.split(" ")[0] for line in (doc or "").splitlines()}
    by_python = "python" in launchers and "torchrun" not in launchers
    if by_python and "TORCHELASTIC_RUN_ID" in os.environ:
        fail(f"python starts this script, torchrun does not. Type: {typed('python')}")
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = fail
    if by_epochs:
        parser.add_argument("total_epochs", type=positive_int, help="when to stop")
        parser.add_argument("save_every", type=positive_int, help="epochs per snapshot")
    parser.add_argument(
        "--batch-size",
        "--batch_size",
        type=positive_int,
        default=32 if by_epochs else None,
        help="samples that one process takes in a step (default: "
        + ("32" if by_epochs else "the preset's")
        + "); the effective batch is this times the number of processes",
    )
    parser.add_argument(
        "--snapshot-path",
        "--snapshot_path",
        default="snapshot.pt" if by_epochs else "mingpt.pt",
        help="where to save to and resume from (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        default="auto",
        help="auto (the accelerator if there is one, else the CPU; this is the "
        "default), cpu, cuda, or another type that PyTorch knows",
    )
    return parser


def parse_nodes(parser):
    """The arguments of a script that is typed on each machine."""
    parser.add_argument(
        "--epochs",
        metavar="N",
        default=argparse.SUPPRESS,
        help="the same as N 1: total_epochs is N, and every epoch is saved",
    )
    parser.add_argument(
        "--nodes", type=positive_int, default=1, help="machines (default: 1)"
    )
    parser.add_argument(
        "--nr", type=int, help="the number of this machine: 0, 1 and so on"
    )
    parser.add_argument(
        "--gpus", "--nprocs", metavar="NPROCS", type=positive_int, help=NPROCS
    )
    parser.add_argument(
        "--master-addr",
        "--master_addr",
        default="localhost",
        help="the name or address of machine 0 (default: localhost)",
    )
    parser.add_argument(
        "--master-port",
        "--master_port",
        type=positive_int,
        default=29500,
        help="the port at which machine 0 waits for the others (default: 29500)",
    )
    parser.add_argument(
        "--wait",
        metavar="SECONDS",
        type=positive_int,
        default=300,
        help="how long to wait for the other machines (default: 300)",
    )
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.error = fail
    early.add_argument("--epochs")
    found, words = early.parse_known_args()
    args = parser.parse_args([found.epochs, "1", *words] if found.epochs else words)
    if args.nodes == 1:
        args.nr, args.master_addr = args.nr or 0, "localhost"
    if args.nr is None:
        fail(f"--nodes {args.nodes}: type --nr 0 on the first machine, and so on")
    if args.nr not in range(args.nodes):
        fail(
            f"--nr {args.nr}: of --nodes {args.nodes}, the first has --nr 0 and the"
            f" last --nr {args.nodes - 1}"
        )
    if args.master_port > 65535:
        fail(f"--master-port {args.master_port}: the last port is 65535")
    return args


# What each machine may have of its own. All else must be the same.
OF_ONE_MACHINE = ("nr", "master_addr", "master_port", "snapshot_path", "wait")


def roll_call(args, port):
    """Machine 0's `port`, once all machines are there; else one line, exit status 2.

    Each machine tells machine 0 what it was started with. Machine 0 compares, and
    answers all at once: if something is wrong, all end with the same line.
    """
    if args.nodes == 1:
        return port
    settings = {x: str(y) for x, y in vars(args).items() if x not in OF_ONE_MACHINE}
    settings |= {"device": device_type(args.device), **own_checksums()}
    me = {"nr": args.nr, "host": socket.gethostname(), "settings": settings}
    if settings["device"] == "cpu" and "GLOO_SOCKET_IFNAME" not in os.environ:
        try:
            me["gloo"] = socket.gethostbyname(me["host"])
        except OSError:  # gloo does the same
            me["gloo"] = "127.0.0.1"
    place = f"{args.master_addr}:{args.master_port}"
    say(f"machine {args.nr} ({me['host']}) waits for {args.nodes} machines at {place}")
    if args.nr == 0:
        answer = answer_all(args, me, port)
    else:
        answer = ask_machine_0(args, me, place)
    if "fault" in answer:
        fail(answer["fault"])
    return answer["port"]


def own_checksums():
    """Of the script, and of each module in this folder and below: {whose: checksum}."""
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
    files = {"the script": sys.argv[0]}
    for name, module in sorted(sys.modules.items()):
        path = os.path.abspath(getattr(module, "__file__", None) or "")
        installed = "site-packages" in path or "lib/python" in path  # in a .venv, say
        if name == "__main__" or installed or not path.startswith(folder):
            continue
        if path.endswith(".py") and os.path.isfile(path):
            files[path.removeprefix(folder)] = path
    checksums = {}
    for whose, path in files.items():
        with open(path, "rb") as file:
            checksums[f"{whose}'s checksum"] = f"{zlib.crc32(file.read()):08x}"
    return checksums


def answer_all(args, me, port):
    """On machine 0: wait for the others, and tell them `port`, or what is wrong."""
    deadline = time.monotonic() + args.wait
    try:
        with socket.socket() as probe:
            probe.bind((args.master_addr, 0))  # is this an address of this machine?
        server = socket.create_server(("", args.master_port))
    except socket.gaierror as error:
        fail(f"--master-addr {args.master_addr}: {error.strerror}")
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            fail(
                f"--nr 0 belongs to the machine at --master-addr {args.master_addr}:"
                f" this machine, {me['host']}, does not have that address"
            )
        fail(
            f"--master-port {args.master_port}: {os.strerror(error.errno)}. Choose"
            " another one, on all machines"
        )
    there, answer = {}, {}  # of each connection, what its machine says
    while not answer:
        present = [x["nr"] for x in there.values()]
        missing = [str(nr) for nr in range(1, args.nodes) if nr not in present]
        if not missing:
            answer = {"port": port}
            break
        patience = max(0, deadline - time.monotonic())
        ready, _, _ = select.select([server, *there], [], [], patience)
        if not ready:
            answer["fault"] = (
                f"after {args.wait} s, there is no machine with --nr"
                f" {', '.join(missing)} (of --nodes {args.nodes})"
            )
        for connection in ready:
            if connection is not server:  # it was closed: that machine has stopped
                del there[connection]
                connection.close()
                continue
            connection, _ = server.accept()
            connection.settimeout(5)
            other = hear(connection)
            if not {"nr", "host", "settings"} <= other.keys():  # a port scan, say
                connection.close()
                continue
            fault = why_not(me, other, there.values())
            there[connection] = other
            if fault:
                answer["fault"] = fault
    for connection in there:
        tell(connection, answer)
        connection.close()
    server.close()
    return answer


def why_not(me, other, there):
    """Why machine `other` cannot train with machine 0, `me`, and those that are there.

    One line, or None.
    """
    for name, value in me["settings"].items():
        if other["settings"].get(name) != value:
            return (
                f"{name} is {other['settings'].get(name)} on machine {other['nr']}"
                f" ({other['host']}) and {value} on machine 0 ({me['host']}): all"
                " machines need the same"
            )
    # gloo tells the other machines where the name of its own leads.
    to_itself = [x for x in (me, other) if x.get("gloo", "").startswith("127.")]
    if to_itself and me["host"] != other["host"]:
        names = [f"{x['host']} is {x['gloo']} on machine {x['nr']}" for x in to_itself]
        return (
            f"{' and '.join(names)}, where no other machine can connect to it. Type"
            " there: export GLOO_SOCKET_IFNAME=eth0 (or what `ip -br addr` shows)"
        )
    for one in there:
        if one["nr"] == other["nr"]:
            return (
                f"two machines have --nr {one['nr']}: {one['host']} and"
                f" {other['host']}. Each needs a number of its own"
            )
    return None


def ask_machine_0(args, me, place):
    """On all other machines: what machine 0 answers, or why it does not."""
    deadline = time.monotonic() + args.wait
    while True:
        try:
            connection = socket.create_connection(
                (args.master_addr, args.master_port), timeout=min(5, args.wait)
            )
            break
        except socket.gaierror as error:
            fail(f"--master-addr {args.master_addr}: {error.strerror}")
        except OSError as error:
            if time.monotonic() > deadline:
                reason = error.strerror or error
                return {
                    "fault": f"after {args.wait} s, machine 0 does not answer at"
                    f" {place} ({reason}). Start it there, or give another"
                    " --master-addr"
                }
        time.sleep(0.2)
    with connection:
        tell(connection, me)
        connection.settimeout(args.wait + 5)
        answer = hear(connection)
    if answer.keys() & {"fault", "port"}:
        return answer
    return {"fault": f"{place} gave no answer: see what machine 0 says"}


def tell(connection, what):
    """Send it in one line, if the other side is still there."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(what).encode() + b"\n")


def hear(connection):
    """What the other side says in one line, a dict; {} if it says nothing like it."""
    with contextlib.suppress(OSError, ValueError), connection.makefile() as stream:
        said = json.loads(stream.readline(1 << 20))
        return said if isinstance(said, dict) else {}
    return {}


def torchrun_env():
    """torchrun's RANK, LOCAL_RANK and WORLD_SIZE as ints, else one line and exit 2."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    command = typed("torchrun --standalone --nproc-per-node=2")
    if len(missing) == len(names):
        fail(f"torchrun starts this script, python does not. Type: {command}")
    if missing:
        fail(f"not set: {', '.join(missing)}. torchrun sets them all: {command}")
    try:
        return [int(os.environ[name]) for name in names[:3]]
    except ValueError as error:
        fail(f"RANK, LOCAL_RANK or WORLD_SIZE is not a number: {error}")


def count_nodes(world_size, batch_size):
    """(nodes, processes on each of them), else one line and exit status 2.

    A loss over the batch of a node needs as many processes on every node, or it would
    be over unequally many samples.
    """
    names = ("GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")
    missing = [name for name in names if name not in os.environ]
    if missing:
        fail(f"not set: {missing[0]}. torchrun sets it")
    nodes, nprocs = (int(os.environ[name]) for name in names)
    if nodes * nprocs != world_size:
        fail(
            f"this node has {nprocs} of {world_size} processes, and there are {nodes}"
            " nodes: give every node the same --nproc-per-node"
        )
    if nprocs * batch_size == 1:
        fail(
            "a node takes 1 sample in a step, and there is none to tell it from: raise"
            " --batch-size"
        )
    return nodes, nprocs


def device_type(name, distributed=True):
    """The type of device that `--device name` means here, else one line and exit 2."""
    accelerator = torch.accelerator.current_accelerator()
    available = torch.accelerator.is_available()
    usable = ["cpu", accelerator.type] if available else ["cpu"]
    if name not in ["auto", *usable]:
        fail(f"--device {name}: here PyTorch can only use {' or '.join(usable)}")
    if distributed and name == "mps":
        fail("--device mps: processes cannot exchange its tensors. Type --device cpu")
    if name != "auto":
        return name
    if torch.accelerator.device_count() > 0 and not available:
        fail(
            f"there are {torch.accelerator.device_count()} accelerators, and PyTorch "
            "cannot use them: is the driver too old? --device cpu trains without them"
        )
    # gloo, which the processes would have to use there, takes no tensors of MPS.
    return "cpu" if distributed and usable[-1] == "mps" else usable[-1]


def device_count(name):
    """How many devices processes can share out for `--device name`; 0: only the CPU."""
    return torch.accelerator.device_count() if device_type(name) != "cpu" else 0


def get_device(name, local_rank=None, nprocs=1):
    """The accelerator of this process, made its current one, or its share of the CPU.

    `name` is that of `--device`. Without a `local_rank` there is one process alone.
    `nprocs` processes share out the CPU's threads; torchrun has done so already.
    """
    kind, index = device_type(name, local_rank is not None), local_rank or 0
    if kind == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // nprocs))
        return torch.device("cpu")
    try:
        torch.accelerator.set_device_index(index)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        fail(f"cannot use {kind} {index}: {reason}. --device cpu trains without it")
    return torch.device(kind, index)


def has_bfloat16(device):
    """Whether `device` computes in bfloat16 itself. Older GPUs only imitate it."""
    if device.type not in ("cuda", "xpu"):
        return True
    return torch.get_device_module(device).is_bf16_supported(including_emulation=False)


def autocast_dtype(precision, device):
    """The dtype that `--precision` means. All ranks call this, and all get the same.

    A rank that scaled its loss while others did not would spoil the gradients of all.
    """
    if precision != "auto":
        return DTYPES[precision]
    all_have_it = torch.tensor(int(has_bfloat16(device)), device=device)
    dist.all_reduce(all_have_it, dist.ReduceOp.MIN)
    return torch.bfloat16 if all_have_it.item() else torch.float16


def check_run(
    args,
    train_set,
    eval_set,
    model,
    loss_fn,
    make_optimizer,
    world_size=None,
    nprocs=None,
):
    """End with one line and exit status 2 if this run cannot work; change no file.

    After `args` comes what `load_train_objs` returns. A process that trains alone has
    no `world_size`. `nprocs` says how many of the processes are on this machine. How
    many samples there are is noted in `args.samples`, for `roll_call`.
    """
    devices = torch.accelerator.device_count()
    on_cpu = device_type(args.device, world_size is not None) == "cpu"
    world_size = world_size or 1
    # Of one machine's processes, torchrun says how many there are; others at least
    # which this one is. If neither is said, all processes are on this machine.
    nprocs = nprocs or int(os.environ.get("LOCAL_RANK", world_size - 1)) + 1
    # With --virtual-local-rank each process sees one device, and is number 0 there.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not visible or "," in visible:
        nprocs = int(os.environ.get("LOCAL_WORLD_SIZE", nprocs))
    if nprocs > devices > 0 and not on_cpu:
        fail(
            f"{nprocs} processes here need {nprocs} accelerators: there is {devices}. "
            "To try several processes on the CPU, add --device cpu"
        )
    if world_size * args.batch_size > len(train_set):
        fail(
            f"one step takes {world_size} x {args.batch_size} samples and there are "
            f"{len(train_set)}: lower --batch-size or the number of processes"
        )
    if len(eval_set) == 0:
        fail("there is no held-out sample")
    path = os.path.realpath(args.snapshot_path)
    name = os.path.basename(args.snapshot_path)  # none ends with a slash
    if not name or (os.path.exists(path) and not os.path.isfile(path)):
        fail(f"cannot write {args.snapshot_path!r}: that is no file")
    try:
        with open_beside(path) as file:
            pass
        with contextlib.suppress(FileNotFoundError):  # another run was quicker
            os.remove(file.name)
    except OSError as error:
        fail(f"cannot write {args.snapshot_path}: {error.strerror}")
    if os.path.exists(path):
        check_snapshot(args.snapshot_path, model, make_optimizer(model.parameters()))
    args.samples = len(train_set), len(eval_set)


def find_launcher():
    """Whether torchrun or srun has started this process as one of several.

    srun's names for rank and world size then have torchrun's names as well.
    """
    env = os.environ
    # A batch script has SLURM_NTASKS, too. But it is in no step, as srun's tasks are,
    # and a task that is alone may start processes of its own.
    if "RANK" not in env and int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        tasks = env["SLURM_STEP_TASKS_PER_NODE"]  # such as 2(x3), or 2,1
        if "," in tasks:
            fail(f"srun has started {tasks} tasks on the nodes: start equally many")
        if "MASTER_ADDR" not in env:
            hosts = ["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]]
            env["MASTER_ADDR"] = subprocess.check_output(hosts, text=True).split()[0]
        # Steps of one job may run at once. They must not meet at one port.
        number = int(env["SLURM_JOB_ID"]) + 997 * int(env.get("SLURM_STEP_ID", 0))
        env.setdefault("MASTER_PORT", str(20000 + number % 10000))
        env["RANK"], env["LOCAL_RANK"] = env["SLURM_PROCID"], env["SLURM_LOCALID"]
        env["WORLD_SIZE"] = env["SLURM_STEP_NUM_TASKS"]
        env["LOCAL_WORLD_SIZE"] = tasks.partition("(")[0]
    return "RANK" in env


@functools.cache
def launcher_store():
    """The store of the processes that torchrun or srun has started: the same always."""
    return next(dist.rendezvous("env://", timeout=timedelta(minutes=5)))[0]


NUMBERS = itertools.count()


def find_store(place=None):
    """The store in which the processes of one process group find each other.

    `place` is its address and port; without, a launcher has said where it is. That one
    is the same for each group that a script makes. In it, each group has keys of its
    own: a process must not look for another at an address of the group before.
    """
    if place:
        return dist.TCPStore(*place)
    return dist.PrefixStore(f"fit {next(NUMBERS)}", launcher_store())


def find_master():
    """(MASTER_ADDR, MASTER_PORT) of several machines, else one line and exit 2."""
    try:
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        fail(f"several machines need MASTER_ADDR and MASTER_PORT on each: {error}")


def check_loop(loop, world_size=None, nprocs=None):
    """`check_run` for a `TrainLoop`, and what else can be wrong with it."""
    choices = {
        "gpu_mode": ("single", "dp", "ddp", "ddp2"),
        "precision": ("fp32", "bf16", "fp16"),
    }
    for name, known in choices.items():
        if getattr(loop, name) not in known:
            fail(f"{name} {getattr(loop, name)!r}: choose {', '.join(known)}")
    for name in ("accumulate", "save_every", "clip"):
        value = getattr(loop, name)
        if value is not None and not value > 0:
            fail(f"{name} {value!r}: a number above 0 is needed")
    if nprocs not in (None, loop.nprocs):
        fail(f"num_gpus is {nprocs}, and {loop.nprocs} processes were started here")
    own = set(map(id, loop.model.parameters()))
    given = [x for group in loop.optimizer.param_groups for x in group["params"]]
    if any(id(x) not in own for x in given):
        fail(
            "the optimizer has parameters that the model does not have, of the"
            " criterion perhaps: ranks would not share them, and no snapshot would"
            " have them. Make them parameters of the model"
        )
    if world_size is None and find_launcher() and os.environ["WORLD_SIZE"] != "1":
        fail(f"gpu_mode {loop.gpu_mode} is one process: start one, or choose ddp")
    if loop.gpu_mode == "ddp2" and loop.accumulate > 1:
        fail("gpu_mode ddp2 has one loss for the whole batch: accumulate must be 1")
    if loop.gpu_mode == "ddp2" and world_size % loop.nprocs:
        fail("gpu_mode ddp2 needs equally many processes on each machine")
    for name in ("train_loader", "val_loader", "test_loader"):
        if getattr(loop, name) is not None or name != "test_loader":
            check_loader(name, getattr(loop, name))
    kinds = [type(callback).__name__ for callback in loop.callbacks]
    if len(set(kinds)) < len(kinds):
        fail(f"two callbacks of one class share their state in the snapshot: {kinds}")
    args = argparse.Namespace(
        device=loop.device_name,
        batch_size=loop.train_loader.batch_size,
        snapshot_path=loop.snapshot_path,
    )
    data = loop.train_loader.dataset, loop.val_loader.dataset
    objects = loop.model, loop.criterion, lambda _: loop.optimizer
    check_run(args, *data, *objects, world_size=world_size, nprocs=nprocs)


def check_loader(name, loader):
    """End with one line and exit status 2 unless `TrainLoop` can share it out."""
    if not isinstance(loader, DataLoader):
        fail(f"{name} is no DataLoader, but a {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset):
        fail(f"{name}: an IterableDataset has no indices that a sampler can share out")
    if type(loader).__iter__ is not DataLoader.__iter__:
        fail(f"{name}: a {type(loader).__name__} would lose its __iter__")
    if loader.batch_size is None:
        fail(f"{name}: no batch_sampler can be shared out. Give it batch_size=...")
    sampler = loader.sampler
    all_of_them = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(loader.dataset)
    )
    if not all_of_them:
        fail(f"{name}: its {type(sampler).__name__} would be lost. Say shuffle=...")
    if name != "train_loader" and loader.drop_last:
        fail(f"{name}: drop_last=True leaves samples out. Say drop_last=False")


def save_loop(loop, path):
    """Write a `TrainLoop` for other processes to read, or one line and exit status 2.

    Not by pickle alone: it would put the tensors of all ranks into one memory, so that
    every process trains the same weights, and all of a tensor for each row of it.
    """
    try:
        torch.save(loop, path)
    except (AttributeError, pickle.PicklingError, TypeError) as error:
        fail(f"gpu_mode {loop.gpu_mode} cannot send this to other processes: {error}")


def check_snapshot(path, model, optimizer):
    """End with one line and exit status 2 if `model` cannot go on from this snapshot.

    The file is mapped, not read: its shapes are enough, and it may be large.
    """
    other = "choose another --snapshot-path"
    try:
        snapshot = read_snapshot(path, mmap=True)
        if not isinstance(snapshot, dict):
            raise TypeError(f"a {type(snapshot).__name__}")
        saved = shapes(snapshot["MODEL_STATE"])
        groups = snapshot["OPTIMIZER_STATE"]["param_groups"]
        done, unit = finished(snapshot)
        if not done >= 0:
            raise ValueError(f"{unit.upper()}_RUN is below 0")
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        fail(f"{path} is not what these scripts save ({reason}): {other}")
    except Exception as error:
        if not zipfile.is_zipfile(path):
            with open(path, "rb") as file:
                cut_short = file.read(4) in (b"", b"PK\3\4")  # how torch.save begins
            if cut_short:
                fail(f"{path} is cut short: delete it or {other}")
            fail(f"{path} is no snapshot: {other}")
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].split(". ")[0]
        fail(f"cannot read {path}: {' '.join(reason.split())}")
    if saved != shapes(model.state_dict()):
        fail(f"{path} belongs to another model: {other}")
    check_optimizer(path, groups, optimizer.state_dict()["param_groups"], other)
    if snapshot.get("SAMPLES_RUN") and os.environ.get("RANK", "0") == "0":
        say(
            f"{path} was saved inside an epoch, after {snapshot['SAMPLES_RUN']} of its"
            " samples: a script that does not count samples trains them again"
        )


def shapes(state):
    """The shape of each entry; None for extra state, which may be anything."""
    return {name: getattr(value, "shape", None) for name, value in state.items()}


def check_optimizer(path, saved_groups, groups, other):
    """The same for the optimizer; print the settings that the snapshot replaces."""
    sizes = [[len(group["params"]) for group in x] for x in (saved_groups, groups)]
    if sizes[0] != sizes[1]:
        fail(f"{path} belongs to an optimizer of other parameter groups: {other}")
    for saved, group in zip(saved_groups, groups, strict=True):
        settings = {name: group[name] for name in group if name != "params"}
        for name, value in settings.items():
            # Between versions, torch adds settings that are bool or None.
            if name not in saved and type(value) in (int, float, tuple):
                fail(f"{path} belongs to another optimizer, without {name}: {other}")
        if "max_lr" in saved:
            continue  # OneCycleLR and its kind have put their own settings there
        for name, value in settings.items():
            # A scheduler changes "lr" and keeps what it started from as "initial_lr".
            used = saved.get(f"initial_{name}", saved.get(name, value))
            first = group.get(f"initial_{name}", value)
            if used != first and os.environ.get("RANK", "0") == "0":
                say(f"{name} is {used}, as in {path}, not {first}, as in the script")


def open_beside(path):
    """A new file beside `path` under a name of its own, locked while it is open."""
    while True:
        file = open(f"{path}.{uuid.uuid4().hex[:8]}.tmp", "xb")  # noqa: SIM115
        if fcntl:
            with contextlib.suppress(OSError):  # some file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
        if os.path.exists(file.name):
            return file
        file.close()  # between `open` and `flock`, another run took it for left over


def remove_left_over(path):
    """Remove what killed writers left beside `path`: files that nobody has locked."""
    for name in glob.glob(glob.escape(path) + "." + "[0-9a-f]" * 8 + ".tmp"):
        with contextlib.suppress(OSError), open(name, "rb+") as file:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            else:
                file.close()  # Windows removes no file that is open
            os.remove(name)


@contextlib.contextmanager
def replacing(path):
    """A binary file that becomes `path` if the block ends well, and else is removed.

    A kill at any moment leaves the old file or the new one, whole: the new one is
    written beside, flushed to the disk, and renamed into place, which is atomic. Each
    has a name of its own, so that two runs that share a path by mistake do not mix
    their weights in one file. The next write removes what a kill has left behind.
    """
    path = os.path.realpath(path)  # a link to the file stays a link
    remove_left_over(path)
    file = open_beside(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if os.path.exists(path):
                shutil.copymode(path, file.name)
            if not fcntl:
                file.close()  # Windows renames no file that is open
            os.replace(file.name, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.remove(file.name)
        # torch hides the disk's error: "unexpected pos"
        cause = error if isinstance(error, OSError) else error.__context__
        if isinstance(cause, OSError):
            reason = f"{cause.strerror}: {path} is not written, the old one is kept"
            raise OSError(cause.errno, reason) from None
        raise


def save_atomically(snapshot, path):
    """Write so that a kill at any moment leaves the old snapshot or the new one."""
    with replacing(path) as file:
        torch.save(snapshot, file)
        file.flush()
        # What could not be loaded would be found out when it is needed: so now, while
        # the old one is still there.
        read_snapshot(file.name, mmap=True)


def read_snapshot(path, mmap=False):
    """The snapshot at `path`, all on the CPU, or {"EPOCHS_RUN": 0} if there is none.

    With `mmap` its tensors stay on the disk until they are looked at.
    """
    if not os.path.exists(path):
        return {"EPOCHS_RUN": 0}
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def check_schedule(path, snapshot, steps_per_epoch):
    """End with one line and exit status 2 if a schedule cannot go on from `snapshot`.

    Its scheduler counts steps, which must be as many in an epoch as they were.
    """
    if "SCHEDULER_STATE" not in snapshot:
        fail(f"{path} was saved without a schedule: choose another --snapshot-path")
    epochs, steps = snapshot["EPOCHS_RUN"], snapshot["SCHEDULER_STATE"]["last_epoch"]
    if steps != epochs * steps_per_epoch:
        fail(
            f"{path} has made {steps / epochs:g} steps in each epoch, and this run"
            f" would make {steps_per_epoch}: keep the effective batch"
        )


def finished(snapshot):
    """How far a snapshot is: (12, "epochs"), or steps if its script counts those."""
    if "STEPS_RUN" in snapshot:
        return snapshot["STEPS_RUN"], "steps"
    return snapshot["EPOCHS_RUN"], "epochs"


def identify(path):
    """What a rank tells the others about its snapshot: a tuple that fits `compare`."""
    snapshot = read_snapshot(path, mmap=True)
    # How far it is. Within an epoch, a variant counts samples.
    done = [*finished(snapshot), snapshot.get("SAMPLES_RUN", 0)]
    checksums = []
    if os.path.exists(path):
        with zipfile.ZipFile(path) as file:
            checksums = [entry.CRC for entry in file.infolist()]
    return done, checksums, socket.gethostname(), os.path.realpath(path)


def compare(found):
    """The rank with the newest snapshot, and a line if others have another one or none.

    `found`: of each rank, what `identify` returned.
    """
    # The first of all. "steps" are more than the "epochs" of those that found nothing.
    newest = max(range(len(found)), key=lambda rank: found[rank][0])
    done, checksums, host, path = found[newest]
    others = {
        f"{x[2]}:{x[3]} has {x[0][0] if x[1] else 'none'}"
        for x in found
        if x[1] != checksums
    }
    if not others:
        return newest, ""
    return newest, (
        f"ranks found different snapshots: all take rank {newest}'s, {host}:{path},"
        f" with {done[0]} {done[1]} ({', '.join(sorted(others))})"
    )


def map_tensors(function, value):
    """`value` with `function` applied to all tensors in its dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        mapped = copy.copy(value)  # a state_dict has _metadata: its modules' versions
        for key, x in value.items():  # not by update(): a Counter's would add
            mapped[key] = map_tensors(function, x)
        return mapped
    if type(value) in (list, tuple):
        return type(value)(map_tensors(function, x) for x in value)
    return value


def broadcast_snapshot(snapshot, src, device):
    """Rank `src`'s snapshot on every rank, on the CPU; it travels through `device`.

    One tensor at a time, so that no rank ever holds the one that travels twice.
    """
    here = dist.get_rank() == src
    outline = [map_tensors(lambda x: x.to("meta"), snapshot) if here else None]
    dist.broadcast_object_list(outline, src)

    def send(tensor):
        data = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if here:
            data.copy_(tensor)
        # As bytes: gloo and NCCL do not know every dtype.
        dist.broadcast(data.view(-1).view(torch.uint8), src)
        return tensor if here else data.cpu()

    return map_tensors(send, snapshot if here else outline[0])


def evaluate_retrieval(batches, loss_fn):
    """The loss on all ranks' batches, and how many points are found; for `_evaluate`.

    batches: pairs (output, targets) of this rank. Ranks may have unequally many
    samples, or none. A point is found if, of all second views, its own scores highest
    with its first view.
    """
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, [(x.cpu(), y.cpu()) for x, y in batches])
    output, targets = map(torch.cat, zip(*sum(found, []), strict=True))
    best = (output[:, 0] @ output[:, 1].T).argmax(1)
    accuracy = (targets[best] == targets).double().mean()
    loss = loss_fn(output, targets)
    return {"held-out loss": loss.item(), "retrieval accuracy": accuracy.item()}


def describe_run(trainer):
    """What is about to run, in two lines, and what is special to the rung in a third.

    A Trainer with DataParallel has a `dp_model`, one of mixed precision a `scaler`. A
    rung with more to say prints it after.
    """
    train_data, eval_data = trainer.train_data, trainer.eval_data
    batch, path, done = train_data.batch_size, trainer.snapshot_path, trainer.epochs_run
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    device = trainer.device.type
    if device == "cpu" and torch.accelerator.is_available():
        device += f" ({torch.accelerator.current_accelerator().type} is not used)"
    total = trainer.total_epochs
    if done >= total:
        plan = (
            f"nothing to do: {path} has finished {done} of {total} epochs. To start"
            " afresh, delete it or choose another --snapshot-path"
        )
    elif done:
        plan = f"resuming from {path}: {done} of {total} epochs are finished"
    else:
        plan = f"starting with epoch 1: no epoch is finished in {path}"
    if hasattr(trainer, "dp_model"):
        plan += f"\n{describe_split(trainer.dp_model, batch)}"
    if getattr(trainer, "dtype", None):
        plan += f"\n{describe_precision(trainer)}"
    return (
        f"{world_size} x {device}, batch {batch} each: effective batch"
        f" {world_size * batch}, {len(train_data)} steps per epoch,"
        f" {len(train_data.dataset)} samples, {len(eval_data.dataset)} held out\n{plan}"
    )


def describe_split(dp_model, batch):
    """How `torch.nn.DataParallel` splits a batch of this many samples, in a line."""
    count = len(getattr(dp_model, "device_ids", []))  # a plain model has none
    if count < 2:
        return (
            "DataParallel passes each batch through: it splits over two or more CUDA"
            f" GPUs, and this run uses {count}"
        )
    sizes = [len(x) for x in torch.empty(batch).chunk(count)]  # as DataParallel does
    return (
        f"DataParallel splits each batch over {len(sizes)} of {count} CUDA GPUs:"
        f" {' + '.join(map(str, sizes))} samples"
    )


def describe_precision(trainer):
    """What a rung that mixes precisions computes in, in a line."""
    scale, weights = trainer.scaler.get_scale(), trainer.model.parameters()
    dtypes = " and ".join(sorted({str(x.dtype) for x in weights}))
    text = f"autocast to {trainer.dtype}, weights in {dtypes}, loss scale {scale:g}"
    return text.replace("torch.", "")


def describe_epoch(trainer, metrics, samples_per_s):
    """How the epoch went that has just finished; `metrics`: names and their numbers."""
    line = f"epoch {trainer.epochs_run}/{trainer.total_epochs}"
    floor = getattr(trainer.eval_data.dataset, "noise_floor", None)
    for name, value in metrics.items():
        line += f" | {name} {value if isinstance(value, int) else f'{value:.6f}'}"
        if floor and name == "held-out loss":
            line += f" (noise floor {floor:.6f})"
    return f"{line} | {samples_per_s:,.0f} samples/s"
