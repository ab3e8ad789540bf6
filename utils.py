"""Copy this, too: data set, command line, device and snapshot file of all scripts."""

import argparse
import math
import os
import signal
import sys
import tempfile
import time

import torch
import torch.distributed as dist

# DDP imports this module. If it does so first, a program may hang when it ends:
# https://github.com/pytorch/pytorch/issues/190489
import torch.distributed.nn.functional

# {path of a snapshot: when it was last changed, as far as this process has seen}. If it
# has been changed since, another run saves there, too.
last_seen = {}


class MyTrainDataset(torch.utils.data.Dataset):
    """A linear regression with known noise: `size` samples, 20 features and 1 target.

    A sample: float32 tensors of shapes (20,) and (1,). Other seeds draw other samples
    for the same weights, whose mean squared error is `noise_floor`.
    """

    noise_floor = 0.01

    def __init__(self, size, seed=0):
        weight = torch.randn(20, 1, generator=torch.Generator().manual_seed(2**31))
        generator = torch.Generator().manual_seed(seed)
        source = torch.randn(size, 20, generator=generator)
        noise = self.noise_floor**0.5 * torch.randn(size, 1, generator=generator)
        targets = source @ weight + noise
        self.data = list(zip(source, targets, strict=True))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


def get_rank():
    """This process' rank, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def gather(value):
    """[the `value` of each rank], on all ranks; [`value`] without a process group."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def error(message):
    """Bad input: end the program with one line on stderr and exit status 2."""
    # All ranks find the same fault, and one line is enough. When the first rank of a
    # machine ends, its launcher ends the others, which sleep here.
    local_rank = int(os.environ.get("LOCAL_RANK", get_rank()))
    if local_rank > 0:
        time.sleep(5)
    # A thread of gloo may still hold a tensor, and exits abort then: it needs a moment.
    time.sleep(0.2)
    script = os.path.basename(sys.argv[0])
    print(f"{script}: error: {message}", file=sys.stderr)
    sys.exit(2)


def positive_int(text):
    """`text` as an int of 1 or more, else the error that argparse makes a line of."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def writable_path(text):
    """`text` if a file can be written there, else the error that argparse shows."""
    folder, name = os.path.split(os.path.realpath(text))
    try:
        is_other = os.path.exists(text) and not os.path.isfile(text)  # such as a folder
        if is_other or not os.path.basename(text):
            raise OSError("that names no file")
        # A file beside it, with as long a name as `save_atomically` takes.
        tempfile.NamedTemporaryFile(
            prefix=f"{name}.", suffix=".tmp", dir=folder
        ).close()  # which removes it
    except OSError as reason:
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {reason}") from None
    return text


def make_parser(doc):
    """The command line that all scripts share; `doc` is the script's docstring."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = error
    parser.add_argument("total_epochs", type=positive_int, help="when to stop")
    parser.add_argument("save_every", type=positive_int, help="epochs per snapshot")
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


def torchrun_env():
    """torchrun's RANK, LOCAL_RANK and WORLD_SIZE as ints."""
    try:
        return [int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
    except KeyError as name:
        # Python keeps there how the program was started: None, or as `python -m NAME`.
        spec = sys.modules["__main__"].__spec__
        script = f"-m {spec.name}" if spec else sys.argv[0]
        error(f"no {name}: type torchrun --standalone --nproc-per-node=2 {script} ...")


def device_type(name, distributed):
    """The type of device that `--device name` means here, such as "cuda"."""
    kind = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    if name == "auto" and kind == "cpu" and torch.accelerator.device_count():
        error("PyTorch cannot use the accelerators here: is the driver too old?")
    backend = dist.get_default_backend_for_device(kind)  # Windows has no NCCL
    if distributed and (kind == "mps" or not dist.is_backend_available(backend)):
        kind = "cpu"  # tensors of such a device cannot be exchanged
    usable = {"auto": kind, "cpu": "cpu", kind: kind}
    if name not in usable:
        error(f"--device {name}: this script can only use {', '.join(usable)} here")
    return usable[name]


def choose_nprocs(device, nprocs=None):
    """Processes to start: `nprocs`, or one per accelerator, or 2 on the CPU."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        error("start this script with python, not with torchrun")
    on_cpu = device_type(device, distributed=True) == "cpu"
    count = 2 if on_cpu else torch.accelerator.device_count()
    if nprocs and nprocs > count and not on_cpu:
        error(f"{nprocs} processes, {count} accelerators: try more with --device cpu")
    return nprocs or count


def set_device(name, local_rank=None, nprocs=1):
    """This rank's device, now the current one; `nprocs` share out the CPU's threads."""
    if local_rank is None and "TORCHELASTIC_RUN_ID" in os.environ:
        error("start this script with python, not with torchrun")
    kind = device_type(name, distributed=local_rank is not None)
    if kind == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // nprocs))
        return torch.device("cpu")
    device = torch.device(kind, local_rank or 0)
    try:
        torch.accelerator.set_device_index(device.index)
    except RuntimeError as reason:
        error(f"cannot use {device}: {str(reason).splitlines()[0]}. Try --device cpu")
    return device


def spawn(main, args, nprocs):
    """`torch.multiprocessing.spawn`, which ends in silence if a rank called `error`."""
    # Ranks end with this process, by SIGINT, which a shell script's `&` would ignore.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        torch.multiprocessing.spawn(main, args, nprocs)
    except torch.multiprocessing.ProcessExitedException as end:
        if end.exit_code != 2:
            raise
        sys.exit(2)


def check_objects(train_set, eval_set, model, optimizer, batch_size):
    """End with one line if ranks cannot train on what `load_train_objs` returns."""
    parameters = set(model.parameters())
    for group in optimizer.param_groups:
        if set(group["params"]) - parameters:
            error("the optimizer has parameters that the model does not have")
    sizes = gather((len(train_set), len(eval_set)))
    if len(set(sizes)) > 1:
        error(f"ranks have different numbers of (training, held-out) samples: {sizes}")
    samples, held_out = sizes[0]
    step = len(sizes) * batch_size
    if step > samples or held_out == 0:
        error(f"too few: a step takes {step} of {samples} samples, {held_out} held out")


def sum_of_weights(model):
    """The sum of the weights' absolute values."""
    total = 0
    for weight in model.parameters():
        weight_sum = weight.detach().abs().float().sum()
        if hasattr(weight_sum, "full_tensor"):  # each rank has a part of the weight
            weight_sum = weight_sum.full_tensor()
        total += weight_sum.item()
    return total


def check_weights(loss, model, epochs_run, path):
    """End with a line if `loss` or weights are NaN, or differ between ranks by 1e-5."""
    sums = gather(sum_of_weights(model))
    all_are_finite = math.isfinite(loss + sum(sums))
    if not all_are_finite or max(sums) > 1.00001 * min(sums):
        by_rank = ", ".join(f"{weights:.6g}" for weights in sums)
        found = f"loss {loss:.6f}, weights by rank {by_rank}"
        error(f"epoch {epochs_run}: {found}, not saved to {path}")


def save_atomically(snapshot, path):
    """Write so that a kill at any moment leaves the old snapshot or the new one."""
    path = os.path.realpath(path)  # if `path` is a link, the file that it leads to
    temporary = f"{path}.{os.urandom(4).hex()}.tmp"  # two runs may save at once
    try:
        with open(temporary, "xb") as file:
            torch.save(snapshot, file)
            file.flush()
            os.fsync(file.fileno())  # now it is on the disk, also if the power fails
        # A run that resumes loads it so. With mmap, this reads no tensors.
        torch.load(temporary, map_location="cpu", weights_only=True, mmap=True)
        if os.path.exists(path) and os.path.getmtime(path) != last_seen.get(path):
            error(f"another run saves to {path}, too: choose another --snapshot-path")
        os.replace(temporary, path)
        last_seen[path] = os.path.getmtime(path)
    except (OSError, RuntimeError) as reason:  # RuntimeError: torch's, on a full disk
        raise OSError(f"{path} is not written, the old one is kept") from reason
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def read_snapshot(path, mmap=False, counter="EPOCHS_RUN"):
    """The snapshot at `path`, on the CPU, or None. With `mmap`, it is read on use."""
    if not os.path.exists(path):
        return None
    last_seen[os.path.realpath(path)] = os.path.getmtime(path)
    try:
        snapshot = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        if not {"MODEL_STATE", "OPTIMIZER_STATE", counter} <= snapshot.keys():
            raise ValueError(f"it has {', '.join(snapshot)}")
        return snapshot
    except Exception as reason:
        error(f"{path} is cut short or no snapshot: {reason!r:.200}")


def broadcast_snapshot(path, src):
    """Rank `src`'s snapshot at `path`, on every rank."""
    is_source = dist.get_rank() == src
    with open(path, "rb") if is_source else tempfile.TemporaryFile() as file:
        # In parts of 4 MB: a whole one would be in memory several times.
        while True:
            part = file.read(4 * 2**20) if is_source else None
            received = [part]
            dist.broadcast_object_list(received, src)
            part = received[0]
            if part == b"":  # the end of the file
                break
            if not is_source:
                file.write(part)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)


def shapes(state):
    """[(name, shape)] of a model's state, in order: optimizers go by number."""
    return [(name, getattr(value, "shape", ())) for name, value in state.items()]


def lengths(groups):
    """How many parameters are in each of an optimizer's groups."""
    return [len(group["params"]) for group in groups]


def check_snapshot(snapshot, model, optimizer, path):
    """End with one line unless `snapshot` fits; print the settings that it replaces."""
    hint = "choose another --snapshot-path"
    if shapes(snapshot["MODEL_STATE"]) != shapes(model.state_dict()):
        error(f"{path} belongs to another model: {hint}")
    old_groups = snapshot["OPTIMIZER_STATE"]["param_groups"]
    new_groups = optimizer.state_dict()["param_groups"]
    if lengths(old_groups) != lengths(new_groups):
        error(f"{path} belongs to an optimizer of other parameter groups: {hint}")
    for old, new in zip(old_groups, new_groups, strict=True):
        for name, value in new.items():
            # An older PyTorch may not have saved all options that are bools or None.
            if name not in old and type(value) in (int, float, tuple):
                error(f"{path} belongs to another optimizer, without {name}: {hint}")
        if get_rank() == 0:
            print_replaced(old, new, path)


def print_replaced(old, new, path):
    """Print the settings of a group of parameters that a snapshot replaces."""
    for name, value in new.items():
        saved = old.get(name, value)
        # A schedule keeps there what it began with. If this run has a schedule, it sets
        # the value itself.
        initial = f"initial_{name}"
        if saved != value and initial not in new:
            by = " by schedule" if old.get(initial) == value else ""
            print(f"{name} is {saved} as in {path}{by}, not {value} as here")


def describe_run(train_data, eval_data, device):
    """What is about to run, in a line."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    # Fewer than ranks if some ranks share a batch
    replicas = getattr(train_data.sampler, "num_replicas", ranks)
    batch = train_data.batch_size
    line = f"{ranks} x {device.type}, batch {batch} each: effective batch"
    line += f" {replicas * batch}, {len(train_data)} steps per epoch,"
    line += f" {len(train_data.dataset)} samples, {len(eval_data.dataset)} held out"
    noise_floor = getattr(eval_data.dataset, "noise_floor", None)
    if noise_floor:
        line += f" (noise floor {noise_floor})"
    return line


def progress(epochs_run, total_epochs, path):
    """How many epochs are finished, in a line. Without snapshots, `path` is None."""
    where = f" in {path}" if path else ""
    line = f"{epochs_run} of {total_epochs} epochs are finished{where}"
    return f"nothing to do: {line}" if epochs_run >= total_epochs else line
