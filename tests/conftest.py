"""Runs that several tests look at are made once, when the first of them asks."""

import json
import os
import shutil
import signal
import sys

import pytest

# All tests run on the CPU, also where there are GPUs, but for those of test_gpu.py.
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# A shell that starts pytest in the background makes it ignore Ctrl-C, and with it all
# that it starts, whose end some tests ask for.
signal.signal(signal.SIGINT, signal.default_int_handler)

from ladder.rungs import ROOT, commands  # noqa: E402
from proofs import launch, processes, results, warm  # noqa: E402
from tests.site_fixtures import address, browser, pages, site, visit  # noqa: E402, F401

OBSERVER = ROOT / "proofs" / "observer"


# What `pytest` leaves out unless it is told --all


def pytest_addoption(parser):
    parser.addoption(
        "--all",
        action="store_true",
        help="run the tests marked `waits` as well: hosts, Slurm, hangs, the browser",
    )


left_out = {}  # {file: how many of its tests}


def pytest_collection_modifyitems(config, items):
    if config.getoption("--all"):
        return
    waiting = [item for item in items if item.get_closest_marker("waits")]
    for item in waiting:
        left_out[item.path.name] = left_out.get(item.path.name, 0) + 1
    config.hook.pytest_deselected(items=waiting)
    items[:] = [item for item in items if item not in waiting]


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """The last line that pytest prints."""
    if left_out:
        files = ", ".join(f"{name} ({count})" for name, count in left_out.items())
        print(f"Left out, because they wait: {files}. To run them too: pytest --all")


# Runs


def once(make):
    """`make`, called once for the same arguments; what failed is not tried again."""
    made = {}

    def get(*arguments):
        if arguments not in made:
            try:
                made[arguments] = make(*arguments), None
            except Exception as error:
                made[arguments] = None, error
        result, error = made[arguments]
        if error:
            raise error
        return result

    return get


def processes_of(name, nprocs):
    return nprocs if name in launch.DISTRIBUTED else 1


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """`runs(name, nprocs=2)`: (folder, Done) of 5 epochs at an effective batch of 64.

    It saves every second epoch. In forks. With `hooks`, it runs a copy that has them.
    """

    @once
    def run(name, nprocs, hooks):
        folder = tmp_path_factory.mktemp("run")
        script = ROOT / name
        if hooks:
            script = launch.plant(name, tmp_path_factory.mktemp("copy"), hooks=hooks)
        options = ("--batch-size", launch.batch_size(name, 64, nprocs))
        done = launch.train(script, 5, 2, *options, cwd=folder, nprocs=nprocs)
        return folder, done

    return lambda name, nprocs=2, hooks=(): run(name, processes_of(name, nprocs), hooks)


@pytest.fixture(scope="session")
def typed(tmp_path_factory):
    """`typed(name)`: (folder, Done, threads) of the docstring's command, as typed.

    threads: for each rank, the names of gloo's threads that were left at its exit.
    """

    @once
    def run(name):
        folder = tmp_path_factory.mktemp("typed")
        log = tmp_path_factory.mktemp("threads")
        launch.plant(name, folder)
        (words,) = commands(name)
        path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        env = {"PATH": path, "PYTHONPATH": OBSERVER, "THREADS_LOG": log}
        done = processes.run(words, folder, **env)
        assert done.returncode == 0, done.stdout + done.stderr
        return folder, done, [x.read_text() for x in log.iterdir()]

    return run


@pytest.fixture(scope="session")
def probes(tmp_path_factory):
    """`probes(name, nprocs)`: ([(train, held-out loss)], [facts of each rank], Done).

    Two epochs over 197 samples, 66 a step on all ranks together, 17 held out: 197 is
    2 x 66 + 65, and with 3 ranks padding would make a third step of it. The facts are
    those of proofs/hooks/probe.py. `hooks`: others to attach before it.
    """

    @once
    def run(name, nprocs, hooks):
        folder = tmp_path_factory.mktemp("probe")
        script = launch.plant(name, folder, hooks=[*hooks, "probe"])
        options = ("--batch-size", launch.batch_size(name, 66, nprocs))
        done = launch.train(script, 2, 1, *options, cwd=folder, nprocs=nprocs)
        files = sorted(folder.glob("probe.*.json"))
        assert len(files) == nprocs
        facts = [json.loads(file.read_text()) for file in files]
        return results.losses(done), facts, done

    return lambda name, nprocs, hooks=(): run(name, processes_of(name, nprocs), hooks)


@pytest.fixture(autouse=True)
def no_fork_is_left():
    """A test that fails between two forks leaves none behind."""
    yield
    warm.end_all()


@pytest.fixture
def copy_of(tmp_path):
    """`copy_of(folder)`: a snapshot to spoil."""

    def get(folder):
        shutil.copy(folder / "snapshot.pt", tmp_path)
        return tmp_path / "snapshot.pt"

    return get
