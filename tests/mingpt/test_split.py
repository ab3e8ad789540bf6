"""mingpt.train --split: the training without it, with a part of a layer on a rank."""

import os
import re

import pytest

from tests.mingpt.test_shard import TWO, bytes_held, runs  # noqa: F401  a fixture, too
from tests.mingpt.test_train import check_runs, gpt, snapshot, steps_run, text  # noqa: F401  fixtures
from tools.run.results import same_bits, shape_of

pytestmark = pytest.mark.waits

# Each trains on 4 blocks in a step, as two ranks do without --split.
ONE_GROUP = ["--split", 2, "--batch-size", 4, "--accumulate", 2]
TWO_GROUPS = ["--split", 2, *TWO]


@pytest.mark.parametrize(
    ("nprocs", "options", "real"),
    [
        (2, ONE_GROUP, ""),
        (4, [*TWO_GROUPS, "--checkpoint"], ""),
        (2, [*ONE_GROUP, "--compile", "on"], "a fork cannot"),
    ],
)
def test_trains_the_same(runs, tmp_path, nprocs, options, real):  # noqa: F811
    """A rank that held other weights, or clipped otherwise, would change the sums."""
    run, whole, _ = runs
    done = run(tmp_path, *options, nprocs=nprocs, real=real)
    check_runs(tmp_path, whole, "train loss", "val loss", "bits per byte")
    found = snapshot(tmp_path)
    expected = snapshot(whole)
    assert shape_of(found) == shape_of(expected)
    assert found["WINDOWS_RUN"] == expected["WINDOWS_RUN"] == 8 * 4
    assert " 0.03 M parameters" in done.stdout
    assert f" {4 * 18} tokens a step, 8 steps" in done.stdout
    assert bytes_held(tmp_path, rank=1) < 0.7 * bytes_held(whole, rank=1)


def test_resumes_bit_for_bit(runs, tmp_path):  # noqa: F811
    """With dropout: other elements on a rank would leave it other whole weights."""
    run, _, _ = runs
    whole = tmp_path / "whole"
    stopped = tmp_path / "stopped"
    options = [*TWO_GROUPS, "--dropout", 0.1]
    fault = {"DO": "sigterm", "AT_STEP": 2, "RANK_ONLY": 1, "ASK_EVERY": 1}
    run(whole, *options, nprocs=4)
    run(stopped, *options, nprocs=4, status=1, **fault)
    assert steps_run(stopped) == 3
    run(stopped, *options, nprocs=4)
    assert same_bits(snapshot(stopped), snapshot(whole))


def test_resumes_without_it_and_with_it(runs, tmp_path):  # noqa: F811
    """With --split, without, with --shard, without, with --split. SIGTERM ends four."""
    run, whole, _ = runs
    alone = ONE_GROUP[2:]
    for step, options, nprocs, status in (
        (1, ONE_GROUP, 2, 1),  # torchrun's own status
        (2, alone, None, os.EX_TEMPFAIL),
        (4, [*TWO, "--shard"], 2, 1),
        (5, alone, None, os.EX_TEMPFAIL),
    ):
        fault = {"DO": "sigterm", "AT_STEP": step, "ASK_EVERY": 1}
        run(tmp_path, *options, nprocs=nprocs, status=status, **fault)
        assert steps_run(tmp_path) == step + 1
    run(tmp_path, *ONE_GROUP, nprocs=2)
    assert steps_run(tmp_path) == 8
    check_runs(tmp_path, whole, "val loss")


def test_parts_that_differ_by_replica_are_not_saved(runs, tmp_path):  # noqa: F811
    """Each rank has a part of a layer, which one other rank has, too."""
    run, _, _ = runs
    fault = {"DO": "apart", "AT_STEP": 2, "RANK_ONLY": 3}
    done = run(tmp_path, *TWO_GROUPS, nprocs=4, status=1, **fault)
    line = ": part 1 of transformer.h.0.mlp.c_fc.weight differs by rank, sums "
    assert line in done.stderr
    assert not (tmp_path / "mingpt.pt").exists()


BAD = {
    "ranks": (["--split", 3], "--split 3 does not divide 2 ranks"),
    "heads": (["--n-head", 1], "--split 2 does not divide 1 heads"),
    "model": (
        ["--model", "mingpt.modern"],
        "--split cannot cut mingpt.modern, only mingpt.model",
    ),
    "shard": (["--shard"], "argument --shard: not allowed with argument --split"),
    "scaler": (
        ["--precision", "fp16"],
        "--split: choose --precision fp32 or bf16, not fp16",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(gpt, tmp_path, what):  # noqa: F811
    """One line, and nothing written."""
    options, message = BAD[what]
    done = gpt(tmp_path, "--split", 2, *options, nprocs=2, status=1)
    errors = re.findall("^train.py: error: (.*)$", done.stderr, re.M)
    assert errors == [message]
    assert re.search("exitcode +: 2 ", done.stderr)
    assert not list(tmp_path.iterdir())
