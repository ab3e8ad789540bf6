"""With an accelerator: one process on each, and no more than there are."""

import os
import shutil
import sys

import pytest
import torch

from ladder.rungs import ROOT, RUNGS
from proofs.launch import DISTRIBUTED, launch
from proofs.processes import run
from proofs.results import losses
from tests.conftest import VISIBLE

if not shutil.which("nvidia-smi"):
    pytest.skip("there is no NVIDIA GPU here", allow_module_level=True)

ENV = {} if VISIBLE is None else {"CUDA_VISIBLE_DEVICES": VISIBLE}


def on_gpu(command, folder):
    """Run `command` with the accelerators that all other tests hide."""
    hidden = os.environ.pop("CUDA_VISIBLE_DEVICES")
    try:
        return run(command, folder, **ENV)
    finally:
        os.environ["CUDA_VISIBLE_DEVICES"] = hidden


@pytest.fixture(scope="module")
def count(tmp_path_factory):
    code = "import torch; print(torch.accelerator.device_count())"
    done = on_gpu([sys.executable, "-c", code], tmp_path_factory.mktemp("count"))
    if int(done.stdout) == 0:
        pytest.skip("torch sees no accelerator")
    return int(done.stdout)


@pytest.mark.parametrize("name", RUNGS)
def test_one_process_trains_on_the_gpu(runs, count, name, tmp_path):
    """The losses are those of the CPU, as far as the GPU rounds alike."""
    done = on_gpu(
        launch(ROOT / name, 5, 2, "--batch-size", 64, nprocs=1)
        if name in DISTRIBUTED
        else [sys.executable, ROOT / name, "5", "2", "--batch-size", "64"],
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 x cuda, batch 64 each: effective batch 64")
    alone = losses(runs("single_gpu.py")[1])
    torch.testing.assert_close(losses(done), alone, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_more_processes_than_gpus_are_refused(count, name, tmp_path):
    done = on_gpu(launch(ROOT / name, 5, 2, nprocs=count + 1), tmp_path)
    assert done.returncode != 0
    line = f"{count + 1} processes here need {count + 1} accelerators: there is {count}"
    assert done.stderr.count(line) == 1
    assert not list(tmp_path.iterdir())
