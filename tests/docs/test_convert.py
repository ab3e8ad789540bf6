"""The scripts of docs/convert_your_script.md: what one trains, the next one trains."""

import ast
import inspect
import os
import re
import runpy

import pytest
import torch

from tests.conftest import OBSERVER
from tools.diffs import hunks
from tools.run.launch import plant, run_script
from tools.run.processes import Program
from tools.run.results import load, same_bits, shape_of
from tools.scripts import ROOT
from tools.site.pages import quoted
from variants.real_job import end_with_rank, exit_after

PAGE = "docs/convert_your_script.md"
REST = "docs/adapt_your_script.md"
BEFORE = "docs/convert_your_script/before.py"
STEP2 = "docs/convert_your_script/step2.py"
AFTER = "docs/convert_your_script/after.py"
COMPARE = "docs/convert_your_script/compare.py"
SNAPSHOT = "stripes_snapshot.pt"
MODEL = "stripes_model.pt"
KEYS = [
    "conv1.weight",
    "conv1.bias",
    "conv2.weight",
    "conv2.bias",
    "linear.weight",
    "linear.bias",
]


def alone(script, *options, cwd):
    """Done of a script that is one process, with one thread, as torchrun gives it."""
    return run_script(script, *options, cwd=cwd, OMP_NUM_THREADS=1)


def torchrun(script, *options, cwd, nprocs=2, real="", **env):
    """Done of a script under torchrun; `real` as in `tools.run.launch.launch`."""
    words = ["torchrun", "--standalone", f"--nproc-per-node={nprocs}", script]
    return Program([*words, *options], cwd, real, OMP_NUM_THREADS=1, **env).finish()


def curve(done):
    """[(loss, accuracy in percent)] on the held-out samples, of each epoch."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"(?m)^Test loss (\S+), accuracy (\S+)%$", done.stdout)
    return [(float(loss), float(accuracy)) for loss, accuracy in lines]


def progress(done):
    """[("1", "0", "1000", "0")]: epoch, samples done, all samples, percent."""
    pattern = r"(?m)^Train epoch (\d+) \[(\d+)/(\d+) \((\d+)%\)\]"
    return re.findall(pattern, done.stdout)


@pytest.mark.text
@pytest.mark.parametrize(("old", "new"), [(BEFORE, STEP2), (STEP2, AFTER)])
def test_the_tables_name_every_change(old, new):
    """A table has a row for each hunk, but for those in the docstring."""
    (page,) = (ROOT / PAGE).read_text().split(f"`diff {old} {new}`")[1:]
    _, _, below = page.partition("|---|---|\n")
    table, _, _ = below.partition("\n\n")
    texts = []
    for row in table.splitlines():
        _, first_cell, *_ = row.split("|")
        texts += quoted(first_cell)
    first_code = ast.parse((ROOT / new).read_text()).body[1].lineno
    changes = []
    for hunk in hunks(old, new):
        if hunk.new_start >= first_code:
            changes.append("\n".join(hunk.lines))
    for change in changes:
        assert [text for text in texts if text in change], change
    for text in texts:
        assert [change for change in changes if text in change], text


@pytest.mark.text
def test_the_switch_is_that_of_the_script():
    lines = without_comments(shown("FIRST_LR"))
    assert len(lines) > 10
    assert not set(lines) - set(without_comments((ROOT / STEP2).read_text()))


def without_comments(text):
    """The lines of a code, without indents."""
    return [line.partition("  #")[0].strip() for line in text.splitlines()]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """(folder, Done) of step2.py: one process, batch 60."""
    folder = tmp_path_factory.mktemp("one")
    return folder, alone(ROOT / STEP2, cwd=folder)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """(folder, Done) of after.py: two processes, batch 30 each."""
    folder = tmp_path_factory.mktemp("two")
    return folder, torchrun(ROOT / AFTER, "--save-model", cwd=folder)


def test_two_processes_save_what_one_saves(one, two):
    """The same kind of snapshot, and a model with plain keys, written after the loop.

    With dropout the processes draw other numbers than one does: what they have learnt
    is compared without, by a command of the page.
    """
    folder_of_one, done_of_one = one
    folder, done = two
    _, accuracy = curve(done)[-1]
    assert accuracy > 80
    assert progress(done) == progress(done_of_one)
    assert progress(done)[1] == ("1", "600", "1000", "62")
    snapshot = load(folder / SNAPSHOT)
    snapshot_of_one = load(folder_of_one / SNAPSHOT)
    assert shape_of(snapshot) == shape_of(snapshot_of_one), "either continues the other"
    assert snapshot["EPOCHS_RUN"] == 5
    assert same_bits(load(folder / MODEL), snapshot["MODEL_STATE"])
    assert list(snapshot["MODEL_STATE"]) == KEYS
    assert sorted(os.listdir(folder)) == [MODEL, SNAPSHOT], "nothing else is left"


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """What step2.py ends with, to compare with."""
    folder = tmp_path_factory.mktemp("compared")
    done = alone(ROOT / STEP2, "--compare", "--epochs", 2, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "alone.pt"


RESULT = {"LR": 0.1, "FIRST_LR": 0.1, "EPOCHS_TRAINED": 2}
CHANGES = [
    ({"EPOCHS_TRAINED": 0}, "trained 0 epochs: remove the snapshot before each run"),
    ({"EPOCHS_TRAINED": 1}, "epochs trained: 1, but in a.pt: 2"),
    ({"LR": None, "FIRST_LR": None}, "has no LR, FIRST_LR"),
    ({"MODEL_STATE": {"x": torch.ones(2)}}, "has other weights than a.pt, such as x"),
    ({"MODEL_STATE": {"w": torch.ones(3)}}, "has other weights than a.pt, such as w"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_compare_refuses_what_cannot_be_compared(change, message, tmp_path):
    result = RESULT | {"MODEL_STATE": {"w": torch.ones(2)}}
    torch.save(result, tmp_path / "a.pt")
    for name, value in change.items():
        result[name] = value
        if value is None:
            del result[name]
    torch.save(result, tmp_path / "b.pt")
    done = alone(ROOT / COMPARE, "a.pt", "b.pt", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"compare.py: error: b.pt: {message}")


def test_dropout_of_any_kind_is_turned_off():
    """The loop of step2.py finds it in layers that the script does not have, too."""
    layers = [
        torch.nn.Sequential(torch.nn.AlphaDropout(), torch.nn.Dropout()),
        torch.nn.LSTM(8, 8, num_layers=2, dropout=0.5),
        torch.nn.TransformerEncoderLayer(8, 2, dropout=0.5),
    ]
    step2 = runpy.run_path(ROOT / STEP2)
    for layer in layers:
        step2["turn_dropout_off"](layer)
        inputs = torch.ones(3, 4, 8)
        # As text: an LSTM's output is a tuple of tuples.
        assert str(layer(inputs)) == str(layer(inputs)), layer


STEP = "scheduler.step()"
OPTIMIZER_STEP = "        optimizer.step()\n"
SHARE = "DistributedSampler(train_set,"
MISTAKES = {
    "a continue above the scheduler": (STEP, f"if rank: continue\n        {STEP}"),
    "the model is not wrapped": ("train(args, ddp_model,", "train(args, model,"),
    "the sampler is not told the epoch": ("sampler.set_epoch(epoch)", "pass"),
    "every process takes all samples": (SHARE, f"{SHARE} num_replicas=1, rank=0,"),
    "the batch is not divided": ("args.batch_size // world_size", "args.batch_size"),
    "dropout is on": ("        turn_dropout_off(model)", "        pass"),
}


@pytest.mark.waits
@pytest.mark.parametrize("mistake", MISTAKES)
def test_compare_shows_a_mistake(mistake, compared, tmp_path):
    """None of them raises. Each is far above what rounding does in float64."""
    script = plant(AFTER, tmp_path / "copy", MISTAKES[mistake])
    done = torchrun(script, "--compare", "--epochs", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    files = [compared, *sorted(tmp_path.glob("world_*.pt"))]
    done = alone(ROOT / COMPARE, *files, cwd=tmp_path)
    _, *found = re.findall(r"by (\S+), rate \S+", done.stdout)
    assert len(found) == 2
    assert min(map(float, found)) > 1e-5


def shown(text):
    """The lines of the two pages that have this text in them."""
    pages = (ROOT / PAGE).read_text() + (ROOT / REST).read_text()
    fences = pages.split("```")[1::2]
    (lines,) = [fence for fence in fences if text in fence]
    return lines.removeprefix("python\n")


@pytest.mark.waits
def test_a_break_that_all_ranks_decide(tmp_path):
    """The lines of the guide: one rank wants to stop, and all do."""
    wish = "time.monotonic() > deadline"
    lines = shown(wish).replace(wish, "rank == 1 and epoch == 2")
    step = f"        {STEP}\n"
    script = plant(AFTER, tmp_path / "copy", (step, f"{step}{lines}\n"))
    done = torchrun(script, cwd=tmp_path)
    assert len(curve(done)) == 2


@pytest.mark.waits
def test_a_batch_sampler_is_shared_out(tmp_path):
    """The lines of the page: the weights of the script without a batch sampler.

    On three processes, of which none may take a share of two.
    """
    text = (ROOT / AFTER).read_text()
    (sampler,) = re.findall(r"(?s)    sampler = Distri.*?\n    \)\n", text)
    made = "    sampler = RandomSampler(train_set, generator=torch.Generator())\n"
    made += "    batch_sampler = BatchSampler(sampler, args.batch_size, True)\n"
    names = "    BatchSampler,\n    DataLoader,\n    RandomSampler,\n"
    plant(STEP2, tmp_path)
    plant(
        AFTER,
        tmp_path,
        ("    DataLoader,\n", names),
        (sampler, made),
        ("        sampler.set_epoch(epoch)\n", shown("in batch_sampler")),
        ("loader.batch_size", "len(images)"),
    )
    text = compare(tmp_path, nprocs=3)
    assert text.count("differ by 0.000000000000, rate 0.004900\n") == 4


NOISY = """import random
import numpy

class Noisy(Subset):
    def __getitems__(self, indices):
        samples = super().__getitems__(indices)
        return [(x + random.random() + numpy.random.rand(), y) for x, y in samples]


def get_args():"""


def at_once_and_resumed(script, folder, *options):
    """Run two epochs, and one and one: the same snapshot. The first one's folder."""
    at_once = folder / "at once"
    resumed = folder / "resumed"
    for cwd, epochs in ((at_once, 2), (resumed, 1), (resumed, 2)):
        cwd.mkdir(exist_ok=True)
        done = torchrun(script, "--epochs", epochs, *options, cwd=cwd)
        assert done.returncode == 0, done.stderr
    assert same_bits(load(at_once / SNAPSHOT), load(resumed / SNAPSHOT))
    return at_once


@pytest.mark.waits
@pytest.mark.parametrize("workers", [False, True])
def test_noise_of_each_library_resumes(workers, tmp_path):
    """Drawn by the rank, or by workers that come from a fork server."""
    data = "    # Whole batches only"
    seed = "        torch.manual_seed(args.seed + epoch * world_size + rank)\n"
    changes = [
        ("def get_args():", NOISY),
        (data, f"    train_set = Noisy(train_set, range(1000))\n{data}"),
        (seed, shown("numpy.random.seed(seed)")),
    ]
    if workers:
        text = (ROOT / AFTER).read_text()
        loader = re.search(r"(?s)train_loader = DataLoader\(.*?\n    \)", text)[0]
        lines = shown("set_forkserver_preload").strip().replace("\n", "\n    ")
        # Both workers come from a fork server.
        there = "torch.multiprocessing.active_children()"
        see = f"assert [x._start_method for x in {there}] == 2 * ['forkserver']"
        ends = "import threading\n\n\n"
        ends += inspect.getsource(end_with_rank) + "\n\n"
        ends += inspect.getsource(exit_after)
        changes += [
            (loader, lines),
            (OPTIMIZER_STEP, f"{OPTIMIZER_STEP}        {see}\n"),
            ("def get_args():", f"{ends}\n\ndef get_args():"),
        ]
    at_once_and_resumed(plant(AFTER, tmp_path / "copy", *changes), tmp_path)


def compare(folder, nprocs=2):
    """What compare.py prints of step2.py and after.py, copies in `folder`.

    Both have printed the same losses and accuracies.
    """
    options = ("--compare", "--epochs", 2)
    done_alone = alone(folder / "step2.py", *options, cwd=folder)
    (folder / SNAPSHOT).unlink()
    done = torchrun(folder / "after.py", *options, cwd=folder, nprocs=nprocs)
    (folder / SNAPSHOT).unlink()
    assert curve(done) == curve(done_alone)
    files = sorted(path.name for path in folder.glob("*_rank_*.pt"))
    return alone(ROOT / COMPARE, "alone.pt", *files, cwd=folder).stdout


@pytest.mark.waits
def test_a_cosine_is_compared_before_its_end(tmp_path):
    """The rate is neither 0 nor the first."""
    names = "CosineAnnealingLR, LinearLR, SequentialLR"
    lines = shown("SequentialLR(")
    for name in (STEP2, AFTER):
        text = (ROOT / name).read_text()
        (line,) = re.findall(r"    scheduler = StepLR\(.*\n", text)
        plant(name, tmp_path, ("import StepLR", f"import {names}"), (line, lines))
    text = compare(tmp_path)
    assert text.count("differ by 0.000000000000, rate 0.005000\n") == 3
    assert "the rate has not changed yet" not in text


def averaged(name, folder, *changes):
    """A copy of a script that has a batch normalization and averages its weights."""
    names = "from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn\n"
    imports = "import torch.nn as nn\n"
    rate = '    first_lr = optimizer.param_groups[0]["lr"]\n'
    resume = '        epochs_run = snapshot["EPOCHS_RUN"]\n'
    saved = '"EPOCHS_RUN": epoch,'
    # What is compared, and not what is saved: "LR" is below it.
    compared = '"MODEL_STATE": {}.state_dict(),\n            "LR"'
    changes = [
        *changes,
        ("self.conv2 =", "self.norm = nn.BatchNorm2d(8)\n        self.conv2 ="),
        ("F.relu(self.conv1(x))", "F.relu(self.norm(self.conv1(x)))"),
        (imports, imports + names),
        (rate, shown("AveragedModel(") + rate),
        (resume, f'{resume}        ema.load_state_dict(snapshot["EMA"])\n'),
        (saved, f'{saved} "EMA": ema.state_dict(),'),
        ("test(model, device, test_loader)", "test(ema, device, test_loader)"),
        (compared.format("model"), compared.format("ema.module")),
    ]
    if name == AFTER:
        top = "@torch.no_grad()\ndef test(model, device, loader):\n"
        changes.append((top, top + shown("dist.broadcast(")))
    return plant(name, folder, *changes)


@pytest.mark.waits
def test_averaged_weights_are_compared_with_frozen_statistics(tmp_path):
    """The layer whose statistics are frozen learns."""
    off = "        turn_dropout_off(model)\n"
    for name in (STEP2, AFTER):
        averaged(name, tmp_path, (off, off + shown("batchnorm._BatchNorm")))
    assert compare(tmp_path).count("differ by 0.000000000000") == 3
    state = load(tmp_path / "alone.pt")["MODEL_STATE"]
    assert (state["norm.weight"] - 1).abs().max() > 1e-3
    assert not state["norm.running_mean"].any()


@pytest.mark.waits
def test_averaged_weights_resume_and_are_tested_alike(tmp_path):
    script = averaged(AFTER, tmp_path / "copy")
    folder = at_once_and_resumed(script, tmp_path, "--compare")
    states = []
    for rank in (0, 1):
        result = load(folder / f"world_2_rank_{rank}.pt")
        states.append(result["MODEL_STATE"])
    assert same_bits(*states), "each has rank 0's statistics"


@pytest.mark.waits
def test_a_kill_in_a_write_leaves_the_last_snapshot(one, tmp_path):
    """step2.py dies while it writes its third snapshot, and goes on from the second.

    The learning rate and dropout's random numbers must go on, too.
    """
    save = "        torch.save(snapshot, file)\n"
    half = 'file.write(b"half"), file.flush(), os.kill(os.getpid(), 9)'
    die = f'        if snapshot["EPOCHS_RUN"] == 3:\n            {half}\n'
    script = plant(STEP2, tmp_path / "copy", (save, die + save))
    assert alone(script, cwd=tmp_path).returncode == -9
    assert load(tmp_path / SNAPSHOT)["EPOCHS_RUN"] == 2
    done = alone(ROOT / STEP2, cwd=tmp_path)
    assert "resuming: 2 of 5 epochs are finished" in done.stdout
    folder, _ = one
    assert same_bits(load(tmp_path / SNAPSHOT), load(folder / SNAPSHOT))
    assert not (tmp_path / f"{SNAPSHOT}.tmp").exists()


@pytest.mark.waits
def test_killed_after_resumes_bit_for_bit(two, tmp_path):
    """Also what each process draws: the numbers follow from epoch and rank."""
    die = "if epoch == batch_idx == 3 and dist.get_rank(): os.kill(os.getpid(), 9)\n"
    change = (OPTIMIZER_STEP, f"{OPTIMIZER_STEP}        {die}")
    script = plant(AFTER, tmp_path / "copy", change)
    assert torchrun(script, cwd=tmp_path).returncode == 1
    assert load(tmp_path / SNAPSHOT)["EPOCHS_RUN"] == 2
    done = torchrun(ROOT / AFTER, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("resuming: 2 of 5 epochs are finished") == 1
    assert "epoch 2 [" not in done.stdout
    folder, _ = two
    assert same_bits(load(tmp_path / SNAPSHOT), load(folder / SNAPSHOT))


@pytest.mark.waits
def test_no_gloo_thread_outlives_after(tmp_path):
    log = tmp_path / "threads"
    log.mkdir()
    done = torchrun(
        ROOT / AFTER,
        "--epochs",
        1,
        cwd=tmp_path,
        real="threads that outlive a script do so in a new interpreter alone",
        PYTHONPATH=OBSERVER,
        THREADS_LOG=log,
    )
    assert done.returncode == 0, done.stderr
    assert [path.read_text() for path in log.iterdir()] == ["[]", "[]"]
