"""How many bytes a rank holds for each parameter of a model, with AdamW.

torchrun --standalone --nproc-per-node=4 docs/sharding/memory.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # see utils.py
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

WIDTH, BLOCKS, BATCH = 64, 15, 512


class Model(torch.nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = torch.nn.ModuleList()
        for _ in range(BLOCKS):
            layers = torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()
            self.blocks.append(torch.nn.Sequential(*layers))

    def forward(self, x):
        for block in self.blocks:
            if self.checkpointed:  # keep x alone, and compute the rest once more
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x


def held_by(model, optimizer):
    """The bytes of this rank's weights, gradients and optimizer state."""
    weights = list(model.parameters())
    state = getattr(optimizer, "optim", optimizer).state  # ZeRO-1's inner optimizer
    tensors = weights + [x.grad for x in weights]
    tensors += [x for y in state.values() for x in y.values()]
    return sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in tensors)


def kept_by(model):
    """The bytes that the forward pass leaves for the backward pass."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        output = model(torch.ones(BATCH, WIDTH))
    events = trace.profiler.kineto_results.events()
    output.mean().backward()
    return sum(x.nbytes() for x in events if x.name() == "[memory]")


def prepare(way, checkpointed):
    model = Model(checkpointed)
    if way in ("FSDP", "HSDP"):
        shape = (2, ranks // 2) if way == "HSDP" else (1, ranks)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        for part in [*model.blocks, model]:
            fully_shard(part, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    if way == "ZeRO-1":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    else:
        optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(BATCH, WIDTH)).mean().backward()
        optimizer.step()
    return model, optimizer


def measure(way, formula, checkpointed=False):
    model, optimizer = prepare(way, checkpointed)
    held = held_by(model, optimizer) / (BLOCKS * (WIDTH + 1) * WIDTH)
    kept = kept_by(model) / (BLOCKS * BATCH * WIDTH)
    name = f"{way}, checkpointing" if checkpointed else way
    return f"{name:20} | {formula:7.1f} | {held:8.1f} | {kept:11.1f}"


if __name__ == "__main__":
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    lines = [
        "way                  | formula | measured | activations",
        measure("DDP", 4 + 4 + 8),
        measure("ZeRO-1", 4 + 4 + 8 / ranks),
        measure("HSDP", (4 + 4 + 8) / (ranks // 2)),
        measure("FSDP", (4 + 4 + 8) / ranks),
        measure("FSDP", (4 + 4 + 8) / ranks, checkpointed=True),
    ]
    if dist.get_rank() == 0:
        print("\n".join(lines))
    dist.destroy_process_group()
