"""What chapter 8 says of the experiments in docs/slower."""

import pytest

from tools.proofs.launch import run_script
from tools.scripts import ROOT


def test_each_sample_of_a_shared_stream_comes_once(tmp_path):
    done = run_script(ROOT / "docs/slower/loading.py", cwd=tmp_path)
    assert done.stdout.splitlines()[:2] == [
        "Stream: 12 samples, each comes 4 times",
        "Shared: 12 samples, each comes 1 times",
    ], done.stderr


@pytest.mark.waits
def test_no_rule_holds_for_every_batch(tmp_path):
    done = run_script(ROOT / "docs/slower/batch_size.py", cwd=tmp_path)
    rows = [x.split(" (")[0].split()[3:] for x in done.stdout.splitlines()[1:]]
    (sgd, *s, adam), a = ([[*map(float, x)] for x in y] for y in (rows[:5], rows[5:]))
    assert all(kept > root for kept, root, *_ in s + a)
    assert all(x[2] == x[3] < x[1] for x in s[:2]) and s[2][2] == float("inf")
    assert all(x[1] == x[3] < x[2] for x in a[:2]) and a[2][2] > 2 * a[2][1]
    assert s[2][3] > 3 * sgd[0] and a[2][3] > 3 * adam[0]
