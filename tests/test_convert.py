"""The scripts of docs/convert_your_script.md: what one trains, the next one trains."""

import json
import os
import re
import uuid

import pytest
import torch

from ladder.rungs import ROOT
from proofs import launch
from proofs.launch import plant, run_script
from proofs.processes import left_over, run
from proofs.results import load, same_bits, shape_of, weights
from proofs.warm import Fork
from tests.conftest import OBSERVER

BEFORE, STEP1, STEP2, AFTER = (
    f"docs/convert/{name}.py" for name in ("before", "step1", "step2", "after")
)
SNAPSHOT = "stripes_snapshot.pt"

linux = pytest.mark.skipif(
    not os.path.isdir("/proc/self"), reason="processes are looked up in /proc"
)


def alone(script, cwd):
    """Done of a script that is one process.

    It has one thread, as torchrun gives to each of several processes: these small
    convolutions gain nothing from more, and wait long where others compute.
    """
    return run_script(script, cwd=cwd, OMP_NUM_THREADS=1)


def torchrun(script, cwd, nprocs=2, real="", **env):
    """Done of a script under torchrun; `real` as `proofs.launch.launch` has it."""
    words = ["torchrun", "--standalone", f"--nproc-per-node={nprocs}", str(script)]
    if real:
        return run(launch.as_typed(words), cwd, **env)
    return Fork(words, cwd, **env).finish()


def curve(done):
    """[(loss, accuracy)] of the five epochs that a run has printed, once each."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"epoch (\d)/5 loss (\S+) accuracy (\S+)", done.stdout)
    assert [line[0] for line in lines] == ["1", "2", "3", "4", "5"]
    return [(float(loss), float(accuracy)) for _, loss, accuracy in lines]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """(folder, Done) of step2.py: one process, batch 64."""
    folder = tmp_path_factory.mktemp("one")
    return folder, alone(ROOT / STEP2, cwd=folder)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """(folder, Done, threads) of after.py: two processes, batch 32 each.

    threads: for each rank, the names of gloo's threads that were left at its exit.
    """
    folder, log = tmp_path_factory.mktemp("two"), tmp_path_factory.mktemp("threads")
    real = "threads that outlive a script do so in a new interpreter alone"
    env = {"PYTHONPATH": OBSERVER, "THREADS_LOG": log}
    done = torchrun(ROOT / AFTER, folder, real=real, **env)
    return folder, done, [json.loads(x.read_text()) for x in log.iterdir()]


@pytest.mark.parametrize("name", [BEFORE, STEP1])
def test_before_learns(name, tmp_path):
    """As it stands, unseeded. step1.py is the same, but for its indentation."""
    assert curve(alone(ROOT / name, cwd=tmp_path))[-1][1] > 0.5
    assert list(load(tmp_path / "stripes_model.pt"))[0] == "0.weight"
    assert os.listdir(tmp_path) == ["stripes_model.pt"]


def test_only_the_order_is_new_in_step2(one, tmp_path):
    """before.py, seeded and in step2.py's order, prints its numbers to the digit."""
    order = "sampler = torch.utils.data.RandomSampler(train_set, generator=G)\n"
    script = plant(
        BEFORE,
        tmp_path,
        ("\ndevice = ", "\ntorch.manual_seed(0)\nG = torch.Generator()\ndevice = "),
        ("train_loader = DataLoader(", order + "train_loader = DataLoader("),
        ("shuffle=True", "sampler=sampler, drop_last=True"),
        ("(EPOCHS):\n", "(EPOCHS):\n    G.manual_seed(epoch)\n"),
    )
    assert curve(alone(script, cwd=tmp_path)) == curve(one[1])


def test_two_processes_train_as_one(one, two):
    """1 x 64 and 2 x 32: the same losses and accuracy, and the same kind of snapshot.

    Weights are compared in `test_three_processes_train_as_one`, in float64: in float32,
    Adam lets rounding grow.
    """
    alone, together = (torch.tensor(curve(run[1])) for run in (one, two))
    torch.testing.assert_close(together[:, 0], alone[:, 0], rtol=1e-3, atol=1e-4)
    one_sample = 1.001 / 250  # rounding may tip one that lies on the edge
    torch.testing.assert_close(together[:, 1], alone[:, 1], rtol=0, atol=one_sample)
    theirs, mine = (run[0] / SNAPSHOT for run in (one, two))
    assert shape_of(load(mine)) == shape_of(load(theirs)), "either continues the other"
    assert load(mine)["EPOCHS_RUN"] == 5
    assert os.listdir(two[0]) == [SNAPSHOT], "nothing else is left behind"


def test_a_kill_in_a_write_leaves_the_last_snapshot(tmp_path):
    """step2.py dies while it writes its third snapshot, and goes on from the second.

    With dropout, so that the random numbers must go on, too.
    """
    dropout = "nn.Flatten(),", "nn.Flatten(), nn.Dropout(0.1),"
    save = "        torch.save(snapshot, file)\n"
    half = 'file.write(b"half"), file.flush(), os.kill(os.getpid(), 9)'
    die = f'        if snapshot["EPOCHS_RUN"] == 3:\n            {half}\n'
    whole = plant(STEP2, tmp_path / "whole", dropout)
    assert alone(whole, cwd=whole.parent).returncode == 0
    script = plant(STEP2, tmp_path / "copy", dropout, (save, die + save))
    assert alone(script, cwd=tmp_path).returncode == -9
    assert load(tmp_path / SNAPSHOT)["EPOCHS_RUN"] == 2
    done = alone(whole, cwd=tmp_path)
    assert "resuming: 2 of 5 epochs are finished" in done.stdout
    assert same_bits(load(tmp_path / SNAPSHOT), load(whole.parent / SNAPSHOT))
    assert not (tmp_path / f"{SNAPSHOT}.tmp").exists()


@linux
def test_killed_after_resumes_bit_for_bit(two, tmp_path):
    script = plant(AFTER, tmp_path / "copy", hooks=["convert_kill"])
    mark = uuid.uuid4().hex
    real = "a rank is killed, and nothing may be left"
    done = torchrun(script, tmp_path, real=real, MARK=mark)
    assert done.returncode == 1
    assert "SIGKILL" in done.stderr
    assert not left_over(mark)
    assert load(tmp_path / SNAPSHOT)["EPOCHS_RUN"] == 2
    done = torchrun(ROOT / AFTER, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("resuming: 2 of 5 epochs are finished") == 1
    assert "epoch 2/5" not in done.stdout
    assert same_bits(load(tmp_path / SNAPSHOT), load(two[0] / SNAPSHOT))


def odd_float64(batch_size):
    """Changes to a script: 1007 samples, which padding would make a step more."""
    return (
        ("make_data(1250), [1000, 250]", "make_data(1257), [1007, 250]"),
        ("BATCH_SIZE = 64", f"BATCH_SIZE = {batch_size}"),
        ("EPOCHS = 5", "EPOCHS = 5\ntorch.set_default_dtype(torch.float64)"),
    )


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """(folder, Done, [facts of each rank]) of after.py, float64, 21 samples each."""
    folder = tmp_path_factory.mktemp("three")
    script = plant(AFTER, folder / "copy", *odd_float64(64), hooks=["convert_probe"])
    done = torchrun(script, folder, nprocs=3, OMP_NUM_THREADS=1)
    assert done.returncode == 0, done.stderr
    files = [folder / f"probe.{rank}.json" for rank in range(3)]
    return folder, done, [json.loads(file.read_text()) for file in files]


@linux
def test_three_processes_train_as_one(three, tmp_path):
    """3 x 21 and 1 x 63: the same weights, tight enough to see any other sample."""
    script = plant(STEP2, tmp_path / "copy", *odd_float64(63))
    done = alone(script, cwd=tmp_path)
    assert curve(done) == curve(three[1])
    assert len({facts["sum"] for facts in three[2]}) == 1, "equal on all, to the bit"
    mine, theirs = (weights(x / SNAPSHOT) for x in (three[0], tmp_path))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@linux
def test_three_processes_evaluate_each_sample_once(three):
    """250 held-out samples are 84 + 83 + 83; none of them is trained on."""
    _, done, facts = three
    assert [len(x["evaluated"]) for x in facts] == [84, 83, 83]
    held_out = set().union(*(x["evaluated"] for x in facts))
    assert len(held_out) == 250
    trained = {index for x in facts for epoch in x["trained"] for index in epoch}
    assert not held_out & trained
    assert {f"{x['accuracy']:.4f}" for x in facts} == {f"{curve(done)[-1][1]:.4f}"}


@linux
def test_three_processes_share_out_each_epoch(three):
    """15 steps of 3 x 21 different samples; another order in each epoch."""
    _, _, facts = three
    orders = [[x["trained"][epoch] for x in facts] for epoch in range(5)]
    for order in orders:
        assert [len(part) for part in order] == [315, 315, 315]
        assert len(set().union(*order)) == 945
    assert len({str(order) for order in orders}) == 5


@linux
def test_each_process_has_random_numbers_of_its_own(three):
    """They follow from epoch and rank alone, so that a resumed run repeats them."""
    for rank, facts in enumerate(three[2]):
        assert facts["seeds"] == [epoch * 3 + rank for epoch in range(5)]


@linux
def test_one_process_prints_and_saves_and_all_end_well(two, three):
    _, done, facts = three
    assert len(curve(done)) == 5
    assert [x["saved"] for x in facts] == [5, 0, 0]
    assert [x["timeout_s"] for x in facts] == [300] * 3
    assert two[2] == [[], []], "a thread is left, and the exit can abort"


def test_after_says_how_to_start_it(tmp_path):
    done = alone(ROOT / AFTER, cwd=tmp_path)
    assert done.returncode == 2
    command = "torchrun --standalone --nproc-per-node=2"
    assert done.stderr == f"start this with: {command} {ROOT / AFTER}\n"
    assert not os.listdir(tmp_path)
