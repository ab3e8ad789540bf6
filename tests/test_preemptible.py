"""preemptible.py: told to stop, it saves inside the epoch and resumes at that step."""

import os
import re
import uuid

import pytest
import torch

from ladder.rungs import ROOT
from proofs.launch import (
    as_typed,
    command,
    environment,
    home,
    launch,
    plant,
    run_script,
)
from proofs.processes import left_over, run
from proofs.results import load, same_bits, weights
from proofs.warm import Fork

NAME = "variants/preemptible.py"
IMPATIENT = ROOT / "tests" / "faults" / "impatient_torchrun.py"
START = "starting with epoch 1: no epoch is finished in "
TRAINED = "samples of the next epoch are trained already\n"
ENDS = "torchrun's signals, report and status are the claim"  # so no fork


def ranks(script, *arguments, cwd, nprocs=2, **env):
    """Run ranks without torchrun, so that the exit status of each is seen.

    They are forks, and each has a folder of its own, `cwd`/RANK: [Done of each rank].
    """
    env |= {"MASTER_ADDR": "localhost", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    env |= {"WORLD_SIZE": nprocs, "PYTHONPATH": home(script)}
    words = ["python", script, *arguments]
    store = torch.distributed.TCPStore("localhost", 0, is_master=True)
    forks = []
    for rank in range(nprocs):
        folder = cwd / str(rank)
        folder.mkdir(parents=True, exist_ok=True)
        where = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": store.port}
        forks.append(Fork(words, folder, **env, **where))
    return [fork.finish() for fork in forks]


def position(path):
    """(EPOCHS_RUN, SAMPLES_RUN) of a snapshot."""
    snapshot = load(path)
    return snapshot["EPOCHS_RUN"], snapshot["SAMPLES_RUN"]


def trained(folder):
    """[(EPOCHS_RUN, sample)] of all steps of all ranks."""
    lines = [x.split() for y in folder.glob("*/trained") for x in y.open()]
    return [(int(x[0]), int(index)) for x in lines for index in x[2:]]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """A copy that notes what it does and stops where the test says, with dropout."""
    folder = tmp_path_factory.mktemp("copy")
    return plant(NAME, folder, hooks=["preemption"])


@pytest.fixture
def preempt(script, tmp_path):
    """`preempt(*args, told=, expect=)`: a run that must end by being preempted."""

    def get(*args, expect, **env):
        path = tmp_path / "snapshot.pt"
        args = (*args, "--snapshot-path", path)
        done = ranks(script, *args, cwd=tmp_path, **{"P": 0} | env)
        assert {x.returncode for x in done} == {os.EX_TEMPFAIL}, done
        last = f"preempted after {expect[1]} samples of the epoch\n"
        assert done[0].stdout.endswith(last)
        assert not any(x.stdout for x in done[1:]), "one rank saves"
        (tmp_path / "snapshot.pt.preempted").unlink()
        assert position(path) == expect
        return done[0].stdout

    return get


def test_sigterm_to_torchrun(runs, tmp_path):
    """As Slurm and clouds send it, in the middle of the third epoch of five."""
    script = plant(NAME, tmp_path / "copy", hooks=["in_step_80"])
    mark = uuid.uuid4().hex
    env = {"MARK": mark, "IN_STEP_80": "sigterm_to_launcher"}
    done = launch(script, 5, 2, cwd=tmp_path, real=ENDS, **env)
    assert done.returncode == 1, "as after a crash"
    assert "got signal: 15" in done.stderr
    assert not left_over(mark)
    assert done.stdout.endswith("preempted after 1024 samples of the epoch\n")
    names = sorted(x.name for x in tmp_path.iterdir())
    assert names == ["copy", "snapshot.pt", "snapshot.pt.preempted"]
    assert position(tmp_path / "snapshot.pt") == (2, 1024)
    path = tmp_path / "snapshot.pt"
    done, _ = ranks(ROOT / NAME, 5, 2, "--snapshot-path", path, cwd=tmp_path)
    assert f"resuming from {path}: 2 of 5 epochs are finished\n" in done.stdout
    assert "\n1024 samples of the next epoch are trained already\n" in done.stdout
    assert re.findall(r"epoch (\d)/5", done.stdout) == ["3", "4", "5"]
    assert same_bits(load(path), load(runs(NAME)[0] / "snapshot.pt"))


def test_workers_of_a_data_loader_are_told_too(tmp_path):
    """torchrun signals whole process groups. A worker that died would end its rank."""
    workers = ("worker_init_fn=", "num_workers=2,\n        worker_init_fn=")
    script = plant(NAME, tmp_path / "copy", workers, hooks=["in_step_80"])
    mark = uuid.uuid4().hex
    env = {"MARK": mark, "IN_STEP_80": "sigterm_to_launcher"}
    done = launch(script, 5, 5, cwd=tmp_path, real=ENDS, **env)
    assert "preempted after 1024 samples of the epoch\n" in done.stdout, done.stderr
    assert position(tmp_path / "snapshot.pt") == (2, 1024)
    assert (tmp_path / "snapshot.pt.preempted").exists()
    assert not left_over(mark)


def test_a_slow_save_is_not_cut_off(tmp_path):
    """One process is told. It goes when rank 0 has saved, as torchrun then ends all."""
    script = plant(NAME, tmp_path / "copy", hooks=["slow_save", "in_step_80"])
    mark = uuid.uuid4().hex
    words = as_typed(command(script, 5, 5))
    at = words.index("torch.distributed.run")
    words[at - 1 : at + 1] = [IMPATIENT]
    env = {"MARK": mark, "IN_STEP_80": "sigterm"} | environment(script, {})
    done = run(words, tmp_path, **env)
    assert done.returncode == 1
    assert re.search(r"exitcode +: 75 ", done.stderr), "torchrun was not told itself"
    assert not left_over(mark)
    assert position(tmp_path / "snapshot.pt") == (2, 1024)
    assert (tmp_path / "snapshot.pt.preempted").exists()


def test_wherever_it_is_told_to_stop_nothing_is_lost(script, preempt, tmp_path):
    """In the first epoch, at once after resuming, in a last step, while it evaluates.

    Each time one rank alone is told. With dropout, the weights end bit-identical.
    """
    whole, path = tmp_path / "whole", tmp_path / "snapshot.pt"
    args = (5, 2, "--snapshot-path")
    undisturbed = ranks(script, *args, whole / "snapshot.pt", cwd=whole, P=0.1)
    assert [x.returncode for x in undisturbed] == [0, 0]
    stops = [
        ("0 320 1", (0, 384), f"{START}{path}\n0 {TRAINED}"),
        ("0 384 0", (0, 448), f"{START}{path}\n384 {TRAINED}"),
        ("2 1984 1", (3, 0), f"{START}{path}\n448 {TRAINED}"),
        ("3 2048 0", (4, 0), f"3 of 5 epochs are finished\n0 {TRAINED}"),
        ("4 960 1", (4, 1024), f"4 of 5 epochs are finished\n0 {TRAINED}"),
    ]
    outputs = []
    for told, expect, line in stops:
        outputs.append(preempt(5, 2, expect=expect, TOLD=told, P=0.1))
        assert line in outputs[-1]
    # Told while it evaluates for the last time, it ends as if it had not been told.
    done = ranks(script, *args, path, cwd=tmp_path, P=0.1, TOLD="4 2048 0")
    assert [x.returncode for x in done] == [0, 0]
    assert not (tmp_path / "snapshot.pt.preempted").exists()
    outputs.append(done[0].stdout)
    for rank in "01":
        steps = (whole / rank / "trained").read_text()
        assert (tmp_path / rank / "trained").read_text() == steps
    epochs = r"epoch (\d)/5 .* held-out loss (\S+)"
    curve = re.findall(epochs, undisturbed[0].stdout)
    assert len(curve) == 5
    assert re.findall(epochs, "".join(outputs)) == curve
    assert same_bits(load(path), load(whole / "snapshot.pt"))


def test_told_just_after_the_ranks_agreed_to_go_on(preempt, tmp_path):
    """The rank that is told goes on, too: it says so before the next step."""
    preempt(5, 5, expect=(0, 5 * 64), LATE="5 1")
    found = [float((tmp_path / rank / "timeout").read_text()) for rank in "01"]
    assert found == [300, 300], "and no rank waits longer for the others' answers"
    for file in ("backend", "barrier"):
        found = [(tmp_path / rank / file).read_text() for rank in "01"]
        assert found == ["gloo", "gloo"], "the ranks compare numbers on the CPU"


def test_the_rest_of_an_epoch_on_more_processes_or_fewer(
    script, preempt, runs, tmp_path
):
    """2 x 32, 4 x 16, 1 x 64: each sample once, and the model of one process."""
    preempt(5, 5, expect=(2, 1024), TOLD="2 960 1")
    options = {"nprocs": 4, "expect": (2, 1536), "TOLD": "2 1472 3"}
    preempt(5, 5, "--batch-size", 16, **options)
    path = tmp_path / "snapshot.pt"
    args = (5, 5, "--batch-size", 64, "--snapshot-path", path)
    (done,) = ranks(script, *args, cwd=tmp_path, nprocs=1, P=0)
    assert done.returncode == 0, done.stderr
    everything = [(epoch, sample) for epoch in range(5) for sample in range(2048)]
    assert sorted(trained(tmp_path)) == everything
    alone = weights(runs("single_gpu.py")[0] / "snapshot.pt")
    torch.testing.assert_close(weights(path), alone, rtol=0, atol=1e-6)


def test_the_sampler_leaves_out_what_is_trained():
    """And nothing, where nobody says that something is."""
    from variants.preemptible import ResumableSampler

    sampler = ResumableSampler(range(10), num_replicas=2, rank=1, shuffle=False)
    assert list(sampler) == [1, 3, 5, 7, 9]
    sampler.start = 3
    assert list(sampler) == [7, 9]


def test_no_step_is_left_of_the_epoch(script, preempt, tmp_path):
    """64 samples are left, and the next run's steps have 128: the epoch has no loss."""
    options = {"nprocs": 1, "expect": (0, 1984), "TOLD": "0 1920 0"}
    preempt(2, 2, "--batch-size", 64, **options)
    args = (2, 2, "--batch-size", 64, "--snapshot-path", tmp_path / "snapshot.pt")
    done = ranks(script, *args, cwd=tmp_path, P=0)
    assert [x.returncode for x in done] == [0, 0], done
    assert re.search(r"epoch 1/2 \| train loss nan \| held-out loss \d", done[0].stdout)
    assert position(tmp_path / "snapshot.pt") == (2, 0)
    assert len(trained(tmp_path)) == 1984 + 2048


def snapshot_of(runs, epochs_run, samples_run):
    """A snapshot as preemptible.py writes it, or as its parent does (None)."""
    snapshot = load(runs("multinode.py")[0] / "snapshot.pt") | {
        "EPOCHS_RUN": epochs_run
    }
    return snapshot if samples_run is None else snapshot | {"SAMPLES_RUN": samples_run}


NEWEST = [
    ((2, None), (2, 1024), f"2 of 4 epochs are finished\n1024 {TRAINED}"),
    ((2, 1984), (3, None), f"3 of 4 epochs are finished\n0 {TRAINED}"),
]


@pytest.mark.parametrize(("first", "second", "line"), NEWEST)
def test_the_newest_snapshot_is_told_by_its_samples_too(
    runs, tmp_path, first, second, line
):
    """Each rank has its own disk. A snapshot of multinode.py will do as well."""
    for rank, what in enumerate((first, second)):
        (tmp_path / str(rank)).mkdir()
        path = tmp_path / str(rank) / "snapshot.pt"
        torch.save(snapshot_of(runs, *what), path)
    done = ranks(ROOT / NAME, 4, 4, cwd=tmp_path)
    assert [x.returncode for x in done] == [0, 0], done
    assert f"resuming from snapshot.pt: {line}" in done[0].stdout
    assert position(tmp_path / "0" / "snapshot.pt") == (4, 0)


@pytest.mark.parametrize("name", ["single_gpu.py", "multinode.py"])
def test_other_rungs_repeat_the_interrupted_epoch(runs, tmp_path, name):
    """They take what is finished: nothing, if the first epoch was interrupted."""
    lines = {0: START, 2: "2 of 5 epochs are finished\n"}
    for epochs_run, line in lines.items():
        path = tmp_path / f"{epochs_run}.pt"
        torch.save(snapshot_of(runs, epochs_run, 1024), path)
        nprocs = 2 if name == "multinode.py" else 1
        args = (5, 5, "--batch-size", 64 // nprocs, "--snapshot-path", path)
        if name == "multinode.py":
            done = ranks(ROOT / name, *args, cwd=tmp_path)[0]
        else:
            done = run_script(ROOT / name, *args, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert line in done.stdout
        found = re.findall(r"epoch (\d)/5 ", done.stdout)
        assert found == [str(x) for x in range(epochs_run + 1, 6)]
    alone = weights(runs("single_gpu.py")[0] / "snapshot.pt")
    torch.testing.assert_close(weights(tmp_path / "0.pt"), alone, rtol=0, atol=1e-6)
