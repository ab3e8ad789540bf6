"""What docs/it_hangs.md says of a rank that waits, and its commands do not show."""

import os
import re
import shutil

import pytest

from tools.run.launch import plant
from tools.run.processes import PATH, Program, wait_until
from tools.scripts import ROOT

STACKS = ROOT / "docs/it_hangs/stacks.sh"

pytestmark = pytest.mark.waits  # for time-outs of collectives

TIMEOUT = 8  # seconds: leaves py-spy time on a busy machine


@pytest.fixture(scope="module")
def skipped(tmp_path_factory):
    """(Done, what stacks.sh printed while it hung) of hang.py with `skip`.

    Rank 1 has a DataLoader, whose worker also sleeps.
    """
    folder = tmp_path_factory.mktemp("skipped")
    change = "timedelta(seconds=5)", f"timedelta(seconds={TIMEOUT})"
    loader = "DataLoader([0], num_workers=1, collate_fn=lambda _: time.sleep(12))"
    loader = f"loader = iter(torch.utils.data.{loader}); save()  # this"
    changes = change, ("save()  # this", loader)
    script = plant("docs/it_hangs/hang.py", folder / "copy", *changes)
    words = ["torchrun", "--standalone", "--nproc-per-node=2", script, "skip"]
    program = Program(words, folder, real=True)
    traces = folder / "trace_0", folder / "trace_1"
    # The first is written after 1 s, and the loop takes less.
    wait_until(lambda: program.poll() or all(path.exists() for path in traces))
    looked = Program(["sh", STACKS, program.pid], folder, real=True).finish()
    return program.finish(), looked.stdout


def test_the_rank_that_waits_raises_at_the_time_out(skipped):
    done, _ = skipped
    assert done.returncode == 1
    assert f"Timed out waiting {TIMEOUT}000ms for recv operation" in done.stderr
    assert "[rank0]: RuntimeError" in done.stderr
    assert "[rank1]" not in done.stderr, "it is ended where it is"


@pytest.mark.skipif(
    not all(shutil.which(x, path=PATH) for x in ("py-spy", "pgrep")) or os.geteuid(),
    reason="needs py-spy (pip install py-spy), pgrep (procps) and root",
)
def test_py_spy_shows_the_line_of_each_rank(skipped):
    _, stacks = skipped
    ranks = dict(re.findall(r"^RANK=(\d)\n(.*?)(?=^RANK|\Z)", stacks, re.M | re.S))
    assert sorted(ranks) == ["0", "1"]
    main = {rank: text.split('"MainThread"')[1] for rank, text in ranks.items()}
    assert re.match(r"\s+all_reduce \(torch/distributed", main["0"])
    assert re.match(r"\s+save \(hang.py:\d+\)", main["1"])
    assert "<lambda> (hang.py:" in ranks["1"].split('"MainThread"')[2]
