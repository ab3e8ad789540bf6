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
rank = dist.get_rank()
world_size = dist.get_world_size()
torch.manual_seed(0)
layers = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50), torch.nn.Flatten(0, 1)
model = torch.nn.Sequential(*layers).double()
ddp_model = torch.nn.parallel.DistributedDataParallel(model)
tokens, labels = torch.randint(50, (2, 12, 12))
lengths = torch.tensor([1, 7, 2, 8, 3, 9, 4, 10, 5, 11, 6, 12])
labels[torch.arange(12) >= lengths[:, None]] = PAD


def gradient():
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


F.cross_entropy(model(tokens), labels.flatten()).backward()
expected = gradient()

tokens = tokens[rank::world_size].split(2)  # this rank's micro-batches
labels = [its.flatten() for its in labels[rank::world_size].split(2)]
counts = [(its != PAD).sum() for its in labels]
total = sum(counts)
dist.all_reduce(total)
pieces = len(counts)
ways = {  # what the sum over each micro-batch is divided by
    "the mean of all means": [count * pieces for count in counts],
    "divided by this rank's tokens": [sum(counts)] * pieces,
    "divided by all ranks' tokens": [total / world_size] * pieces,
}
for way, divisors in ways.items():
    ddp_model.zero_grad()
    for i in range(pieces):
        last = i == pieces - 1
        with contextlib.nullcontext() if last else ddp_model.no_sync():
            output = ddp_model(tokens[i])
            loss = F.cross_entropy(output, labels[i], reduction="sum") / divisors[i]
            loss.backward()
    found = gradient()
    if rank == 0:
        error = (found - expected).norm() / expected.norm()
        print(f"{way}: gradient error {100 * error:.6f} %")
del ddp_model  # it goes before the process group, or the exit may hang
dist.destroy_process_group()
