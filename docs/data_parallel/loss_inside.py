"""What goes wrong on several GPUs if forward() returns the loss. It runs on the CPU.

python docs/data_parallel/loss_inside.py BATCH GPUS

It cuts a batch as DataParallel does, by `chunk`, and computes both losses of it: the
loss of the gathered outputs, and the mean of the losses of the pieces.
"""

import argparse

import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("batch", type=int, help="samples in the batch")
parser.add_argument("gpus", type=int, help="GPUs that would share the batch")
args = parser.parse_args()

torch.manual_seed(0)
source, targets = torch.randn(args.batch, 20), torch.randn(args.batch, 1)
model = torch.nn.Linear(20, 1)
pieces = list(zip(source.chunk(args.gpus), targets.chunk(args.gpus), strict=True))

# The loss outside: DataParallel gathers the outputs, and you compute one loss of them.
output = torch.cat([model(x) for x, _ in pieces])
outside = F.mse_loss(output, targets)
(right,) = torch.autograd.grad(outside, model.weight)

# The loss inside: DataParallel gathers the losses, and you take their mean.
losses = torch.stack([F.mse_loss(model(x), y) for x, y in pieces])
inside = losses.mean()
(wrong,) = torch.autograd.grad(inside, model.weight)

print("samples on each GPU:", *(len(x) for x, _ in pieces))
print("loss on each GPU:   ", *(f"{x:.6f}" for x in losses.tolist()))
print(f"loss outside forward: {outside:.6f}")
print(f"loss inside forward:  {inside:.6f}")
print(f"the gradients differ by {(wrong - right).norm() / right.norm():.1%}")
