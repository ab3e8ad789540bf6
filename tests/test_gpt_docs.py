"""What docs/5_minGPT.md shows of mingpt, and two claims that only it makes."""

import itertools
import math
import re

import pytest

from mingpt.train import lr_scale
from tests.test_gpt_train import gpt, text, trained  # noqa: F401  gpt, text: fixtures
from tools.proofs.results import load
from tools.proofs.warm import Fork
from tools.scripts import ROOT


@pytest.mark.waits
def test_a_wrong_mask_sees_the_future(tmp_path):
    script = ROOT / "docs" / "gpt" / "mask.py"
    done = Fork(["python", script], tmp_path, OMP_NUM_THREADS=1).finish()
    assert done.returncode == 0, done.stderr
    guess, wrong, right = done.stdout.splitlines()
    (guess,) = numbers(guess)
    (wrong, future_of_wrong), (right, future_of_right) = map(numbers, (wrong, right))
    assert wrong < guess / 8, "all places but the last, of 12, see the answer"
    assert future_of_wrong > 1
    assert guess - 0.01 < right < guess + 0.01
    assert future_of_right == 0


def numbers(line):
    return [float(x) for x in re.findall(r"\d+\.\d+", line)]


@pytest.mark.waits
@pytest.mark.parametrize("steps, model", [(1, "mingpt.model"), (7, "mingpt.modern")])
def test_the_learning_rate_of_each_step(gpt, tmp_path, steps, model):  # noqa: F811
    """It rises in two of ten steps. Then it falls to a tenth, along a cosine."""
    rates = [lr_scale(step, 10, 0.2) for step in range(10)]
    assert rates[:3] == [0.5, 1, 1]
    falls = [a - b for a, b in itertools.pairwise(rates[2:])]
    assert all(x > 0 for x in falls)
    assert max(falls) == max(falls[3:5]), "steepest in the middle"
    assert math.isclose(lr_scale(10, 10, 0.2), 0.1)
    assert lr_scale(0, 1, 0.5) == 1
    options = ["--steps", steps, "--lr", 0.01, "--warmup", 0.4, "--model", model]
    trained(gpt, *options, cwd=tmp_path)
    for group in load(tmp_path / "mingpt.pt")["OPTIMIZER_STATE"]["param_groups"]:
        last = lr_scale(steps - 1, steps, 0.4)
        assert math.isclose(group["lr"], 0.01 * last)
        assert group["initial_lr"] == 0.01


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_clips_the_gradients_that_are_not_scaled(gpt, tmp_path, precision):  # noqa: F811
    """AdamW's first average of the gradients is a tenth of the first gradient."""
    clip = 0.01
    options = ["--steps", 1, "--precision", precision, "--clip", clip]
    trained(gpt, *options, cwd=tmp_path)
    state = load(tmp_path / "mingpt.pt")["OPTIMIZER_STATE"]["state"]
    squares = sum(x["exp_avg"].double().square().sum() for x in state.values())
    assert math.isclose(10 * math.sqrt(squares), clip, rel_tol=1e-3)
