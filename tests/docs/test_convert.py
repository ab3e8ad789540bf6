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
REST = "docs/adapt_your_script.md"
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


@pytest.mark.text
@pytest.mark.parametrize(
    ("old", "new"), [("docs/convert_your_script/before.py", STEP2), (STEP2, AFTER)]
)
def test_the_tables_name_every_change(old, new):
    """A table has a row for each hunk, but for those in the docstring."""
    _, below = (ROOT / PAGE).read_text().split(f"`diff {old} {new}`")
    table = re.search(r"(?s)[|]---[|]---[|]\n(.*?)\n\n", below)[1]
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
    one = run_script(ROOT / STEP2, "--epochs", 6, cwd=tmp_path)
    two = torchrun(AFTER, "--epochs", 7, cwd=tmp_path)
    for done, epochs in (one, "5 of 6"), (two, "6 of 7"):
        assert f"resuming: {epochs} epochs are finished" in done.stdout, done.stderr


def test_a_kill_while_step2_writes_leaves_the_old_snapshot(tmp_path):
    write = "torch.save(snapshot, file)"
    kill = """if snapshot["EPOCHS_RUN"] == 2:
            file.write(b"half")
            file.flush()
            os.kill(os.getpid(), 9)
        """
    script = plant(STEP2, tmp_path, (write, kill + write))
    assert run_script(script, cwd=tmp_path).returncode == -9
    assert load(tmp_path / SNAPSHOT)["EPOCHS_RUN"] == 1


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


NOISY = """import random
import numpy
from variants.real_job import end_with_rank

class Noisy(Subset):
    def __getitems__(self, indices):
        samples = super().__getitems__(indices)
        return [(x + random.random() + numpy.random.rand(), y) for x, y in samples]


def get_args():"""
BOTH_FROM_A_FORK_SERVER = """\
        workers = torch.multiprocessing.active_children()
        assert [x._start_method for x in workers] == 2 * ["forkserver"]
"""
AVERAGE = "from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn\n"
NOTE = """\
        torch.save(ema.module.state_dict(), f"rank_{rank}.pt")
        drawn = random.random(), numpy.random.rand(), torch.rand(()).item()
        print(*map("drawn {}".format, drawn), flush=True)
"""


@pytest.mark.waits
@pytest.mark.parametrize("workers", [False, True])
def test_the_lines_of_the_pages_resume(workers, tmp_path):
    """In a script that has a batch normalization, and that rank 1 stops.

    Noise of each library is drawn by the rank, or by workers that come from a fork
    server. No two ranks or epochs draw the same. Averaged weights are tested with rank
    0's statistics.
    """
    wish = "time.monotonic() > deadline"
    stop = fence("docs/convert_your_script.md", wish)
    stop = stop.replace(wish, "rank == 1 and epoch == 2")
    save = "        save_once(snapshot, SNAPSHOT)\n"
    imports = "import torch.nn as nn\n"
    data = "    # Whole batches only"
    start = "    epochs_run = 0\n"
    resume = '        epochs_run = snapshot["EPOCHS_RUN"]\n'
    saved = '"EPOCHS_RUN": epoch,'
    top = "@torch.no_grad()\ndef test(model, device, loader):\n"
    seed = "        torch.manual_seed(args.seed + epoch * world_size + rank)\n"
    changes = [
        (imports, imports + AVERAGE),
        ("def get_args():", NOISY),
        ("self.conv2 =", "self.norm = nn.BatchNorm2d(8)\n        self.conv2 ="),
        ("F.relu(self.conv1(x))", "F.relu(self.norm(self.conv1(x)))"),
        (top, top + fence(REST, "dist.broadcast(")),
        (data, f"    train_set = Noisy(train_set, range(1000))\n{data}"),
        (start, fence(REST, "AveragedModel(") + start),
        (resume, f'{resume}        ema.load_state_dict(snapshot["EMA"])\n'),
        (seed, fence(REST, "numpy.random.seed(seed)")),
        ("test(model, device, test_loader)", "test(ema, device, test_loader)"),
        (save, save + NOTE + stop),
        (saved, f'{saved} "EMA": ema.state_dict(),'),
    ]
    if workers:
        text = (ROOT / AFTER).read_text()
        (loader,) = re.findall(r"(?s)    train_loader = .*?\n    \)\n", text)
        lines = textwrap.indent(fence(REST, "set_forkserver_preload"), "    ")
        steps = "        optimizer.step()\n"
        changes += [(loader, lines), (steps, steps + BOTH_FROM_A_FORK_SERVER)]
    script = plant(AFTER, tmp_path / "copy", *changes)
    at_once = tmp_path / "at once"
    resumed = tmp_path / "resumed"
    for cwd, epochs in (resumed, 1), (resumed, 9), (at_once, 9):
        cwd.mkdir(exist_ok=True)
        done = torchrun(script, "--epochs", epochs, cwd=cwd, PYTHONPATH=ROOT)
    assert load(at_once / SNAPSHOT)["EPOCHS_RUN"] == 2
    assert same_bits(load(at_once / SNAPSHOT), load(resumed / SNAPSHOT))
    drawn = re.findall(r"drawn (\S+)", done.stdout)
    assert len(drawn) == len({*drawn}) == 2 * 2 * 3
    assert same_bits(load(at_once / "rank_0.pt"), load(at_once / "rank_1.pt"))


@pytest.mark.waits
def test_no_gloo_thread_outlives_after(tmp_path):
    log = tmp_path / "threads"
    log.mkdir()
    why = "threads that outlive a script do so in a new interpreter alone"
    env = {"real": why, "PYTHONPATH": OBSERVER, "THREADS_LOG": log}
    torchrun(AFTER, "--epochs=1", cwd=tmp_path, **env)
    assert [path.read_text() for path in log.iterdir()] == ["[]", "[]"]
