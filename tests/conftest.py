"""Runs that several tests look at are made once, when the first of them asks."""

import os
import shutil
import warnings

import pytest
import torch
import torch._dynamo  # noqa: F401  optimizers import it: once here, not in each fork

# All tests run on the CPU, also where there are GPUs, but for those of test_gpu.py.
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
torch.set_num_threads(1)  # this process forks: no thread pool may exist in it

from ladder.rungs import ROOT
from proofs import launch  # noqa: E402


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """`runs(name, nprocs)`: a rung's own 5 epochs at an effective batch of 64."""
    made = {}

    def get(name, nprocs=2):
        if name not in rungs.DISTRIBUTED:
            nprocs = 1
        if (name, nprocs) not in made:
            folder = tmp_path_factory.mktemp("run")
            script, options = ROOT / name, ("--batch-size", 64 // nprocs)
            done = rungs.train(script, 5, 2, *options, cwd=folder, nprocs=nprocs)
            made[name, nprocs] = folder, done
        return made[name, nprocs]

    return get


@pytest.fixture(scope="session")
def probes(tmp_path_factory):
    """`probes(name, nprocs)`: see `rungs.probe`."""
    made = {}

    def get(name, nprocs):
        if name not in rungs.DISTRIBUTED:
            nprocs = 1
        if (name, nprocs) not in made:
            folder = tmp_path_factory.mktemp("probe")
            made[name, nprocs] = rungs.probe(name, folder, nprocs)
        return made[name, nprocs]

    return get


@pytest.fixture
def copy_of(tmp_path):
    """`copy_of(folder)`: a snapshot to spoil."""

    def get(folder):
        shutil.copy(folder / "snapshot.pt", tmp_path)
        return tmp_path / "snapshot.pt"

    return get
