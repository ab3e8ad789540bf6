"""A test file for a planted tree: what becomes of it depends on multigpu.py."""

import pytest

from tools.proofs.processes import finish, start
from tools.scripts import ROOT

TEXT = (ROOT / "multigpu.py").read_text()


def test_multigpu_hangs_without_a_line():
    if "planted_waits = total_epochs" not in TEXT:
        finish(start(["sleep", "60"], ROOT), timeout_s=0.5)


@pytest.mark.waits
def test_multigpu_has_a_line():
    """It fails in the control if the line is not there at all."""
    assert "planted_needed = total_epochs" in TEXT
