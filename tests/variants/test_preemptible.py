"""preemptible.py: told to stop, it saves inside the epoch and resumes at that step."""

import itertools
import os
import re
import uuid

import pytest
import torch

from tests.helpers.checks import import_script
from tools.run.launch import command, environment, home, launch, plant
from tools.run.processes import Program, left_over
from tools.run.results import load, same_bits, weights
from tools.scripts import ROOT

NAME = "variants/preemptible.py"
IMPATIENT = ROOT / "tests/hooks/impatient_torchrun.py"
RESUMED = "{} of {} epochs are finished in {}\n{} samples of the next epoch are trained"


def ranks(script, *arguments, cwd, nprocs=2, **env):
    """[Done of each rank], without torchrun, whose own exit status would hide theirs.

    Each rank is a fork in a folder of its own, `cwd`/RANK.
    """
    words = ["python", script, *arguments]
    store = torch.distributed.TCPStore("localhost", 0, is_master=True)
    env |= {
        "WORLD_SIZE": nprocs,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PYTHONPATH": home(script),
    }
    forks = []
    for rank in range(nprocs):
        folder = cwd / str(rank)
        folder.mkdir(parents=True, exist_ok=True)
        fork = Program(words, folder, **env, RANK=rank, LOCAL_RANK=rank)
        forks.append(fork)
    return [fork.finish() for fork in forks]


def position(path):
    snapshot = load(path)
    return snapshot["EPOCHS_RUN"], snapshot["SAMPLES_RUN"]


def assert_they_end(done):
    """All ranks end well."""
    for rank in done:
        assert rank.returncode == 0, done


def trained(folder):
    """[(EPOCHS_RUN, sample)] of all steps of all ranks."""
    found = []
    for file in folder.glob("*/trained"):
        for line in file.read_text().splitlines():
            epoch, _, *samples = map(int, line.split())
            found += [(epoch, sample) for sample in samples]
    return found


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """A copy that notes what it does and stops where the test says, with dropout."""
    folder = tmp_path_factory.mktemp("copy")
    often = "ask_every = 10", "ask_every = 1"
    return plant(NAME, folder, often, hooks=["preemption"])


@pytest.fixture
def preempt(script, tmp_path):
    """`preempt(*args, told=, expect=)`: a run that must end by being preempted."""

    def get(*args, expect, **env):
        path = tmp_path / "snapshot.pt"
        args = (*args, "--snapshot-path", path)
        done = ranks(script, *args, cwd=tmp_path, **{"P": 0} | env)
        for rank in done:
            assert rank.returncode == os.EX_TEMPFAIL, done
        _, samples = expect
        shown = done[0].stdout
        assert f"\npreempted after {samples} samples" in shown
        (tmp_path / "snapshot.pt.preempted").unlink()
        assert position(path) == expect
        return shown

    return get


@pytest.mark.waits
def test_sigterm_to_torchrun(runs, tmp_path):
    """It signals whole process groups, and so the workers of a DataLoader, too.

    A fork server, from which they come in Python 3.14, would die.
    """
    options = "num_workers=2, multiprocessing_context='fork', worker_init_fn="
    workers = "worker_init_fn=", options
    script = plant(NAME, tmp_path / "copy", workers, hooks=["faults:in_step_80"])
    mark = uuid.uuid4().hex
    env = {"MARK": mark, "IN_STEP_80": "sigterm_to_launcher"}
    done = launch(script, 5, 2, cwd=tmp_path, real="torchrun's own signals", **env)
    assert done.returncode == 1, "as after a crash"
    assert "got signal: 15" in done.stderr
    assert not left_over(mark)
    assert done.stdout.endswith("preempted after 1280 samples of the epoch\n")
    path = tmp_path / "snapshot.pt"
    assert (tmp_path / "snapshot.pt.preempted").exists()
    assert position(path) == (2, 1280), "asked at step 20, told in step 16"
    clock = "time.perf_counter() - start", "1"  # a second for each epoch
    script = plant(NAME, tmp_path / "second", clock)
    done, _ = ranks(script, 5, 2, "--snapshot-path", path, cwd=tmp_path)
    assert RESUMED.format(2, 5, path, 1280) in done.stdout
    epochs = re.findall(r"epoch (\d)/5 .* (\S+) samples/s", done.stdout)
    assert epochs == [("3", "768"), ("4", "2,048"), ("5", "2,048")]
    undisturbed, _ = runs(NAME)
    assert same_bits(load(path), load(undisturbed / "snapshot.pt"))


@pytest.mark.waits
def test_weights_that_are_nan_are_not_saved_at_sigterm(tmp_path):
    """They become NaN in the third epoch, and SIGTERM comes in its step 80."""
    step = "        self.optimizer.step()\n"
    nan = "self.model.weight.data.fill_(torch.nan)"
    in_third_epoch = f"        if self.epochs_run == 2: {nan}\n"
    changes = [(step, step + in_third_epoch)]
    script = plant(NAME, tmp_path / "copy", *changes, hooks=["faults:in_step_80"])
    path = tmp_path / "snapshot.pt"
    args = (5, 1, "--snapshot-path", path)
    done = ranks(script, *args, cwd=tmp_path, IN_STEP_80="sigterm")
    assert [rank.returncode for rank in done] == [2, 2], done
    line = "error: weight has weights that are not finite, not saved to "
    assert f"{line}{path}" in done[0].stderr
    assert position(path) == (2, 0)
    assert not (tmp_path / "snapshot.pt.preempted").exists()


@pytest.mark.waits
def test_a_slow_save_is_not_cut_off(tmp_path):
    """One process is told. It goes when rank 0 has saved, as torchrun then ends all."""
    hooks = ["timing:slow_save", "faults:in_step_80"]
    script = plant(NAME, tmp_path / "copy", hooks=hooks)
    mark = uuid.uuid4().hex
    _, *arguments = command(script, 5, 5)  # of torchrun
    words = ["python", IMPATIENT, *arguments]
    env = environment(script, {"MARK": mark, "IN_STEP_80": "sigterm"})
    done = Program(words, tmp_path, real=True, **env).finish()
    assert re.search(r"exitcode +: 75 ", done.stderr), "torchrun was not told itself"
    assert not left_over(mark)
    assert position(tmp_path / "snapshot.pt") == (2, 1280)
    assert (tmp_path / "snapshot.pt.preempted").exists()


def test_wherever_it_is_told_to_stop_nothing_is_lost(script, preempt, tmp_path):
    """In the first epoch, at once after resuming, in a last step, while it evaluates.

    Each time one rank alone is told. With dropout, the weights end bit-identical.
    """
    whole = tmp_path / "whole"
    path = tmp_path / "snapshot.pt"
    args = (script, 5, 2, "--snapshot-path")
    undisturbed = ranks(*args, whole / "snapshot.pt", cwd=whole, P=0.1)
    assert_they_end(undisturbed)
    stops = [
        ("0 320 1", (0, 384)),
        ("0 384 0", (0, 448)),
        ("2 1984 1", (3, 0)),
        ("3 2048 0", (4, 0)),
        ("4 960 1", (4, 1024)),
    ]
    shown = ""
    epochs_run = 0
    samples_run = 0
    for told, expect in stops:
        output = preempt(5, 2, expect=expect, TOLD=told, P=0.1)
        assert RESUMED.format(epochs_run, 5, path, samples_run) in output
        shown += output
        epochs_run, samples_run = expect
    # Told while it evaluates for the last time, it ends as if it had not been told.
    done = ranks(*args, path, cwd=tmp_path, P=0.1, TOLD="4 2048 0")
    assert_they_end(done)
    assert not (tmp_path / "snapshot.pt.preempted").exists()
    shown += done[0].stdout
    for rank in "01":
        steps = (whole / rank / "trained").read_text()
        assert (tmp_path / rank / "trained").read_text() == steps
    epochs = r"epoch (\d)/5 .* held-out loss (\S+)"
    curve = re.findall(epochs, undisturbed[0].stdout)
    assert len(curve) == 5
    assert re.findall(epochs, shown) == curve
    assert same_bits(load(path), load(whole / "snapshot.pt"))


def test_told_just_after_the_ranks_agreed_to_go_on(preempt, tmp_path):
    """The rank that is told goes on, too: it says so before the next step."""
    preempt(5, 5, expect=(0, 5 * 64), LATE="5 1")
    for rank in "01":
        found = (tmp_path / rank / "group").read_text()
        assert found == "gloo 300", "they compare numbers on the CPU, and do not hang"


@pytest.mark.waits
def test_the_rest_of_an_epoch_on_more_processes_or_fewer(
    script, preempt, runs, tmp_path
):
    """2 x 32, 4 x 16, 1 x 64: each sample once, and the model of one process."""
    preempt(5, 5, expect=(2, 1024), TOLD="2 960 1")
    four = {"nprocs": 4, "expect": (2, 1536), "TOLD": "2 1472 3"}
    preempt(5, 5, "--batch-size", 16, **four)
    path = tmp_path / "snapshot.pt"
    args = (5, 5, "--batch-size", 64, "--snapshot-path", path)
    done = ranks(script, *args, cwd=tmp_path, nprocs=1, P=0)
    assert_they_end(done)
    each_sample_once = list(itertools.product(range(5), range(2048)))
    assert sorted(trained(tmp_path)) == each_sample_once
    folder, _ = runs("single_gpu.py")
    alone = weights(folder / "snapshot.pt")
    mine = weights(path)[-len(alone) :]  # without those of the hook
    torch.testing.assert_close(mine, alone, rtol=0, atol=1e-6)


def test_the_sampler_leaves_out_what_is_trained():
    """And nothing, where nobody says that something is. What is left, it counts."""
    preemptible = import_script(NAME)
    sampler = preemptible.ResumableSampler(
        range(10), num_replicas=2, rank=1, shuffle=False
    )
    assert list(sampler) == [1, 3, 5, 7, 9]
    sampler.start = 3
    assert list(sampler) == [7, 9]
    assert len(sampler) == 2


@pytest.mark.waits
def test_no_step_is_left_of_the_epoch(script, preempt, tmp_path):
    """64 samples are left, and the next run's steps have 128: the epoch has no step."""
    one = {"nprocs": 1, "expect": (0, 1984), "TOLD": "0 1920 0"}
    preempt(2, 2, "--batch-size", 64, **one)
    path = tmp_path / "snapshot.pt"
    args = (2, 2, "--batch-size", 64, "--snapshot-path", path)
    done = ranks(script, *args, cwd=tmp_path, P=0)
    assert_they_end(done)
    assert re.search(r"epoch 1/2 \| train loss 0.0+ \| held-out", done[0].stdout)
    assert position(path) == (2, 0)
    assert len(trained(tmp_path)) == 1984 + 2048


NEWEST = [
    ({"EPOCHS_RUN": 2}, {"EPOCHS_RUN": 2, "SAMPLES_RUN": 1024}),
    ({"EPOCHS_RUN": 2, "SAMPLES_RUN": 1984}, {"EPOCHS_RUN": 3}),
    (None, {"EPOCHS_RUN": 0, "SAMPLES_RUN": 0}),
]


@pytest.mark.parametrize(("first", "second"), NEWEST)
def test_the_newest_snapshot_is_told_by_its_samples_too(runs, tmp_path, first, second):
    """Each rank has its own disk. A snapshot of multinode.py will do as well."""
    folder, _ = runs("multinode.py")
    snapshot = load(folder / "snapshot.pt")
    for rank, counts in enumerate((first, second)):
        disk = tmp_path / str(rank)
        disk.mkdir()
        if counts:
            torch.save(snapshot | counts, disk / "snapshot.pt")
    epochs = second["EPOCHS_RUN"]
    samples = second.get("SAMPLES_RUN", 0)
    done = ranks(ROOT / NAME, epochs + 1, 5, cwd=tmp_path)
    assert_they_end(done)
    assert "All take rank 1's\n" in done[0].stdout
    line = RESUMED.format(epochs, epochs + 1, "snapshot.pt", samples)
    assert line in done[0].stdout
    assert position(tmp_path / "0" / "snapshot.pt") == (epochs + 1, 0)
