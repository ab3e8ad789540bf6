"""Leave each rank a part of the model and of its optimizer: FSDP2, for --shard."""

import torch
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor


def shard(model, optimizer, device, dtype, cpu_group):
    """Divide a model on the CPU, and the state of its optimizer, among all ranks.

    dtype: the model computes in it. The weights that are trained keep their own.
    """
    whole = list(model.parameters())
    for x in whole:  # as DDP does: ranks may have drawn different weights
        dist.broadcast(x.data, src=0, group=cpu_group)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    half = dtype if dtype.itemsize < 4 else None  # so that half as many bytes are sent
    policy = fsdp.MixedPrecisionPolicy(half, reduce_dtype=half and torch.float32)
    lists = [x for x in model.modules() if isinstance(x, torch.nn.ModuleList)]
    for part in [*(block for x in lists for block in x), model]:
        fsdp.fully_shard(part, mesh=mesh, mp_policy=policy)
    fsdp.register_fsdp_forward_method(model, "generate")  # it does not call forward
    parts = dict(zip(whole, model.parameters(), strict=True))
    for group in optimizer.param_groups:  # or it would train the old parameters
        group["params"] = [parts[x] for x in group["params"]]
    for one in getattr(optimizer, "optimizers", [optimizer]):
        states = {parts[x]: state for x, state in one.state.items()}
        one.state.clear()
        for part, state in states.items():
            one.state[part] = {name: like(part, x) for name, x in state.items()}


def like(part, x):
    """What belongs to this rank's part of a parameter."""
    if x.shape != part.shape:  # such as the step of Adam
        return x.to(part.device)
    return distribute_tensor(x, part.device_mesh, part.placements, src_data_rank=None)
