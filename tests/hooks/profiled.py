"""For profiled.py: steps whose parts are known, and a CPU that passes for a GPU.

Each part of a step takes at least SLEEPS ms. In forward, rank 1 takes LATE ms more, and
an evaluation takes 120. clock.RANK.json: [ms of each step, by the clock].
"""

import json
import os
import time

import torch
import torch.distributed as dist

from . import Noted, replace, write

SLEEPS = json.loads(os.environ["SLEEPS"])
LATE = int(os.environ["LATE"])
clock = []  # [begin, end] of each step


def sleep(ms):
    time.sleep(ms / 1e3)


class Slow(Noted):
    def __getitem__(self, index):
        if len(self.seen) % 32 == 0:  # once in a batch
            sleep(SLEEPS["data"])
        return super().__getitem__(index)


class Model(torch.nn.Module):
    """Its last layer's message is under way while the hidden layer computes."""

    def __init__(self):
        super().__init__()
        self.hidden = torch.nn.Linear(20, 20)
        self.last = torch.nn.Linear(20, 1)
        self.hidden.bias.requires_grad = False

    def forward(self, source):
        if not self.training:
            return self.last(self.hidden(source))
        sleep(SLEEPS["forward"] + LATE * dist.get_rank())
        hidden = self.hidden(source)
        hidden.register_hook(lambda _: sleep(SLEEPS["backward"]))
        return self.last(hidden)


class Trainer:
    def _run_batch(self, source, targets):
        sleep(SLEEPS["rest"])
        return super()._run_batch(source, targets)

    def _evaluate(self):
        sleep(120)
        return super()._evaluate()

    def train(self, *arguments):
        super().train(*arguments)
        write("clock", [(end - begin) * 1e3 for begin, end in clock])


def around_load_train_objs(load_train_objs):
    train_set, eval_set, _, loss_fn = load_train_objs()
    return Slow(train_set), eval_set, Model(), loss_fn


def around_make_optimizer(_, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    optimizer.register_step_pre_hook(lambda *_: sleep(SLEEPS["optimizer"]))
    return optimizer


def dump(inner, *arguments):
    write("dumped", True)
    inner(*arguments)


replace(json, "dump", dump)


def around_StepProfile(inner, *arguments):
    profile = inner(*arguments)
    inner_mark = profile.mark
    inner_step = profile.step

    def mark(part):
        if part == "data":
            now = time.perf_counter()
            clock.append([now, now])
        inner_mark(part)

    def step():
        clock[-1][1] = time.perf_counter()
        inner_step()

    profile.mark = mark
    profile.step = step
    return profile


def gpu(script):
    """The profile believes that it looks at a GPU, whose kernels are the CPU's work."""
    waited = []

    class Event(script["CpuEvent"]):
        def __init__(self, device, enable_timing=False):
            assert device.type == "cuda" and enable_timing

        def elapsed_time(self, end):
            assert waited
            return super().elapsed_time(end)

    def as_kernels(inner, events, on_cpu):
        assert not on_cpu
        for event in events:
            is_message = event.name == "backward"  # lasts as long as the messages
            covers_all = event.name.startswith("ProfilerStep")
            if is_message or covers_all or "evaluate_function" in event.name:
                event.device_type = torch.autograd.DeviceType.CUDA
                event.is_user_annotation = covers_all
            if is_message:
                event.name = "ncclDevKernel"
        return inner(events, on_cpu)

    def on_gpu(inner, model, device, path):
        return inner(model, torch.device("cuda"), path)

    torch.Event = Event
    torch.accelerator.synchronize = lambda: waited.append(True)
    replace(script, "exposed_ms", as_kernels)
    replace(script, "StepProfile", on_gpu)
