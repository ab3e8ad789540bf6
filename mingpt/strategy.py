"""What a rank has of the model: all of it, or a part of each weight (--shard).

`mingpt.train.choose_strategy` chooses Strategy, Sharded or `mingpt.split.Split`, and
all else uses each of them in the same way.
"""

import contextlib
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


class Strategy:
    """Each rank has the whole model. The others change what is different for them."""

    replica_size = 1  # how many ranks share a batch: together they are one replica
    data_group = None  # the ranks that average gradients: all

    def distribute(self, model, device):
        """Move what this rank has of the model to the device.

        All ranks call it, before they make the optimizer.
        """
        model.to(device)

    def wrap(self, model):
        """What computes a batch's loss. DDP averages the gradients in its backward."""
        if dist.get_world_size() == self.replica_size:
            return model  # there is no other replica to average with
        return DistributedDataParallel(model, process_group=self.data_group)

    def micro_batch(self, wrapped_model, is_last):
        """The context of forward and backward. DDP sends the gradients of the last."""
        if is_last or not isinstance(wrapped_model, DistributedDataParallel):
            return contextlib.nullcontext()
        return wrapped_model.no_sync()

    def part_of(self, saved, weight):
        """What this rank has of a value that was saved for a weight."""
        return utils.part_of(saved, weight)

    def whole_of(self, value, weight):
        """A copy of what was a weight's, whole, on rank 0's CPU. All ranks call it."""
        if not isinstance(value, torch.Tensor):
            return value
        if isinstance(value, DTensor):
            value = value.full_tensor()
        return value.to("cpu", copy=True) if dist.get_rank() == 0 else None

    def named_weights(self, model):
        """Pairs. All ranks with one name should have the same weight."""
        return model.named_parameters()

    def clip_grad_norm_(self, model, max_norm):
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


class Sharded(Strategy):
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
            for weight in module.parameters():
                if not isinstance(weight, DTensor):  # it is in no block before
                    dist.broadcast(weight.detach(), src=0)  # all start from rank 0's
            fully_shard(module, mesh=mesh, mp_policy=self.policy)
        register_fsdp_forward_method(model, "generate")  # it calls no forward

    def wrap(self, model):
        return model  # FSDP averages the gradients


@torch.no_grad()
def change_tensors(snapshot, model, optimizer, change):
    """The snapshot with `change(value, weight)` for each value that a weight has there.

    change: `part_of` or `whole_of` of a Strategy.
    """
    weights = model.state_dict(keep_vars=True)
    changed = {}  # {id of a value: what became of it}, so that tied ones stay tied
    model_state = {}
    for name, value in snapshot["MODEL_STATE"].items():
        if id(value) not in changed:
            # There is no weight if the snapshot is another model's.
            changed[id(value)] = change(value, weights.get(name))
        model_state[name] = changed[id(value)]
    state = change_averages(snapshot["OPTIMIZER_STATE"], optimizer, change)
    return snapshot | {"MODEL_STATE": model_state, "OPTIMIZER_STATE": state}


def change_averages(state, optimizer, change):
    """The same for an optimizer's state, such as its averages of gradients."""
    if "optimizers" in state:  # it is mingpt.modern's
        pairs = zip(state["optimizers"], optimizer.optimizers, strict=True)
        states = [change_averages(*pair, change) for pair in pairs]
        return state | {"optimizers": states}
    groups = [group["params"] for group in optimizer.param_groups]
    weights = dict(enumerate(itertools.chain(*groups)))
    averages = {}
    for number, values in state["state"].items():
        weight = weights.get(number)
        averages[number] = {
            name: change(value, weight) for name, value in values.items()
        }
    return state | {"state": averages}
