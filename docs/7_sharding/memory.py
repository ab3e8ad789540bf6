"""How many bytes a rank holds for each parameter of a model, with AdamW.

torchrun --standalone --nproc-per-node=4 -m docs.7_sharding.memory
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # see utils.py
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrap
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from mingpt.model import GPT, Block, GPTConfig

# As in the smallest GPT-2, the embedding is five times as large as a block.
CONFIG = GPTConfig(block_size=64, vocab_size=4096, n_layer=12, n_head=4, n_embd=64)
BATCH = (16, CONFIG.block_size, CONFIG.n_embd)


def held(way):
    """Bytes of this rank's weights, gradients and optimizer state, by parameter."""
    model, make = torch.nn.Sequential(*GPT(CONFIG).transformer.h), torch.optim.AdamW
    size = sum(x.numel() for x in model.parameters())
    if way in ("FSDP", "HSDP"):
        shape = (2, W // 2) if way == "HSDP" else (1, W)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        for part in [*model, model]:
            fully_shard(part, mesh=mesh)
        optimizer = make(model.parameters())
    else:
        model = DistributedDataParallel(model)
        optimizer = make(model.parameters())
        if way == "ZeRO-1":
            optimizer = ZeroRedundancyOptimizer(model.parameters(), make)
    model(torch.ones(BATCH)).mean().backward()
    optimizer.step()
    weights = list(model.parameters())
    states = getattr(optimizer, "optim", optimizer).state.values()  # ZeRO-1 has .optim
    tensors = weights + [x.grad for x in weights]
    tensors += [x for state in states for x in state.values()]
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    return sum(x.nbytes for x in local) / size


def whole(*names):
    """The share of a GPT that is whole after a forward pass. `names`: sharded alone."""
    model = GPT(CONFIG)
    model.lm_head = torch.nn.Linear(64, 4096, bias=False)  # its own weights
    size = sum(x.numel() for x in model.parameters())
    for part in [*model.transformer.h, *map(model.get_submodule, names), model]:
        fully_shard(part, mesh=init_device_mesh("cpu", (W,)))
    model(torch.zeros(BATCH[:2], dtype=torch.long))
    return sum(x.numel() for x in model.parameters() if type(x) is not DTensor) / size


def kept(model):
    """Bytes that a forward pass keeps for each number that a block puts out."""
    x = torch.ones(BATCH)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        _ = model(x)
    events = trace.profiler.kineto_results.events()
    allocated = sum(x.nbytes() for x in events if x.name() == "[memory]")
    return allocated / (len(model) * x.numel())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    W = dist.get_world_size()
    formulas = {"DDP": 16, "ZeRO-1": 8 + 8 / W, "HSDP": 32 / W, "FSDP": 16 / W}
    lines = [f"{x:7}| formula {y:4.1f} | {held(x):4.1f}" for x, y in formulas.items()]
    root, ends = whole(), whole("transformer.wte", "lm_head")
    lines.append(f"whole after forward       | {root:.0%}; both ends alone, {ends:.0%}")
    model = torch.nn.Sequential(*GPT(CONFIG).transformer.h)
    lines.append(f"activations, all kept     | {kept(model):.1f}")
    wrap.apply_activation_checkpointing(model, check_fn=lambda x: isinstance(x, Block))
    lines.append(f"activations, checkpointed | {kept(model):.1f}")
    if dist.get_rank() == 0:
        print("\n".join(lines))
    dist.destroy_process_group()
