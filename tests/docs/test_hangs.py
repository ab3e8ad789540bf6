"""What docs/it_hangs.md says of a rank that waits, and its commands do not show."""

import os
import re
import shutil

import pytest

from tools.run.launch import copy_script, torchrun_words
from tools.run.processes import PATH, Program, wait_until
from tools.scripts import ROOT

STACKS = ROOT / "docs/it_hangs/stacks.sh"

pytestmark = pytest.mark.waits  # for time-outs of collectives

# Instead of the page's 5 s: on a busy machine, py-spy needs the time.
TIMEOUT_S = 8


@pytest.fixture(scope="module")
def skipped(tmp_path_factory):
    """(Done, what stacks.sh printed while it hung) of hang.py with `skip`.

    Rank 1 has a DataLoader, whose worker also sleeps. It is a fork, as a lambda needs
    it: Python 3.14 has another default.
    """
    folder = tmp_path_factory.mktemp("skipped")
    # The worker sleeps longer than the ranks wait.
    loader = """loader = iter(torch.utils.data.DataLoader([0], num_workers=1,
            multiprocessing_context="fork", collate_fn=lambda _: time.sleep(12)))
            save()  # this"""
    script = copy_script(
        "docs/it_hangs/hang.py",
        folder / "copy",
        ("timedelta(seconds=5)", f"timedelta(seconds={TIMEOUT_S})"),
        ("save()  # this", loader),
    )
    program = Program([*torchrun_words(2), script, "skip"], folder, real=True)
    # The first is written after 1 s, and the loop takes less.
    wait_until(lambda: program.poll() or len([*folder.glob("trace_?")]) == 2)
    looked = Program(["sh", STACKS, program.pid], folder, real=True).finish()
    return program.finish(), looked.stdout


def test_the_rank_that_waits_raises_at_the_time_out(skipped):
    done, _ = skipped
    assert done.returncode == 1
    assert f"Timed out waiting {TIMEOUT_S}000ms for recv operation" in done.stderr
    assert "[rank0]: RuntimeError" in done.stderr
    assert "[rank1]" not in done.stderr, "it is ended where it is"


tools = [shutil.which(name, path=PATH) for name in ("py-spy", "pgrep")]


@pytest.mark.skipif(
    None in tools or os.geteuid() != 0,
    reason="needs py-spy (pip install py-spy), pgrep (procps) and root",
)
def test_py_spy_shows_the_line_of_each_rank(skipped):
    _, stacks = skipped
    ranks = dict(re.findall(r"(?ms)^RANK=(\d)\n(.*?)(?=^RANK|\Z)", stacks))
    assert sorted(ranks) == ["0", "1"]
    stack_of_0 = ranks["0"].split('"MainThread"')[1]
    assert re.match(r"\s+all_reduce \(torch/distributed", stack_of_0)
    _, stack_of_1, stack_of_worker, *_ = ranks["1"].split('"MainThread"')
    assert re.match(r"\s+save \(hang.py:\d+\)", stack_of_1)
    assert "<lambda> (hang.py:" in stack_of_worker
