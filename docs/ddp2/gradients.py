"""The gradient of a loss over the batch of all ranks, computed in six ways.

torchrun --standalone --nproc-per-node=4 -m docs.ddp2.gradients

As in CLIP, the temperature is used in the loss and not in the encoder. After each way
the gradients are averaged over the ranks, as DDP does it. In float64.
"""

import gc

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # noqa: F401  before the group is made
import torch.nn.functional as F

from variants.ddp2 import Gather


def with_gradient(mine):
    return Gather.apply(mine, dist.group.WORLD)


def without_gradient(mine):
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.detach())
    return torch.cat(parts)


def own_put_in(mine):
    parts = list(without_gradient(mine).chunk(dist.get_world_size()))
    parts[dist.get_rank()] = mine
    return torch.cat(parts)


def only_mine(mine):
    return mine


def loss_of(points, views, log_scale):
    """points: those of which this rank computes the loss, its own or all of `views`."""
    first = len(points) * dist.get_rank() % len(views)  # 0 if it takes all
    partners = torch.arange(first, first + len(points))
    loss = 0
    for view in (0, 1):
        scores = points[:, view] @ views[:, 1 - view].T * log_scale.exp()
        loss += F.cross_entropy(scores, partners)
    return loss / 2


WAYS = {  # how the views come, whether a rank takes its own points alone, a factor
    "gathered with gradient": (with_gradient, False, 1),
    "... the loss of own points": (with_gradient, True, 1),
    "own part put in": (own_put_in, False, 1),
    "... and the loss times 4": (own_put_in, False, 4),
    "others without gradient": (without_gradient, True, 1),
    "no gather, plain DDP": (only_mine, False, 1),
}


def main():
    torch.manual_seed(0)  # the same on every rank
    encoder = torch.randn(8, 20, dtype=torch.float64, requires_grad=True)
    log_scale = torch.tensor(10.0, dtype=torch.float64).log().requires_grad_()
    points = torch.randn(64, 1, 20, dtype=torch.float64)
    source = points + torch.randn(64, 2, 20, dtype=torch.float64)

    def gradients(source, gather, own_points, factor):
        """(gradient of the encoder, of the temperature), as DDP averages them."""
        output = F.normalize(source @ encoder.T, dim=-1)
        views = gather(output)
        points = output if own_points else views
        loss = factor * loss_of(points, views, log_scale)
        found = torch.autograd.grad(loss, [encoder, log_scale])
        for gradient in found:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        return found

    # Each rank encodes everything: nothing has to be gathered.
    true, true_of_scale = gradients(source, only_mine, False, 1)
    mine = source.chunk(dist.get_world_size())[dist.get_rank()]
    lines = [f"{'way':26}  length  angle  temperature"]
    for name, way in WAYS.items():
        gradient, of_scale = gradients(mine, *way)
        length = gradient.norm() / true.norm()
        cosine = F.cosine_similarity(gradient.flatten(), true.flatten(), dim=0)
        angle = cosine.clamp(max=1).acos().rad2deg()
        ratio = of_scale / true_of_scale
        lines.append(f"{name:26} {length:7.4f} {angle:5.1f}° {ratio:12.4f}")
    if dist.get_rank() == 0:
        print("\n".join(lines))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()  # or a thread of gloo may abort the exit
    dist.destroy_process_group()
