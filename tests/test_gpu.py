"""With an accelerator: one process on each, and no more than there are."""

import json
import re
import sys

import pytest
import torch

from tests.conftest import VISIBLE
from tools.proofs import launch
from tools.proofs.processes import run
from tools.proofs.results import losses
from tools.scripts import ROOT, SCRIPTS

# AMD's GPUs are "cuda", too.
if str(torch.accelerator.current_accelerator()) != "cuda":
    pytest.skip("this PyTorch is built for no GPU", allow_module_level=True)

# All other tests hide the accelerators. NCCL would print lines among the script's.
ENV = {"CUDA_VISIBLE_DEVICES": VISIBLE, "NCCL_DEBUG": None}
WHY = "an accelerator's driver does not survive a fork"


@pytest.fixture(scope="module")
def count(tmp_path_factory):
    code = "import torch; print(torch.accelerator.device_count())"
    done = run([sys.executable, "-c", code], tmp_path_factory.mktemp("count"), **ENV)
    if int(done.stdout) == 0:
        pytest.skip("PyTorch sees no GPU")
    return int(done.stdout)


@pytest.mark.parametrize("name", SCRIPTS)
def test_one_process_trains_on_the_gpu(runs, count, name, tmp_path):
    """The losses are those of the CPU, as far as the GPU rounds alike."""
    options, hooks = ("--batch-size", 64), launch.hooks_to_compare(name)
    script = launch.plant(name, tmp_path / "copy", hooks=hooks)
    done = launch.train(script, 5, 2, *options, cwd=tmp_path, nprocs=1, real=WHY, **ENV)
    assert re.search(
        r"^1 x cuda, batch \d+ each: effective batch 64", done.stdout, re.M
    )
    alone = losses(runs(launch.task_of(name), 1, hooks)[1])
    torch.testing.assert_close(losses(done), alone, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", launch.DISTRIBUTED)
def test_more_processes_than_gpus_are_refused(count, name, tmp_path):
    how = {"cwd": tmp_path, "nprocs": count + 1, "real": WHY}
    done = launch.launch(ROOT / name, 5, 2, **how, **ENV)
    assert done.returncode != 0
    assert done.stderr.count("error: ") >= 1
    assert not list(tmp_path.iterdir())


def test_data_parallel_splits_each_batch_over_two_gpus(count, runs, tmp_path):
    """In training and in evaluation. It trains the same model."""
    if count < 2:
        pytest.skip("DataParallel splits batches over two GPUs or more")
    visible = ",".join((VISIBLE or "0,1").split(",")[:2])
    name = "variants/data_parallel.py"
    script = launch.plant(name, tmp_path / "copy", hooks=["data_parallel"])
    env = ENV | {"CUDA_VISIBLE_DEVICES": visible}
    done = launch.train(script, 5, 2, "--batch-size", 64, cwd=tmp_path, real=WHY, **env)
    alone = losses(runs("single_gpu.py")[1])
    torch.testing.assert_close(losses(done), alone, rtol=1e-3, atol=1e-4)
    noted = json.loads((tmp_path / "noted.json").read_text())
    steps = 5 * (2048 // 64 + 512 // 64)
    for gpu in ("cuda:0", "cuda:1"):
        assert noted["calls"].count([gpu, 32]) == steps
    assert len(noted["calls"]) == 2 * steps
