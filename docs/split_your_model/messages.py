"""How often a rank all-reduces in its replica, for three pairs of layers.

torchrun --standalone --nproc-per-node=2 -m docs.split_your_model.messages
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, parallel
from torch.profiler import ProfilerActivity, profile

import utils
from variants import tensor_parallel

WIDTH = 8


class Pair(torch.nn.Module):
    """Its first layers all take the input, as q, k and v do."""

    def __init__(self, first_layers):
        super().__init__()
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(first_layers)]
        self.first = torch.nn.ModuleList(layers)
        self.last = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, source):
        return self.last(sum(layer(source) for layer in self.first))


def messages(first_layers, plan):
    """How many a forward and a backward pass send. plan: for the pair as a whole."""
    model = torch.nn.Sequential(Pair(first_layers))
    for i in range(first_layers):
        plan[f"0.first.{i}"] = parallel.ColwiseParallel()
    plan["0.last"] = parallel.RowwiseParallel()
    tensor_parallel.PLAN = plan
    device = torch.device("cpu")
    tensor_parallel.split_layers(model, device, split=dist.get_world_size())
    source = torch.randn(4, WIDTH, requires_grad=True)  # of a layer before
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        model(source).sum().backward()
    models.append(model)
    return sum(event.name == "gloo:all_reduce" for event in seen.events())


def main():
    whole = {"input_layouts": Replicate(), "desired_input_layouts": Replicate()}
    for name, first_layers in {"two layers": 1, "SwiGLU": 2, "attention": 3}.items():
        alone = messages(first_layers, {})
        prepare = parallel.PrepareModuleInput(**whole)
        prepared = messages(first_layers, {"0": prepare})
        if dist.get_rank() == 0:
            print(f"{name}: {alone} messages, {prepared} with PrepareModuleInput")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    models = []
    main()
    for model in models:
        utils.forget_meshes(model)
    dist.destroy_process_group()
