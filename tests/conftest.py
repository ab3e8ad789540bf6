"""Options and marks, and runs that several tests look at, which are made once.

Gradients are computed in forks: pytest's own process refuses them.
"""

import collections
import os
import shutil
import signal

import pytest

import tests.helpers.hidden_gpus  # noqa: F401, before torch

# If a shell starts pytest in the background, pytest ignores Ctrl-C, and so do the
# programs that it starts. Some tests end a program in this way.
signal.signal(signal.SIGINT, signal.default_int_handler)

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from tests.helpers.checks import STANDIN, noted  # noqa: E402
from tests.helpers.made_once import made_once  # noqa: E402
from tests.hooks.faults import kill_in_step_80  # noqa: E402
from tests.hooks.probe import probe  # noqa: E402
from tools.run import launch  # noqa: E402
from tools.run.processes import Program, end_all, left_over  # noqa: E402
from tools.scripts import commands, trunk  # noqa: E402

# `pytest` leaves some tests out unless it is told --all.


def pytest_addoption(parser):
    parser.addoption(
        "--all",
        action="store_true",
        help="run the tests marked `waits` as well: hosts, Slurm, hangs, the browser",
    )


# Gradients are computed and models are compiled in forks, so that tests pass in any
# order: tests/helpers/forked.py says why.


def refuse(*_, **__):
    pytest.fail("a gradient or a compilation in pytest's own process: use in_a_fork")


in_this_process = pytest.MonkeyPatch()
in_this_process.setattr(torch.autograd, "backward", refuse)
in_this_process.setattr(torch.autograd, "grad", refuse)
in_this_process.setattr(FakeTensorMode, "__enter__", refuse)  # of each compilation
os.register_at_fork(after_in_child=in_this_process.undo)


left_out = collections.Counter()  # {folder: how many of its tests are left out}


def pytest_collection_modifyitems(config, items):
    """A test that is named, as `FILE::TEST`, runs as with --all."""
    if config.getoption("--all") or any("::" in name for name in config.args):
        return
    waiting = [item for item in items if item.get_closest_marker("waits")]
    left_out.update(item.path.parent.name for item in waiting)
    config.hook.pytest_deselected(items=waiting)
    items[:] = [item for item in items if item not in waiting]


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """Print which tests were left out, below all that pytest prints."""
    if left_out:
        counts = ", ".join(f"{count} in {name}" for name, count in left_out.items())
        reason = "they take long, test the tools or need more than pip"
        print(f"Left out, because {reason}: {counts}. To run them too: pytest --all")


# Runs


@pytest.fixture(scope="session")
def standin(tmp_path_factory):
    """Compile the stand-in for GPUs.

    This takes a minute, and longer on a busy machine. If a time-out killed the
    compiler, its lock would stay, and later tests would wait for it.
    """
    for compiler in ("g++", "ninja"):
        if not shutil.which(compiler):
            pytest.skip("the stand-in for GPUs needs g++ and ninja")
    program = Program(
        ["python", "-c", "import torch"],
        tmp_path_factory.getbasetemp(),
        real=True,
        **STANDIN,
    )
    program.succeed(timeout_s=600)


@made_once
def runs(folder, name, nprocs=2, hooks=()):
    """`runs(name, nprocs=2)`: (folder, Done) of 5 epochs.

    The run saves every second epoch. Its processes are forks. hooks: those of `start`,
    in a tuple.
    """
    done = launch.train(name, 5, 2, cwd=folder, nprocs=nprocs, hooks=hooks)
    return folder, done


@made_once
def typed(folder, name):
    """`typed(name)`: (folder, Done) of the docstring's command, as typed.

    The scripts of the root run in new interpreters, as a user starts them.
    """
    launch.copy_script(name, folder)
    (words,) = commands(name)
    real = name in trunk()
    return folder, Program(words, folder, real, PYTHONPATH=folder).succeed()


@made_once
def killed(folder, name):
    """`killed(name)`: (folder, Done, processes left) of a run like those of `runs`.

    The last rank gets SIGKILL in its third epoch, when 2 epochs are saved. The scripts
    of the root run in new interpreters, because how they end is the claim.
    """
    done = launch.train(
        name,
        5,
        2,
        cwd=folder,
        status=1 if name in launch.DISTRIBUTED else -signal.SIGKILL,
        real=name in trunk(),
        hooks=[kill_in_step_80],
        MARK=f"killed {name}",
    )
    return folder, done, left_over(f"killed {name}")


@made_once
def probes(folder, name, nprocs=2, hooks=()):
    """`probes(name, nprocs=2)`: ([facts of each rank], Done).

    The run takes two epochs with 197 samples, of which all ranks together take 66 in a
    step, and 17 more are held out. 197 is 2 x 66 + 65: an epoch has two steps, but with
    3 ranks, padding would make a third. The facts are those of tests/hooks/probe.py.
    hooks: others to attach before this one, in a tuple.
    """
    how = {"nprocs": nprocs, "batch": 66, "hooks": [*hooks, probe]}
    done = launch.train(name, 2, 1, cwd=folder, **how)
    ranks = nprocs if name in launch.DISTRIBUTED else 1
    return noted(folder, "probe", ranks), done


@pytest.fixture(autouse=True)
def no_program_is_left():
    """End the programs that a failed test has left, and allow no process group."""
    before = set(Program.running)
    yield
    end_all(but=before)
    assert not torch.distributed.is_initialized(), "forks of later tests would have it"
