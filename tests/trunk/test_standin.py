"""On the stand-in for GPUs: what belongs on a device is there, and on the right one.

tests/standin/standin.cpp says what it is. It needs g++ and ninja: a minute once.
"""

import re

import pytest

from tests.helpers.checks import STANDIN, noted
from tests.helpers.gpt_runs import GPT
from tests.helpers.scripts import exceptions_of
from tests.hooks.accelerators import note_standin
from tools.run.launch import DISTRIBUTED, run_script, torchrun_words, train
from tools.run.processes import Program
from tools.run.results import losses
from tools.scripts import ROOT, SCRIPTS, calls

pytestmark = [pytest.mark.waits, pytest.mark.usefixtures("standin")]
# For programs of this repository, and not of a copy. One thread each: they are forks.
ON_PATH = {"PYTHONPATH": f"{ROOT}:{STANDIN['PYTHONPATH']}", "OMP_NUM_THREADS": 1}


def test_two_ranks_on_one_device_are_refused(tmp_path):
    """As NCCL refuses them, so that the other tests show what it would."""
    own = "utils.set_device(args.device, rank, world_size)"
    first = "utils.set_device(args.device, 0, world_size)"
    how = {"cwd": tmp_path, "changes": [(own, first)], **STANDIN}
    done = train("multigpu.py", 1, 1, status=1, **how)
    assert " use one device" in done.stderr


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", SCRIPTS)
def test_devices_train_as_the_cpu_and_no_step_waits(runs, name, devices, tmp_path):
    ranks = devices if name in DISTRIBUTED else 1
    done = train(
        name,
        5,
        2,
        cwd=tmp_path,
        nprocs=devices,
        hooks=[note_standin],
        STANDIN_DEVICES=devices,
        **STANDIN,
    )
    assert f"{ranks} x standin, " in done.stdout
    _, on_the_cpu = runs(name, devices)
    assert losses(done) == losses(on_the_cpu)
    expected = {}
    if "DistributedDataParallel" in calls(name):
        expected = {"copies that wait": 2}  # it sends the order of its buckets, once
    for seen in noted(tmp_path, "seen", ranks):
        if exceptions_of(name).waits:
            seen.pop("waits", None)
        assert seen == expected


def test_the_group_is_on_the_ranks_device(tmp_path):
    """NCCL of PyTorch 2.15 would take a number that another launcher has left.

    The stand-in would then refuse two ranks on one device.
    """
    train("multigpu.py", 1, 1, cwd=tmp_path, LOCAL_RANK=1, **STANDIN)


DRAWS = """
import torch
from mingpt.model import attention
from mingpt.split import attend

q = torch.ones(1, 2, 9, 4, device="standin")
for rank in 0, 1:
    torch.manual_seed(0)
    print(attend(attention, rank, q, q, q, 0.5).tolist())
    print(torch.rand(2, device="standin").tolist(), torch.rand(2).tolist())
"""


def test_ranks_of_a_layer_later_draw_alike(tmp_path):
    """From the device's own random numbers, which are not those of the CPU."""
    (tmp_path / "draws.py").write_text(DRAWS)
    done = run_script(tmp_path / "draws.py", cwd=tmp_path, **ON_PATH)
    first, later, other, later_there = done.stdout.splitlines()
    assert first != other
    assert later == later_there


# One sample, after the last step: each of its 200 tokens is a pass through the model.
TORCHRUN = " ".join(torchrun_words(2))
MINGPT = f"{TORCHRUN} {GPT} --steps 4 --eval-every 4"
LOOP = "-m variants.train_loop 2 1 --gpu-mode"
COMMANDS = {
    "mingpt": MINGPT,
    "mingpt --shard": f"{MINGPT} --shard",
    "mingpt --split": f"{MINGPT} --split 2",
    "train_loop, dp": f"python {LOOP} dp",
    "train_loop, ddp": f"{TORCHRUN} {LOOP} ddp",
    "train_loop, ddp2": f"{TORCHRUN} {LOOP} ddp2",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_module_trains_as_on_the_cpu(name, tmp_path):
    def run(folder, **env):
        return Program(COMMANDS[name].split(), folder, **env).succeed().stdout

    def losses_in(output):
        without_speed = re.sub(r"[\d,]+ (tokens|samples)/s.*", "", output)
        return re.findall(".* loss .*", without_speed)

    on_the_cpu = run(tmp_path / "cpu", PYTHONPATH=ROOT, OMP_NUM_THREADS=1)
    on_standin = run(tmp_path / "standin", **ON_PATH)
    assert "x standin, " in on_standin
    assert "x standin, " not in on_the_cpu
    assert losses_in(on_standin) == losses_in(on_the_cpu) != []
