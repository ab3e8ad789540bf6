"""What a rank has of the model: all of it, or a part of each weight (--shard).

`mingpt.train.main` chooses Whole, Sharded or `mingpt.split.Split`. The Trainer uses
each of them in the same way.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from variants.fsdp import shard


class Parallel:
    """The base of these classes. DDP averages the gradients, except in Sharded."""

    replica_size = 1  # how many ranks share a batch: together they are one replica
    data_group = None  # the ranks that average gradients: all

    def distribute(self, model, optimizer, device):
        """After a snapshot is loaded, once. Returns what computes a batch's loss."""
        if dist.get_world_size() == self.replica_size:
            return model  # there is no other replica to average with
        return DistributedDataParallel(model, process_group=self.data_group)

    def named_weights(self, model):
        """{name: weight}. All ranks with one name should have the same weights."""
        return dict(model.named_parameters())

    def clip_grad_norm_(self, model, max_norm):
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def whole_copies(self, model, optimizer):
        """{`place_of` a part: the copy of the whole tensor}, which copy_to_cpu takes.

        All ranks call it, and rank 0 gets the copies. DTensors are not among them,
        because copy_to_cpu gathers those itself.
        """
        return {}


class Whole(Parallel):
    """Each rank has the whole model, on its device."""


class Sharded(Parallel):
    """Each rank has a part of each weight. FSDP gathers them, block by block."""

    def __init__(self, dtype):
        self.dtype = dtype

    def distribute(self, model, optimizer, device):
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy()
        if self.dtype != torch.float32:
            # The ranks send weights in 16 bits, and average gradients in 32.
            policy = MixedPrecisionPolicy(self.dtype, reduce_dtype=torch.float32)
        optimizers = getattr(optimizer, "optimizers", [optimizer])
        shard(model, mesh, *optimizers, mp_policy=policy)
        register_fsdp_forward_method(model, "generate")  # it calls no forward
        return model


def copy_to_cpu(value, copies):
    """`value`, all tensors in its dicts and lists copied, on rank 0.

    All ranks gather what is in parts, one tensor at a time. copies: {`place_of` a
    tensor: its copy}, of what is copied already. Therefore tied weights stay tied.
    """
    if isinstance(value, dict):
        return {name: copy_to_cpu(item, copies) for name, item in value.items()}
    if isinstance(value, list):
        return [copy_to_cpu(item, copies) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    whole = value
    if isinstance(value, DTensor):
        whole = value.full_tensor()  # all ranks take part, also those without a part
    if dist.get_rank() > 0:
        return None
    place = place_of(value)
    if place not in copies:
        copies[place] = whole.to("cpu", copy=True)
    return copies[place]


def place_of(tensor):
    """Where a tensor is in memory: two that are tied are at the same place."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.data_ptr(), part.dtype, part.shape, part.stride()


def forget_meshes(optimizer):
    """They hold the process group, and PyTorch keeps them in its caches."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if isinstance(weight, DTensor):
                vars(weight.device_mesh).clear()
