"""mingpt.train --shard: the training without it, with a part of the model on a rank."""

import os

import pytest

from tests.helpers.checks import assert_no_gloo_thread, noted, observed
from tests.helpers.gpt_runs import SHARE_OF_TWO, check_runs, gpt, long_run

pytestmark = pytest.mark.waits


def test_trains_the_same_with_half_of_the_bytes(unsplit, tmp_path):
    long_run(tmp_path, f"{SHARE_OF_TWO} --shard", nprocs=2)
    check_runs(unsplit(), tmp_path, "train loss", "val loss")
    all_bytes, _ = noted(unsplit(), "held")
    of_parts = noted(tmp_path, "held")
    assert max(of_parts) < 0.53 * all_bytes < sum(of_parts)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="only Linux has it")
@pytest.mark.parametrize("options", ["--shard", "--split 2"])
def test_no_gloo_thread_outlives_main(tmp_path, options):
    """One that does may abort the exit."""
    log = tmp_path / "log"
    options = f"--steps 2 {options}"
    gpt(tmp_path, options, nprocs=2, real=True, **observed(log))
    assert_no_gloo_thread(log)
