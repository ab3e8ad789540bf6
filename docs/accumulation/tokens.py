"""A loss that is a mean over tokens, on several ranks and in micro-batches.

torchrun --standalone --nproc-per-node=2 docs/accumulation/tokens.py

Twelve sentences of one to twelve real tokens are padded to twelve. For three ways to
divide the loss, rank 0 prints how far the gradient is from the gradient of one process
that has all sentences in one batch. In float64, so that no rounding hides a mistake.
"""

import contextlib
import functools
import gc
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the process group is made
import torch.nn.functional as F

PAD = -100  # cross_entropy leaves out the tokens with this label
MICRO = 2  # sentences of a micro-batch


def make_data():
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(50, (2, 12, 12), generator=generator)
    lengths = torch.tensor([1, 7, 2, 8, 3, 9, 4, 10, 5, 11, 6, 12])
    labels[torch.arange(12) >= lengths[:, None]] = PAD
    return tokens, labels


def make_model():
    torch.manual_seed(0)
    layers = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50), torch.nn.Flatten(0, 1)
    return torch.nn.Sequential(*layers).double()


def gradient(model):
    return torch.cat([x.grad.flatten() for x in model.parameters()])


def divided(logits, labels, total, world_size):
    loss_sum = F.cross_entropy(logits, labels, ignore_index=PAD, reduction="sum")
    return loss_sum * world_size / total


def accumulate(ddp_model, micro_batches, loss_fn):
    """The gradient of this rank's micro-batches, averaged over the ranks by DDP."""
    ddp_model.zero_grad()
    for i, (tokens, labels) in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        with contextlib.nullcontext() if last else ddp_model.no_sync():
            loss_fn(ddp_model(tokens), labels.flatten()).backward()
    return gradient(ddp_model)


def compare():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tokens, labels = make_data()
    model = make_model()
    F.cross_entropy(model(tokens), labels.flatten(), ignore_index=PAD).backward()
    expected = gradient(model)

    ddp_model = torch.nn.parallel.DistributedDataParallel(make_model())
    shares = tokens[rank::world_size], labels[rank::world_size]
    micro_batches = list(zip(*(x.split(MICRO) for x in shares), strict=True))

    def mean_of_means(logits, labels):
        loss = F.cross_entropy(logits, labels, ignore_index=PAD)
        return loss / len(micro_batches)

    total = sum((labels != PAD).sum() for _, labels in micro_batches)
    ways = {
        "the mean of all means": mean_of_means,
        "divided by this rank's tokens": functools.partial(
            divided, total=total.clone(), world_size=1
        ),
    }
    dist.all_reduce(total)
    all_ranks = functools.partial(divided, total=total, world_size=world_size)
    ways["divided by all ranks' tokens"] = all_ranks
    for way, loss_fn in ways.items():
        found = accumulate(ddp_model, micro_batches, loss_fn)
        error = (found - expected).norm() / expected.norm()
        if rank == 0:
            print(f"{way}: gradient error {100 * error:.6f} %")


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    compare()
    gc.collect()  # the DDP models go before the process group, or the exit may hang
    dist.destroy_process_group()
