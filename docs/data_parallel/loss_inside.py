"""A loss outside of the model, and inside on several GPUs. It runs on the CPU.

python docs/data_parallel/loss_inside.py BATCH GPUS
"""

import sys

import torch
import torch.nn.functional as F

batch, gpus = map(int, sys.argv[1:])
torch.manual_seed(0)
source = torch.randn(batch, 20)
targets = torch.randn(batch, 1)
model = torch.nn.Linear(20, 1)
# DataParallel cuts a batch by `chunk`, too.
sources = source.chunk(gpus)
outputs = [model(piece) for piece in sources]

# Outside: DataParallel gathers the outputs, and you compute one loss of them.
outside = F.mse_loss(torch.cat(outputs), targets)
(right,) = torch.autograd.grad(outside, model.weight, retain_graph=True)

# Inside: DataParallel gathers the losses, and you take their mean.
pairs = zip(outputs, targets.chunk(gpus), strict=True)
losses = torch.stack([F.mse_loss(*pair) for pair in pairs])
(wrong,) = torch.autograd.grad(losses.mean(), model.weight)

print("samples on each GPU:", *map(len, sources))
print("loss on each GPU:   ", *(f"{loss:.6f}" for loss in losses.tolist()))
print(f"loss outside forward: {outside:.6f}")
print(f"loss inside forward:  {losses.mean():.6f}")
print(f"the gradients differ by {(wrong - right).norm() / right.norm():.1%}")
