"""The shares of a step: known ones are found, of each rank, and add up to the clock."""

import json
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.checks import help_of, noted
from tests.helpers.made_once import made_once
from tests.hooks import replace, write
from tests.hooks.timing import after
from tools.run.launch import run_script, train
from tools.scripts import ROOT

# ms that each part of a step takes at least
SLEEPS = {"data": 8, "forward": 12, "backward": 16, "optimizer": 10, "rest": 6}
LATE = 60  # ms more, of rank 1's forward pass
EVALUATION = 120  # ms
NAME = "variants/profiled.py"
FEW = ("MyTrainDataset(2048)", "MyTrainDataset(256)")  # 4 steps in an epoch


def slowly(part):
    return after(SLEEPS[part] / 1e3)


def known_steps(script):
    """Each part of a step takes as long as SLEEPS says.

    clock.RANK.json: the ms of each step, by the clock.
    """
    began = 0
    clock = []

    def slow_pass(model, _, output):
        if model.training:
            time.sleep((SLEEPS["forward"] + LATE * dist.get_rank()) / 1e3)
            output.register_hook(lambda _: time.sleep(SLEEPS["backward"] / 1e3))

    def load_train_objs(inner):
        train_set, eval_set, model, loss_fn = inner()
        model.bias.requires_grad_(False)
        model.register_forward_hook(slow_pass)
        return train_set, eval_set, model, loss_fn

    def mark(inner, profile, part):
        nonlocal began
        inner(profile, part)
        if part == "data":
            began = time.perf_counter()

    def step(inner, profile):
        clock.append(1e3 * (time.perf_counter() - began))
        inner(profile)

    def train(inner, *arguments):
        inner(*arguments)
        write("clock", clock)

    def dump(inner, *arguments):
        assert dist.get_rank() == 0
        inner(*arguments)

    replace(script, "load_train_objs", load_train_objs)
    replace(torch.utils.data._utils.collate, "default_collate", slowly("data"))
    replace(torch.optim.SGD, "step", slowly("optimizer"))
    replace(script["Trainer"], "_run_batch", slowly("rest"))
    replace(script["Trainer"], "_evaluate", after(EVALUATION / 1e3))
    replace(script["Trainer"], "train", train)
    replace(script["StepProfile"], "mark", mark)
    replace(script["StepProfile"], "step", step)
    replace(json, "dump", dump)


def passes_for_a_gpu(script):
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


@made_once
def profiled(folder, *hooks):
    """`profiled(*hooks)`: (folder, Done) of six epochs of four steps on two ranks."""
    hooks = [known_steps, *hooks]
    done = train(NAME, 6, 6, "--trace", "my", cwd=folder, changes=[FEW], hooks=hooks)
    return folder, done


@pytest.mark.waits
@pytest.mark.parametrize("hooks", [(), (passes_for_a_gpu,)], ids=["cpu", "gpu"])
def test_shares_are_those_planted_and_add_up_to_the_clock(profiled, hooks):
    folder, _ = profiled(*hooks)
    first, second = json.loads((folder / "my.json").read_text())["ms"]
    for part, slept in SLEEPS.items():
        assert first[part] >= slept, part
        assert second[part] >= slept, part
    assert second["forward"] >= SLEEPS["forward"] + LATE
    for ms, clock in zip((first, second), noted(folder, "clock"), strict=True):
        active = clock[7:12]  # after those of WAIT and WARM_UP
        assert sum(active) / 5 == pytest.approx(ms["step"], rel=0.05)
        assert sum(ms.values()) == pytest.approx(2 * ms["step"])
    waits_for_the_other = first["exposed communication"]
    assert waits_for_the_other > LATE / 2


def test_one_file_and_one_table_of_all_ranks(profiled):
    folder, done = profiled()
    found = json.loads((folder / "my.json").read_text())
    head, *table = done.stdout.splitlines()[-8:]
    assert head.split() == ["share", "of", "a", "step", "rank", "0", "rank", "1"]
    first, second = found["ms"]
    for part, line in zip(first, table, strict=True):
        expected = part
        for ms in (first, second):
            share = ms[part] / ms["step"]
            expected += f" {ms[part]:.2f} ms {share:.0%}"
        assert " ".join(line.split()) == expected
    assert found["parameters"] == 20  # without the frozen bias


def test_each_rank_has_a_trace_with_the_parts(profiled):
    folder, _ = profiled()
    for rank in (0, 1):
        trace = json.loads((folder / f"my.{rank}.json").read_text())
        assert trace["distributedInfo"]["rank"] == rank
        for part, slept in SLEEPS.items():
            took = []  # ms
            for event in trace["traceEvents"]:
                if event["name"] == part and "dur" in event:
                    took.append(event["dur"] / 1e3)
            assert sum(ms >= slept for ms in took) >= 5, (part, took)


def test_too_few_steps_for_a_profile(tmp_path):
    done = train(NAME, 2, 2, cwd=tmp_path, changes=[FEW])
    assert done.stdout.splitlines()[-1] == "no profile: it takes 12 steps"


def test_the_first_step_can_be_measured(tmp_path):
    waits = ("WAIT = 5", "WAIT = 0"), ("WARM_UP = 2", "WARM_UP = 0")
    changes = FEW, *waits, ("ACTIVE = 5", "ACTIVE = 1")
    done = train(NAME, 1, 1, cwd=tmp_path, changes=changes)
    assert done.stdout.splitlines()[-1].startswith("step ")
    assert not list(tmp_path.glob("*.json")), "they are for --trace"


def test_help_and_a_folder_that_is_not_there(tmp_path):
    assert "also write files that begin with this" in help_of(NAME, tmp_path)
    done = run_script(ROOT / NAME, 1, 1, "--trace", "no/trace", cwd=tmp_path)
    assert "argument --trace: cannot write 'no/trace'" in done.stderr
