"""The check of one script says what is left to do."""

import pytest

from tools.files import copy_tree, edit
from tools.run.processes import Program


@pytest.mark.waits
def test_what_a_new_script_lacks_is_listed(tmp_path):
    copy_tree(tmp_path)
    script = tmp_path / "variants" / "new.py"
    script.write_text((tmp_path / "multigpu.py").read_text())
    edit(script, ("Parent: single_gpu.py", "Parent: multigpu.py"))
    edit(script, ("python multigpu.py", "python -m variants.new"))
    (tmp_path / "tests/badly_formatted.py").write_text("pair = [1,2]\n")
    words = ["python", "-m", "tools.prove.check", "--text", "variants/new.py"]
    done = Program(words, tmp_path).finish()
    for left in (
        "docs/new.md: ",
        "docs/which_one.md: ",
        "docs/pictures/which_one.svg: ",
        "tests/variants/test_new.py: ",
        "python -m ruff format --check .\n",
        "python -m tools.site.build --check --diffs\n",
    ):
        assert f"\n- {left}" in done.stdout, left
    assert "python -m ruff check .: ok, " in done.stdout
    assert done.returncode == 1
    assert not done.stdout.endswith("done\n")
