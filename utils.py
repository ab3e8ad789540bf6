"""What no rung teaches: the data set, the command line, the device, the snapshot file.

The same for every rung. Whatever a lesson changes stands in the scripts, in sight.
"""

import argparse
import contextlib
import io
import os
import sys
import time

import torch

# A gloo thread that outlives the training can abort or hang the process at exit. This
# module keeps the process group alive if it is imported, as DDP does, after the group
# is made (https://github.com/pytorch/pytorch/issues/190489): so it is imported before.
import torch.distributed.nn.functional
from torch.utils.data import Dataset


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


def fail(message):
    """End the program with one line on stderr and exit status 2: the input is bad."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # All processes of a machine find the same fault. The first says so, and while
        # the others wait, torchrun ends them; if it found none, they speak after all.
        time.sleep(5)
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr)
    sys.exit(2)


def positive_int(text):
    """`text` as an int of 1 or more, else the error that argparse makes a line of."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def make_parser(doc):
    """The command line that all rungs share; `doc` is the script's docstring."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = fail
    parser.add_argument("total_epochs", type=positive_int, help="when to stop")
    parser.add_argument("save_every", type=positive_int, help="epochs per snapshot")
    parser.add_argument(
        "--batch-size",
        "--batch_size",
        type=positive_int,
        default=32,
        help="samples in a step of one process (default: 32)",
    )
    parser.add_argument(
        "--snapshot-path",
        "--snapshot_path",
        default="snapshot.pt",
        help="where to save to and resume from (default: snapshot.pt)",
    )
    return parser


def torchrun_env():
    """torchrun's RANK, LOCAL_RANK and WORLD_SIZE as ints, else one line and exit 2."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    script = os.path.basename(sys.argv[0])
    command = f"torchrun --standalone --nproc-per-node=2 {script} 50 10"
    if len(missing) == len(names):
        fail(f"torchrun starts this script, python does not. Type: {command}")
    if missing:
        fail(f"not set: {', '.join(missing)}. torchrun sets them all: {command}")
    try:
        return [int(os.environ[name]) for name in names[:3]]
    except ValueError as error:
        fail(f"RANK, LOCAL_RANK or WORLD_SIZE is not a number: {error}")


def check_run(args, train_set, eval_set, model, *_, world_size=1):
    """End with one line and exit status 2 if this run cannot work; change no file.

    After `args` comes what `load_train_objs` returns; the rest of it is not looked at.
    """
    devices = torch.accelerator.device_count()
    # Of one machine's processes, torchrun says how many there are; others at least
    # which this one is. If neither is said, all processes are on this machine.
    nprocs = int(os.environ.get("LOCAL_RANK", world_size - 1)) + 1
    nprocs = int(os.environ.get("LOCAL_WORLD_SIZE", nprocs))
    if nprocs > devices > 0:
        fail(f"{nprocs} processes here need {nprocs} accelerators: there is {devices}")
    if world_size * args.batch_size > len(train_set):
        fail(
            f"one step takes {world_size} x {args.batch_size} samples and there are "
            f"{len(train_set)}: lower --batch-size or the number of processes"
        )
    if len(eval_set) == 0:
        fail("there is no held-out sample")
    path = os.path.realpath(args.snapshot_path)
    if not args.snapshot_path or (os.path.exists(path) and not os.path.isfile(path)):
        fail(f"cannot write {args.snapshot_path!r}: that is no file")
    try:
        left_by_a_kill = os.path.exists(f"{path}.tmp")
        open(f"{path}.tmp", "ab").close()
    except OSError as error:
        fail(f"cannot write {args.snapshot_path}.tmp: {error.strerror}")
    if not left_by_a_kill:
        with contextlib.suppress(FileNotFoundError):  # another process was quicker
            os.remove(f"{path}.tmp")
    if not os.path.exists(path):
        return
    cure = "delete it or choose another --snapshot-path"
    try:
        snapshot = read_snapshot(path)
        saved = {name: value.shape for name, value in snapshot["MODEL_STATE"].items()}
        snapshot["OPTIMIZER_STATE"]["param_groups"]
        if not snapshot["EPOCHS_RUN"] >= 0:
            raise ValueError
    except Exception:  # unreadable in one way or another: the cure is the same
        fail(f"{args.snapshot_path} is cut short or is no snapshot: {cure}")
    if saved != {name: value.shape for name, value in model.state_dict().items()}:
        fail(f"{args.snapshot_path} belongs to another model: {cure}")


def get_device(local_rank=0, nprocs=1):
    """The accelerator of this process, made its current one, or its share of the CPU.

    `nprocs` processes share out the CPU's threads; torchrun has done so already.
    """
    if not torch.accelerator.is_available():
        torch.set_num_threads(max(1, torch.get_num_threads() // nprocs))
        return torch.device("cpu")
    torch.accelerator.set_device_index(local_rank)
    return torch.device(torch.accelerator.current_accelerator().type, local_rank)


def save_atomically(snapshot, path):
    """Write so that a kill at any moment leaves the old file or the new one, whole.

    Beside, flushed to the disk, renamed into place: `os.replace` is atomic. A kill may
    leave `path`.tmp behind; the next save uses it up. Two runs need two paths.
    """
    path = os.path.realpath(path)  # a link to the file stays a link
    beside = f"{path}.tmp"
    with open(beside, "wb") as file:
        torch.save(snapshot, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def read_snapshot(path):
    """The snapshot at `path`, all on the CPU, or {"EPOCHS_RUN": 0} if there is none."""
    if not os.path.exists(path):
        return {"EPOCHS_RUN": 0}
    return torch.load(path, map_location="cpu", weights_only=True)


def to_tensor(snapshot):
    """`snapshot` as bytes in a uint8 tensor of shape (n,), ready to be broadcast."""
    file = io.BytesIO()
    torch.save(snapshot, file)
    # A clone owns its memory: a tensor that shares a buffer's could not be resized.
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8).clone()


def from_tensor(data):
    """What `to_tensor` made into `data`, on any device; the result is on the CPU."""
    buffer = bytearray(len(data))
    torch.frombuffer(buffer, dtype=torch.uint8).copy_(data)
    return torch.load(io.BytesIO(buffer), map_location="cpu", weights_only=True)


def print_run(trainer, total_epochs, world_size=1):
    """Say what is about to run. A rung that has more to say prints it afterwards."""
    train_data, eval_data = trainer.train_data, trainer.eval_data
    batch, path, done = train_data.batch_size, trainer.snapshot_path, trainer.epochs_run
    print(
        f"{world_size} x {trainer.device.type}, batch {batch} each: effective batch"
        f" {world_size * batch}, {len(train_data)} steps per epoch,"
        f" {len(train_data.dataset)} samples, {len(eval_data.dataset)} held out"
    )
    if done >= total_epochs:
        print(f"nothing to do: {path} has finished {done} of {total_epochs} epochs")
    elif done:
        print(f"resuming from {path}: {done} of {total_epochs} epochs are finished")
    else:
        print(f"starting with epoch 1: no epoch is finished in {path}", flush=True)


def print_epoch(trainer, total_epochs, train_loss, eval_loss, samples_per_s):
    """Say how the epoch went that has just finished."""
    floor = getattr(trainer.eval_data.dataset, "noise_floor", None)
    print(
        f"epoch {trainer.epochs_run}/{total_epochs} | train loss {train_loss:.6f}"
        f" | held-out loss {eval_loss:.6f}"
        + (f" (noise floor {floor:.6f})" if floor else "")
        + f" | {samples_per_s:,.0f} samples/s",
        flush=True,
    )
