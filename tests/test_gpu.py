"""With an accelerator: one process on each, and no more than there are."""

import json
import re
import shutil
import sys

import pytest
import torch

from ladder.rungs import ROOT, RUNGS
from proofs.launch import (
    DISTRIBUTED,
    hooks_to_compare,
    launch,
    plant,
    task_of,
    train,
)
from proofs.processes import run
from proofs.results import load, losses, weights
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


DATA_PARALLEL = "variants/data_parallel.py"


@pytest.fixture
def two(count):
    """The environment in which there are two GPUs."""
    if count < 2:
        pytest.skip("DataParallel splits batches over two GPUs or more")
    names = (VISIBLE or "0,1").split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[:2])}


def test_data_parallel_splits_each_batch_over_two_gpus(two, runs, tmp_path):
    """In training and in evaluation; an odd batch, too. It trains the same model."""
    script = plant(DATA_PARALLEL, tmp_path / "copy", hooks=["data_parallel"])
    options = ("--batch-size", 64)
    done = train(script, 5, 2, *options, cwd=tmp_path, real=WHY, **two)
    line = "DataParallel splits each batch over 2 of 2 CUDA GPUs: 32 + 32 samples"
    assert done.stdout.splitlines()[2] == line
    alone = losses(runs("single_gpu.py")[1])
    torch.testing.assert_close(losses(done), alone, rtol=1e-3, atol=1e-4)
    noted = json.loads((tmp_path / "noted.json").read_text())
    steps = 5 * (2048 // 64 + 512 // 64)
    for gpu in ("cuda:0", "cuda:1"):
        assert noted["calls"].count([gpu, 32]) == steps
    assert len(noted["calls"]) == 2 * steps
    assert list(load(tmp_path / "snapshot.pt")["MODEL_STATE"]) == ["weight", "bias"]

    options = ("--batch-size", 33, "--snapshot-path", "odd.pt")
    done = train(script, 1, 1, *options, cwd=tmp_path, real=WHY, **two)
    assert done.stdout.splitlines()[2].endswith("2 of 2 CUDA GPUs: 17 + 16 samples")
    script = ROOT / "single_gpu.py"
    options = ("--batch-size", 33, "--snapshot-path", "alone.pt", "--device", "cpu")
    train(script, 1, 1, *options, cwd=tmp_path, real=WHY)
    mine, theirs = (weights(tmp_path / x) for x in ("odd.pt", "alone.pt"))
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_data_parallel_leaves_the_gpus_alone_on_the_cpu(two, tmp_path):
    """It would take them, and refuse a model that is on the CPU."""
    options = ("--device", "cpu")
    script = ROOT / DATA_PARALLEL
    done = train(script, 1, 1, *options, cwd=tmp_path, real=WHY, **two)
    assert done.stdout.startswith("1 x cpu (cuda is not used), batch 32 each")
    assert done.stdout.splitlines()[2].endswith("and this run uses 0")
