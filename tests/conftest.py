"""Options and marks, and runs that several tests look at, which are made once.

Gradients are computed in forks: pytest's own process refuses them.
"""

import collections
import functools
import os
import re
import shutil
import signal

import pytest

# All tests run on the CPU, also where there are GPUs, but for those of test_gpu.py.
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# A shell that starts pytest in the background makes it ignore Ctrl-C, and with it all
# that it starts, whose end some tests ask for.
signal.signal(signal.SIGINT, signal.default_int_handler)

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from tests.helpers.checks import STANDIN, noted  # noqa: E402
from tests.helpers.site_fixtures import address, browser, pages, site, visit  # noqa: E402, F401
from tests.hooks.faults import kill_in_step_80, record_in_one_piece  # noqa: E402
from tests.hooks.probe import probe  # noqa: E402
from tools.run import hosts, launch  # noqa: E402
from tools.run.processes import Program, end_all, left_over  # noqa: E402
from tools.scripts import ROOT, commands, trunk  # noqa: E402

OBSERVER = ROOT / "tests" / "observer"
NO_HOSTS = hosts.why_not()
needs_hosts = pytest.mark.skipif(NO_HOSTS is not None, reason=str(NO_HOSTS))

# Their commands run in new interpreters, as a user starts them: those of the scripts of
# the root, and of one cheap variant for each launcher (`python`, `python` that spawns,
# `torchrun`). The others' run in forks, unless a test marked `full` asks for more.
IN_NEW_INTERPRETERS = [
    *trunk(),
    "variants/data_parallel.py",
    "variants/multinode_spawn.py",
    "variants/preemptible.py",
]


# `pytest` leaves some tests out unless it is told --all or --full.


def pytest_addoption(parser):
    parser.addoption(
        "--all",
        action="store_true",
        help="run the tests marked `waits` as well: hosts, Slurm, hangs, the browser",
    )
    parser.addoption(
        "--full",
        action="store_true",
        help="--all, and what only a new interpreter shows of each script",
    )


# Gradients are computed in forks, so that tests pass in any order. There models are
# compiled, too: a build for CUDA would count eight GPUs where there is none.

ONLY_IN_FORKS = [
    (torch.autograd, "backward"),
    (torch.autograd, "grad"),
    (FakeTensorMode, "__enter__"),  # of each compilation
]
allowed = [getattr(*place) for place in ONLY_IN_FORKS]


def refuse(*_, **__):
    pytest.fail("a gradient or a compilation in pytest's own process: use in_a_fork")


def allow():
    for place, function in zip(ONLY_IN_FORKS, allowed, strict=True):
        setattr(*place, function)


for place in ONLY_IN_FORKS:
    setattr(*place, refuse)
os.register_at_fork(after_in_child=allow)


left_out = {}  # {option: {folder: how many of its tests}}


def pytest_collection_modifyitems(config, items):
    """A test that is named, as `FILE::TEST`, runs as with --full."""
    if config.getoption("--full") or any("::" in name for name in config.args):
        return
    leave_out("full", "--full", config, items)
    if not config.getoption("--all"):
        leave_out("waits", "--all", config, items)


def leave_out(mark, option, config, items):
    marked = [item for item in items if item.get_closest_marker(mark)]
    left_out[option] = collections.Counter(item.path.parent.name for item in marked)
    config.hook.pytest_deselected(items=marked)
    items[:] = [item for item in items if item not in marked]


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """The last lines that pytest prints."""
    reasons = {
        "--full": "they need new interpreters",
        "--all": "they take long, test the tools or need more than pip",
    }
    for option, folders in left_out.items():
        if folders:
            counts = ", ".join(f"{count} in {name}" for name, count in folders.items())
            line = f"Left out, because {reasons[option]}: {counts}."
            print(f"{line} To run them too: pytest {option}")


# Runs


@pytest.fixture(scope="session")
def standin(tmp_path_factory):
    """The stand-in for GPUs is compiled.

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


def made_once(run):
    """`get(name, nprocs=2, hooks=())`: what `run` returns, made when first asked for.

    nprocs counts for those scripts alone that run as several processes. The fixtures
    that take no more than a name use functools.cache.
    """
    kept = functools.cache(run)

    def get(name, nprocs=2, hooks=()):
        nprocs = nprocs if name in launch.DISTRIBUTED else 1
        return kept(name, nprocs, tuple(hooks))

    return get


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """`runs(name, nprocs=2)`: (folder, Done) of 5 epochs at an effective batch of 64.

    It saves every second epoch. In forks. hooks: as of `launch`.
    """

    @made_once
    def run(name, nprocs, hooks):
        folder = tmp_path_factory.mktemp("run")
        size = launch.batch_size(name, 64, nprocs)
        done = launch.train(
            name, 5, 2, "--batch-size", size, cwd=folder, nprocs=nprocs, hooks=hooks
        )
        return folder, done

    return run


@pytest.fixture(scope="session")
def typed(tmp_path_factory, request):
    """`typed(name)`: (folder, Done, threads) of the docstring's command, as typed.

    threads: for each rank, the names of gloo's threads that were left at its exit.
    Those of IN_NEW_INTERPRETERS run so, and those whose threads a test asks for: forks
    show none.
    """
    new = set(IN_NEW_INTERPRETERS)
    for test in request.session.items:
        if test.get_closest_marker("full"):
            new.update(re.findall(r"\[(.*\.py)\]", test.nodeid))

    @functools.cache
    def run(name):
        folder = tmp_path_factory.mktemp("typed")
        log = tmp_path_factory.mktemp("threads")
        launch.plant(name, folder)
        (words,) = commands(name)
        how = {"PYTHONPATH": folder}
        if name in new:
            how = {"real": True, "PYTHONPATH": OBSERVER, "THREADS_LOG": log}
        done = Program(words, folder, **how).succeed()
        # torch.profiler logs there that it starts and stops; such lines may mingle.
        complaints = re.sub("(?m)^(USDT:.*)?\n", "", done.stderr)
        threads = [file.read_text() for file in log.iterdir()]
        return folder, done._replace(stderr=complaints), threads

    return run


@pytest.fixture(scope="session")
def killed(tmp_path_factory):
    """`killed(name)`: (folder, Done, processes left) of a run like those of `runs`.

    In its third epoch, the last rank gets SIGKILL: it has saved 2 epochs. The scripts
    of the root run in new interpreters, because how they end is the claim.
    """

    @functools.cache
    def run(name):
        folder = tmp_path_factory.mktemp("killed")
        done = launch.launch(
            name,
            5,
            2,
            "--batch-size",
            launch.batch_size(name, 64),
            cwd=folder,
            real=name in trunk(),
            hooks=[kill_in_step_80, record_in_one_piece],
            MARK=f"killed {name}",
        )
        return folder, done, left_over(f"killed {name}")

    return run


@pytest.fixture(scope="session")
def probes(tmp_path_factory):
    """`probes(name, nprocs)`: ([facts of each rank], Done).

    Two epochs over 197 samples, 66 a step on all ranks together, 17 held out: 197 is
    2 x 66 + 65, and with 3 ranks padding would make a third step of it. The facts are
    those of tests/hooks/probe.py. `hooks`: others to attach before it.
    """

    @made_once
    def run(name, nprocs, hooks):
        folder = tmp_path_factory.mktemp("probe")
        size = launch.batch_size(name, 66, nprocs)
        hooks = [*hooks, probe]
        done = launch.train(
            name, 2, 1, "--batch-size", size, cwd=folder, nprocs=nprocs, hooks=hooks
        )
        return noted(folder, "probe", nprocs), done

    return run


@pytest.fixture(autouse=True)
def no_program_is_left():
    """A test that fails leaves none of its own behind. Nor a process group."""
    before = set(Program.running)
    yield
    end_all(but=before)
    assert not torch.distributed.is_initialized(), "forks of later tests would have it"


@pytest.fixture
def copy_of(tmp_path):
    """`copy_of(folder)`: a snapshot to spoil."""

    def get(folder):
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
        return tmp_path / "snapshot.pt"

    return get
