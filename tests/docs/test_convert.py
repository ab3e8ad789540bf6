"""The scripts of docs/convert_your_script.md: what one trains, the next one trains."""

import os
import re
import textwrap

import pytest

from tests.conftest import OBSERVER
from tests.helpers.fences import fence
from tools.diffs import hunks
from tools.run.launch import plant, run_script
from tools.run.processes import Program
from tools.run.results import load, same_bits
from tools.scripts import ROOT, read_lines
from tools.site.pages import quoted

PAGE = "docs/convert_your_script.md"
REST = "adapt_your_script"
STEP2 = "docs/convert_your_script/step2.py"
AFTER = "docs/convert_your_script/after.py"
SNAPSHOT = "stripes_snapshot.pt"
MODEL = "stripes_model.pt"


def torchrun(script, *options, cwd, real="", **env):
    """Done of a script under torchrun; `real` as in `tools.run.launch.launch`."""
    words = ["torchrun", "--standalone", "--nproc-per-node=2", ROOT / script, *options]
    done = Program(words, cwd, real, OMP_NUM_THREADS=1, **env).finish()
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def alone(script, *options, cwd):
    """Done of a script that is one process, with one thread, as torchrun gives it."""
    return run_script(ROOT / script, *options, cwd=cwd, OMP_NUM_THREADS=1)


@pytest.mark.text
@pytest.mark.parametrize(
    ("old", "new"), [("docs/convert_your_script/before.py", STEP2), (STEP2, AFTER)]
)
def test_the_tables_name_every_change(old, new):
    """A table has a row for each hunk, but for those in the docstring."""
    (page,) = (ROOT / PAGE).read_text().split(f"`diff {old} {new}`")[1:]
    _, below = page.split("|---|---|\n", maxsplit=1)
    table, _ = below.split("\n\n", maxsplit=1)
    texts = []
    for row in table.splitlines():
        texts += quoted(row.split("|")[1])
    docstring_ends = read_lines(new).index("import argparse")
    changes = []
    for hunk in hunks(old, new):
        if hunk.new_start > docstring_ends:
            changes.append("\n".join(hunk.lines))
    for change in changes:
        assert any(text in change for text in texts), change
    for text in texts:
        assert any(text in change for change in changes), text


def test_two_processes_save_what_one_saves(tmp_path):
    """Either continues the other. After the loop, they save a model with plain keys.

    With dropout the processes draw other numbers than one does: what they have learnt
    is compared without, by the audit.
    """
    done = torchrun(AFTER, "--save-model", cwd=tmp_path)
    *_, accuracy = re.findall(r"accuracy (\S+)%", done.stdout)
    assert float(accuracy) > 80
    assert "Train epoch 1 [600/1000 (62%)]" in done.stdout, "of 16 whole batches"
    model = load(tmp_path / MODEL)
    assert same_bits(model, load(tmp_path / SNAPSHOT)["MODEL_STATE"])
    assert sorted(os.listdir(tmp_path)) == [MODEL, SNAPSHOT], "nothing else is left"
    one = alone(STEP2, "--epochs", 6, cwd=tmp_path)
    two = torchrun(AFTER, "--epochs", 7, cwd=tmp_path)
    for done, epochs in (one, "5 of 6"), (two, "6 of 7"):
        assert f"resuming: {epochs} epochs are finished" in done.stdout, done.stderr


STEP = "        scheduler.step()\n"
OPTIMIZER_STEP = "        optimizer.step()\n"


@pytest.mark.waits
def test_a_break_that_all_ranks_decide(tmp_path):
    """The lines of the guide: one rank wants to stop, and all do."""
    wish = "time.monotonic() > deadline"
    lines = fence("convert_your_script", wish)
    lines = lines.replace(wish, "rank == 1 and epoch == 2")
    script = plant(AFTER, tmp_path / "copy", (STEP, f"{STEP}{lines}\n"))
    done = torchrun(script, cwd=tmp_path)
    assert done.stdout.count("Test loss") == 2


@pytest.mark.waits
def test_a_batch_sampler_is_shared_out(tmp_path):
    """The lines of the page: the weights of the script without a batch sampler.

    On three processes, of which none may take a share of two.
    """
    text = (ROOT / AFTER).read_text()
    (sampler,) = re.findall(r"(?s)    sampler = Distri.*?\n    \)\n", text)
    batch_sampler = """\
    sampler = RandomSampler(train_set, generator=torch.Generator())
    batch_sampler = BatchSampler(sampler, args.batch_size, True)
"""
    names = "    BatchSampler,\n    DataLoader,\n    RandomSampler,\n"
    plant(
        AFTER,
        tmp_path,
        ("    DataLoader,\n", names),
        (sampler, batch_sampler),
        ("        sampler.set_epoch(epoch)\n", fence(REST, "in batch_sampler")),
        ("loader.batch_size", "len(images)"),
    )
    plant("docs/convert_your_script/before.py", tmp_path)
    words = "torchrun --standalone --nproc-per-node=3 after.py --epochs 2"
    like = "--like=python before.py --epochs 2"
    done = Program(
        ["python", "-m", "cluster.audit", like, *words.split()],
        tmp_path,
        real="the audit watches interpreters from their start",
        PYTHONPATH=ROOT,
        OMP_NUM_THREADS=1,
    ).finish()
    assert done.returncode == 0, done.stdout + done.stderr


def at_once_and_resumed(script, folder):
    """Run two epochs, and one and one: the same snapshot. The first one's folder."""
    at_once = folder / "at once"
    resumed = folder / "resumed"
    for cwd, epochs in (at_once, 2), (resumed, 1), (resumed, 2):
        cwd.mkdir(exist_ok=True)
        torchrun(script, "--epochs", epochs, cwd=cwd, PYTHONPATH=ROOT)
    assert same_bits(load(at_once / SNAPSHOT), load(resumed / SNAPSHOT))
    return at_once


NOISY = """import random
import numpy
from variants.real_job import end_with_rank

class Noisy(Subset):
    def __getitems__(self, indices):
        samples = super().__getitems__(indices)
        return [(x + random.random() + numpy.random.rand(), y) for x, y in samples]


def get_args():"""
# Both workers come from a fork server.
BOTH_FROM_FORK_SERVER = """\
        workers = torch.multiprocessing.active_children()
        assert [x._start_method for x in workers] == 2 * ["forkserver"]
"""


@pytest.mark.waits
@pytest.mark.parametrize("workers", [False, True])
def test_noise_of_each_library_resumes(workers, tmp_path):
    """Drawn by the rank, or by workers that come from a fork server."""
    data = "    # Whole batches only"
    seed = "        torch.manual_seed(args.seed + epoch * world_size + rank)\n"
    changes = [
        ("def get_args():", NOISY),
        (data, f"    train_set = Noisy(train_set, range(1000))\n{data}"),
        (seed, fence(REST, "numpy.random.seed(seed)")),
    ]
    if workers:
        text = (ROOT / AFTER).read_text()
        (loader,) = re.findall(r"(?s)    train_loader = .*?\n    \)\n", text)
        lines = textwrap.indent(fence(REST, "set_forkserver_preload"), "    ")
        changes += [
            (loader, lines),
            (OPTIMIZER_STEP, OPTIMIZER_STEP + BOTH_FROM_FORK_SERVER),
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
    state = '        torch.save(ema.module.state_dict(), f"rank_{rank}.pt")\n'
    script = plant(
        AFTER,
        tmp_path / "copy",
        ("self.conv2 =", "self.norm = nn.BatchNorm2d(8)\n        self.conv2 ="),
        ("F.relu(self.conv1(x))", "F.relu(self.norm(self.conv1(x)))"),
        (imports, imports + names),
        (start, fence(REST, "AveragedModel(") + start),
        (resume, f'{resume}        ema.load_state_dict(snapshot["EMA"])\n'),
        (saved, f'{saved} "EMA": ema.state_dict(),'),
        ("test(model, device, test_loader)", "test(ema, device, test_loader)"),
        (top, top + fence(REST, "dist.broadcast(")),
        (STEP, STEP + state),
    )
    folder = at_once_and_resumed(script, tmp_path)
    states = [load(folder / f"rank_{rank}.pt") for rank in (0, 1)]
    assert same_bits(*states), "each has rank 0's statistics"


@pytest.mark.waits
def test_a_kill_in_a_write_leaves_the_last_snapshot(tmp_path):
    """step2.py dies while it writes its third snapshot, and goes on from the second.

    The learning rate and dropout's random numbers must go on, too.
    """
    save = "        torch.save(snapshot, file)\n"
    die = """\
        if snapshot["EPOCHS_RUN"] == 3:
            file.write(b"half"), file.flush(), os.kill(os.getpid(), 9)
"""
    script = plant(STEP2, tmp_path / "copy", (save, die + save))
    assert alone(script, cwd=tmp_path).returncode == -9
    resumed = alone(STEP2, cwd=tmp_path)
    assert "resuming: 2 of 5 epochs are finished" in resumed.stdout
    alone(STEP2, cwd=tmp_path / "copy")
    assert same_bits(load(tmp_path / SNAPSHOT), load(tmp_path / "copy" / SNAPSHOT))


@pytest.mark.waits
def test_no_gloo_thread_outlives_after(tmp_path):
    log = tmp_path / "threads"
    log.mkdir()
    why = "threads that outlive a script do so in a new interpreter alone"
    env = {"real": why, "PYTHONPATH": OBSERVER, "THREADS_LOG": log}
    torchrun(AFTER, "--epochs=1", cwd=tmp_path, **env)
    assert [path.read_text() for path in log.iterdir()] == ["[]", "[]"]
