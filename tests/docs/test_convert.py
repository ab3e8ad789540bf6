"""The scripts of docs/convert_your_script.md: what one trains, the next one trains."""

import os
import re
import textwrap

import pytest

from tests.helpers.checks import assert_no_gloo_thread, fence, observed
from tools.run.launch import copy_script, run_script, torchrun, torchrun_words
from tools.run.processes import Program
from tools.run.results import load, same_bits
from tools.scripts import ROOT

PAGE = "docs/convert_your_script.md"
REST = "docs/adapt_your_script.md"
BEFORE = "docs/convert_your_script/before.py"
STEP1 = "docs/convert_your_script/step1.py"
AFTER = "docs/convert_your_script/after.py"
SHARDED = "docs/shard_your_model/after_fsdp.py"
SNAPSHOT = "stripes_snapshot.pt"


def train_page_script(script, epochs, *options, cwd, **env):
    """Done of a script on two processes. Workers would take most of the time."""
    words = ROOT / script, "--workers=0", "--epochs", epochs, *options
    return torchrun(*words, cwd=cwd, OMP_NUM_THREADS=1, **env)


def compared(folder, nprocs):
    """The exit status of the audit of after.py, which compares it with before.py."""
    options = ["--epochs=2", "--workers=0"]
    like = " ".join(["--like=python before.py", *options])
    command = ["python", "-m", "cluster.audit", like]
    command += [*torchrun_words(nprocs), "after.py", *options]
    env = {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1}
    # The audit watches interpreters from their start.
    return Program(command, folder, real=True, **env).finish().returncode


def test_two_processes_save_what_one_saves(tmp_path):
    """Either continues the other.

    With dropout the processes draw other numbers than one does: what they have learnt
    is compared without, by the audit.
    """
    done = train_page_script(AFTER, 5, cwd=tmp_path)
    *_, accuracy = re.findall(r"accuracy (\S+)%", done.stdout)
    assert float(accuracy) > 80
    assert os.listdir(tmp_path) == [SNAPSHOT], "nothing else is left"
    one = run_script(ROOT / STEP1, "--workers=0", "--epochs=6", cwd=tmp_path)
    two = train_page_script(AFTER, 7, cwd=tmp_path)
    for done, epochs in (one, "5 of 6"), (two, "6 of 7"):
        assert f"resuming: {epochs} epochs are finished" in done.stdout, done.stderr


@pytest.mark.waits
def test_the_sharded_script_trains_and_resumes_as_ddp_does(tmp_path):
    """Both start with rank 0's weights, though rank 1 has made others."""
    make = "    model = Net().to(device)\n"
    others = make, f"{make}    model.linear.bias.data += rank\n"
    whole = copy_script(AFTER, tmp_path / "whole", others)
    parts = copy_script(SHARDED, tmp_path / "parts", others)
    for script, epochs in (whole, 2), (parts, 1), (parts, 2):
        done = train_page_script(script, epochs, cwd=script.parent)
    assert "resuming: 1 of 2 epochs are finished" in done.stdout
    states = [load(path.with_name(SNAPSHOT))["MODEL_STATE"] for path in (whole, parts)]
    assert same_bits(*states)


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
    names = "BatchSampler, DataLoader, RandomSampler"
    copy_script(
        AFTER,
        tmp_path,
        ("DataLoader, DistributedSampler", names),
        (sampler, batch_sampler),
        ("        sampler.set_epoch(epoch)\n", fence(REST, "in batch_sampler")),
    )
    copy_script(BEFORE, tmp_path)
    assert compared(tmp_path, nprocs=3) == 0


SHIFT = """\
def augment(image):
    shift = torch.randint(-2, 3, (2,)).tolist()
    return image.roll(shift, (-2, -1))


"""


@pytest.mark.waits
@pytest.mark.parametrize(("seeded", "status"), [(True, 0), (False, 1)])
def test_augmentation_by_the_number_of_a_sample(seeded, status, tmp_path):
    """With the lines of the page, two processes see the pictures of one."""
    augmented = fence(PAGE, "class Augmented")
    if not seeded:
        augmented = re.sub(".*manual_seed.*\n", "", augmented)
    train_set = "    train_set, test_set = random_split(make_data(1250), [1000, 250])\n"
    train = "        train(args"
    for script in BEFORE, AFTER:
        copy_script(
            script,
            tmp_path,
            ("def get_args():", f"{SHIFT}{augmented}\n\ndef get_args():"),
            (train_set, f"{train_set}    train_set = Augmented(train_set)\n"),
            (train, f"        train_set.epoch = epoch\n{train}"),
        )
    assert compared(tmp_path, nprocs=2) == status


NOISY = """import random
import numpy
from variants.real_job import end_with_rank

class Noisy(torch.utils.data.Subset):
    def __getitems__(self, indices):
        samples = super().__getitems__(indices)
        return [(x + random.random() + numpy.random.rand(), y) for x, y in samples]


def get_args():"""
BOTH_FROM_A_FORK_SERVER = """\
        workers = torch.multiprocessing.active_children()
        assert [x._start_method for x in workers] == 2 * ["forkserver"]
"""
IMPORTS = """\
import torch.nn as nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
"""
NOTE = """\
        torch.save(ema.module.state_dict(), f"rank_{rank}.pt")
        drawn = random.random(), numpy.random.rand(), torch.rand(()).item()
        print(*map("drawn {}".format, drawn), flush=True)
"""


@pytest.mark.waits
@pytest.mark.parametrize("workers", [False, True])
def test_the_lines_of_the_pages_resume(workers, tmp_path):
    """In a script that rank 1 stops.

    Noise of each library is drawn by the rank, or by workers that come from a fork
    server. No two ranks or epochs draw the same. Averaged weights are tested with rank
    0's statistics.
    """
    wish = "time.monotonic() > deadline"
    stop = fence("docs/convert_your_script.md", wish)
    stop = stop.replace(wish, "rank == 1 and epoch == 2")
    save = "        save_once(snapshot, SNAPSHOT)\n"
    data = "    sampler = Distri"
    start = "    epochs_run = 0\n"
    resume = '        epochs_run = snapshot["EPOCHS_RUN"]\n'
    saved = '"EPOCHS_RUN": epoch,'
    seed = "        torch.manual_seed(args.seed + epoch * world_size + rank)\n"
    changes = [
        ("import torch.nn as nn\n", IMPORTS),
        ("def get_args():", NOISY),
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
    script = copy_script(AFTER, tmp_path / "copy", *changes)
    at_once = tmp_path / "at once"
    resumed = tmp_path / "resumed"
    for cwd, epochs in (resumed, 1), (resumed, 9), (at_once, 9):
        done = train_page_script(script, epochs, cwd=cwd, PYTHONPATH=ROOT)
    assert load(at_once / SNAPSHOT)["EPOCHS_RUN"] == 2
    assert same_bits(load(at_once / SNAPSHOT), load(resumed / SNAPSHOT))
    drawn = re.findall(r"drawn (\S+)", done.stdout)
    assert len(drawn) == len({*drawn}) == 2 * 2 * 3
    assert same_bits(load(at_once / "rank_0.pt"), load(at_once / "rank_1.pt"))


@pytest.mark.waits
@pytest.mark.parametrize("script", [AFTER, SHARDED])
def test_no_gloo_thread_outlives_it(script, tmp_path):
    log = tmp_path / "threads"
    train_page_script(
        script, 1, "--workers=2", cwd=tmp_path, real=True, **observed(log)
    )
    assert_no_gloo_thread(log)
