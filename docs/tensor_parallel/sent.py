"""Bytes that a rank all-reduces in a step: in its replica, and between replicas.

torchrun --standalone --nproc-per-node=4 -m docs.tensor_parallel.sent
"""

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DistributedSampler

from variants.tensor_parallel import average_gradients, forget_meshes, split_layers

WIDTH, WIDE, BATCH = 1024, 4096, 32


def main():
    dist.init_process_group("gloo")
    for split in (1, 2, 4):
        up, down = torch.nn.Linear(WIDTH, WIDE), torch.nn.Linear(WIDE, WIDTH)
        model = torch.nn.Sequential(up, torch.nn.GELU(), down)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sampler = DistributedSampler(range(64), num_replicas=4 // split, rank=0)
        group = split_layers(model, optimizer, sampler, torch.device("cpu"))
        source = torch.randn(BATCH, WIDTH, requires_grad=True)  # of a layer before
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            model(source).square().mean().backward()
            average_gradients(model, group)
        sent = [0, 0]
        for event in seen.events():
            if event.name == "gloo:all_reduce":
                (shape,) = event.input_shapes[:1]
                of_a_batch = shape == [BATCH, WIDTH] and split > 1
                others = of_a_batch or dist.get_world_size(group) > 1
                sent[of_a_batch] += 4 * torch.Size(shape).numel() * others
        if dist.get_rank() == 0:
            inside, between = (f"{sent[x] / 1e6:5.2f} MB" for x in (True, False))
            print(f"--split {split}: {inside} in a replica, {between} between replicas")
    forget_meshes(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
