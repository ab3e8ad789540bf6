"""after.py, told to stop by Slurm. Parent: docs/convert_your_script/after.py

torchrun --standalone --nproc-per-node=2 docs/slurm/after_slurm.py
"""

import argparse
import gc
import os
import signal

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported later, it may abort the exit
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

SNAPSHOT = "stripes_snapshot.pt"


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--no-cuda", action="store_true")
    parser.add_argument("--snapshot-path", default=SNAPSHOT)
    return parser.parse_args()


def make_data(n):
    """Noisy images of 12 x 12 pixels. The label is the direction of the stripes."""
    labels = torch.randint(4, (n,))
    y, x = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    waves = torch.stack([x, y, x + y, x - y])[labels]
    images = torch.sin(waves + 2 * torch.pi * torch.rand(n, 1, 1))
    images = images + 1.5 * torch.randn(n, 12, 12)
    return TensorDataset(images.unsqueeze(1), labels)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.norm2 = nn.BatchNorm2d(16)
        self.dropout = nn.Dropout(0.2)
        self.linear = nn.Linear(64, 4)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        x = self.dropout(F.avg_pool2d(x, 4))
        return self.linear(x.flatten(1))


def sum_over_processes(values, device):
    """The sum of each of `values` over all processes. All of them must call this."""
    sums = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return sums.tolist()


def print_once(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


def train(args, model, device, loader, optimizer, epoch):
    model.train()
    for batch_idx, (images, labels) in enumerate(loader):
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            progress = f"epoch {epoch}, batch {batch_idx}/{len(loader)}"
            [loss_sum] = sum_over_processes([loss.item()], device)
            mean_loss = loss_sum / dist.get_world_size()
            print_once(f"{progress}: train loss {mean_loss:.4f}")


@torch.no_grad()
def test(model, device, loader):
    model.eval()
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    loss, correct = 0.0, 0
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        output = model(images)
        loss += F.cross_entropy(output, labels, reduction="sum").item()
        correct += (output.argmax(1) == labels).sum().item()
    total = len(loader.dataset)
    loss, correct = sum_over_processes([loss, correct], device)
    print_once(f"test loss {loss / total:.4f}, accuracy {correct / total:.1%}")


def save_once(values, path):
    if dist.get_rank() == 0:
        torch.save(values, f"{path}.tmp")  # a kill leaves the old file or the new one
        os.replace(f"{path}.tmp", path)


def ignore_sigterm(worker):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def main():
    args = get_args()
    told = torch.zeros(1)
    signal.signal(signal.SIGTERM, lambda *_: told.fill_(1))
    torch.manual_seed(args.seed)
    use_cuda = not args.no_cuda and torch.cuda.is_available()
    device = torch.device("cuda" if use_cuda else "cpu")
    if use_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device_id = torch.cuda.current_device() if use_cuda else None
    dist.init_process_group("nccl" if use_cuda else "gloo", device_id=device_id)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set = random_split(make_data(1250), [1000, 250])
    assert args.batch_size % world_size == 0, "the processes must share the batch"
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train_loader = DataLoader(
        train_set,
        batch_size=args.batch_size // world_size,
        sampler=sampler,
        drop_last=True,
        num_workers=args.workers,
        pin_memory=use_cuda,
        worker_init_fn=ignore_sigterm,  # torchrun sends it to workers, too
        multiprocessing_context="fork" if args.workers else None,
    )
    test_loader = DataLoader(
        test_set,
        batch_size=args.batch_size,
        sampler=range(rank, len(test_set), world_size),
        num_workers=args.workers,
        pin_memory=use_cuda,
        worker_init_fn=ignore_sigterm,  # as above
        multiprocessing_context="fork" if args.workers else None,
    )

    model = Net().to(device)
    ddp_model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)

    epochs_run = 0
    if os.path.exists(args.snapshot_path):
        snapshot = torch.load(args.snapshot_path, map_location="cpu", weights_only=True)
        model.load_state_dict(snapshot["MODEL_STATE"])
        optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        scheduler.load_state_dict(snapshot["SCHEDULER_STATE"])
        epochs_run = snapshot["EPOCHS_RUN"]
        print_once(f"resuming: {epochs_run} of {args.epochs} epochs are finished")

    for epoch in range(epochs_run + 1, args.epochs + 1):
        sampler.set_epoch(epoch)
        torch.manual_seed(args.seed + epoch * world_size + rank)
        train(args, ddp_model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()
        snapshot = {
            "MODEL_STATE": model.state_dict(),
            "OPTIMIZER_STATE": optimizer.state_dict(),
            "SCHEDULER_STATE": scheduler.state_dict(),
            "EPOCHS_RUN": epoch,
        }
        save_once(snapshot, args.snapshot_path)
        [votes] = sum_over_processes([told.item()], device)
        if votes > 0:
            break


if __name__ == "__main__":
    main()
    gc.collect()  # the model goes before its process group, or the exit may hang
    dist.destroy_process_group()
