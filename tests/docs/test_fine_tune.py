"""The scripts of docs/fine_tune.md, on one process and on two."""

import pytest
import torch
from torch.testing import assert_close

from tests.helpers.checks import assert_same_weights, fence
from tools.run.launch import plant, torchrun
from tools.run.processes import Program
from tools.run.results import load, same_bits
from tools.scripts import ROOT

PRETRAIN = "docs/fine_tune/pretrain.py"
TUNE = "docs/fine_tune/fine_tune.py"
SHARDED = "docs/fine_tune/sharded.py"


@pytest.fixture
def tune(tmp_path):
    """`tune(script, *options, nprocs=2)`: what it prints, beside a pretrained.pt."""
    Program(["python", ROOT / PRETRAIN], tmp_path, OMP_NUM_THREADS=1).succeed()

    def run(script, *options, nprocs=2):
        how = {"cwd": tmp_path, "nprocs": nprocs, "OMP_NUM_THREADS": 1}
        return torchrun(ROOT / script, *options, **how).stdout

    return run


def test_any_number_of_processes_goes_on_from_any_epoch(tune, tmp_path):
    """One trains 5 epochs, two are killed in epoch 8, one ends: as two at once.

    In the first 5, the body is frozen, and keeps its bits.
    """
    tuned = tmp_path / "tuned.pt"
    tune(TUNE)
    at_once = tuned.rename(tmp_path / "at_once.pt")
    tune(TUNE, "--epochs", 5, nprocs=1)
    model = load(tuned)["MODEL_STATE"]
    for name, value in load(tmp_path / "pretrained.pt").items():
        assert name.startswith("head") or same_bits(model[name], value)
    save = "        save_once(snapshot, SNAPSHOT)\n"
    kill = "        if epoch == 8:\n            os.kill(os.getpid(), 9)\n"
    plant(PRETRAIN, tmp_path / "copy")
    with pytest.raises(AssertionError, match="SIGKILL"):
        tune(plant(TUNE, tmp_path / "copy", (save, kill + save)))
    tune(TUNE, nprocs=1)
    assert_same_weights(tuned, at_once)


def test_each_rank_draws_other_numbers_in_each_epoch(tune, tmp_path):
    """Else all would drop the same units, if the model had dropout."""
    plant(PRETRAIN, tmp_path)
    draw = "        loss = test(", "        print(torch.rand(1))\n        loss = test("
    assert len({*tune(plant(TUNE, tmp_path, draw)).splitlines()}) == 30


def test_a_thawed_layer_has_a_rate_of_its_own(tune, tmp_path):
    """Adam's first step moves a weight by its rate, whatever the gradient is."""
    tune(TUNE, "--epochs", 1, "--frozen-epochs", 0, "--batch-size", 256, nprocs=1)
    tuned = load(tmp_path / "tuned.pt")["MODEL_STATE"]
    moved = tuned["body.0.bias"] - load(tmp_path / "pretrained.pt")["body.0.bias"]
    assert_close(moved.abs().max().item(), 0.001, rtol=0.1, atol=0)


@pytest.mark.waits
def test_sharded_prints_and_saves_what_ddp_does(tune, tmp_path):
    """Also if it resumes at the thaw, or after it."""
    epochs = tune(TUNE).splitlines()
    sharded = [tune(SHARDED, "--epochs", epoch) for epoch in (5, 7, 10)]
    printed = "".join(sharded).splitlines()
    assert [line for line in printed if "loss" in line] == epochs
    assert_same_weights(tmp_path / "tuned.pt", tmp_path / "tuned_sharded.pt")


def test_a_load_that_skips_other_names_is_seen():
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(1, 1)})
    body = model.state_dict()
    model["head"] = torch.nn.Linear(1, 1)
    lines = fence("docs/fine_tune.md", "strict=False")
    exec(lines, {"model": model, "state": body})
    from_ddp = {f"module.{name}": value for name, value in body.items()}
    with pytest.raises(AssertionError, match="module.body"):
        exec(lines, {"model": model, "state": from_ddp})
