"""How many bytes a rank holds for each parameter of a model, with AdamW.

torchrun --standalone --nproc-per-node=4 -m docs.7_sharding.memory
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # see utils.py
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrap
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from mingpt.model import GPT, GPTConfig

# As in the smallest GPT-2, the embedding is five times as large as a block.
CONFIG = GPTConfig(block_size=64, vocab_size=4096, n_layer=12, n_head=4, n_embd=64)
BATCH = (16, CONFIG.block_size, CONFIG.n_embd)


def held(way):
    """Bytes of this rank's weights, gradients and optimizer state, by parameter."""
    model = torch.nn.Sequential(*GPT(CONFIG).transformer.h)
    size = sum(weight.numel() for weight in model.parameters())
    if way in ("FSDP", "HSDP"):
        shape = (2, W // 2) if way == "HSDP" else (1, W)
        names = "replicate", "shard"
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
        for part in [*model, model]:
            fully_shard(part, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    if way == "ZeRO-1":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    model(torch.ones(BATCH)).mean().backward()
    optimizer.step()
    tensors = []
    for weight in model.parameters():
        tensors += [weight, weight.grad]
    own = getattr(optimizer, "optim", optimizer)  # ZeRO-1 has .optim
    for state in own.state.values():
        tensors += state.values()
    nbytes = 0
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        nbytes += tensor.nbytes
    return nbytes / size


def whole(*names):
    """The share of a GPT that is whole after a forward pass. `names`: sharded alone."""
    model = GPT(CONFIG)
    model.lm_head = torch.nn.Linear(64, 4096, bias=False)  # its own weights
    size = sum(weight.numel() for weight in model.parameters())
    alone = map(model.get_submodule, names)
    for part in [*model.transformer.h, *alone, model]:
        fully_shard(part, mesh=dist.init_device_mesh("cpu", (W,)))
    model(torch.zeros(BATCH[:2], dtype=torch.long))
    weights = [weight for weight in model.parameters() if type(weight) is not DTensor]
    return sum(weight.numel() for weight in weights) / size


def kept(model):
    """Bytes that a forward pass keeps for each number that a block puts out."""
    source = torch.ones(BATCH)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        _ = model(source)
    events = trace.profiler.kineto_results.events()
    allocated = sum(event.nbytes() for event in events if event.name() == "[memory]")
    return allocated / (len(model) * source.numel())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    W = dist.get_world_size()
    formulas = {"DDP": 16, "ZeRO-1": 8 + 8 / W, "HSDP": 32 / W, "FSDP": 16 / W}
    lines = []
    for way, formula in formulas.items():
        lines.append(f"{way:7}| formula {formula:4.1f} | {held(way):4.1f}")
    root = whole()
    ends = whole("transformer.wte", "lm_head")
    lines.append(f"whole after forward       | {root:.0%}; both ends alone, {ends:.0%}")
    model = torch.nn.Sequential(*GPT(CONFIG).transformer.h)
    lines.append(f"activations, all kept     | {kept(model):.1f}")
    model = torch.nn.Sequential(*map(wrap.checkpoint_wrapper, model))
    lines.append(f"activations, checkpointed | {kept(model):.1f}")
    if dist.get_rank() == 0:
        print("\n".join(lines))
    dist.destroy_process_group()
