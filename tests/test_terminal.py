"""In a terminal: Ctrl-C and `| head` end a run without a traceback."""

import os
import signal
import uuid

import pytest

from ladder.rungs import ROOT
from proofs.launch import SPAWNED, UNDER_TORCHRUN, launch, plant, start
from proofs.processes import TIMEOUT_S, finish, left_over
from proofs.results import load

PYTHON = ["single_gpu.py", *SPAWNED]


def began(name, folder, mark):
    """`name` in `folder`, in its third epoch."""
    process = start(ROOT / name, 100_000, 1, cwd=folder, MARK=mark)
    for line in process.stdout:
        if line.startswith("epoch 2 saved"):
            return process
    raise AssertionError(process.stderr.read())


@pytest.mark.parametrize("name", PYTHON)
def test_ctrl_c(name, tmp_path):
    """A terminal sends SIGINT to the script and to all processes that it started."""
    mark = uuid.uuid4().hex
    process = began(name, tmp_path, mark)
    os.killpg(process.pid, signal.SIGINT)
    done = finish(process)
    assert done.returncode == -signal.SIGINT, "as a shell expects it"
    assert done.stderr == "stopped by Ctrl-C: the same command resumes\n"
    assert load(tmp_path / "snapshot.pt")["EPOCHS_RUN"] >= 2
    assert not left_over(mark)


@pytest.mark.parametrize("name", UNDER_TORCHRUN[:1])
def test_ctrl_c_under_torchrun(name, tmp_path):
    """torchrun hands it on, and adds a traceback of its own. No script can spare it."""
    mark = uuid.uuid4().hex
    process = began(name, tmp_path, mark)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.returncode == 1
    ours, torchruns = done.stderr.split("Traceback", 1)
    assert ours.count("stopped by Ctrl-C: the same command resumes\n") == 1
    assert "torch/distributed/run.py" in torchruns
    assert "Traceback" not in torchruns
    assert not left_over(mark)


def test_other_errors_are_shown(tmp_path):
    """Also one that happens to have an exit code, as those of click do."""
    change = (
        "loss.backward()",
        "raise type('UsageError', (Exception,), {'exit_code': 2})",
    )
    script = plant("single_gpu.py", tmp_path, change)
    done = launch(script, 1, 1, cwd=tmp_path, real="what Python prints is the claim")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.endswith("UsageError\n")


@pytest.mark.parametrize("name", PYTHON)
def test_head(name, tmp_path):
    """`python multigpu.py 50 10 | head -3`: who reads has gone, and the run ends."""
    mark = uuid.uuid4().hex
    process = began(name, tmp_path, mark)
    process.stdout.close()
    assert process.wait(TIMEOUT_S) == 141, "as if SIGPIPE had ended it"
    assert process.stderr.read() == ""
    assert not left_over(mark)
