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


def load(path):
    """The snapshot at `path`, put together if it is in parts."""
    snapshot = torch.load(path, map_location="cpu", weights_only=True)
    if "FOLDER" in snapshot:  # of torch.distributed.checkpoint, beside it
        put_together(snapshot, Path(path).parent / snapshot.pop("FOLDER"))
    return snapshot


def put_together(snapshot, folder):
    """Make `snapshot` the plain one of which `folder` has the parts."""
    snapshot.pop("SHAPES")
    with tempfile.NamedTemporaryFile() as whole:
        dcp_to_torch_save(folder, whole.name)
        snapshot |= load(whole.name)
    optimizer = snapshot["OPTIMIZER_STATE"]  # with names, where others have numbers
    numbers = {}
    for group in optimizer["param_groups"]:
        for name in group["params"]:
            numbers[name] = len(numbers)
        group["params"] = [numbers[name] for name in group["params"]]
    state = optimizer["state"]
    optimizer["state"] = {numbers[name]: state[name] for name in state}


def weights(path):
    """All the weights in a snapshot, as one float64 tensor of shape (n,)."""
    state = load(path)["MODEL_STATE"]
    return torch.cat([weight.double().flatten() for weight in state.values()])


def same_bits(one, other):
    """Whether two snapshots hold the same: keys, weights, optimizer state, epochs."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and same_bits(
            [*one.values()], [*other.values()]
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return one == other


def shape_of(snapshot):
    """Keys, types and shapes of all that is in a snapshot, without the values."""
    if isinstance(snapshot, torch.Tensor):
        return snapshot.dtype, snapshot.shape
    if isinstance(snapshot, dict):
        return {key: shape_of(value) for key, value in snapshot.items()}
    if isinstance(snapshot, list):
        return [shape_of(value) for value in snapshot]
    return type(snapshot)
