"""Every script learns, trains the model of its parent, and resumes it bit for bit."""

import math
import os
import re
import shutil
import types

import pytest
import torch
from torch.testing import assert_close

from tests.helpers.checks import (
    assert_no_gloo_thread,
    assert_same_losses,
    assert_same_snapshot,
    assert_same_weights,
    hooks_to_compare,
    noted,
    objects_of,
    observed,
    stack,
)
from tests.helpers.made_once import made_once
from tests.helpers.scripts import (
    SAME_TASK_AS_SINGLE_GPU,
    exceptions_of,
    task_of,
)
from tests.hooks import replace
from tests.hooks.accelerators import one_gpu
from tests.hooks.models import batch_norm, double, float64, weighted_loss
from tests.hooks.notes import note_each, note_lines
from tests.hooks.timing import quick_stores
from tools.run.launch import DISTRIBUTED, UNDER_TORCHRUN, copy_script, start, train
from tools.run.results import load, losses
from tools.scripts import EDGES, SCRIPTS

SINGLE = "single_gpu.py"
MULTIGPU = "multigpu.py"


def variants_wait(names):
    """`names`, the variants among them for `--all`: runs of their own are dear."""
    waits = pytest.mark.waits
    return [pytest.param(name, marks=waits if "/" in name else ()) for name in names]


@pytest.mark.parametrize("name", variants_wait(SAME_TASK_AS_SINGLE_GPU))
def test_learns(typed, name):
    """With the docstring's own command: to within 10 % of the noise floor."""
    _, done = typed(name)
    (printed,) = set(re.findall(r"\(noise floor (\S+)\)", done.stdout))
    noise_floor = float(printed)
    (train_loss, _), *_, (_, held_out_loss) = losses(done)
    assert train_loss > 10 * noise_floor
    assert held_out_loss == pytest.approx(noise_floor, rel=0.1)
    saved = re.findall(r"epoch (\d+) saved to snapshot.pt", done.stdout)
    assert saved == ["10", "20", "30", "40", "50"]


@pytest.mark.parametrize("name", variants_wait(SCRIPTS))
def test_the_first_command_has_nothing_to_complain_about(typed, name):
    """Not a warning: the first lines that a newcomer sees are the script's own."""
    _, done = typed(name)
    # torch.profiler logs that it starts and stops. The lines of two ranks may mingle.
    noise = "USDT:.*"
    if name in UNDER_TORCHRUN:  # torchrun says that it sets OMP_NUM_THREADS
        noise += "|W.*run.py.*"
    assert not re.sub(f"(?m)^({noise})?\n", "", done.stderr)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="only Linux has it")
@pytest.mark.parametrize("name", variants_wait(DISTRIBUTED))
def test_no_gloo_thread_outlives_main(name, tmp_path):
    """One that does may abort the process at exit, or hang it.

    Only a new interpreter shows it: in a fork, the line that prevents it is not missed.
    """
    log = tmp_path / "log"
    train(name, 1, 1, cwd=tmp_path, real=True, **observed(log))
    assert_no_gloo_thread(log)


SAME = [(parent, child, 2) for parent, child in EDGES]
SAME.append((SINGLE, MULTIGPU, 4))


@pytest.mark.parametrize(("parent", "child", "nprocs"), SAME)
def test_same_training_as_its_parent(runs, parent, child, nprocs):
    """One process with batch 64, 2 x 32, 4 x 16: the same losses, the same weights.

    A script with a task of its own trains on 2 processes as it does on one.
    """
    hooks = hooks_to_compare(child)
    if task_of(child) == task_of(parent):
        other_folder, other = runs(parent, 2, hooks)
    else:
        other_folder, other = runs(child, 1, hooks)
    folder, done = runs(child, nprocs, hooks)
    assert_same_losses(losses(done), losses(other))
    assert_same_weights(folder, other_folder)


@pytest.mark.parametrize("name", SCRIPTS)
def test_snapshot_holds_plain_keys(runs, name):
    folder, _ = runs(name)
    snapshot = load(folder)
    keys = ["MODEL_STATE", "OPTIMIZER_STATE", "EPOCHS_RUN"]
    snapshot = {key: snapshot[key] for key in keys}  # a variant may add to them
    _, _, model, *_ = objects_of(name)
    assert list(snapshot["MODEL_STATE"]) == list(model.state_dict())
    assert len(snapshot["OPTIMIZER_STATE"]["state"]) == len(list(model.parameters()))
    if name in SAME_TASK_AS_SINGLE_GPU:
        of_single, _ = runs(SINGLE)
        # All but the values is the same.
        assert_close(snapshot, load(of_single), rtol=0, atol=math.inf)
    pattern = rf"snapshot\.pt({exceptions_of(name).leaves})?"
    for file in os.listdir(folder):
        assert re.fullmatch(pattern, file), "no left-overs"


@pytest.mark.parametrize("name", variants_wait(SCRIPTS))
def test_killed_inside_an_epoch_it_resumes_bit_for_bit(runs, killed, tmp_path, name):
    """The scripts of the root were killed as real processes.

    They resume in forks, as the others do: so this also shows that forks, in which most
    tests run, compute the bits of real processes.
    """
    folder, _, _ = killed(name)
    resumed = tmp_path / "resumed"
    shutil.copytree(folder, resumed)
    done = train(name, 5, 2, cwd=resumed)
    assert re.findall(r"(?m)^epoch (\d)/5", done.stdout) == ["3", "4", "5"]
    undisturbed, _ = runs(name)
    assert_same_snapshot(resumed, undisturbed)
    for log in undisturbed.glob("*.csv"):
        assert (resumed / log.name).read_text() == log.read_text()


def test_any_script_continues_any_other(tmp_path):
    """From script to script in one training, and the world size changes with them.

    What is not tried here follows from `test_snapshot_holds_plain_keys`: the snapshots
    of all scripts are alike.
    """
    whole = tmp_path / "whole"
    expected = train(SINGLE, 4, 4, cwd=whole)
    chain = [(SINGLE, 1), ("multinode.py", 2), (MULTIGPU, 4), (SINGLE, 1)]
    pieces = []
    for epoch, (name, nprocs) in enumerate(chain, start=1):
        done = train(name, epoch, 1, cwd=tmp_path, nprocs=nprocs)
        pieces += losses(done)
    assert_same_losses(pieces, losses(expected))
    assert_same_weights(tmp_path, whole)


def test_a_finished_run_says_so(runs, tmp_path):
    folder, _ = runs(MULTIGPU)
    path = tmp_path / "snapshot.pt"
    shutil.copy(folder / path.name, path)
    before = path.read_bytes()
    done = train(MULTIGPU, 5, 1, cwd=tmp_path)
    line = "nothing to do: 5 of 5 epochs are finished in snapshot.pt\n"
    assert done.stdout.endswith(line)
    assert path.read_bytes() == before


def test_two_runs_of_multigpu_at_once_do_not_collide(tmp_path):
    """Nor with a third that sits on the port that everybody copies."""
    blocker = torch.distributed.TCPStore("localhost", 0, is_master=True)
    # Ranks that wait for one that nobody starts raise soon, and not after five minutes.
    soon = ("timedelta(minutes=5)", "timedelta(seconds=30)")
    script = copy_script(MULTIGPU, tmp_path / "copy", soon)
    programs = []
    for path in "first.pt", "second.pt":
        program = start(
            script,
            1,
            1,
            "--snapshot-path",
            path,
            cwd=tmp_path,
            hooks=[quick_stores],
            MASTER_PORT=blocker.port,
            MASTER_ADDR="localhost",
        )
        programs.append(program)
    for program in programs:
        program.succeed()
    assert_same_snapshot(tmp_path / "first.pt", tmp_path / "second.pt")


# A run with a model with BatchNorm, a loss that must be moved, and a clock of its own


def note_statistics(script):
    """statistics.RANK.json: BatchNorm's means before each evaluation."""
    note_each(
        script,
        "_evaluate",
        "statistics",
        lambda trainer: trainer.model[0].running_mean.tolist(),
    )


def count_seconds(script):
    """By the script's clock, a step takes a second, and an evaluation 1000."""
    seconds = []

    def run_batch(inner, *arguments):
        seconds.append(1)
        return inner(*arguments)

    def evaluate(inner, self):
        seconds.append(1000)
        return inner(self)

    replace(script["Trainer"], "_run_batch", run_batch)
    replace(script["Trainer"], "_evaluate", evaluate)
    script["time"] = types.SimpleNamespace(perf_counter=lambda: sum(seconds))


@made_once
def changed(folder, name):
    """`changed(name)`: (folder, Done, hooks) of two epochs.

    It finds one GPU, and takes the CPU because it is told to.
    """
    hooks = [batch_norm, weighted_loss, one_gpu, note_lines]
    hooks += [note_statistics, count_seconds, *hooks_to_compare(name)]
    changes = []
    if name in SAME_TASK_AS_SINGLE_GPU:  # enough samples for some steps
        changes = [("MyTrainDataset(2048)", "MyTrainDataset(256)")]
    done = train(
        name, 2, 1, "--device", "cpu", cwd=folder, changes=changes, hooks=hooks
    )
    return folder, done, hooks


@pytest.mark.parametrize("name", variants_wait(SCRIPTS))
def test_a_line_added_anywhere_in_train_runs_on_every_rank(changed, name):
    """A reader adds a scheduler's step, a counter or a `break` wherever it seems right.

    On rank 0 alone, it would change what that rank does, with no error.
    """
    folder, _, _ = changed(name)
    first, *others = noted(folder, "lines", 2 if name in DISTRIBUTED else 1)
    passed, lines = first
    assert {*passed} == {*lines}
    assert all(other == first for other in others)


@pytest.mark.parametrize("name", variants_wait(SCRIPTS))
def test_what_is_evaluated_is_what_is_saved(changed, name):
    """Also with BatchNorm, whose statistics each rank gathers from its own samples."""
    folder, done, hooks = changed(name)
    _, eval_set, model, loss_fn, _ = objects_of(name)
    if float64 in hooks:
        eval_set = double(eval_set)
        model.double()
    source, targets = stack(eval_set)
    norm = torch.nn.BatchNorm1d(source.shape[1], dtype=source.dtype)
    model = torch.nn.Sequential(norm, model)
    model.load_state_dict(load(folder)["MODEL_STATE"])
    (_, last), *_ = noted(folder, "statistics", 2 if name in DISTRIBUTED else 1)
    assert norm.running_mean.tolist() == pytest.approx(last), "rank 0's are saved"
    model.eval()
    expected = loss_fn(model(source), targets).item()
    _, held_out_loss = losses(done)[-1]
    assert held_out_loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", variants_wait(SCRIPTS))
def test_the_speed_is_that_of_the_training(changed, name):
    """Without the evaluation: 1 s for each step, by the clock of `count_seconds`."""
    _, done, _ = changed(name)
    steps, samples = re.search(r"(\d+) steps per epoch, (\d+)", done.stdout).groups()
    speed = f"{int(samples) / int(steps):,.0f}"
    assert re.findall(r"\| (\S+) samples/s", done.stdout) == [speed, speed]


@pytest.mark.parametrize("name", variants_wait(DISTRIBUTED))
def test_device_cpu_tries_several_processes_on_one_gpu(changed, name):
    _, done, _ = changed(name)
    assert "2 x cpu, batch " in done.stdout
