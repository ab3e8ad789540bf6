"""What a run has printed and saved, ready to be compared."""

import re
import tempfile
from pathlib import Path

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def losses(done):
    """[(train loss, held-out loss) of each epoch printed]."""
    pairs = re.findall(r"train loss (\S+) \| held-out loss (\S+)", done.stdout)
    return [tuple(map(float, pair)) for pair in pairs]


def load(place):
    """The snapshot at `place`, a file, or snapshot.pt in a folder.

    It is put together if it is in parts.
    """
    path = Path(place)
    if path.is_dir():
        path = path / "snapshot.pt"
    folders = {}  # {epochs: such a folder}, of torch.distributed.checkpoint
    for metadata in path.parent.glob(f"{path.name}.*/.metadata"):
        epochs = metadata.parent.suffixes[-2]  # before a random name
        folders[int(epochs.removeprefix("."))] = metadata.parent
    if folders:
        newest = max(folders)
        return put_together(folders[newest]) | {"EPOCHS_RUN": newest}
    return torch.load(path, map_location="cpu", weights_only=True)


def put_together(folder):
    """The model and the optimizer of a snapshot in parts, as a plain one has them."""
    with tempfile.NamedTemporaryFile() as whole:
        dcp_to_torch_save(folder, whole.name)
        snapshot = torch.load(whole.name, map_location="cpu", weights_only=True)
    optimizer = snapshot["OPTIMIZER_STATE"]
    numbers = {}  # which a plain snapshot has in place of names
    for group in optimizer["param_groups"]:
        for name in group["params"]:
            numbers[name] = len(numbers)
        group["params"] = [numbers[name] for name in group["params"]]
    order = snapshot.pop("NAMES")  # otherwise, buffers would be the last
    snapshot["MODEL_STATE"] = {name: snapshot["MODEL_STATE"][name] for name in order}
    state = optimizer["state"]
    optimizer["state"] = {numbers[name]: state[name] for name in state}
    return snapshot


def weights(place):
    """All the weights in a snapshot, as one float64 tensor of shape (n,)."""
    state = load(place)["MODEL_STATE"]
    return torch.cat([weight.double().flatten() for weight in state.values()])


def same_bits(one, other):
    """Whether two snapshots hold the same: keys, weights, optimizer state, epochs."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return same_bits([*one.items()], [*other.items()])
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return one == other
