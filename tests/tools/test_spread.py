"""A change of a script is carried into those that come from it."""

import subprocess

import pytest

from tools.files import copy_tree, edit
from tools.spread import spread

pytestmark = pytest.mark.waits


def test_each_script_below_gets_the_change_or_is_listed(tmp_path):
    """One has a change of its own in the same line: nothing of it is touched."""
    copy_tree(tmp_path)
    commands = "git init -q; git add .; git -c user.name=x -c user.email=x commit -qmx"
    subprocess.run(commands, shell=True, check=True, cwd=tmp_path)
    method = "    def train(self, total_epochs):\n"
    longer = f"{method}        print(total_epochs)\n"
    edit(tmp_path / "multigpu.py", (method, longer))
    diloco = tmp_path / "variants/diloco.py"
    edit(diloco, (method, f"{method}        print()\n"))
    before = diloco.read_text()
    changed, conflicts = spread(tmp_path)
    assert conflicts == ["variants/diloco.py"]
    assert diloco.read_text() == before
    assert "single_gpu.py" not in changed
    for name in ("multinode.py", "variants/preemptible.py", "variants/profiled.py"):
        assert name in changed
        assert longer in (tmp_path / name).read_text()
    assert spread(tmp_path) == ([], conflicts)
