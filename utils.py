"""Data, command line, devices and snapshots. Copy it with any script that you copy.

The words below, in short: several processes train one model together. Each has a copy
of the model and computes gradients on its share of the samples, which a sampler chooses
(DistributedSampler). DistributedDataParallel (DDP) wraps the model and averages the
gradients in `backward()`, so that all copies take the same step. (Some scripts split
the weights over the processes instead.) Each process is a rank, with a number from 0
on. Its local rank is its number on its own machine, and the world size is how many
ranks there are. They form a process group, in which they exchange data through a
backend: NCCL between NVIDIA GPUs, gloo between CPUs. A launcher starts them: torchrun,
or `spawn` below. If one rank ends with an error, the launcher ends all others. A script
on one device has no process group. An accelerator is a GPU, of any maker.

In `main`, each rank calls `set_device` first, because NCCL sends from the device that
was set. Then it forms the group (`init_process_group`), and after that it may call
`gather` and the checks, which exchange data. A snapshot is a file with the model, the
optimizer and how many epochs are finished. A DTensor is PyTorch's tensor of which each
rank has a part: only models that ranks split have some, and need the last section.
"""

import argparse
import math
import os
import random
import signal
import sys
import tempfile
import time

import numpy
import torch
import torch.distributed as dist

# Keep this import, which nothing here uses. DistributedDataParallel would import it
# later, and a program might hang when it ends: https://github.com/pytorch/pytorch/issues/190489
import torch.distributed.nn.functional
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import Dataset, IterableDataset

# {path of a snapshot: the file's time when this run last read or wrote it; None without
# a file}. If the file has another time when we save, another run has written it.
last_seen = {}


# Data


class MyTrainDataset(Dataset):
    """A linear regression with known noise: `size` samples, 20 features and 1 target.

    A sample: float32 tensors of shapes (20,) and (1,). All seeds draw samples for the
    same weights. On average over new samples, no model can have a lower mean squared
    error than `noise_floor`.
    """

    noise_floor = 0.01

    def __init__(self, size, seed=0):
        # A seed that nobody will choose for the samples
        weight_generator = torch.Generator().manual_seed(2**31)
        weight = torch.randn(20, 1, generator=weight_generator)
        generator = torch.Generator().manual_seed(seed)
        source = torch.randn(size, 20, generator=generator)
        noise = self.noise_floor**0.5 * torch.randn(size, 1, generator=generator)
        targets = source @ weight + noise
        self.data = list(zip(source, targets, strict=True))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


# Ranks


def get_rank():
    """This process' rank, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def gather(value):
    """[the `value` of each rank], on all ranks; [`value`] without a process group.

    value: a small Python object; tensors in it are on the CPU. All ranks must call it:
    each waits for the others.
    """
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)  # fills the list
    return values


def error(message):
    """End the program with one line on stderr and exit status 2; does not return."""
    local_rank = int(os.environ.get("LOCAL_RANK", get_rank()))  # torchrun sets it
    if local_rank > 0:
        time.sleep(5)  # rank 0 mostly prints the same, and the launcher ends this one
    time.sleep(0.2)  # gloo's threads may need Python a moment longer, or they abort it
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr)
    sys.exit(2)


def seed(number):
    """`torch.manual_seed(number)`, and the same for `random` and NumPy.

    Data may draw from all three. `load_train_objs` gives all ranks one seed. If only
    PyTorch were seeded again, all ranks would go on with the same numbers from the
    other two, and a resumed run with other numbers than one that was not interrupted.
    """
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number % 2**32)  # it takes 32 bits


# The command line


def positive_int(text):
    """`text` as an int of 1 or more, or the error that argparse prints."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def writable_path(text):
    """`text` if a snapshot can be saved there, or the error that argparse prints."""
    try:
        is_other = os.path.exists(text) and not os.path.isfile(text)  # such as a folder
        if is_other or not os.path.basename(text):  # no name after the last slash
            raise OSError("that names no file")
        probe = temporary_name(text)  # do what `save_atomically` will do
        open(probe, "xb").close()
        renamed = temporary_name(text)
        os.replace(probe, renamed)
        os.remove(renamed)
    except OSError as reason:
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {reason}") from None
    return text


def make_parser(doc):
    """The command line that all scripts share; `doc` is the script's docstring."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = error  # argparse calls it: one line, without the usage
    parser.add_argument("total_epochs", type=positive_int, help="when to stop")
    parser.add_argument("save_every", type=positive_int, help="epochs per snapshot")
    # Two spellings of an option: scripts of other authors have the one with `_`.
    parser.add_argument(
        "--batch-size",
        "--batch_size",
        type=positive_int,
        default=32,
        help="samples that one process takes in a step (default: %(default)s)",
    )
    parser.add_argument(
        "--snapshot-path",
        "--snapshot_path",
        type=writable_path,
        default="snapshot.pt",
        help="where to save to and resume from (default: %(default)s)",
    )
    parser.add_argument(
        "--device", default="auto", help="such as cpu (default: the accelerator)"
    )
    return parser


# Launchers


def torchrun_env():
    """torchrun's RANK, LOCAL_RANK and WORLD_SIZE as ints."""
    try:
        return [int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
    except KeyError as name:
        error(f"no {name}: start this script with torchrun, as --help shows")


def refuse_torchrun():
    """For scripts that start their ranks themselves, and for those on one device.

    torchrun would start such a script several times, each to train a model alone.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun sets it
        error("start this script with python, not with torchrun")


def choose_nprocs(device, nprocs=None):
    """Processes to start: `nprocs`, or one per accelerator, or 2 on the CPU.

    An error if torchrun has started the script, or if there are not so many devices.
    """
    refuse_torchrun()
    on_cpu = device_type(device, distributed=True) == "cpu"
    count = 2 if on_cpu else torch.accelerator.device_count()
    if nprocs and nprocs > count and not on_cpu:
        error(f"{nprocs} processes, {count} accelerators: try more with --device cpu")
    return nprocs or count


def spawn(main, args, nprocs):
    """Run `main(rank, *args)` in `nprocs` processes, and wait until they have ended.

    As `torch.multiprocessing.spawn`, without its traceback if a rank called `error`.
    """
    # If this process dies, the ranks get a SIGINT: PyTorch asks Linux for that. But
    # they inherit how this process treats SIGINT. If a shell has started it with `&`,
    # it ignores SIGINT, and they would live on. With SIG_DFL, they end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        torch.multiprocessing.spawn(main, args, nprocs)
    except torch.multiprocessing.ProcessExitedException as end:
        if end.exit_code != 2:  # not by `error`
            raise
        sys.exit(2)


# Devices


def device_type(name, distributed):
    """The type of device that `--device name` means here, such as "cuda", or an error.

    distributed: whether several processes train together.
    """
    best = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    if name == "auto" and best == "cpu" and torch.accelerator.device_count():
        # PyTorch can count devices without a working driver, but not use them.
        error("PyTorch cannot use the accelerators here: is the driver too old?")
    if distributed:
        # Ranks can only use devices whose tensors some backend sends. On Windows there
        # is no NCCL. For a Mac's GPU ("mps") PyTorch names gloo, which cannot send its
        # tensors.
        backend = dist.get_default_backend_for_device(best)
        if best == "mps" or not dist.is_backend_available(backend):
            best = "cpu"
    usable = dict.fromkeys(["auto", "cpu", best])  # each once
    if name not in usable:
        error(f"--device {name}: this script can only use {', '.join(usable)} here")
    return best if name == "auto" else name


def set_device(name, local_rank=None, nprocs=1):
    """This process' device. An accelerator is PyTorch's current one from now on.

    Ends with an error if the device cannot be had, or if torchrun starts a script on
    one device.
    local_rank: None in a script on one device. nprocs: how many processes share this
    machine's CPU threads; if each used all of them, they would wait for one another.
    """
    if local_rank is None:
        refuse_torchrun()
    kind = device_type(name, distributed=local_rank is not None)
    if kind == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // nprocs))
        return torch.device("cpu")
    device = torch.device(kind, local_rank or 0)
    torch.accelerator.set_device_index(device.index)
    return device


# Checks. All ranks call them, because some of them exchange data


def check_optimizer(optimizer, model):
    """End with an error if a snapshot would not hold all that the optimizer changes."""
    # DDP, too, only knows the model's parameters: others, such as a loss's own, would
    # become different from rank to rank. (A set compares tensors by which objects they
    # are, not by their values.)
    parameters = set(model.parameters())
    for group in optimizer.param_groups:
        if set(group["params"]) - parameters:
            error("the optimizer has parameters that the model does not have")
    for value in vars(optimizer).values():  # some wrap another, as Lookahead does
        if isinstance(value, torch.optim.Optimizer):
            error("the optimizer holds another one, whose state would not be saved")


def check_data(train_set, eval_set, batch_size):
    """End with an error if ranks differ in how much data they have, or have too little.

    batch_size: how many samples a rank takes in a step; a fraction where ranks share a
    batch, as in variants/tensor_parallel.py.
    """
    if isinstance(train_set, IterableDataset):
        error("no sampler shares out an IterableDataset: write a Dataset's __getitem__")
    sizes = gather((len(train_set), len(eval_set)))
    if len(set(sizes)) > 1:
        error(f"ranks have different numbers of (training, held-out) samples: {sizes}")
    samples, held_out = sizes[0]
    # The training loaders have `drop_last`: a rank without a whole batch makes no step.
    step = round(len(sizes) * batch_size)
    if step > samples or not held_out:
        error(
            f"too few samples: a step takes {step}, and there are {samples}"
            f" to train on, {held_out} held out"
        )


def check_state(losses, model, path):
    """End with an error, after each epoch, if a snapshot of it would be wrong.

    Also after an epoch that is not saved: you hear of it soon.
    """
    wrong = what_is_wrong(losses, model.named_parameters())
    if wrong:
        error(f"{wrong}, not saved to {path}")


def what_is_wrong(losses, weights):
    """What is not finite, or which trained weight differs by rank; "" if all is well.

    losses: means over all ranks, equal on each rank. weights: pairs of a name and a
    parameter. After each step, those of one name should be the same on all ranks that
    have it. Other devices may round them otherwise, which moves a sum of weights by
    about 1e-7 of their 2-norm, however many they are. Ranks that are 1e-5 of it apart,
    a hundred times as much, do not average their gradients.
    """
    pairs_of = {}  # {name: [(sum, norm) of each rank that has it]}
    for found in gather(sums_of(weights)):
        for name, pair in found.items():
            pairs_of.setdefault(name, []).append(pair)
    for loss in losses:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
    for name, pairs in pairs_of.items():
        sums, norms = zip(*pairs, strict=True)
        if not math.isfinite(sum(sums)):
            return f"{name} has weights that are not finite"
        # Sums alone would not do: where gradients add up to 0, as before a softmax,
        # weights that differ keep equal sums.
        for kind, numbers in (("sums", sums), ("norms", norms)):
            if max(numbers) - min(numbers) > 1e-5 * max(norms):
                shown = ", ".join(f"{number:.6g}" for number in numbers)
                return f"{name} differs by rank, {kind} {shown}"
    return ""


def sums_of(weights):
    """{name: (its sum, its 2-norm)} of those (name, weight) that are trained."""
    found = {}
    for name, weight in weights:
        if not weight.requires_grad:
            continue
        weight = weight.detach()
        if weight.is_complex():
            weight = torch.view_as_real(weight)
        # In float64, ranks with other numbers of threads get the same sums. A Mac's GPU
        # has no float64, but it trains alone.
        dtype = torch.float32 if weight.device.type == "mps" else torch.float64
        total = weight.sum(dtype=dtype)
        norm = torch.linalg.vector_norm(weight, dtype=dtype)
        if isinstance(total, DTensor):  # ranks split the weight: all get its whole sum
            total = total.full_tensor()
            norm = norm.full_tensor()
        found[name] = torch.stack([total, norm])
    # One copy from the device for all
    pairs = torch.stack([*found.values()]).tolist() if found else []
    return dict(zip(found, pairs, strict=True))


# Snapshots


def temporary_name(path):
    """A new name in the folder of `path`, or of the file that it leads to as a link."""
    return f"{os.path.realpath(path)}.{os.urandom(4).hex()}.tmp"


def changed_at(path):
    """When the file was changed, in seconds since 1970; None if there is none."""
    return os.path.getmtime(path) if os.path.exists(path) else None


def save_atomically(snapshot, path):
    """Write so that a kill at any moment leaves the old snapshot or the new one.

    It writes a temporary file, loads it as a test, looks for another run, and renames
    it to `path`. snapshot: a dict with MODEL_STATE, OPTIMIZER_STATE and EPOCHS_RUN. One
    rank calls it. OSError if it cannot write, as on a full disk, or cannot load what it
    has written. An error ends the program if another run has saved there since this run
    read or wrote the file. What is written to the end is never removed.
    """
    path = os.path.realpath(path)  # if `path` is a link, the file that it leads to
    temporary = temporary_name(path)  # two runs may save at once
    complete = False
    try:
        with open(temporary, "xb") as file:
            torch.save(snapshot, file)
            file.flush()
            os.fsync(file.fileno())  # now it is on the disk, also if the power fails
        complete = True
        # What cannot be loaded must not replace the old one: `weights_only` refuses
        # most classes. With mmap, tensors stay on the disk, so that this is quick.
        torch.load(temporary, map_location="cpu", weights_only=True, mmap=True)
        now = changed_at(path)
        if now and last_seen.get(path, now) != now:  # (never seen: no complaint)
            # It exits: what it raises, SystemExit, is no Exception.
            error(f"another run saves to {path}, too: this run's is {temporary}")
        os.replace(temporary, path)
        last_seen[path] = changed_at(path)
    except Exception as reason:  # on a full disk, PyTorch raises a RuntimeError
        new = f", the new snapshot is {temporary}" if complete else ""
        # Not `error`: a script may catch this and train on.
        raise OSError(f"{path} is not written{new}") from reason
    finally:
        if not complete and os.path.exists(temporary):
            os.remove(temporary)


def read_snapshot(path, mmap=False):
    """The snapshot at `path`, on the CPU, or None without a file; else an error.

    mmap: leave tensors on the disk until they are used.
    """
    last_seen[os.path.realpath(path)] = changed_at(path)
    if not os.path.exists(path):
        return None
    try:
        snapshot = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        # (How far the run was has several names: mingpt counts steps.)
        if not {"MODEL_STATE", "OPTIMIZER_STATE"}.issubset(snapshot):
            raise ValueError(f"it has {', '.join(snapshot)}")
        return snapshot
    except Exception as reason:
        error(f"{path} is cut short or no snapshot: {reason!r:.200}")


def broadcast_snapshot(path, src):
    """Rank `src`'s snapshot at `path`, on every rank.

    For several machines, where only some may have the newest file: each rank reads its
    own, and the caller chooses a `src` with the most epochs. All ranks call this; the
    others put what they receive into a temporary file. It travels in parts of 4 MB,
    because what is sent is copied several times.
    """
    is_source = dist.get_rank() == src
    # The source opens its snapshot, and the others open an empty file.
    with open(path, "rb") if is_source else tempfile.TemporaryFile() as file:
        while True:
            part = [file.read(4 * 2**20) if is_source else None]
            dist.broadcast_object_list(part, src)  # puts the source's into the list
            if part[0] == b"":  # the end of the file
                break
            if not is_source:
                file.write(part[0])
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)


def check_snapshot(snapshot, model, optimizer, path):
    """End with an error if `snapshot` does not fit; print the settings it will replace.

    Call it before `load_state_dict`, which itself complains of another optimizer.
    Buffers may have other shapes, as a table that grows. model: the one inside DDP,
    which was saved.
    """
    if snapshot.get("SAMPLES_RUN"):  # by variants/preemptible.py
        error(f"{path} was saved inside an epoch: go on with the script that saved it")
    saved = snapshot["MODEL_STATE"]
    # The order counts: an optimizer's state belongs to parameters by their position.
    # keep_vars: what is a Parameter stays one. (`named_parameters` has other names for
    # layers that are wrapped, as to save memory.)
    here = model.state_dict(keep_vars=True)
    fits = list(saved) == list(here)
    for name, weight in here.items():
        if isinstance(weight, torch.nn.Parameter):
            lazy = torch.nn.parameter.is_lazy(weight)  # it has no shape before the data
            fits = fits and (lazy or saved[name].shape == weight.shape)
    if not fits:
        error(f"{path} belongs to another model: choose another --snapshot-path")
    print_replaced(snapshot["OPTIMIZER_STATE"], optimizer.state_dict(), path)


def print_replaced(saved, here, path):
    """Rank 0 prints the settings of an optimizer, such as a rate, that will change.

    saved, here: the optimizer's `state_dict` in the snapshot and in this run.
    """
    if get_rank() > 0:
        return
    for old, new in zip(saved["param_groups"], here["param_groups"], strict=False):
        for name, value in new.items():
            replacement = old.get(name, value)  # what was not saved is not replaced
            # A schedule stores `initial_lr`, and will set `lr` itself.
            is_setting = name != "params" and f"initial_{name}" not in new
            if is_setting and replacement != value:
                print(f"{name} is {replacement} as in {path}, not {value} as here")


# Printed lines


def describe_run(train_data, eval_data, device):
    """What is about to run, in a line."""
    # `train_data` and `eval_data` are DataLoaders. The effective batch is what all
    # ranks together take in a step.
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    # A DistributedSampler deals the samples out to `num_replicas` copies of the model.
    # There are fewer copies than ranks if ranks split its layers (tensor parallelism).
    replicas = getattr(train_data.sampler, "num_replicas", ranks)
    batch = train_data.batch_size
    line = (
        f"{ranks} x {device.type}, batch {batch} each: effective batch"
        f" {replicas * batch}, {len(train_data)} steps per epoch,"
        f" {len(train_data.dataset)} samples, {len(eval_data.dataset)} held out"
    )
    noise_floor = getattr(eval_data.dataset, "noise_floor", None)
    if noise_floor:
        line += f" (noise floor {noise_floor})"
    return line


def progress(epochs_run, total_epochs, path):
    """How many epochs are finished, in a line. Without snapshots, `path` is None."""
    where = f" in {path}" if path else ""
    line = f"{epochs_run} of {total_epochs} epochs are finished{where}"
    return f"nothing to do: {line}" if epochs_run >= total_epochs else line


# For models that ranks split, whose weights are DTensors


def join_parts(value):
    """`value` with its DTensors made whole, on rank 0's CPU. All ranks call it."""
    if isinstance(value, dict):
        return {name: join_parts(item) for name, item in value.items()}
    if isinstance(value, DTensor):
        whole = value.full_tensor()
        return whole.cpu() if dist.get_rank() == 0 else None
    return value


def part_of(saved, weight):
    """This rank's part of what was saved for a weight: of its values or its momentum.

    `saved` itself if the weight is not split, or if `saved` is no tensor as large as
    the weight, such as Adam's count of steps.
    """
    if isinstance(weight, DTensor) and getattr(saved, "shape", None) == weight.shape:
        mesh = weight.device_mesh
        # Without a source rank, each cuts its part out of its own copy.
        return distribute_tensor(saved, mesh, weight.placements, src_data_rank=None)
    return saved


def keep_parts(snapshot, model, optimizer):
    """Leave in a snapshot this rank's parts of the tensors, so that they fit."""
    weights = model.state_dict()
    saved = snapshot["MODEL_STATE"]
    for name in saved:
        saved[name] = part_of(saved[name], weights[name])
    # In the order of the numbers in the optimizer's state_dict
    trained = [weight for group in optimizer.param_groups for weight in group["params"]]
    states = snapshot["OPTIMIZER_STATE"]["state"]
    for number, weight in enumerate(trained):
        state = states.get(number, {})
        for name in state:
            state[name] = part_of(state[name], weight)


def forget_meshes(model):
    """Empty the meshes of a split model, the grids of its ranks.

    PyTorch's caches keep them, and they keep the process group, whose threads may abort
    the exit (gloo's, PyTorch 2.11 to 2.14). PyTorch has no call for it. Do not use the
    model after this.
    """
    for weight in model.parameters():
        if isinstance(weight, DTensor):
            vars(weight.device_mesh).clear()
