"""The check of one script says what is left to do."""

import pytest

from tools.files import copy_tree
from tools.run.processes import Program


@pytest.mark.waits
def test_what_a_new_script_lacks_is_listed(tmp_path):
    copy_tree(tmp_path)
    text = (tmp_path / "multigpu.py").read_text()
    (tmp_path / "variants/new.py").write_text(text)
    (tmp_path / "tests/badly_formatted.py").write_text("pair = [1,2]\n")
    command = "python -m tools.prove.check --text variants/new.py"
    done = Program(command.split(), tmp_path).finish()
    for said in (
        "variants/new.py:1: no chapter explains",
        "FAILED tests/docs/test_docs.py::test_which_one_names_every_script",
        "tests/variants/test_new.py",
        "\n- python -m ruff format --check .\n",
        "\n- python -m tools.site.build --check --diffs\n",
    ):
        assert said in done.stdout + done.stderr, said
    assert "\n- python -m ruff check ." not in done.stdout
    assert done.returncode == 1
