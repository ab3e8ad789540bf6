"""step1.py, repeatable and resumable: the last step on one device.

python docs/convert/step2.py
"""

import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, random_split

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
    return running / len(loader)


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    correct = 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        correct += (model(images).argmax(1) == labels).sum().item()
    return correct / len(loader.dataset)


def save_atomically(snapshot, path):
    """A kill at any moment leaves the old file or the new one, whole."""
    with open(f"{path}.tmp", "wb") as file:
        torch.save(snapshot, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)


def main():
    torch.manual_seed(0)  # before the data, the split and the first weights are drawn
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set, val_set = random_split(make_data(1250), [1000, 250])
    # Whole batches only, so that every step averages over equally many samples.
    sampler = RandomSampler(train_set, generator=torch.Generator())
    train_loader = DataLoader(
        train_set, batch_size=BATCH_SIZE, sampler=sampler, drop_last=True
    )
    val_loader = DataLoader(val_set, batch_size=BATCH_SIZE)

    model = make_model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

    epochs_run = 0
    if os.path.exists(SNAPSHOT):
        snapshot = torch.load(SNAPSHOT, map_location="cpu", weights_only=True)
        model.load_state_dict(snapshot["MODEL_STATE"])
        optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        epochs_run = snapshot["EPOCHS_RUN"]
        print(f"resuming: {epochs_run} of {EPOCHS} epochs are finished")

    for epoch in range(epochs_run, EPOCHS):
        # Order and random numbers follow from the epoch: a resumed run repeats them.
        sampler.generator.manual_seed(epoch)
        torch.manual_seed(epoch)

        loss = train_epoch(model, train_loader, optimizer, device)
        accuracy = evaluate(model, val_loader, device)
        print(f"epoch {epoch + 1}/{EPOCHS} loss {loss:.4f} accuracy {accuracy:.4f}")
        snapshot = {
            "MODEL_STATE": model.state_dict(),
            "OPTIMIZER_STATE": optimizer.state_dict(),
            "EPOCHS_RUN": epoch + 1,
        }
        save_atomically(snapshot, SNAPSHOT)
        print(f"saved to {SNAPSHOT}")


if __name__ == "__main__":
    main()
