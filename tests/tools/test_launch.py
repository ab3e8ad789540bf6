"""What is read from a script in order to launch it."""

import pytest

from tools.files import edit
from tools.run.launch import options_of, plant
from tools.scripts import InputError

pytestmark = pytest.mark.waits


def test_ranks_that_share_a_batch_are_all_ranks_there_are(tmp_path):
    """One option of the docstring's command says how many: wherever it stands."""
    script = plant("variants/tensor_parallel.py", tmp_path)
    edit(script, (" --split 2\n", " --split 2 --seed 7\n"))
    assert options_of(script, 4) == ["--split", "4", "--seed", "7"]
    edit(script, (" --split 2 ", " --split 8 "))
    with pytest.raises(InputError, match="no option of its command has the value"):
        options_of(script, 4)
