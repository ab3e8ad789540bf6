"""mingpt.train --split: the training without it, with a part of a layer on a rank."""

import os

import pytest

from tests.helpers.checks import noted
from tests.helpers.gpt_runs import (
    SHARE_OF_TWO,
    at_step,
    check_resumes,
    check_runs,
    get_sigterm,
    gpt,
    long_run,
    steps_run,
)

pytestmark = pytest.mark.waits

# Each trains on 4 blocks in a step, as the two ranks of `unsplit` do.
ALONE = "--batch-size 4 --accumulate 2"
ONE_GROUP = f"{ALONE} --split 2"
TWO_GROUPS = f"{SHARE_OF_TWO} --split 2"


@pytest.mark.parametrize(
    ("nprocs", "options"),
    [
        (2, ONE_GROUP),
        (4, f"{TWO_GROUPS} --checkpoint"),
        (2, f"{ONE_GROUP} --compile on"),
    ],
)
def test_trains_the_same(unsplit, tmp_path, nprocs, options):
    """A rank that held other weights, or clipped otherwise, would change the sums."""
    long_run(tmp_path, options, nprocs=nprocs)
    check_runs(tmp_path, unsplit(), "train loss", "val loss", "bits per byte")
    assert noted(tmp_path, "held", nprocs)[1] < 0.7 * noted(unsplit(), "held")[1]


def test_resumes_bit_for_bit(tmp_path):
    """With dropout: other elements on a rank would leave it other whole weights.

    The ranks of a replica share a seed, and each replica has its own.
    """
    check_resumes(
        tmp_path,
        f"{TWO_GROUPS} --dropout 0.1",
        at_step(3, get_sigterm, rank=1, ask_every=1),
        status=1,
        resumes_at=3,
        run=long_run,
        nprocs=4,
    )
    first, second, third, fourth = noted(tmp_path / "whole", "seed", ranks=4)
    assert first == second != third == fourth


def test_resumes_without_it_and_with_it(unsplit, tmp_path):
    """With --split, without, with --shard, without, with --split. SIGTERM ends four."""
    shard = f"{SHARE_OF_TWO} --shard"
    for options, nprocs, step, steps_after in (
        (ONE_GROUP, 2, 2, 2),
        (ALONE, None, 1, 3),
        (shard, 2, 2, 5),
        (ALONE, None, 1, 6),
    ):
        status = 1 if nprocs else os.EX_TEMPFAIL  # 1 is torchrun's own
        hooks = [at_step(step, get_sigterm, ask_every=1)]
        long_run(tmp_path, options, nprocs=nprocs, status=status, hooks=hooks)
        assert steps_run(tmp_path) == steps_after
    long_run(tmp_path, ONE_GROUP, nprocs=2)
    assert steps_run(tmp_path) == 8
    check_runs(tmp_path, unsplit(), "val loss")


def test_it_must_divide_the_heads(tmp_path):
    done = gpt(tmp_path, "--split 2 --n-head 1", nprocs=2, status=1)
    assert "error: --split 2 does not divide 1 heads\n" in done.stderr
