"""What has passed is not run again, but a fault in anything it depends on is found."""

import re

import pytest

from tools.files import copy_tree, edit
from tools.prove import inputs, recorded
from tools.run.processes import Program

pytestmark = pytest.mark.waits

ZOO = "tests/trunk/test_zoo.py"
SLURM = "tests/cluster/test_slurm.py"
ACCUMULATION = "tests/variants/test_gradient_accumulation.py"
FSDP = "variants/fsdp.py"
CHANGES = [  # a file, one of tests, the script that a test is about, whether it reruns
    ("utils.py", ZOO, FSDP, True),
    ("multinode.py", ZOO, FSDP, True),
    (FSDP, ZOO, "variants/sharded_snapshot.py", True),
    ("variants/diloco.py", ZOO, FSDP, False),
    ("variants/diloco.py", ZOO, None, True),
    ("tests/helpers/zoo.py", ZOO, FSDP, True),
    ("tests/hooks/probe.py", ZOO, FSDP, True),
    ("tests/standin/standin.cpp", ZOO, FSDP, True),
    ("tests/conftest.py", ZOO, FSDP, True),
    ("tests/trunk/test_probe.py", ZOO, FSDP, False),
    ("README.md", ZOO, FSDP, False),
    ("README.md", "tests/docs/test_site.py", None, True),
    ("cluster/multinode.sbatch", SLURM, None, True),
    ("variants/preemptible.py", SLURM, None, True),
    ("variants/diloco.py", SLURM, None, False),
    ("mingpt/batches.py", "tests/mingpt/test_train.py", None, True),
    ("mingpt/__init__.py", "tests/mingpt/test_train.py", None, True),
    ("benchmarks/report.py", "tests/tools/test_benchmarks.py", None, True),
    ("variants/tensor_parallel.py", "tests/docs/test_fences.py", None, True),
    ("variants/ddp2.py", "tests/variants/test_train_loop.py", None, True),
    ("docs/gradient_accumulation/watch.py", ACCUMULATION, None, True),
]


@pytest.mark.parametrize(("changed", "file", "script", "again"), CHANGES)
def test_what_a_test_depends_on(monkeypatch, changed, file, script, again):
    about = (script,) if script else ()
    recorded.depends_on.cache_clear()
    before = recorded.depends_on(file, about)
    digest_of_file = inputs.digest_of_file

    def of_another(name):
        return "another" if name == changed else digest_of_file(name)

    monkeypatch.setattr(inputs, "digest_of_file", of_another)
    recorded.depends_on.cache_clear()
    assert (recorded.depends_on(file, about) != before) == again


TESTS = (
    "pytest --all -m waits -q -p tools.prove.recorded"
    " tests/trunk/test_training.py -k ddp_by_hand"
)
PAGE = "tools.site.build --check --only ddp_by_hand"
FAULTS = {  # a text, and the fault that takes its place
    "variants/ddp_by_hand.py": (" * len(source)", ""),
    "utils.py": ("def save_atomically(", "def save("),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository in which some tests have passed, and a page is right."""
    folder = tmp_path_factory.mktemp("copy")
    copy_tree(folder)
    for command in TESTS, PAGE:
        status, output = run(command, folder)
        assert status == 0, output
    return folder


def run(command, folder):
    done = Program(["python", "-m", *command.split()], folder, merged=True).finish()
    return done.returncode, done.stdout


@pytest.mark.parametrize("command", [TESTS, PAGE])
def test_nothing_runs_twice(copy, command):
    status, output = run(command, copy)
    assert status == 0
    number = re.search(r"(?m)^(\d+) (tests have passed|commands print)", output)[1]
    assert int(number) > 1
    assert not re.search(r"\d passed|: exit status", output)


@pytest.mark.parametrize("command", [TESTS, PAGE])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(copy, command, name):
    text = (copy / name).read_text()
    edit(copy / name, FAULTS[name])
    status, output = run(command, copy)
    (copy / name).write_text(text)
    assert status == 1, output
