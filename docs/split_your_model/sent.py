"""Bytes that a rank all-reduces in a step: in its replica, and between replicas.

torchrun --standalone --nproc-per-node=4 -m docs.split_your_model.sent
"""

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import utils
from variants.tensor_parallel import average_gradients, split_layers

WIDTH = 1024
WIDE = 4096
BATCH = 32


def main():
    dist.init_process_group("gloo")
    for split in (1, 2, 4):
        up = torch.nn.Linear(WIDTH, WIDE)
        down = torch.nn.Linear(WIDE, WIDTH)
        model = torch.nn.Sequential(up, torch.nn.GELU(), down)
        group = split_layers(model, torch.device("cpu"), split)
        source = torch.randn(BATCH, WIDTH, requires_grad=True)  # of a layer before
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            model(source).square().mean().backward()
            average_gradients(model, group)
        inside = 0
        between = 0
        for event in seen.events():
            if event.name == "gloo:all_reduce":
                shape = event.input_shapes[0]
                nbytes = 4 * torch.Size(shape).numel()
                if split > 1 and shape == [BATCH, WIDTH]:
                    inside += nbytes
                elif dist.get_world_size(group) > 1:
                    between += nbytes
        if dist.get_rank() == 0:
            line = f"--split {split}: {inside / 1e6:5.2f} MB in a replica,"
            print(f"{line} {between / 1e6:5.2f} MB between replicas")
    utils.forget_meshes(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
