"""For ddp_by_hand.py: each rank writes the profiler's events of its last step.

events.RANK.json: [name, start, end in microseconds, shapes] of each.
"""

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from . import replace, write


class Trainer:
    def _run_batch(self, source, targets):
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            dist.barrier()  # or a rank waits for another's profiler to start
            loss = super()._run_batch(source, targets)
        events = []
        for event in seen.events():
            span = event.time_range
            events.append([event.name, span.start, span.end, event.input_shapes])
        write("events", events)
        return loss


class Odd(torch.nn.Module):
    """Frozen and tied weights, two dtypes, memory in other orders, unused parameters.

    One sample in 80 uses `rare`: in most steps some ranks do, or none. It fills the
    first bucket, so that a rank which does not wait for it sends in another order.
    """

    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Linear(20, 20).requires_grad_(False)
        self.first = torch.nn.Linear(20, 20)
        self.tied = torch.nn.Linear(20, 20)
        self.tied.weight = self.first.weight
        self.conv = torch.nn.Conv2d(5, 20, 2).to(memory_format=torch.channels_last)
        self.last = torch.nn.Linear(20, 1).double()
        self.never = torch.nn.Parameter(torch.randn(20))
        self.register_buffer("scale", torch.rand(20))
        self.rare = torch.nn.Linear(20, 26)

    def forward(self, source):
        hidden = self.first(self.frozen(source))
        hidden = self.tied(torch.tanh(hidden)) * self.scale
        images = source.view(-1, 5, 2, 2)
        hidden = hidden + self.conv(images).flatten(1)
        rare = source[:, :1] > 2.25
        if rare.any():
            hidden = hidden + rare * self.rare(source).mean(1, keepdim=True)
        return self.last(hidden.double()).float()


def odd(script):
    """Trains an `Odd`, which begins with other numbers on each rank."""
    ranks = []

    def main(inner, *arguments):
        is_spawned = len(arguments) > 1  # main(rank, ...), and not main(args)
        ranks.append(arguments[0] if is_spawned else 0)
        inner(*arguments)

    def load_train_objs(inner):
        train_set, eval_set, _, loss_fn = inner()
        torch.manual_seed(ranks[-1])
        return train_set, eval_set, Odd(), loss_fn

    def make_optimizer(_, model):
        return torch.optim.AdamW(
            model.parameters(), lr=0.01, weight_decay=0.1, fused=True
        )

    replace(script, "main", main)
    replace(script, "load_train_objs", load_train_objs)
    replace(script, "make_optimizer", make_optimizer)
