"""Two claims that only docs/5_minGPT.md makes: the learning rate, and clipping."""

import itertools
import math

import pytest

from mingpt.train import lr_scale
from tests.test_gpt_train import gpt, text, trained  # noqa: F401  gpt, text: fixtures
from tools.proofs.results import load


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
