"""On the stand-in for GPUs: what belongs on a device is there, and on the right one.

tests/standin/standin.cpp says what it is. It needs g++ and ninja: a minute once.
"""

import json
import re

import pytest

from tools.run.launch import DISTRIBUTED, batch_size, launch, plant, run_script, train
from tools.run.processes import Program
from tools.run.results import losses
from tools.scripts import ROOT, SCRIPTS, calls

pytestmark = [pytest.mark.waits, pytest.mark.usefixtures("standin")]
STANDIN = {"PYTHONPATH": ROOT / "tests" / "standin"}
ON_PATH = {"PYTHONPATH": f"{ROOT}:{STANDIN['PYTHONPATH']}", "OMP_NUM_THREADS": 1}


def test_two_ranks_on_one_device_are_refused(tmp_path):
    """As NCCL refuses them, so that the other tests show what it would."""
    line = "device = utils.set_device(args.device, rank, world_size)"
    script = plant(
        "multigpu.py", tmp_path / "copy", (line, line.replace(" rank", " 0"))
    )
    done = launch(script, 1, 1, cwd=tmp_path, real="", **STANDIN)
    assert " use one device" in done.stderr


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_as_on_the_cpu(runs, name, devices, tmp_path):
    """Two devices also resume. In a step, nothing waits for a device."""
    script = plant(name, tmp_path / "copy", hooks=["standin"])
    how = {"cwd": tmp_path, "nprocs": devices, "STANDIN_DEVICES": devices, **STANDIN}
    found = []
    resumes = devices == 2 and "real_job" not in name  # its rate follows from the end
    for end in (2, 5) if resumes else (5,):
        size = "--batch-size", batch_size(name, 64, devices)
        done = train(script, end, 2, *size, **how)
        found += losses(done)
        ranks = devices if name in DISTRIBUTED else 1
        assert f"{ranks} x standin, " in done.stdout
    assert found == losses(runs(name, devices)[1])
    seen = [json.loads(x.read_text()) for x in tmp_path.glob("seen.*.json")]
    if "sharded_snapshot" in name:  # a thread saves while steps go on, and waits
        seen = [{k: x[k] for k in x if k != "waits"} for x in seen]
    # DDP sends the order of its buckets, once.
    once = "DistributedDataParallel" in calls(script)
    assert seen == [{"copies that wait": 2} if once else {}] * ranks


def test_the_group_is_on_the_ranks_device(tmp_path):
    """NCCL of PyTorch 2.15 would take a number that another launcher has left."""
    train(ROOT / "multigpu.py", 1, 1, cwd=tmp_path, LOCAL_RANK=1, **STANDIN)


def test_two_machines_may_have_more_devices_than_processes(tmp_path):
    """Rank 2 takes device 0 of the second machine, which would be 2 by its rank."""
    words = ["python", "-m", "variants.multinode_spawn", 2, 1, "--nodes", 2]
    words += ["--nprocs", 2, "--master-port", 29517, "--nr"]
    how = {"STANDIN_DEVICES": 4, **ON_PATH}
    forks = []
    for machine in range(2):
        (folder := tmp_path / str(machine)).mkdir()
        forks.append(Program([*words, machine], folder, STANDIN_HOST=machine, **how))
    for done in [fork.finish() for fork in forks]:
        assert done.returncode == 0, done.stderr


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


RING = """
import torch
import torch.distributed as dist
import utils

rank, local_rank, world_size = utils.torchrun_env()
device = utils.set_device("auto", local_rank)
dist.init_process_group(device_id=device)
mine = torch.full((3,), float(rank), device=device)
its = torch.empty_like(mine)
after, before = (rank + 1) % world_size, (rank - 1) % world_size
works = dist.isend(mine, after), dist.irecv(its, before)
for work in works:
    work.wait()
assert its.tolist() == 3 * [before]
if rank == 0:
    dist.send(mine + 5, 1)
elif rank == 1:
    dist.recv(its, 0)
    assert its.tolist() == 3 * [5]
try:
    dist.send(mine.cpu(), after)
except RuntimeError as error:
    print(error)
"""


def test_ranks_send_to_one_another(tmp_path):
    (tmp_path / "ring.py").write_text(RING)
    words = ["torchrun", "--standalone", "--nproc-per-node=3", "ring.py"]
    done = Program(words, tmp_path, STANDIN_DEVICES=3, **ON_PATH).finish()
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("No backend type associated with device type cpu") == 3


# One sample, after the last step: each of its 200 tokens is a pass through the model.
GPT = f"mingpt.train --steps 4 --eval-every 4 --data {ROOT}/README.md --cache tokens"
GPT += " --n-layer 2 --n-embd 32 --block-size 16 --compile off --precision fp32"
LOOP = "variants.train_loop 2 1 --gpu-mode"


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(GPT, id="mingpt"),
        pytest.param(f"{GPT} --shard", id="mingpt --shard"),
        pytest.param(f"{GPT} --split 2", id="mingpt --split"),
        f"{LOOP} dp",
        f"{LOOP} ddp",
        f"{LOOP} ddp2",
    ],
)
def test_a_module_trains_as_on_the_cpu(words, tmp_path):
    start = ["python"]
    if not words.endswith(" dp"):
        start = ["torchrun", "--standalone", "--nproc-per-node=2"]
    printed = []
    for path in ROOT, f"{ROOT}:{STANDIN['PYTHONPATH']}":
        (folder := tmp_path / f"{len(printed)}").mkdir()
        how = {"PYTHONPATH": path, "OMP_NUM_THREADS": 1}
        done = Program([*start, "-m", *words.split()], folder, **how).finish()
        assert done.returncode == 0, done.stderr
        assert ("x standin, " in done.stdout) == (path != ROOT)
        speed = r"[\d,]+ (tokens|samples)/s.*"
        lines = re.sub(speed, "", done.stdout).splitlines()
        printed.append([x for x in lines if " loss " in x])
    assert printed[0] == printed[1] != []
