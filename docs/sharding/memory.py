"""How many bytes a rank holds for each parameter of a model, with AdamW.

torchrun --standalone --nproc-per-node=4 docs/sharding/memory.py
"""

import functools

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # see utils.py
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint_sequential

WIDTH, BLOCKS, BATCH = 64, 16, 1024


def make_model():
    layers = [(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(BLOCKS)]
    return torch.nn.Sequential(*[torch.nn.Sequential(*pair) for pair in layers])


def held(way):
    """Bytes of this rank's weights, gradients and optimizer state, by parameter."""
    model, make = make_model(), torch.optim.AdamW
    if way in ("FSDP", "HSDP"):
        shape = (2, ranks // 2) if way == "HSDP" else (1, ranks)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        for part in [*model, model]:
            fully_shard(part, mesh=mesh)
        optimizer = make(model.parameters())
    else:
        model = DistributedDataParallel(model)
        optimizer = make(model.parameters())
        if way == "ZeRO-1":
            optimizer = ZeroRedundancyOptimizer(model.parameters(), make)
    model(torch.ones(BATCH, WIDTH)).mean().backward()
    optimizer.step()
    weights = list(model.parameters())
    states = getattr(optimizer, "optim", optimizer).state.values()  # ZeRO-1 has .optim
    tensors = weights + [x.grad for x in weights]
    tensors += [x for state in states for x in state.values()]
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    return sum(x.nbytes for x in local) / (BLOCKS * (WIDTH + 1) * WIDTH)


def kept(forward):
    """Bytes that a forward pass keeps for each number that a layer puts out."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        _ = forward(torch.ones(BATCH, WIDTH))
    events = trace.profiler.kineto_results.events()
    allocated = sum(x.nbytes() for x in events if x.name() == "[memory]")
    return allocated / (BLOCKS * BATCH * WIDTH)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    formulas = {"DDP": 16, "ZeRO-1": 8 + 8 / ranks, "HSDP": 32 / ranks}
    formulas["FSDP"] = 16 / ranks
    lines = [f"{x:7}| formula {y:4.1f} | {held(x):4.1f}" for x, y in formulas.items()]
    model = make_model()
    lines.append(f"activations, all kept     | {kept(model):.1f}")
    checkpointed = functools.partial(checkpoint_sequential, model, BLOCKS)
    again = kept(functools.partial(checkpointed, use_reentrant=False))
    lines.append(f"activations, checkpointed | {again:.1f}")
    if dist.get_rank() == 0:
        print("\n".join(lines))
    dist.destroy_process_group()
