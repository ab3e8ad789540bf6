"""What is read from a script in order to launch it: any layout will do."""

import re

import pytest

from tools.files import copy_tree, edit
from tools.run.launch import options_of, plant
from tools.run.processes import Program
from tools.scripts import ROOT, InputError

pytestmark = pytest.mark.waits


def test_scripts_of_another_layout_are_collected(tmp_path):
    """One blank line between functions, a decorated Trainer; no load_train_objs."""
    copy_tree(tmp_path)
    text = (ROOT / "multigpu.py").read_text()
    text = text.replace("Parent: single_gpu", "Parent: multigpu")
    dense = re.sub("\n\n+", "\n\n", text)
    dense = dense.replace("\nclass", "\n@final\nclass")
    (tmp_path / "variants/dense.py").write_text(dense)
    without = text.replace("def load_train_objs", "def load_objects")
    (tmp_path / "variants/without.py").write_text(without)
    words = ["python", "-m", "pytest", "--collect-only", "-q", "--all"]
    done = Program(words, tmp_path).finish()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    for name in "dense", "without":
        assert f"test_a_script_trains_as_on_the_cpu[variants/{name}.py" in done.stdout


def test_ranks_that_share_a_batch_are_all_ranks_there_are(tmp_path):
    """One option of the docstring's command says how many: wherever it stands."""
    script = plant("variants/tensor_parallel.py", tmp_path)
    edit(script, (" --split 2\n", " --split 2 --seed 7\n"))
    assert options_of(script, 4) == ["--split", "4", "--seed", "7"]
    edit(script, (" --split 2 ", " --split 8 "))
    with pytest.raises(InputError, match="no option of its command has the value"):
        options_of(script, 4)
