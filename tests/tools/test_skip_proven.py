"""What has passed is not run again, but a fault in anything it depends on is found."""

import re

import pytest

from tools.files import copy_tree, edit
from tools.prove import inputs, skip_proven
from tools.run.processes import Program

pytestmark = pytest.mark.waits

# A file, one of tests, the script that a test in it is about
CHANGES = """
utils.py tests/trunk/test_zoo.py variants/fsdp.py
multinode.py tests/trunk/test_zoo.py variants/fsdp.py
variants/fsdp.py tests/trunk/test_zoo.py variants/sharded_snapshot.py
variants/diloco.py tests/trunk/test_zoo.py
variants/diloco.py tests/cluster/test_cluster.py
tests/helpers/zoo.py tests/trunk/test_zoo.py variants/fsdp.py
tests/hooks/probe.py tests/trunk/test_zoo.py variants/fsdp.py
tests/conftest.py tests/trunk/test_zoo.py variants/fsdp.py
README.md tests/docs/test_site.py
cluster/multinode.sbatch tests/cluster/test_slurm.py
mingpt/__init__.py tests/mingpt/test_train.py
docs/fine_tune/pretrain.py tests/docs/test_fine_tune.py
variants/mixed_precision.py tests/variants/test_train_loop.py
"""


@pytest.mark.parametrize("row", CHANGES.strip().splitlines())
def test_what_a_test_depends_on(monkeypatch, row):
    changed, file, *about = row.split()
    about = tuple(about)
    skip_proven.depends_on.cache_clear()
    before = skip_proven.depends_on(file, about)
    digest_of_file = inputs.digest_of_file

    def of_another(name):
        return "another" if name == changed else digest_of_file(name)

    monkeypatch.setattr(inputs, "digest_of_file", of_another)
    skip_proven.depends_on.cache_clear()
    assert skip_proven.depends_on(file, about) != before


TESTS = (
    "pytest --all -m waits -q -p tools.prove.skip_proven"
    " tests/trunk/test_training.py -k ddp_by_hand"
)
PAGE = "tools.site.build --check --only ddp_by_hand"
FAULTS = [  # a file, a text, and the fault that takes its place
    ("variants/ddp_by_hand.py", " * len(source)", ""),
    ("utils.py", "def save_atomically(", "def save("),
]


@pytest.mark.parametrize("command", [TESTS, PAGE])
def test_what_has_passed_runs_again_only_with_a_fault(tmp_path, command):
    copy_tree(tmp_path)

    def start():
        return Program(["python", "-m", *command.split()], tmp_path, merged=True)

    start().succeed()
    output = start().succeed().stdout
    number = re.search(r"(?m)^(\d+) (tests have passed|commands print)", output)[1]
    assert int(number) > 1
    assert not re.search(r"\d passed|: exit status", output)
    for name, right, wrong in FAULTS:
        text = (tmp_path / name).read_text()
        edit(tmp_path / name, (right, wrong))
        done = start().finish()
        (tmp_path / name).write_text(text)
        assert done.returncode == 1, done.stdout
