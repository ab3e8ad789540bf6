"""cluster/audit.py on scripts with planted mistakes: each is found, and no other."""

import json
import shlex
import sys
from argparse import Namespace
from typing import NamedTuple

import pytest
import torch

from cluster import audit
from tests.helpers.trainings import RIGHT, WRONG
from tools.run.launch import DISTRIBUTED, launch, plant
from tools.run.processes import Program
from tools.scripts import ROOT

pytestmark = pytest.mark.waits


class Mistake(NamedTuple):
    """A line of a script that is changed, and what the audit says of it."""

    script: str
    changes: list  # of (old, new)
    found: str  # the name of the check
    line: str  # a text of the line that is named
    options: tuple = ()


MODEL = "model = torch.nn.Linear(20, 1)"
NORMALIZED = (
    "model = torch.nn.Sequential(torch.nn.Linear(20, 1), torch.nn.BatchNorm1d(1))"
)
BUFFERS = "            dist.broadcast(contiguous, src=0)  # rank 0 sends\n"
EVALUATED = "sampler = range(rank, len(eval_set), world_size)  # each sample once"
SPLIT = """torch.utils.data.random_split(
        utils.MyTrainDataset(2560), [2048, 512], torch.Generator().manual_seed(SEED)
    )"""

TRAIN_SET = """train_set = utils.MyTrainDataset(2048)
    eval_set = utils.MyTrainDataset(512, seed=1)"""
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node=2"]

MISTAKES = {
    "each rank splits the data by itself": Mistake(
        "multigpu.py",
        [
            (
                TRAIN_SET,
                "train_set, eval_set = " + SPLIT.replace("SEED", "time.time_ns()"),
            )
        ],
        "data",
        "in self.train_data:",
    ),
    "buffers differ": Mistake(
        "multigpu.py",
        [(MODEL, NORMALIZED), (BUFFERS, "")],
        "state",
        "output = self.model(source)",
    ),
    "evaluation is padded": Mistake(
        "multigpu.py",
        [
            (EVALUATED, "sampler = torch.utils.data.DistributedSampler(eval_set)"),
            ("MyTrainDataset(512", "MyTrainDataset(511"),
        ],
        "once",
        "in self.eval_data:",
    ),
    "the snapshot is overwritten": Mistake(
        "multigpu.py",
        [("utils.save_atomically(snap", "torch.save(snap")],
        "in_place",
        "torch.save(snapshot",
    ),
    "the wrapper is saved": Mistake(
        "multigpu.py",
        [('"MODEL_STATE": self.model', '"MODEL_STATE": self.ddp_model')],
        "keys",
        "torch.save(snapshot",
    ),
    "the group stays": Mistake(
        "multigpu.py",
        [("    dist.destroy_process_group()\n", "")],
        "destroyed",
        "init_process_group(",
    ),
    "gradients are scaled when they are clipped": Mistake(
        "variants/mixed_precision.py",
        [("self.scaler.unscale_(self.optimizer)", "pass")],
        "clip",
        "clip_grad_norm_(",
        ("--precision", "fp16"),
    ),
    "no_sync is gone": Mistake(
        "variants/gradient_accumulation.py",
        [
            (
                "contextlib.nullcontext() if last else self.ddp_model.no_sync()",
                "contextlib.nullcontext()",
            )
        ],
        "twice",
        "self.ddp_model(source[micro])",
    ),
    "no_sync is there for the last": Mistake(
        "variants/gradient_accumulation.py",
        [("contextlib.nullcontext() if last else", "")],
        "unsent",
        "self.ddp_model(source[micro])",
    ),
}


AFTER = "docs/convert_your_script/after.py"
SUMMED = (
    "    loss, correct, total = sum_over_processes([loss, correct, total], device)\n"
)

MISTAKES |= {
    "sums of a test stay": Mistake(
        AFTER, [(SUMMED, "")], "met", "output = model(images)"
    ),
    "an optimizer of copies": Mistake(
        AFTER,
        [
            (
                "Adam(model.parameters()",
                "Adam([w.detach().clone() for w in model.parameters()]",
            )
        ],
        "learns",
        "optimizer.step()",
    ),
    "all ranks save": Mistake(
        AFTER,
        [
            (
                "if dist.get_rank() == 0:\n        save_atomically",
                # One after the other: at once, one would miss the other's file.
                "if dist.get_rank() == 0:\n        save_atomically(values, path)\n"
                "    dist.barrier()\n"
                "    if dist.get_rank() == 1:\n        save_atomically",
            )
        ],
        "file",
        "torch.save(snapshot",
    ),
    "no seed for each rank": Mistake(
        AFTER,
        [("args.seed + epoch * world_size + rank", "args.seed + epoch")],
        "random",
        "model(images)",
    ),
    "backward alone is in no_sync": Mistake(
        AFTER,
        [("loss.backward()", "with model.no_sync():\n            loss.backward()")],
        "no_sync",
        "loss.backward()",
    ),
    "all pick the same batch": Mistake(
        AFTER,
        [
            (
                "        images, labels = images.to(device), labels.to(device)\n"
                "        optimizer",
                "        pick = torch.Generator().manual_seed(batch_idx)\n"
                "        pick = torch.randint(1000, (30,), generator=pick).tolist()\n"
                "        images = torch.stack([loader.dataset[i][0] for i in pick])\n"
                "        labels = torch.stack([loader.dataset[i][1] for i in pick])\n"
                "        optimizer",
            )
        ],
        "inputs",
        "model(images)",
    ),
    "betas differ": Mistake(
        AFTER,
        [
            (
                "    epochs_run = 0",
                "    optimizer.param_groups[0]['betas'] = (0.9, 0.99 - rank / 100)\n"
                "    epochs_run = 0",
            )
        ],
        "settings",
        "optimizer.step()",
    ),
    "one rank loads other weights": Mistake(
        AFTER,
        [
            (
                "    epochs_run = 0",
                "    model.conv1.bias.data += rank\n    epochs_run = 0",
            )
        ],
        "start",
        "optimizer.step()",
    ),
    "NaN is saved": Mistake(
        AFTER,
        [
            (
                "save_once(snapshot, SNAPSHOT)",
                'snapshot["MODEL_STATE"]["linear.bias"] += '
                "float('nan')\n        save_once(snapshot, SNAPSHOT)",
            )
        ],
        "nan",
        "torch.save(snapshot",
    ),
}


MODEL_MADE = "ddp_model = nn.parallel.DistributedDataParallel(model)"
ZERO = "        optimizer.zero_grad()\n"
ADAM = "optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)"
AVERAGE = "torch.optim.swa_utils.AveragedModel"
UPDATE = (
    "optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))"
)

MISTAKES |= {
    "gradients pile up": Mistake(AFTER, [(ZERO, "")], "zeroed", "optimizer.step()"),
    "evaluation mode stays": Mistake(
        AFTER, [("    model.train()\n", "")], "mode", "optimizer.step()"
    ),
    "the last layer is in no optimizer": Mistake(
        AFTER,
        [(ADAM, ADAM.replace("model.", "model.conv2."))],
        "unheld",
        "torch.optim.Adam(",
    ),
    "a layer is unfrozen after the wrap": Mistake(
        AFTER,
        [
            (
                MODEL_MADE,
                f"model.linear.requires_grad_(False)\n    {MODEL_MADE}\n"
                "    model.linear.requires_grad_(True)",
            )
        ],
        "unwrapped",
        "DistributedDataParallel(",
    ),
    "rank 0 alone updates an average": Mistake(
        AFTER,
        [
            (
                f"    {ADAM}\n",
                f"    {ADAM}\n    average = {AVERAGE}(model)\n    rank or {UPDATE}\n",
            ),
            ("test(model, device, test_loader)", "test(average, device, test_loader)"),
        ],
        "state",
        "output = model(images)",
    ),
    "one of two optimizers is saved": Mistake(
        AFTER,
        [
            (
                ADAM,
                "half = [model.linear.weight]\n    global second\n"
                "    second = torch.optim.Adam(half, lr=0.001)\n"
                f"    {ADAM}\n    optimizer.param_groups[0]['params'].pop(4)",
            ),
            ("        optimizer.step()\n", "        optimizer.step(), second.step()\n"),
            (ZERO, f"{ZERO}        second.zero_grad()\n"),
        ],
        "optimizer",
        "torch.save(snapshot",
    ),
}


def judged(folder, script, *options, **settings):
    """(findings, what is fine, what was not seen) of two epochs, run in forks."""
    events = folder / "events"
    env = audit.environment(events, **settings)
    if script.name == "after.py":
        done = Program([*TORCHRUN, script, "--epochs=2"], folder, **env).finish()
    else:
        done = launch(script, 2, 1, *options, cwd=folder, real="", **env)
    return judge(events, done)


def judge(events, done):
    (events / "host.status").write_text(str(done.returncode))
    run = audit.Run(events)
    assert run.ranks, done.stdout + done.stderr
    assert not run.failed, run.failed
    return audit.judge(run)


@pytest.mark.parametrize("name", MISTAKES)
def test_planted(tmp_path, name):
    mistake = MISTAKES[name]
    script = plant(mistake.script, tmp_path, *mistake.changes)
    findings, _, _ = judged(tmp_path, script, *mistake.options)
    assert [each["mistake"] for each in findings] == [mistake.found], findings
    named = [audit.code_at(line) for line in findings[0]["lines"]]
    assert any(mistake.line in code for code in named), findings


def trained(folder, name):
    """The same of one of trainings.py."""
    events = folder / "events"
    words = [*TORCHRUN, ROOT / "tests/helpers/trainings.py", name]
    env = audit.environment(events)
    return judge(events, Program(words, folder, **env).finish())


@pytest.mark.parametrize("name", WRONG)
def test_wrong(tmp_path, name):
    findings, _, _ = trained(tmp_path, name)
    worst = [each["mistake"] for each in findings if each["level"] != "COST"]
    assert worst == [WRONG[name]], findings
    named = [audit.code_at(line) for line in findings[0]["lines"]]
    assert any("# MISTAKE" in code for code in named), findings


@pytest.mark.parametrize("name", RIGHT)
def test_right(tmp_path, name):
    """What could be taken for a mistake, and is none."""
    findings, fine, _ = trained(tmp_path, name)
    assert not findings, findings
    assert len(fine) > 5


@pytest.mark.parametrize("name", [*DISTRIBUTED, AFTER])
def test_clean(tmp_path, name):
    """What the repository's scripts do is no mistake."""
    findings, fine, _ = judged(tmp_path, ROOT / name)
    assert not findings, findings
    assert len(fine) > 10


HARMLESS = {
    "a rank looks at all samples first": (
        "    model = Net().to(device)\n",
        "    for _ in DataLoader(train_set, 50):\n        pass\n"
        "    model = Net().to(device)\n",
    ),
    "a log of losses that is saved": (
        "        save_once(snapshot, SNAPSHOT)\n",
        "        save_once(snapshot, SNAPSHOT)\n        if rank == 0:\n"
        "            torch.save({'losses': torch.ones(99999).log10() / 0}, 'log.pt')\n",
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_change(tmp_path, name):
    findings, fine, _ = judged(tmp_path, plant(AFTER, tmp_path, HARMLESS[name]))
    assert not findings, findings
    assert len(fine) > 10


GPT = [*TORCHRUN, "-m", "mingpt.train", "--data", ROOT / "LICENSE", "--steps=40"]
GPT += ["--eval-every=10", "--n-layer=2", "--n-embd=64", "--compile=off"]
LOOP = ["-m", "variants.train_loop", 3, 1, "--gpu-mode"]
MORE = {
    "three ranks": [*TORCHRUN[:-1], "--nproc-per-node=3", ROOT / AFTER, "--epochs=2"],
    "mingpt": GPT,
    "mingpt --shard": [*GPT, "--shard"],
    "mingpt --split": [*GPT, "--split=2"],
    "train_loop": ["python", *LOOP, "ddp"],
    "train_loop, ddp2": [*TORCHRUN, *LOOP, "ddp2"],
}


@pytest.mark.parametrize("name", MORE)
def test_more_is_clean(tmp_path, name):
    events = tmp_path / "events"
    env = audit.environment(events)
    env["PYTHONPATH"] += f":{ROOT}"
    findings, fine, _ = judge(events, Program(MORE[name], tmp_path, **env).finish())
    assert not findings, findings
    assert len(fine) > 5


ALONE = "python before.py --epochs=2"
TOGETHER = "torchrun --standalone --nproc-per-node=2 after.py --epochs=2"
DIFFERENT = {
    "": [],
    "is the batch divided": [("args.batch_size // world_size", "args.batch_size")],
    "does the scheduler count": [
        (
            "        optimizer.step()\n",
            "        optimizer.step()\n        schedule()\n",
        ),
        (
            "    epochs_run = 0",
            "    global schedule\n    schedule = scheduler.step\n    epochs_run = 0",
        ),
    ],
    "a sum, not a mean": [
        ("loss.backward()", "(loss * dist.get_world_size()).backward()"),
    ],
}


@pytest.fixture
def in_forks(monkeypatch, tmp_path):
    """`audit.start` runs commands in forks, which have imported torch already."""

    def start(command, events, **settings):
        env = audit.environment(events, **settings)
        return Program(command, tmp_path, **env).finish().returncode

    monkeypatch.setattr(audit, "start", start)
    monkeypatch.chdir(tmp_path)


def arguments(**given):
    return Namespace(command=shlex.split(TOGETHER), json=False, **given)


@pytest.mark.parametrize("cause", DIFFERENT)
def test_like(tmp_path, in_forks, capsys, cause):
    """Both scripts have dropout, and neither has a switch."""
    plant("docs/convert_your_script/before.py", tmp_path)
    plant(AFTER, tmp_path, *DIFFERENT[cause])
    status = audit.like(arguments(like=ALONE), tmp_path / "events", {})
    printed = capsys.readouterr().out
    assert status == bool(cause), printed
    assert cause in printed
    if not cause:
        assert "equal in 32 steps" in printed


def test_noise_cannot_be_compared(tmp_path, in_forks):
    plant("docs/convert_your_script/before.py", tmp_path)
    noisy = "model(images + torch.randn_like(images))"
    plant(
        AFTER,
        tmp_path,
        ("model(images), labels)\n        loss.b", f"{noisy}, labels)\n        loss.b"),
    )
    with pytest.raises(audit.BadInput, match="the steps draw random numbers"):
        audit.like(arguments(like=ALONE), tmp_path / "events", {})


RESUMED = '        optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])\n'


@pytest.mark.parametrize("change", [(), (RESUMED, "")])
def test_kill(tmp_path, in_forks, capsys, change):
    plant(AFTER, tmp_path, *filter(None, [change]))
    snapshot = tmp_path / "stripes_snapshot.pt"
    snapshot.write_text("the reader's own")
    args = arguments(kill=20, snapshot=snapshot)
    status = audit.survive(args, tmp_path / "events", {})
    printed = capsys.readouterr().out
    assert status == bool(change), printed
    assert ("resumed at step 16" if not status else "after step 17") in printed
    assert snapshot.read_text() == "the reader's own"


def test_harmless(tmp_path):
    """A watched run saves what an unwatched one saves, bit for bit."""
    saved = []
    for name in ("watched", "alone"):
        folder = tmp_path / name
        folder.mkdir()
        env = audit.environment(tmp_path / "events") if name == "watched" else {}
        done = launch(ROOT / "multigpu.py", 2, 1, cwd=folder, real="", **env)
        assert done.returncode == 0
        path = folder / "snapshot.pt"
        saved.append(torch.load(path, weights_only=True))
        assert [each.name for each in folder.iterdir()] == ["snapshot.pt"]
    assert repr(saved[0]) == repr(saved[1])
    one, other = (each["MODEL_STATE"]["weight"] for each in saved)
    assert one.equal(other)


def typed(folder, *words):
    """What `python audit.py WORDS` prints, and its status, in new interpreters."""
    script = ROOT / "cluster" / "audit.py"
    return Program([sys.executable, script, *words], folder, real=True).finish()


def test_typed(tmp_path):
    plant(AFTER, tmp_path, ("        sampler.set_epoch(epoch)\n", ""))
    words = shlex.split(TOGETHER)
    done = typed(tmp_path, "--json", "--batches=4", f"--folder={tmp_path}/kept", *words)
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(done.stdout[done.stdout.index("\n{") :])
    assert [each["mistake"] for each in found["findings"]] == ["order"]
    assert found["steps"] == 8
    assert "the process group is destroyed at the end" in found["ok"]
    again = typed(tmp_path, f"--read={tmp_path}/kept")
    assert again.returncode == 1
    assert "\nAUDIT: 1 MISTAKE, " in again.stdout
    assert "AUDIT FAILED: 1 mistake (after.py:" in again.stdout.splitlines()[-1]
    twice = typed(tmp_path, f"--folder={tmp_path}/kept", *words)
    assert twice.returncode == 2
    assert "holds an earlier audit" in twice.stderr


PITFALLS = """
import importlib.util, os, pickle
assert importlib.util.find_spec("torch")  # and torch is imported later
import torch

weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=torch.tensor(0.1))
for step in range(3):
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
for function in (torch.save, os.replace, torch.nn.utils.clip_grad_norm_):
    assert pickle.loads(pickle.dumps(function)) is function
torch.compile(optimizer.step, backend="eager")()
"""


def test_pitfalls(tmp_path):
    """What a script may do, and a watched one, too."""
    (tmp_path / "script.py").write_text(PITFALLS)
    done = typed(tmp_path, "python", "script.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " steps on 1 rank; your command exited with 0" in done.stdout
    assert "audit itself failed" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith("AUDIT INCOMPLETE: one process")


def test_ended(tmp_path):
    """SIGTERM ends the command, too."""
    kill = "import os, time; os.kill(os.getppid(), 15); time.sleep(9)"
    done = typed(tmp_path, "python", "-c", f"{kill}; open('survived', 'w')")
    assert done.returncode == 2
    assert not (tmp_path / "survived").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "type the command"),
        (("no-such-program",), "cannot start no-such-program: No such file"),
        (("python", "-c", "pass"), "no process of the command imported torch"),
    ],
)
def test_bad_input(tmp_path, words, line):
    done = typed(tmp_path, *words)
    assert done.returncode == 2
    assert line in done.stderr
