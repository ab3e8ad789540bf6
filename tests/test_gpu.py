"""With an accelerator: one process on each, and no more than there are."""

import re
import shutil
import sys

import pytest
import torch

from ladder.rungs import ROOT, RUNGS
from proofs.launch import DISTRIBUTED, hooks_to_compare, launch, plant, task_of
from proofs.processes import run
from proofs.results import losses
from tests.conftest import VISIBLE

if not shutil.which("nvidia-smi"):
    pytest.skip("there is no NVIDIA GPU here", allow_module_level=True)

# All other tests hide the accelerators.
ENV = {"CUDA_VISIBLE_DEVICES": VISIBLE}
WHY = "an accelerator's driver does not survive a fork"


@pytest.fixture(scope="module")
def count(tmp_path_factory):
    code = "import torch; print(torch.accelerator.device_count())"
    folder = tmp_path_factory.mktemp("count")
    done = run([sys.executable, "-c", code], folder, **ENV)
    if int(done.stdout) == 0:
        pytest.skip("torch sees no accelerator")
    return int(done.stdout)


@pytest.mark.parametrize("name", RUNGS)
def test_one_process_trains_on_the_gpu(runs, count, name, tmp_path):
    """The losses are those of the CPU, as far as the GPU rounds alike."""
    options = ("--batch-size", 64)
    hooks = hooks_to_compare(name)
    script = plant(name, tmp_path / "copy", hooks=hooks) if hooks else ROOT / name
    done = launch(script, 5, 2, *options, cwd=tmp_path, nprocs=1, real=WHY, **ENV)
    assert done.returncode == 0, done.stderr
    assert re.match(r"1 x cuda, batch \d+ each: effective batch 64", done.stdout)
    alone = losses(runs(task_of(name), 1, hooks)[1])
    torch.testing.assert_close(losses(done), alone, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_more_processes_than_gpus_are_refused(count, name, tmp_path):
    nprocs = count + 1
    done = launch(ROOT / name, 5, 2, cwd=tmp_path, nprocs=nprocs, real=WHY, **ENV)
    assert done.returncode != 0
    line = f"{nprocs} processes here need {nprocs} accelerators: there is {count}"
    assert done.stderr.count(line) == 1
    assert not list(tmp_path.iterdir())
