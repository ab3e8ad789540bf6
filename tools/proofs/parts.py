"""Snapshots in parts: a file that names a folder of torch.distributed.checkpoint."""

import tempfile

from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tools.proofs.results import load


def put_together(snapshot, beside):
    """The plain snapshot that `snapshot` would be, whose FOLDER is in `beside`."""
    snapshot.pop("SHAPES")
    with tempfile.NamedTemporaryFile() as whole:
        dcp_to_torch_save(beside / snapshot.pop("FOLDER"), whole.name)
        snapshot |= load(whole.name)
    optimizer = snapshot["OPTIMIZER_STATE"]  # with names, where others have numbers
    names = [x for group in optimizer["param_groups"] for x in group["params"]]
    optimizer["state"] = {names.index(k): x for k, x in optimizer["state"].items()}
    for group in optimizer["param_groups"]:
        group["params"] = [names.index(x) for x in group["params"]]
    return snapshot
