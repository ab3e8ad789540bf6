"""mingpt.train --split: the training without it, with a part of a layer on a rank."""

import re

import pytest
import torch

from mingpt import split
from mingpt.model import attention
from tests.mingpt.test_shard import TWO, runs  # noqa: F401  a fixture, too
from tests.mingpt.test_train import check_runs, gpt, text  # noqa: F401  fixtures, too
from tools.run.results import load, same_bits, shape_of

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
    snapshot, other = (load(x / "mingpt.pt") for x in (tmp_path, whole))
    assert shape_of(snapshot) == shape_of(other)
    assert snapshot["WINDOWS_RUN"] == other["WINDOWS_RUN"] == 8 * 4
    for said in (" 0.03 M parameters", f" {4 * 18} tokens a step, 8 steps"):
        assert said in done.stdout
    held, all_held = (int((x / "held.1").read_text()) for x in (tmp_path, whole))
    assert held < 0.7 * all_held


def test_resumes_bit_for_bit(runs, tmp_path):  # noqa: F811
    """With dropout: other elements on a rank would leave it other whole weights."""
    a, b, options = tmp_path / "a", tmp_path / "b", [*TWO_GROUPS, "--dropout", 0.1]
    runs[0](a, *options, nprocs=4)
    runs[0](b, *options, nprocs=4, good=False, DO="sigterm", AT_STEP=2, RANK_ONLY=1)
    assert load(b / "mingpt.pt")["STEPS_RUN"] == 3
    runs[0](b, *options, nprocs=4)
    assert same_bits(*(load(x / "mingpt.pt") for x in (a, b)))


def test_resumes_without_it_and_with_it(runs, tmp_path):  # noqa: F811
    """With --split, without, with --shard, without, with --split. SIGTERM ends four."""
    parts = (
        (1, 2, ONE_GROUP),
        (2, None, ONE_GROUP[2:]),
        (4, 2, [*TWO, "--shard"]),
        (5, None, ONE_GROUP[2:]),
        (9, 2, ONE_GROUP),
    )
    for step, nprocs, more in parts:
        how = {"nprocs": nprocs, "good": step == 9, "DO": "sigterm", "AT_STEP": step}
        runs[0](tmp_path, *more, **how)
        assert load(tmp_path / "mingpt.pt")["STEPS_RUN"] == min(8, step + 1)
    check_runs(tmp_path, runs[1], "val loss")


def test_dropout_differs_between_heads_and_draws_alike():
    q, found = torch.ones(1, 2, 9, 4), []
    for rank in (0, 1):
        torch.manual_seed(0)
        found += split.attend(attention, rank, q, q, q, 0.5), torch.rand(3)
    assert not torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


ONLY = "--split: only mingpt.model with AdamW, no --shard, fp32 or bf16"
BAD = {
    "ranks": (["--split", 3], "--split 3 does not divide 2 ranks"),
    "heads": (["--n-head", 1], "--split 2 does not divide 1 heads"),
    "model": (["--model", "mingpt.modern"], ONLY),
    "shard": (["--shard"], ONLY),
    "scaler": (["--precision", "fp16"], ONLY),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(gpt, tmp_path, what):  # noqa: F811
    """One line, and nothing written."""
    options, message = BAD[what]
    done = gpt("--split", 2, *options, cwd=tmp_path, nprocs=2)
    assert re.findall("^train.py: error: (.*)$", done.stderr, re.M) == [message]
    assert re.search("exitcode +: 2 ", done.stderr) and not list(tmp_path.iterdir())
