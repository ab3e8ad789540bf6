"""Accumulate over the batches of a loader: the last group of an epoch may be shorter.

torchrun --standalone --nproc-per-node=2 docs/accumulation/groups.py

The loader of each rank has ten batches of eight samples and one of five, and every four
of them make a step. Rank 0 prints how far the weights are, after two epochs, from those
of one process that takes each group of all ranks as one batch. In float64.
"""

import contextlib
import gc
import itertools
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the process group is made
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATE, BATCH, SAMPLES = 4, 8, 85  # SAMPLES: of one rank
EPOCHS = 2


def make_model():
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 1).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def by_count(loader, ddp_model, optimizer):
    """What many scripts do: a step after every fourth batch, and each loss / 4."""
    for _ in range(EPOCHS):
        for i, (source, targets) in enumerate(loader, start=1):
            last = i % ACCUMULATE == 0
            with contextlib.nullcontext() if last else ddp_model.no_sync():
                loss = F.mse_loss(ddp_model(source), targets) / ACCUMULATE
                loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()


def by_group(loader, ddp_model, optimizer):
    """Each group knows its own batches and samples, and always ends with a step."""
    for _ in range(EPOCHS):
        batches = iter(loader)
        while group := list(itertools.islice(batches, ACCUMULATE)):
            samples = sum(len(source) for source, _ in group)
            optimizer.zero_grad()
            for i, (source, targets) in enumerate(group, start=1):
                last = i == len(group)
                with contextlib.nullcontext() if last else ddp_model.no_sync():
                    loss = F.mse_loss(ddp_model(source), targets)
                    (loss * len(source) / samples).backward()
            optimizer.step()


def in_one_process(source, targets):
    """The same steps with the batch of all ranks: what both should come out with."""
    model, optimizer = make_model()
    for _ in range(EPOCHS):
        for i in range(0, SAMPLES, ACCUMULATE * BATCH):
            big = slice(i, i + ACCUMULATE * BATCH)  # of each rank
            optimizer.zero_grad()
            loss = F.mse_loss(model(source[:, big]), targets[:, big])
            loss.backward()
            optimizer.step()
    return model.weight


def compare():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    size = (world_size, SAMPLES, 20)
    source = torch.randn(size, generator=generator, dtype=torch.float64)
    targets = source.sum(-1, keepdim=True)
    expected = in_one_process(source, targets)
    loader = DataLoader(TensorDataset(source[rank], targets[rank]), batch_size=BATCH)
    for way in (by_count, by_group):
        model, optimizer = make_model()
        ddp_model = torch.nn.parallel.DistributedDataParallel(model)
        way(loader, ddp_model, optimizer)
        apart = (model.weight - expected).abs().max()
        if rank == 0:
            print(f"{way.__name__}: weights {apart:.6f} from those of one process")


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    compare()
    gc.collect()  # the DDP models go before the process group, or the exit may hang
    dist.destroy_process_group()
