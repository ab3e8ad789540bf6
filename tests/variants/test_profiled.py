"""The shares of a step: known ones are found, of each rank, and add up to the clock."""

import collections
import json
import time

import pytest
import torch
import torch.distributed as dist

from tests.conftest import once
from tests.helpers.checks import help_of, noted
from tests.hooks import replace, write
from tests.hooks.timing import after
from tools.run.launch import run_script, train
from tools.scripts import ROOT

# ms that each part of a step takes at least
SLEEPS = {
    "data": 8,
    "forward": 12,
    "backward": 16,
    "optimizer": 10,
    "rest": 6,
}
LATE = 60  # ms more, of rank 1's forward pass
EVALUATION = 120  # ms
NAME = "variants/profiled.py"
CAP = ("Parallel(self.model)", "Parallel(self.model, bucket_cap_mb=0.0001)")
FEW = ("MyTrainDataset(2048)", "MyTrainDataset(256)")  # 4 steps in an epoch


def slowly(part):
    return after(SLEEPS[part] / 1e3)


class Model(torch.nn.Module):
    """Its last layer's message is under way while the hidden layer computes."""

    def __init__(self):
        super().__init__()
        self.hidden = torch.nn.Linear(20, 20)
        self.last = torch.nn.Linear(20, 1)
        self.hidden.bias.requires_grad = False

    def forward(self, source):
        hidden = self.hidden(source)
        if self.training:
            time.sleep((SLEEPS["forward"] + LATE * dist.get_rank()) / 1e3)
            hidden.register_hook(lambda _: time.sleep(SLEEPS["backward"] / 1e3))
        return self.last(hidden)


def known_steps(script):
    """Each part of a step takes as long as SLEEPS says.

    clock.RANK.json: the ms of each step, by the clock.
    """
    began = 0
    clock = []

    def load_train_objs(inner):
        train_set, eval_set, _, loss_fn = inner()
        return train_set, eval_set, Model(), loss_fn

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


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """`profiled(*hooks)`: (folder, Done) of six epochs of four steps on two ranks."""

    @once
    def run(*hooks):
        folder = tmp_path_factory.mktemp("profiled")
        how = {"changes": [CAP, FEW], "hooks": [known_steps, *hooks]}
        return folder, train(NAME, 6, 6, "--trace", "my", cwd=folder, **how)

    return run


WAYS = [pytest.param((), id="cpu"), pytest.param((passes_for_a_gpu,), id="gpu")]


@pytest.mark.waits
@pytest.mark.parametrize("hooks", WAYS)
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
    assert found["parameters"] == 20 * 20 + 20 + 1  # without the frozen bias


def test_each_rank_has_a_trace_with_the_parts(profiled):
    folder, _ = profiled()
    for rank in (0, 1):
        trace = json.loads((folder / f"my.{rank}.json").read_text())
        assert trace["distributedInfo"]["rank"] == rank
        took = collections.defaultdict(list)  # {part: ms}
        for event in trace["traceEvents"]:
            if event.get("ph") == "X":  # it has a length
                took[event["name"]].append(event["dur"] / 1e3)
        for part, slept in SLEEPS.items():
            long_enough = [ms for ms in took[part] if ms >= slept]
            assert len(long_enough) >= 5, (part, took[part])
        assert max(took["data"]) < EVALUATION  # which is no part of it


def test_too_few_steps_for_a_profile(tmp_path):
    done = train(NAME, 2, 2, cwd=tmp_path, changes=[FEW])
    assert done.stdout.splitlines()[-1] == "no profile: it takes 12 steps"
    assert not list(tmp_path.glob("*.json"))


def test_the_first_step_can_be_measured(tmp_path):
    def measure_the_first(script):
        script.update(WAIT=0, WARM_UP=0, ACTIVE=1)

    how = {"changes": [FEW], "hooks": [measure_the_first]}
    done = train(NAME, 1, 1, cwd=tmp_path, **how)
    assert done.stdout.splitlines()[-1].startswith("step ")
    assert not list(tmp_path.glob("*.json"))  # they are for --trace


def test_help_and_a_folder_that_is_not_there(tmp_path):
    assert "also write files that begin with this" in help_of(NAME, tmp_path)
    done = run_script(ROOT / NAME, 1, 1, "--trace", "no/trace", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "argument --trace: cannot write 'no/trace'" in done.stderr
