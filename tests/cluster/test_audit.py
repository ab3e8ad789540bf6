"""cluster/audit.py on scripts with planted mistakes: each is found, and no other."""

import re
from typing import NamedTuple

import pytest

from cluster import audit
from tests.helpers.gpt_runs import GPT
from tests.helpers.trainings import RIGHT, WRONG
from tools.run.launch import DISTRIBUTED, command, copy_script, torchrun_words, train
from tools.run.processes import Program
from tools.run.results import load, same_bits
from tools.scripts import ROOT, SCRIPTS

pytestmark = pytest.mark.waits

BEFORE = "docs/convert_your_script/before.py"
STEP1 = "docs/convert_your_script/step1.py"
AFTER = "docs/convert_your_script/after.py"
SHARDED = "docs/shard_your_model/after_fsdp.py"
TORCHRUN = torchrun_words(2)
# Workers take most of the time. Of test_clean, "three ranks" has them.
SHORT = ["--epochs=2", "--workers=0"]
TOGETHER = [*TORCHRUN, "after.py", *SHORT]
LIKE = " ".join(["--like=python before.py", *SHORT])


def read_blocks(name):
    """{name of a change: (what is said of it, [(old, new)])}, of a file of them."""
    _, *blocks = (ROOT / name).read_text().split("\n\n")
    found = {}
    for block in blocks:
        title, said, diff = f"{block}\n".split("\n", maxsplit=2)
        pairs = re.findall(r"(?m)((?:^-.*\n)+)((?:^[+].*\n)*)", diff)
        changes = [[re.sub("(?m)^[-+]", "", part) for part in pair] for pair in pairs]
        found[title] = (said, changes)
    return found


MISTAKES = read_blocks("tests/helpers/mistakes.diff")
HARMLESS = read_blocks("tests/helpers/harmless.diff")
UNLIKE = read_blocks("tests/helpers/unlike.diff")


class Report(NamedTuple):
    findings: list
    fine: list  # what the audit has found to be right
    last: str  # the last line


def audited(folder, words, home=ROOT):
    """The Report of a command, run in forks. home: where it finds its modules."""
    events = folder / "events"
    env = audit.environment(events)
    env["PYTHONPATH"] += f":{home}"
    done = Program(words, folder, **env).finish()
    (events / "host.status").write_text(str(done.returncode))
    run = audit.Run(events)
    assert run.ranks, done.stdout + done.stderr
    findings, fine, unchecked = audit.judge(run)
    assert not run.failed, run.failed
    last, status = audit.verdict(run, findings, unchecked)
    assert status == ("MISTAKE" in [each.level for each in findings])
    _, status = audit.verdict(run, findings, unchecked, strict=True)
    assert status == bool(findings)
    return Report(findings, fine, last)


def audited_change(folder, said, changes):
    """The Report of a changed script. said: its name, and options."""
    name, *options = said.split()
    script = copy_script(name, folder, *changes)
    words = [*TORCHRUN, script, *SHORT]
    if name in SCRIPTS:
        words = command(script, 2, 1, *options)
    return audited(folder, words, home=folder)


def audited_training(folder, name):
    """The Report of a training of trainings.py."""
    return audited(folder, [*TORCHRUN, ROOT / "tests/helpers/trainings.py", name])


def check_found(report, mistake, code):
    """One mistake is found, in a line with this code."""
    assert [each.mistake for each in report.findings] == [mistake], report.findings
    (finding,) = report.findings
    assert code in "\n".join(map(audit.code_at, finding.lines))


def check_passed(report, verdict="AUDIT PASSED"):
    assert not report.findings, report.findings
    assert len(report.fine) > 5
    assert report.last.startswith(verdict)


# {a planted mistake: how the facts begin that are not true because of it}. The audit
# must not call them right. Ranks that do not step together have different weights, and
# under FSDP, ranks hold different rows.
NOT_FINE = {
    "each rank decides alone, in another epoch and with another learning rate": (
        "in all steps",
        "all ranks evaluate",
        "all ranks make",
    ),
    "a part is saved": ("in all steps", "all ranks begin with the same weights"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_planted(tmp_path, name):
    said, changes = MISTAKES[name]
    said, mistake, code = said.split(" | ")
    report = audited_change(tmp_path, said, changes)
    check_found(report, mistake, code)
    spoiled = NOT_FINE.get(name, ())
    assert not [line for line in report.fine if line.startswith(spoiled)]


@pytest.mark.parametrize("name", WRONG)
def test_wrong(tmp_path, name):
    check_found(audited_training(tmp_path, name), WRONG[name], "# MISTAKE")


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_change(tmp_path, name):
    check_passed(audited_change(tmp_path, *HARMLESS[name]))


# The training may be right, but the audit has seen nothing that it could compare.
INCOMPLETE = {
    "one_rank_steps_for_all": "AUDIT INCOMPLETE: of 2 processes, 1 made steps"
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(tmp_path, name):
    """Something that could be taken for a mistake is not called one."""
    verdict = INCOMPLETE.get(name, "AUDIT PASSED")
    check_passed(audited_training(tmp_path, name), verdict)


MINGPT = [*TORCHRUN, *GPT.split(), "--steps=40", "--eval-every=10"]
LOOP = ["-m", "variants.train_loop", 3, 1, "--gpu-mode"]
CLEAN = {name: command(name, 2, 1) for name in DISTRIBUTED} | {
    "step1": ["python", ROOT / STEP1, *SHORT],
    "three ranks": ["torchrun", "--nproc-per-node=3", ROOT / AFTER, "--epochs=2"],
    "mingpt": [*MINGPT, "--dropout=0.1"],
    "mingpt --shard": [*MINGPT, "--shard"],
    "mingpt --split": [*MINGPT, "--split=2"],
    "train_loop": ["python", *LOOP, "ddp"],
    "train_loop, ddp2": [*TORCHRUN, *LOOP, "ddp2"],
}


@pytest.mark.parametrize("name", CLEAN)
def test_clean(tmp_path, name):
    """What the repository's scripts do is no mistake."""
    report = audited(tmp_path, CLEAN[name])
    assert not report.findings, report.findings
    assert len(report.fine) > 7


def use_forks(script):
    """The audit's commands run in forks, which have imported torch already."""

    def start(command, events, **settings):
        Program(command, ".", **audit.environment(events, **settings)).finish()

    script["start"] = start


IN_FORKS = {"real": False, "hooks": [use_forks]}


def run_audit(folder, *words, status, real=True, hooks=()):
    """Done of `python audit.py WORDS`, which ends with this exit status."""
    words = ["python", ROOT / "cluster/audit.py", *words]
    program = Program(words, folder, real, hooks=hooks, PYTHONPATH=ROOT)
    return program.end_with(status)


@pytest.mark.parametrize("name", UNLIKE)
def test_another_script_is_compared(tmp_path, name):
    """Both scripts have dropout, and neither has a switch."""
    said, changes = UNLIKE[name]
    status, _, text = said.partition(" | ")
    copy_script(BEFORE, tmp_path)
    copy_script(AFTER, tmp_path, *changes)
    done = run_audit(tmp_path, LIKE, *TOGETHER, status=int(status), **IN_FORKS)
    assert text in done.stdout + done.stderr


STATE = '        optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])\n'


@pytest.mark.parametrize(
    ("launcher", "script", "changes", "status", "said"),
    [
        (["python"], STEP1, [], 0, "resumed at step 17"),
        (TORCHRUN, AFTER, [(STATE, "")], 1, "after step 17"),
        (TORCHRUN, SHARDED, [], 0, "resumed at step 16"),
    ],
)
def test_a_killed_run_is_compared_with_its_resume(
    tmp_path, launcher, script, changes, status, said
):
    command = *launcher, copy_script(script, tmp_path, *changes), *SHORT
    options = "--kill=20", "--snapshot=stripes_snapshot.pt"
    done = run_audit(tmp_path, *options, *command, status=status, **IN_FORKS)
    assert said in done.stdout


def test_a_name_that_pytorch_has_given_up(tmp_path):
    """The command runs on, and the audit says why it has seen nothing."""
    gone = "batchnorm._NormBase\n", "batchnorm._Gone\n"
    copy_script("cluster/audit_watch.py", tmp_path, gone)
    script = copy_script("cluster/audit.py", tmp_path)
    words = ["python", script, "python", "-c", "import torch; print('ended')"]
    done = Program(words, tmp_path).end_with(2)
    assert done.stdout == "ended\n"
    assert "this process is not watched: AttributeError" in done.stderr


def test_a_watched_run_saves_the_same_bits(tmp_path):
    """A watched run saves what an unwatched one saves, bit for bit."""
    alone = tmp_path / "alone"
    train("multigpu.py", 2, 1, cwd=alone)
    audited(tmp_path, command("multigpu.py", 2, 1))
    assert same_bits(load(tmp_path / "snapshot.pt"), load(alone / "snapshot.pt"))


def test_what_the_report_says(tmp_path, monkeypatch):
    copy_script(AFTER, tmp_path, ("        sampler.set_epoch(epoch)\n", ""))
    done = run_audit(tmp_path, "--batches=4", "--folder=kept", *TOGETHER, status=1)
    for line in (
        "MISTAKE 1: all epochs have the same order of samples",
        "AUDIT: 1 mistake, 0 risks, 0 costs; ",
        ". 8 steps on 2 ranks; your command exited with 0.",
        "could still be wrong:\n  all ranks have the same data set (needs two epochs",
        "\n  the process group is destroyed at the end\n",
    ):
        assert line in done.stdout
    again = run_audit(tmp_path, "--read=kept", status=1)
    assert done.stdout.endswith(again.stdout)
    monkeypatch.setattr(audit, "DOCS", None)  # copied away
    [finding], *_ = audit.judge(audit.Run(tmp_path / "kept"))
    assert finding.help == "https://docs.pytorch.org/docs/stable/data.html"
    twice = run_audit(tmp_path, "--folder=kept", *TOGETHER, status=2)
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


def test_what_a_watched_script_may_do(tmp_path):
    """A watched script may do what any other script may do."""
    (tmp_path / "script.py").write_text(PITFALLS)
    done = run_audit(tmp_path, "--folder=.", "python", "script.py", status=0)
    assert " steps on 1 rank; your command exited with 0" in done.stdout
    assert "audit itself failed" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith("AUDIT INCOMPLETE: one process")
    (status,) = tmp_path.glob("*.status")
    status.unlink()
    done = run_audit(tmp_path, "--read=.", status=2)
    assert "AUDIT INCOMPLETE: nobody has written down how" in done.stdout


def test_sigterm_ends_the_command_too(tmp_path):
    """SIGTERM ends the command, too."""
    kill = "import os, time; os.kill(os.getppid(), 15); time.sleep(9)"
    command = "python", "-c", f"{kill}; open('survived', 'w')"
    run_audit(tmp_path, *command, status=2)
    assert not (tmp_path / "survived").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "type the command"),
        ("no-such-program", "cannot start no-such-program: No such file"),
        ("python -c pass", "no step of a torch optimizer was seen"),
        ("--kill=20 --snapshot=. python", "is there, and would be resumed"),
    ],
)
def test_bad_input(tmp_path, words, line):
    assert line in run_audit(tmp_path, *words.split(), status=2).stderr
