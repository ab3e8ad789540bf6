"""The scripts of docs/convert_your_script.md: what one trains, the next one trains."""

import ast
import inspect
import os
import re

import pytest

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


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """(folder, Done) of step2.py: one process, batch 60."""
    folder = tmp_path_factory.mktemp("one")
    return folder, alone(ROOT / STEP2, cwd=folder)


def test_two_processes_save_what_one_saves(one, tmp_path):
    """The same kind of snapshot, and a model with plain keys, written after the loop.

    With dropout the processes draw other numbers than one does: what they have learnt
    is compared without, by the audit.
    """
    folder_of_one, done_of_one = one
    done = torchrun(ROOT / AFTER, "--save-model", cwd=tmp_path)
    _, accuracy = curve(done)[-1]
    assert accuracy > 80
    steps = [line[:3] for line in progress(done)]
    assert steps == [line[:3] for line in progress(done_of_one)]
    assert progress(done)[1] == ("1", "600", "1000", "62"), "of 16 whole batches"
    snapshot = load(tmp_path / SNAPSHOT)
    snapshot_of_one = load(folder_of_one / SNAPSHOT)
    assert shape_of(snapshot) == shape_of(snapshot_of_one), "either continues the other"
    assert snapshot["EPOCHS_RUN"] == 5
    assert same_bits(load(tmp_path / MODEL), snapshot["MODEL_STATE"])
    assert list(snapshot["MODEL_STATE"]) == KEYS
    assert sorted(os.listdir(tmp_path)) == [MODEL, SNAPSHOT], "nothing else is left"


STEP = "scheduler.step()"
OPTIMIZER_STEP = "        optimizer.step()\n"


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
    script = plant(
        AFTER,
        tmp_path / "copy",
        ("    DataLoader,\n", names),
        (sampler, made),
        ("        sampler.set_epoch(epoch)\n", shown("in batch_sampler")),
        ("loader.batch_size", "len(images)"),
    )
    like = ["--like", f"python {ROOT / BEFORE} --epochs 2"]
    command = ["torchrun", "--standalone", "--nproc-per-node=3", script, "--epochs", 2]
    done = Program(
        ["python", "-m", "cluster.audit", *like, *command],
        tmp_path,
        real="the audit watches interpreters from their start",
        PYTHONPATH=ROOT,
        OMP_NUM_THREADS=1,
    ).finish()
    assert done.returncode == 0, done.stdout + done.stderr


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


@pytest.mark.waits
def test_averaged_weights_resume_and_are_tested_alike(tmp_path):
    """The lines of the page, in a script that has a batch normalization."""
    names = "from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn\n"
    imports = "import torch.nn as nn\n"
    start = "    epochs_run = 0\n"
    resume = '        epochs_run = snapshot["EPOCHS_RUN"]\n'
    saved = '"EPOCHS_RUN": epoch,'
    top = "@torch.no_grad()\ndef test(model, device, loader):\n"
    state = 'torch.save(ema.module.state_dict(), f"rank_{rank}.pt")'
    script = plant(
        AFTER,
        tmp_path / "copy",
        ("self.conv2 =", "self.norm = nn.BatchNorm2d(8)\n        self.conv2 ="),
        ("F.relu(self.conv1(x))", "F.relu(self.norm(self.conv1(x)))"),
        (imports, imports + names),
        (start, shown("AveragedModel(") + start),
        (resume, f'{resume}        ema.load_state_dict(snapshot["EMA"])\n'),
        (saved, f'{saved} "EMA": ema.state_dict(),'),
        ("test(model, device, test_loader)", "test(ema, device, test_loader)"),
        (top, top + shown("dist.broadcast(")),
        (STEP, f"{STEP}\n        {state}"),
    )
    folder = at_once_and_resumed(script, tmp_path)
    states = [load(folder / f"rank_{rank}.pt") for rank in (0, 1)]
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
