"""preemptible.py: told to stop, it saves inside the epoch and resumes at that step."""

import os
import re
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.helpers.checks import assert_same_snapshot, assert_same_weights
from tests.helpers.own_disks import launch_on_own_disks
from tests.hooks import replace
from tests.hooks.faults import sigterm_in_step_80, sigterm_to_launcher_in_step_80
from tests.hooks.models import in_front
from tests.hooks.timing import slow_save
from tools.run.launch import command, copy_script, train
from tools.run.processes import Program, left_over
from tools.run.results import load, losses
from tools.scripts import ROOT

NAME = "variants/preemptible.py"
RESUMED = "{} of {} epochs are finished in {}\n{} samples of the next epoch are trained"


def position(folder):
    snapshot = load(folder)
    return snapshot["EPOCHS_RUN"], snapshot["SAMPLES_RUN"]


def send_sigterm_at(epochs_run, samples_run, rank):
    """The hook that sends it to one rank as that step begins, or the evaluation.

    Before the evaluation, all samples of the epoch are run.
    """

    def hook(script):
        def reach(inner, self, *arguments):
            here = self.epochs_run, self.samples_run, dist.get_rank()
            if here == (epochs_run, samples_run, rank):
                signal.raise_signal(signal.SIGTERM)
            return inner(self, *arguments)

        replace(script["Trainer"], "_run_batch", reach)
        replace(script["Trainer"], "_evaluate", reach)

    return hook


def launch_preempted(*arguments, hooks, end, cwd, nprocs=2):
    """A run that must end by being preempted, with this `position`: its losses."""

    def ask_in_each_step(script):
        script["Trainer"].ask_every = 1

    hooks = [ask_in_each_step, *hooks]
    words = [*arguments, "--snapshot-path", cwd / "snapshot.pt"]
    done = launch_on_own_disks(NAME, *words, cwd=cwd, nprocs=nprocs, hooks=hooks)
    assert [rank.returncode for rank in done] == [os.EX_TEMPFAIL] * nprocs, done
    (cwd / "snapshot.pt.preempted").unlink()
    assert position(cwd) == end
    return losses(done[0])


@pytest.mark.waits
def test_sigterm_to_torchrun(runs, tmp_path):
    """It signals whole process groups, and so the workers of a DataLoader, too.

    A fork server, from which they come in Python 3.14, would die.
    """
    options = "num_workers=2, multiprocessing_context='fork', worker_init_fn="
    done = train(
        NAME,
        5,
        2,
        status=1,  # as after a crash
        cwd=tmp_path,
        real=True,
        changes=[("worker_init_fn=", options)],
        hooks=[sigterm_to_launcher_in_step_80],
        MARK=tmp_path,
    )
    assert "got signal: 15" in done.stderr
    assert not left_over(tmp_path)
    assert done.stdout.endswith("preempted after 1280 samples of the epoch\n")
    assert (tmp_path / "snapshot.pt.preempted").exists()
    assert position(tmp_path) == (2, 1280), "asked at step 20, told in step 16"
    clock = "time.perf_counter() - start", "1"  # a second for each epoch
    done = train(NAME, 5, 2, cwd=tmp_path, changes=[clock])
    assert RESUMED.format(2, 5, "snapshot.pt", 1280) in done.stdout
    epochs = re.findall(r"epoch (\d)/5 .* (\S+) samples/s", done.stdout)
    assert epochs == [("3", "768"), ("4", "2,048"), ("5", "2,048")]
    undisturbed, _ = runs(NAME)
    assert_same_snapshot(tmp_path, undisturbed)


@pytest.mark.waits
def test_weights_that_are_nan_are_not_saved_at_sigterm(tmp_path):
    """They become NaN in the third epoch, as SIGTERM comes."""

    step = "            loss_sum += self._run_batch(source, targets)\n"
    in_third_epoch = """\
            if self.epochs_run == 2:
                self.model.weight.data.fill_(torch.nan)
                signal.raise_signal(signal.SIGTERM)
"""
    changes = [(step, in_third_epoch + step)]
    done = train(NAME, 5, 1, status=1, cwd=tmp_path, changes=changes)
    line = "error: weight has weights that are not finite, not saved to snapshot.pt"
    assert line in done.stderr
    assert position(tmp_path) == (2, 0)
    assert not (tmp_path / "snapshot.pt.preempted").exists()


@pytest.mark.waits
def test_a_slow_save_is_not_cut_off(tmp_path):
    """One process is told. It goes when rank 0 has saved, as torchrun then ends all.

    Here it does so after 1 s, and not after 30 s. (In a fork, torchrun would wait.)
    """
    script = copy_script(NAME, tmp_path / "copy", hooks=[slow_save, sigterm_in_step_80])
    _, *arguments = command(script, 5, 5)  # of torchrun
    words = ["python", ROOT / "tests/helpers/impatient_torchrun.py", *arguments]
    done = Program(words, tmp_path, real=True, PYTHONPATH=tmp_path / "copy").finish()
    assert "preempted after 1280 samples of the epoch" in done.stdout
    assert re.search(r"exitcode +: 75 ", done.stderr), "torchrun was not told itself"
    assert position(tmp_path) == (2, 1280)
    assert (tmp_path / "snapshot.pt.preempted").exists()


def test_wherever_it_is_told_to_stop_nothing_is_lost(tmp_path):
    """In the first epoch, at once after resuming, in a last step, while it evaluates.

    Each time one rank alone is told. With dropout, the weights end bit-identical.
    """

    def dropout(script):
        in_front(script, lambda features: torch.nn.Dropout(0.1))

    whole = tmp_path / "whole"
    expected = losses(train(NAME, 5, 2, cwd=whole, hooks=[dropout]))
    found = []
    stops = [
        ((0, 320, 1), (0, 384)),
        ((0, 384, 0), (0, 448)),
        ((2, 1984, 1), (3, 0)),
        ((3, 2048, 0), (4, 0)),
        ((4, 960, 1), (4, 1024)),
    ]
    for place, end in stops:
        hooks = [dropout, send_sigterm_at(*place)]
        found += launch_preempted(5, 2, hooks=hooks, end=end, cwd=tmp_path)
    # Told while it evaluates for the last time, it ends as if it had not been told.
    hooks = [dropout, send_sigterm_at(4, 2048, 0)]
    found += losses(train(NAME, 5, 2, cwd=tmp_path, hooks=hooks))
    assert not (tmp_path / "snapshot.pt.preempted").exists()
    assert_same_snapshot(tmp_path, whole)
    held_out = [loss for _, loss in found]
    assert held_out == [loss for _, loss in expected]
    assert found[1:4] == expected[1:4], "the train losses, too"


def test_told_just_after_the_ranks_agreed_to_go_on(tmp_path):
    """The rank that is told goes on, too: it says so before the next step.

    They ask, and wait for the save, in a group on the CPU, five minutes at most.
    """

    def tell_late(script):
        questions = []

        def all_reduce(inner, *arguments, group=None):
            inner(*arguments, group=group)
            if group is not None:
                questions.append(1)
                if len(questions) == 5 and dist.get_rank() == 1:
                    signal.raise_signal(signal.SIGTERM)

        def new_group(inner, **options):
            assert options == {"timeout": timedelta(minutes=5), "backend": "gloo"}
            return inner(**options)

        def barrier(inner, group):
            assert dist.get_backend(group) == "gloo"
            inner(group)

        replace(dist, "all_reduce", all_reduce)
        replace(dist, "new_group", new_group)
        replace(dist, "barrier", barrier)

    launch_preempted(5, 5, hooks=[tell_late], end=(0, 5 * 64), cwd=tmp_path)


@pytest.mark.waits
def test_the_rest_of_an_epoch_on_more_processes_or_fewer(runs, tmp_path):
    """2 x 32, 4 x 16, 1 x 64: the model of one process."""
    hooks = [send_sigterm_at(2, 960, 1)]
    launch_preempted(5, 5, hooks=hooks, end=(2, 1024), cwd=tmp_path)
    hooks = [send_sigterm_at(2, 1472, 3)]
    launch_preempted(
        5, 5, "--batch-size", 16, hooks=hooks, end=(2, 1536), cwd=tmp_path, nprocs=4
    )
    train(NAME, 5, 5, cwd=tmp_path, nprocs=1)
    alone, _ = runs("single_gpu.py")
    assert_same_weights(tmp_path, alone)


NEWEST = [
    ({"EPOCHS_RUN": 2}, {"EPOCHS_RUN": 2, "SAMPLES_RUN": 1984}),
    ({"EPOCHS_RUN": 2, "SAMPLES_RUN": 1984}, {"EPOCHS_RUN": 3}),
    (None, {"EPOCHS_RUN": 0, "SAMPLES_RUN": 0}),
]


@pytest.mark.parametrize(("first", "second"), NEWEST)
def test_the_newest_snapshot_is_told_by_its_samples_too(runs, tmp_path, first, second):
    """Each rank has its own disk. A snapshot of multinode.py will do as well.

    Where 64 samples are left, and a step takes 128, the epoch has no step.
    """
    folder, _ = runs("multinode.py")
    snapshot = load(folder)
    for rank, counts in enumerate((first, second)):
        disk = tmp_path / str(rank)
        disk.mkdir()
        if counts:
            torch.save(snapshot | counts, disk / "snapshot.pt")
    epochs = second["EPOCHS_RUN"]
    samples = second.get("SAMPLES_RUN", 0)
    done = launch_on_own_disks(NAME, epochs + 1, 5, "--batch-size", 64, cwd=tmp_path)
    assert [rank.returncode for rank in done] == [0, 0], done
    assert "All take rank 1's\n" in done[0].stdout
    line = RESUMED.format(epochs, epochs + 1, "snapshot.pt", samples)
    assert line in done[0].stdout
    has_no_step = "| train loss 0.000000 |" in done[0].stdout
    assert has_no_step == (samples == 1984)
    assert position(tmp_path / "0") == (epochs + 1, 0)
