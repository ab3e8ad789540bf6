"""A test file for a planted tree: what becomes of it depends on multigpu.py."""

from ladder.rungs import ROOT
from proofs.processes import finish, start

TEXT = (ROOT / "multigpu.py").read_text()


def test_multigpu_hangs_without_a_line():
    if "waits = self.total_epochs" not in TEXT:
        finish(start(["sleep", "60"], ROOT), timeout_s=0.5)


def test_multigpu_has_a_line():
    """It fails in the control if the line is not there at all."""
    assert "nobody = self.total_epochs" in TEXT
