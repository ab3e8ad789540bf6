"""Every rung learns, trains the model of the rung below, and resumes it bit for bit."""

import functools
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from ladder.rungs import EDGES, ROOT, RUNGS, commands
from proofs.hooks.float64 import around_load_train_objs as to_float64
from proofs.launch import (
    DISTRIBUTED,
    OF_THE_TRUNKS_TASK,
    UNDER_TORCHRUN,
    batch_size,
    command,
    environment,
    hooks_to_compare,
    launch,
    objects_of,
    plant,
    run_script,
    task_of,
    train,
)
from proofs.results import load, losses, same_bits, shape_of, weights
from proofs.warm import Fork

SINGLE, MULTIGPU, MULTINODE = "single_gpu.py", "multigpu.py", "multinode.py"


@pytest.mark.parametrize("name", RUNGS)
def test_a_task_of_its_own_has_a_test_of_its_own(name):
    """Where `test_learns` below does not know what can be reached."""
    if name not in OF_THE_TRUNKS_TASK:
        own_tests = ROOT / "tests" / f"test_{Path(name).stem}.py"
        assert "\ndef test_learns(typed)" in own_tests.read_text()


@pytest.mark.parametrize("name", OF_THE_TRUNKS_TASK)
def test_learns(typed, name):
    """The docstring's own command, as one types it, gets within 10 % of the floor."""
    folder, done, _ = typed(name)
    curve = losses(done)
    (floor,) = set(re.findall(r"\(noise floor (\S+)\)", done.stdout))
    assert len(curve) == 50
    assert curve[0][0] > 10 * float(floor)
    assert 0.9 * float(floor) < curve[-1][1] < 1.1 * float(floor)
    saved = re.findall(r"epoch (\d+) saved to snapshot.pt", done.stdout)
    assert saved == ["10", "20", "30", "40", "50"]
    torch.manual_seed(0)
    before = torch.nn.Linear(20, 1)
    after = load(folder / "snapshot.pt")["MODEL_STATE"]
    assert not torch.isclose(before.weight, after["weight"]).any()


@pytest.mark.parametrize("name", RUNGS)
def test_the_first_command_has_nothing_to_complain_about(typed, name):
    """Not a warning: the first lines that a newcomer sees are the script's own."""
    _, done, _ = typed(name)
    if name in UNDER_TORCHRUN:  # torchrun says that it sets OMP_NUM_THREADS
        done = done._replace(stderr=re.sub("(?m)^W.*run.py.*\n", "", done.stderr))
    assert not done.stderr


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_no_gloo_thread_outlives_main(typed, name):
    """One that does may abort the process at exit, or hang it.

    Only a new interpreter shows it: in a fork, the line that prevents it is not missed.
    """
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("threads are counted in /proc, which only Linux has")
    _, _, threads = typed(name)
    assert threads == ["[]", "[]"]


@pytest.mark.parametrize("name", RUNGS)
def test_forks_compute_the_same_bits(typed, name, tmp_path):
    """Most tests run a rung in forks of a process that has imported torch already.

    They start in a tenth of the time. What they print and save is what the command in
    the docstring prints and saves, as one types it.
    """
    folder, real, _ = typed(name)
    total, every, *_ = (word for word in commands(name)[0] if word.isdecimal())
    forked = train(ROOT / name, total, every, cwd=tmp_path)
    speed = r"[\d,]+ samples/s"
    assert re.sub(speed, "", forked.stdout) == re.sub(speed, "", real.stdout)
    snapshots = [load(x / "snapshot.pt") for x in (folder, tmp_path)]
    assert same_bits(*snapshots)


SAME = [(parent, child, 2) for parent, child in EDGES] + [(SINGLE, MULTIGPU, 4)]


@pytest.mark.parametrize(("parent", "child", "nprocs"), SAME)
def test_same_training_as_its_parent(runs, parent, child, nprocs):
    """One process with batch 64, 2 x 32, 4 x 16: the same losses, the same weights.

    A rung with a task of its own trains on 2 processes as it does on one.
    """
    hooks = hooks_to_compare(child)
    if task_of(child) == task_of(parent):
        others_folder, others_done = runs(parent, 2, hooks)
    else:
        others_folder, others_done = runs(child, 1, hooks)
    folder, done = runs(child, nprocs, hooks)
    torch.testing.assert_close(losses(done), losses(others_done), rtol=1e-6, atol=2e-6)
    mine, theirs = (weights(x / "snapshot.pt") for x in (folder, others_folder))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", RUNGS)
def test_says_what_it_does(runs, name):
    _, done = runs(name)
    train_set, eval_set, *_ = objects_of(name)
    first, second, *_ = done.stdout.splitlines()
    nprocs = 2 if name in DISTRIBUTED else 1
    assert first == (
        f"{nprocs} x cpu, batch {batch_size(name, 64)} each: effective batch 64,"
        f" {len(train_set) // 64} steps per epoch, {len(train_set)} samples,"
        f" {len(eval_set)} held out"
    )
    assert second == "starting with epoch 1: no epoch is finished in snapshot.pt"
    saved = re.findall(r"epoch (\d+) saved to snapshot.pt", done.stdout)
    assert saved == ["2", "4", "5"], "every second epoch, and the last one"
    floor = r" \(noise floor 0\.010000\)" * hasattr(eval_set, "noise_floor")
    lines = re.findall(
        rf"^epoch \d/5 \| train loss \d+\.\d{{6}} \| held-out loss \d+\.\d{{6}}{floor}"
        r"(?: \| [a-z -]+ \d+(?:\.\d{6})?)* \| [\d,]+ samples/s$",
        done.stdout,
        re.MULTILINE,
    )
    assert len(lines) == 5


@pytest.mark.parametrize("name", RUNGS)
def test_snapshot_holds_plain_keys(runs, name):
    snapshot = load(runs(name)[0] / "snapshot.pt")
    keys = ["MODEL_STATE", "OPTIMIZER_STATE", "EPOCHS_RUN"]
    assert list(snapshot)[:3] == keys, "a variant may add to them"
    snapshot = {key: snapshot[key] for key in keys}
    _, _, model, *_ = objects_of(name)
    assert list(snapshot["MODEL_STATE"]) == list(model.state_dict())
    assert snapshot["EPOCHS_RUN"] == 5
    assert len(snapshot["OPTIMIZER_STATE"]["state"]) == len(list(model.parameters()))
    if name in OF_THE_TRUNKS_TASK:
        assert shape_of(snapshot) == shape_of(load(runs(SINGLE)[0] / "snapshot.pt"))
    files = os.listdir(runs(name)[0])
    assert all(re.fullmatch(r"snapshot\.pt(\.csv)?", x) for x in files), "no left-overs"


@pytest.mark.parametrize("name", RUNGS)
def test_killed_inside_an_epoch_it_resumes_bit_for_bit(runs, name, tmp_path):
    """SIGKILL to the last rank ends all. tests/test_failure.py shows who is named."""
    script = plant(name, tmp_path / "copy", hooks=["in_step_80"])
    args = (5, 2, "--batch-size", batch_size(name, 64))
    done = launch(script, *args, cwd=tmp_path, real="", IN_STEP_80="kill")
    assert done.returncode == (1 if name in DISTRIBUTED else -signal.SIGKILL)
    assert load(tmp_path / "snapshot.pt")["EPOCHS_RUN"] == 2
    done = train(ROOT / name, *args, cwd=tmp_path)
    assert "resuming from snapshot.pt: 2 of 5 epochs are finished" in done.stdout
    assert [x for x in done.stdout.splitlines() if "epoch 3/5" in x]
    assert "epoch 2/5" not in done.stdout
    undisturbed = runs(name)[0]
    snapshots = [load(folder / "snapshot.pt") for folder in (tmp_path, undisturbed)]
    assert same_bits(*snapshots)
    for log in undisturbed.glob("*.csv"):
        assert (tmp_path / log.name).read_text() == log.read_text()


def test_any_rung_continues_any_other(tmp_path):
    """From rung to rung in one training, and the world size changes with them.

    What is not tried here follows from `test_snapshot_holds_plain_keys`: the snapshots
    of all rungs are alike.
    """
    whole = tmp_path / "whole"
    whole.mkdir()
    curve = losses(train(ROOT / SINGLE, 4, 4, "--batch-size", 64, cwd=whole))
    chain = [(SINGLE, 1), (MULTINODE, 2), (MULTIGPU, 4), (SINGLE, 1)]
    pieces = []
    for epoch, (name, nprocs) in enumerate(chain, start=1):
        args = (epoch, 1, "--batch-size", 64 // nprocs)
        pieces += losses(train(ROOT / name, *args, cwd=tmp_path, nprocs=nprocs))
    torch.testing.assert_close(pieces, curve, rtol=1e-6, atol=2e-6)
    mine, theirs = (weights(x / "snapshot.pt") for x in (tmp_path, whole))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", RUNGS)
def test_a_finished_run_says_so(runs, copy_of, name):
    path = copy_of(runs(name)[0])
    before = path.read_bytes()
    done = train(ROOT / name, 5, 1, cwd=path.parent)
    line = "nothing to do: snapshot.pt has finished 5 of 5 epochs. To start afresh, "
    assert f"{line}delete it or choose another --snapshot-path\n" in done.stdout
    assert not losses(done)
    assert path.read_bytes() == before


def test_dropout_and_the_like_resume_too(tmp_path):
    """Random numbers drawn while training follow from the epoch."""
    linear = "torch.nn.Linear(20, 1)"
    dropout = f"torch.nn.Sequential(torch.nn.Dropout(0.1), {linear})"
    script = plant(SINGLE, tmp_path / "copy", (linear, dropout))
    train(script, 2, 1, "--snapshot-path", "whole.pt", cwd=tmp_path)
    train(script, 1, 1, cwd=tmp_path)
    train(script, 2, 1, cwd=tmp_path)
    assert same_bits(load(tmp_path / "snapshot.pt"), load(tmp_path / "whole.pt"))


@pytest.mark.parametrize("name", RUNGS)
def test_what_is_evaluated_is_what_is_saved(name, tmp_path):
    """Also with BatchNorm, whose statistics each rank gathers from its own samples."""
    hooks = ["batch_norm", *hooks_to_compare(name)]
    script = plant(name, tmp_path / "copy", hooks=hooks)
    done = train(script, 2, 1, cwd=tmp_path)
    load_train_objs = functools.partial(objects_of, name)
    if "float64" in hooks:
        load_train_objs = functools.partial(to_float64, load_train_objs)
    _, eval_set, model, loss_fn, _ = load_train_objs()
    source, targets = (torch.stack(x) for x in zip(*eval_set, strict=True))
    norm = torch.nn.BatchNorm1d(source.shape[1], dtype=source.dtype)
    model = torch.nn.Sequential(norm, model)
    model.load_state_dict(load(tmp_path / "snapshot.pt")["MODEL_STATE"])
    model.eval()
    loss = loss_fn(model(source), targets).item()
    assert losses(done)[-1][1] == pytest.approx(loss, rel=1e-5)


def test_two_runs_of_multigpu_at_once_do_not_collide(tmp_path):
    """Nor with a third that sits on the port that everybody copies."""
    blocker = torch.distributed.TCPStore("localhost", 0, is_master=True)
    env = {"MASTER_PORT": blocker.port, "MASTER_ADDR": "localhost"}
    # Ranks that wait for one that nobody starts raise soon, and not after five minutes.
    soon = ("timedelta(minutes=5)", "timedelta(seconds=30)")
    script = plant(MULTIGPU, tmp_path / "copy", soon, hooks=["quick_stores"])
    env = environment(script, env)
    both = [
        Fork(command(script, 1, 1, "--snapshot-path", f"{i}.pt"), tmp_path, **env)
        for i in (0, 1)
    ]
    assert [x.finish().returncode for x in both] == [0, 0]
    assert same_bits(load(tmp_path / "0.pt"), load(tmp_path / "1.pt"))


def test_underscored_options_are_understood(tmp_path):
    args = ("1", "1", "--batch_size", "64", "--snapshot_path", "other.pt")
    done = run_script(ROOT / SINGLE, *args, cwd=tmp_path)
    assert "effective batch 64" in done.stdout
    assert (tmp_path / "other.pt").exists()
