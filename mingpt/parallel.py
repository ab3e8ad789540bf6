"""What a rank has of the model: all of it, or a part of each weight (--shard).

`mingpt.train.main` chooses Whole, Sharded or `mingpt.split.Split`, and all else uses
each of them in the same way.
"""

import itertools

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import utils


class Parallel:
    """The base of these classes. Each has `distribute(model, device)`.

    It moves what this rank has of the model to the device. All ranks call it, before
    they make the optimizer.
    """

    replica_size = 1  # how many ranks share a batch: together they are one replica
    data_group = None  # the ranks that average gradients: all

    def wrap(self, model):
        """What computes a batch's loss. DDP averages the gradients in its backward."""
        if dist.get_world_size() == self.replica_size:
            return model  # there is no other replica to average with
        return DistributedDataParallel(model, process_group=self.data_group)

    def part_of(self, saved, name, weight):
        """What this rank has of a tensor that was saved for a weight, or of another."""
        return utils.part_of(saved, weight)

    def keep_parts(self, snapshot, model, optimizer):
        """Leave in a snapshot what this rank has of each tensor.

        The snapshot may be one of another model: `utils.check_snapshot` comes later,
        because it compares the shapes of parts.
        """
        weights = model.state_dict()
        state = snapshot["MODEL_STATE"]
        for name, saved in state.items():
            state[name] = self.part_of(saved, name, weights.get(name))
        names = {weight: name for name, weight in model.named_parameters()}
        # mingpt.modern has several optimizers in one.
        optimizers = getattr(optimizer, "optimizers", [optimizer])
        state = snapshot["OPTIMIZER_STATE"]
        states = state.get("optimizers", [state])
        for optimizer, state in zip(optimizers, states, strict=False):
            groups = [group["params"] for group in optimizer.param_groups]
            for number, weight in enumerate(itertools.chain(*groups)):
                averages = state["state"].get(number, {})
                for key, saved in averages.items():
                    averages[key] = self.part_of(saved, names[weight], weight)

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
    """Each rank has the whole model."""

    def distribute(self, model, device):
        model.to(device)


class Sharded(Parallel):
    """Each rank has a part of each weight. FSDP gathers them, block by block."""

    def __init__(self, dtype):
        self.policy = MixedPrecisionPolicy()
        if dtype != torch.float32:
            # The ranks send weights in 16 bits, and average gradients in 32.
            self.policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32)

    def distribute(self, model, device):
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        for module in [*model.transformer.h, model]:  # the model takes what is left
            # Only now, so that no device holds the whole model.
            module.to(device)
            for tensor in [*module.parameters(), *module.buffers()]:
                if not isinstance(tensor, DTensor):  # it is in no block before
                    dist.broadcast(tensor.detach(), src=0)  # all start from rank 0's
            fully_shard(module, mesh=mesh, mp_policy=self.policy)
        register_fsdp_forward_method(model, "generate")  # it calls no forward

    def wrap(self, model):
        return model  # FSDP averages the gradients


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
