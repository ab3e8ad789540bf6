"""Fine-tune a pretrained model: at first its new head alone, later the whole model.

Parent: docs/convert_your_script/after.py

torchrun --standalone --nproc-per-node=2 docs/fine_tune/fine_tune.py
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported later, it may abort the exit
import torch.nn as nn
import torch.nn.functional as F
from pretrain import Net, make_data
from torch.utils.data import DataLoader, DistributedSampler, random_split

SNAPSHOT = "tuned.pt"


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--frozen-epochs", type=int, default=5)
    parser.add_argument("--no-cuda", action="store_true")
    return parser.parse_args()


def load_pretrained():
    model = Net()
    state = torch.load("pretrained.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(state)
    model.head = nn.Linear(64, 1)  # for the new task
    return model


def make_optimizer(model):
    body = {"params": model.body.parameters(), "lr": 0.001}  # skipped while frozen
    head = {"params": model.head.parameters(), "lr": 0.01}
    return torch.optim.AdamW([body, head])


def sum_over_processes(values, device):
    """The sum of each of `values` over all processes. All of them must call this."""
    sums = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return sums.tolist()


def print_once(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


def train(model, ddp_model, device, loader, optimizer):
    model.train()
    model.body.eval()  # else batch normalization's statistics move, also if frozen
    for source, targets in loader:
        source, targets = source.to(device), targets.to(device)
        optimizer.zero_grad()
        loss = F.mse_loss(ddp_model(source), targets)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def test(model, device, loader):
    model.eval()
    loss = 0.0
    for source, targets in loader:
        source, targets = source.to(device), targets.to(device)
        loss += F.mse_loss(model(source), targets, reduction="sum").item()
    [loss_sum] = sum_over_processes([loss], device)
    return loss_sum / len(loader.dataset)


def save_once(values, path):
    if dist.get_rank() == 0:
        torch.save(values, f"{path}.tmp")  # a kill leaves the old file or the new one
        os.replace(f"{path}.tmp", path)


def main():
    args = get_args()
    torch.manual_seed(1)  # the same split and the same new head on each process
    use_cuda = not args.no_cuda and torch.cuda.is_available()
    device = torch.device("cuda" if use_cuda else "cpu")
    if use_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device_id = torch.cuda.current_device() if use_cuda else None
    dist.init_process_group("nccl" if use_cuda else "gloo", device_id=device_id)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set = random_split(make_data(512, 1), [256, 256])
    sampler = DistributedSampler(train_set, drop_last=True)
    train_loader = DataLoader(
        train_set,
        batch_size=args.batch_size // world_size,
        sampler=sampler,
        drop_last=True,
    )
    test_loader = DataLoader(
        test_set,
        batch_size=args.batch_size,
        sampler=range(rank, len(test_set), world_size),
    )

    model = load_pretrained().to(device)
    optimizer = make_optimizer(model)

    epochs_run = 0
    if os.path.exists(SNAPSHOT):
        snapshot = torch.load(SNAPSHOT, map_location="cpu", weights_only=True)
        model.load_state_dict(snapshot["MODEL_STATE"])
        optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        epochs_run = snapshot["EPOCHS_RUN"]
        print_once(f"resuming: {epochs_run} of {args.epochs} epochs are finished")

    for epoch in range(epochs_run + 1, args.epochs + 1):
        sampler.set_epoch(epoch)
        torch.manual_seed(epoch * world_size + rank)  # dropout differs by rank
        model.body.requires_grad_(epoch > args.frozen_epochs)
        if epoch in (epochs_run + 1, args.frozen_epochs + 1):
            # DDP looks only once at what is trained.
            ddp_model = nn.parallel.DistributedDataParallel(model)
        train(model, ddp_model, device, train_loader, optimizer)
        loss = test(model, device, test_loader)
        print_once(f"epoch {epoch}: test loss {loss:.4f}")
        snapshot = {
            "MODEL_STATE": model.state_dict(),
            "OPTIMIZER_STATE": optimizer.state_dict(),
            "EPOCHS_RUN": epoch,
        }
        save_once(snapshot, SNAPSHOT)


if __name__ == "__main__":
    main()
    gc.collect()  # the model goes before its process group, or the exit may hang
    dist.destroy_process_group()
