"""cluster/audit.py on scripts with planted mistakes: each is found, and no other."""

import re
import shlex
import sys
from argparse import Namespace

import pytest
import torch

from cluster import audit
from tests.helpers.trainings import RIGHT, WRONG
from tools.run.launch import DISTRIBUTED, launch, plant
from tools.run.processes import Program
from tools.scripts import ROOT

pytestmark = pytest.mark.waits


AFTER = "docs/convert_your_script/after.py"
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node=2"]
TEXTS = (ROOT / "tests/helpers/mistakes.diff").read_text().split("\n\n")[1:]
MISTAKES = {text.partition("\n")[0]: text for text in TEXTS}
CHANGE = re.compile(r"((?:\n-.*)+)((?:\n\+.*)*)")


def without_signs(lines):
    return "".join(line[1:] + "\n" for line in lines.split("\n")[1:])


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
    findings, fine, unchecked = audit.judge(run)
    mistakes = [each for each in findings if each.level == "MISTAKE"]
    assert audit.verdict(run, findings, unchecked)[1] == bool(mistakes)
    assert audit.verdict(run, findings, unchecked, strict=True)[1] == bool(findings)
    return findings, fine, unchecked


@pytest.mark.parametrize("name", MISTAKES)
def test_planted(tmp_path, name):
    words, check, code = MISTAKES[name].split("\n")[1].split(" | ")
    script, *options = words.split()
    changes = [map(without_signs, both) for both in CHANGE.findall(MISTAKES[name])]
    script = plant(script, tmp_path, *changes)
    findings, _, _ = judged(tmp_path, script, *options)
    assert [each["mistake"] for each in findings] == [check], findings
    named = [audit.code_at(line) for line in findings[0]["lines"]]
    assert any(code in line for line in named), findings


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


def test_a_rank_that_makes_no_step(tmp_path):
    """It may be right; but nothing was compared, and not because it was alone."""
    findings, _, unchecked = trained(tmp_path, "one_rank_steps_for_all")
    last, _ = audit.verdict(audit.Run(tmp_path / "events"), findings, unchecked)
    assert last.startswith("AUDIT INCOMPLETE: of 2 processes, 1 made steps")


def test_ranks_that_do_not_step_together(tmp_path):
    """Their weights differ, and not their shares of the samples."""
    findings, fine, _ = trained(tmp_path, "each_rank_decides_alone")
    assert [each["mistake"] for each in findings] == ["skips"]
    assert "on a value that all ranks share" in findings[0]["fix"]
    assert "each rank trains on different samples" in fine
    for begin in ("in all steps", "all ranks evaluate", "all ranks make"):
        assert not [each for each in fine if each.startswith(begin)]


@pytest.mark.parametrize("name", RIGHT)
def test_right(tmp_path, name):
    """What could be taken for a mistake, and is none."""
    findings, fine, _ = trained(tmp_path, name)
    assert not findings, findings
    assert len(fine) > 5


def test_parts_are_not_compared(tmp_path):
    """Under FSDP, ranks hold other rows: nothing says that they are right."""
    _, fine, unchecked = trained(tmp_path, "a_part_is_saved")
    assert not [each for each in fine if "same weights" in each]
    assert unchecked["all ranks begin with the same weights"]


@pytest.mark.parametrize("name", [*DISTRIBUTED, AFTER])
def test_clean(tmp_path, name):
    """What the repository's scripts do is no mistake."""
    findings, fine, _ = judged(tmp_path, ROOT / name)
    assert not findings, findings
    assert len(fine) > 10


def test_harmless_changes(tmp_path):
    """A rank looks at all samples first, and losses are saved in a log."""
    looks = "    for _ in DataLoader(train_set, 50):\n        pass\n"
    makes = "    model = Net().to(device)\n"
    saves = "        save_once(snapshot, SNAPSHOT)\n"
    logs = "        torch.save({'losses': torch.ones(99999).log10() / 0}, 'log.pt')\n"
    changes = (
        (makes, looks + makes),
        (saves, f"{saves}        if rank == 0:\n    {logs}"),
    )
    findings, fine, _ = judged(tmp_path, plant(AFTER, tmp_path, *changes))
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
        Program(command, tmp_path, **env).finish()

    monkeypatch.setattr(audit, "start", start)
    monkeypatch.chdir(tmp_path)


def arguments(**given):
    return Namespace(command=shlex.split(TOGETHER), **given)


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
    args = arguments(kill=20, snapshot=tmp_path / "stripes_snapshot.pt")
    status = audit.survive(args, tmp_path / "events", {})
    printed = capsys.readouterr().out
    assert status == bool(change), printed
    assert ("resumed at step 16" if not status else "after step 17") in printed
    with pytest.raises(audit.BadInput, match="is there, and would be resumed"):
        audit.survive(arguments(kill=20, snapshot=tmp_path), tmp_path, {})


def steps(*weights):
    return {
        step: audit.Event(value={"w": each}, rate=1, gradients=1, lines=[])
        for step, each in enumerate(weights)
    }


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([2.0, 3.0, 4.0], None),
        ([2.0, 3.0, 5.0], "w after step 4 was 4 in the whole run, 5 in the resumed"),
        ([2.0, 3.0, 4.0, 5.0], "made 3 steps, not 2: is an epoch repeated?"),
        ([0.0, 1.0, 2.0, 3.0, 4.0], "it did not resume all that it trains"),
        ([9.0, 9.5], "with weights that the whole run never had"),
    ],
)
def test_resumed(weights, said):
    begin, found = audit.resumed(steps(0.0, 1.0, 2.0, 3.0, 4.0), steps(*weights))
    if said:
        assert said in found[1]
    else:
        assert (begin, found) == (2, None)


def test_a_name_that_pytorch_has_given_up(tmp_path):
    """The command runs on, and the audit says why it has seen nothing."""
    for name in ("audit.py", "audit_watch.py"):
        text = (ROOT / "cluster" / name).read_text()
        (tmp_path / name).write_text(text.replace("._NormBase\n", "._Gone\n"))
    words = ["python", "audit.py", "python", "-c", "import torch; print('ended')"]
    done = Program(words, tmp_path).finish()
    assert done.returncode == 2
    assert done.stdout == "ended\n"
    assert "this process is not watched: AttributeError" in done.stderr


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


def test_typed(tmp_path, monkeypatch):
    plant(AFTER, tmp_path, ("        sampler.set_epoch(epoch)\n", ""))
    words = shlex.split(TOGETHER)
    done = typed(tmp_path, "--batches=4", f"--folder={tmp_path}/kept", *words)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "MISTAKE 1: all epochs have the same order of samples" in done.stdout
    assert "AUDIT: 1 mistake, 0 risks, 0 costs; " in done.stdout
    assert ". 8 steps on 2 ranks; your command exited with 0." in done.stdout
    assert "\n  the process group is destroyed at the end\n" in done.stdout
    again = typed(tmp_path, f"--read={tmp_path}/kept")
    assert again.returncode == 1
    assert again.stdout[again.stdout.index("AUDIT") :] in done.stdout
    monkeypatch.setattr(audit, "DOCS", None)  # copied away
    [finding], *_ = audit.judge(audit.Run(tmp_path / "kept"))
    assert finding.help == "https://docs.pytorch.org/docs/stable/data.html"
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
    done = typed(tmp_path, f"--folder={tmp_path}", "python", "script.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " steps on 1 rank; your command exited with 0" in done.stdout
    assert "audit itself failed" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith("AUDIT INCOMPLETE: one process")
    for path in tmp_path.glob("*.status"):
        path.unlink()
    done = typed(tmp_path, f"--read={tmp_path}")
    assert done.returncode == 2
    assert "AUDIT INCOMPLETE: nobody has written down how" in done.stdout


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
        (("python", "-c", "pass"), "no step of a torch optimizer was seen"),
    ],
)
def test_bad_input(tmp_path, words, line):
    done = typed(tmp_path, *words)
    assert done.returncode == 2
    assert line in done.stderr
