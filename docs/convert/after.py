"""step2.py on many devices: one process for each, gradients averaged.

torchrun --standalone --nproc-per-node=2 docs/convert/after.py
"""

import gc
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

# Imported before the process group is made: DDP would import it later, and it would
# keep the group alive to the end, where a thread of gloo can abort or hang the exit.
import torch.distributed.nn.functional
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    Subset,
    TensorDataset,
    random_split,
)

EPOCHS = 5
BATCH_SIZE = 64
SNAPSHOT = "stripes_snapshot.pt"


def make_data(n):
    """Noisy images of 12 x 12 pixels. The label is the direction of the stripes."""
    labels = torch.randint(4, (n,))
    y, x = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    waves = torch.stack([x, y, x + y, x - y])[labels]
    images = torch.sin(waves + 2 * torch.pi * torch.rand(n, 1, 1))
    images = images + 1.5 * torch.randn(n, 12, 12)
    return TensorDataset(images.unsqueeze(1), labels)


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3),
        nn.ReLU(),
        nn.AvgPool2d(4),
        nn.Flatten(),
        nn.Linear(64, 4),
    )


def sum_over_processes(values, device):
    """The sum of each of `values` over all processes. All of them must call this."""
    sums = torch.tensor(values, device=device)
    dist.all_reduce(sums)
    return sums.tolist()


def train_epoch(model, loader, optimizer, device):
    model.train()
    running = 0.0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        running += loss.item()
    running, steps = sum_over_processes([running, len(loader)], device)
    return running / steps


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    correct = 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        correct += (model(images).argmax(1) == labels).sum().item()
    correct, samples = sum_over_processes([correct, len(loader.dataset)], device)
    return correct / samples


def save_atomically(snapshot, path):
    """A kill at any moment leaves the old file or the new one, whole."""
    with open(f"{path}.tmp", "wb") as file:
        torch.save(snapshot, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)


def main():
    torch.manual_seed(0)  # before the data, the split and the first weights are drawn
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = torch.accelerator.current_accelerator()
    train_set, val_set = random_split(make_data(1250), [1000, 250])
    # Whole batches only, so that every step averages over equally many samples.
    sampler = DistributedSampler(train_set, drop_last=True)
    train_loader = DataLoader(
        train_set, batch_size=BATCH_SIZE // world_size, sampler=sampler, drop_last=True
    )
    val_set = Subset(val_set, range(rank, len(val_set), world_size))
    val_loader = DataLoader(val_set, batch_size=BATCH_SIZE)

    model = make_model().to(device)
    ddp_model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

    epochs_run = 0
    if os.path.exists(SNAPSHOT):
        snapshot = torch.load(SNAPSHOT, map_location="cpu", weights_only=True)
        model.load_state_dict(snapshot["MODEL_STATE"])
        optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        epochs_run = snapshot["EPOCHS_RUN"]
        if rank == 0:
            print(f"resuming: {epochs_run} of {EPOCHS} epochs are finished")

    for epoch in range(epochs_run, EPOCHS):
        # Order and random numbers follow from the epoch: a resumed run repeats them.
        sampler.set_epoch(epoch)
        torch.manual_seed(epoch * world_size + rank)

        loss = train_epoch(ddp_model, train_loader, optimizer, device)
        accuracy = evaluate(model, val_loader, device)
        if rank != 0:  # one process prints and saves
            continue
        print(f"epoch {epoch + 1}/{EPOCHS} loss {loss:.4f} accuracy {accuracy:.4f}")
        snapshot = {
            "MODEL_STATE": model.state_dict(),
            "OPTIMIZER_STATE": optimizer.state_dict(),
            "EPOCHS_RUN": epoch + 1,
        }
        save_atomically(snapshot, SNAPSHOT)
        print(f"saved to {SNAPSHOT}")


if __name__ == "__main__":
    if "RANK" not in os.environ:
        command = "torchrun --standalone --nproc-per-node=2"
        print(f"start this with: {command} {sys.argv[0]}", file=sys.stderr)
        sys.exit(2)
    dist.init_process_group(timeout=timedelta(minutes=5))
    main()
    gc.collect()  # the DDP model goes before its process group, or the exit may hang
    dist.destroy_process_group()
