"""A mean over tokens, on several ranks and in micro-batches: three ways to divide.

torchrun --standalone --nproc-per-node=2 docs/gradient_accumulation/tokens.py

Twelve sentences of 1 to 12 tokens are padded. Rank 0 prints how far each way's gradient
is from that of one process with all sentences in one batch, in float64.
"""

import contextlib

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the process group is made
import torch.nn.functional as F

PAD = -100  # the label of tokens that cross_entropy leaves out
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layers = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50), torch.nn.Flatten(0, 1)
model = torch.nn.Sequential(*layers).double()
ddp_model = torch.nn.parallel.DistributedDataParallel(model)
tokens, labels = torch.randint(50, (2, 12, 12))
lengths = torch.tensor([1, 7, 2, 8, 3, 9, 4, 10, 5, 11, 6, 12])
labels[torch.arange(12) >= lengths[:, None]] = PAD

F.cross_entropy(model(tokens), labels.flatten()).backward()
expected = torch.cat([x.grad.flatten() for x in model.parameters()])

mine = tokens[rank::world_size].split(2), labels[rank::world_size].split(2)
micro_batches = list(zip(*mine, strict=True))
counts = [(labels != PAD).sum() for _, labels in micro_batches]
total = sum(counts)
dist.all_reduce(total)
for way, divisors in {
    "the mean of all means": [x * len(counts) for x in counts],
    "divided by this rank's tokens": [sum(counts)] * len(counts),
    "divided by all ranks' tokens": [total / world_size] * len(counts),
}.items():
    ddp_model.zero_grad()
    for i, (tokens, labels) in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        with contextlib.nullcontext() if last else ddp_model.no_sync():
            sums = F.cross_entropy(ddp_model(tokens), labels.flatten(), reduction="sum")
            (sums / divisors[i]).backward()
    found = torch.cat([x.grad.flatten() for x in model.parameters()])
    if rank == 0:
        error = (found - expected).norm() / expected.norm()
        print(f"{way}: gradient error {100 * error:.6f} %")
del ddp_model  # it goes before the process group, or the exit may hang
dist.destroy_process_group()
