"""A loss outside of the model, and inside on several GPUs. It runs on the CPU.

python docs/data_parallel/loss_inside.py BATCH GPUS
"""

import sys

import torch
import torch.nn.functional as F

batch, gpus = map(int, sys.argv[1:])
torch.manual_seed(0)
source, targets = torch.randn(batch, 20), torch.randn(batch, 1)
model = torch.nn.Linear(20, 1)
# DataParallel cuts a batch by `chunk`, too.
pieces = list(zip(source.chunk(gpus), targets.chunk(gpus), strict=True))

# Outside: DataParallel gathers the outputs, and you compute one loss of them.
outside = F.mse_loss(torch.cat([model(x) for x, _ in pieces]), targets)
(right,) = torch.autograd.grad(outside, model.weight)

# Inside: DataParallel gathers the losses, and you take their mean.
losses = torch.stack([F.mse_loss(model(x), y) for x, y in pieces])
(wrong,) = torch.autograd.grad(losses.mean(), model.weight)

print("samples on each GPU:", *(len(x) for x, _ in pieces))
print("loss on each GPU:   ", *(f"{x:.6f}" for x in losses.tolist()))
print(f"loss outside forward: {outside:.6f}")
print(f"loss inside forward:  {losses.mean():.6f}")
print(f"the gradients differ by {(wrong - right).norm() / right.norm():.1%}")
