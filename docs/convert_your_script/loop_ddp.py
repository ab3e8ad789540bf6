"""loop.py on many devices. Parent: docs/convert_your_script/loop.py

torchrun --standalone --nproc-per-node=2 docs/convert_your_script/loop_ddp.py
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported later, it may abort the exit
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
train_set = TensorDataset(torch.randn(512, 20), torch.randn(512, 1))
model = torch.nn.Linear(20, 1).to(device)
ddp_model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
sampler = DistributedSampler(train_set, drop_last=True)
loader = DataLoader(train_set, 64 // world_size, sampler=sampler, drop_last=True)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for source, target in loader:
        output = ddp_model(source.to(device))
        loss = torch.nn.functional.mse_loss(output, target.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mean = loss.detach()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    if rank == 0:
        print(f"epoch {epoch}: last loss {mean.item():.6f}")
if rank == 0:
    torch.save(model.state_dict(), "loop.pt")
del ddp_model, loss, output  # they hold the last backward pass
dist.destroy_process_group()
