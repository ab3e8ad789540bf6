"""mixed_precision.py: autocast, the scaler and its state, clipping, skipped steps.

That it trains as its parent does but for the precision is shown by the tests of all
scripts: they run it in float64, which autocast leaves alone.
"""

import math
import re
import shutil

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.checks import (
    STANDIN,
    assert_same_snapshot,
    help_of,
    import_script,
    noted,
)
from tests.helpers.forked import in_a_fork
from tests.helpers.made_once import made_once
from tests.hooks import replace, write
from tests.hooks.accelerators import note_standin
from tests.hooks.faults import raise_error_in_step_80
from tests.hooks.models import float64
from tools.run.launch import run_script, train
from tools.run.results import load, losses, weights
from tools.scripts import ROOT

NAME = "variants/mixed_precision.py"
PARENT = "multigpu.py"
FP16 = ("--precision", "fp16")
STEPS = 32  # of an epoch with an effective batch of 64
SPOILED_STEP = 40  # in the second epoch


def skipped(done):
    """The skipped steps of each epoch, as printed."""
    counts = re.findall(r"skipped steps (\d+)$", done.stdout, re.M)
    return [*map(int, counts)]


def note_precision(script):
    """noted.RANK.json: after each step the scale and the weights, and all dtypes.

    These are of what the model and the loss return: {"Linear True": ...} in training.
    """
    facts = {"scales": [], "weights": [], "dtypes": {}}

    def note_dtype(module, inputs, result):
        name = f"{type(module).__name__} {torch.is_grad_enabled()}"
        facts["dtypes"][name] = str(result.dtype)

    def run_batch(inner, self, *arguments):
        loss = inner(self, *arguments)
        facts["scales"].append(self.scaler.get_scale())
        facts["weights"].append(self.model.weight.tolist())
        return loss

    def evaluate(inner, self):
        held_out_loss = inner(self)
        write("noted", facts)
        return held_out_loss

    nn.modules.module.register_module_forward_hook(note_dtype)
    replace(script["Trainer"], "_run_batch", run_batch)
    replace(script["Trainer"], "_evaluate", evaluate)


def spoil_a_step(script):
    """In one step, the samples of rank 1 are infinite."""
    steps = []

    def run_batch(inner, self, source, targets):
        steps.append(1)
        if len(steps) == SPOILED_STEP and dist.get_rank() == 1:
            source = source * math.inf
        return inner(self, source, targets)

    replace(script["Trainer"], "_run_batch", run_batch)


@made_once
def spoiled(folder, *options):
    """`spoiled(*options)`: (folder, Done) of five epochs with a spoiled step."""
    hooks = [note_precision, spoil_a_step]
    status = 0 if options else 2  # bfloat16 skips no step
    return folder, train(NAME, 5, 2, *options, status=status, cwd=folder, hooks=hooks)


# The precision


@pytest.mark.parametrize(
    ("options", "dtype", "scale"),
    [((), "torch.bfloat16", 1), (FP16, "torch.float16", 65536)],
)
def test_computes_in_it_trains_and_evaluates(spoiled, options, dtype, scale):
    """The model's output has the lower precision on each rank, the loss has not."""
    folder, done = spoiled(*options)
    for rank in noted(folder):
        assert rank["dtypes"] == {
            "Linear True": dtype,
            "DistributedDataParallel True": dtype,
            "MSELoss True": "torch.float32",
            "Linear False": dtype,
            "MSELoss False": "torch.float32",
        }
    line = f"autocast to {dtype}, weights in torch.float32, loss scale {scale}"
    assert done.stdout.splitlines()[2] == line


def test_bfloat16_stays_near_float32(runs):
    """Weights after 5 epochs: within 0.002 of the parent's, and not the same."""
    folder, _ = runs(NAME)
    parents_folder, _ = runs(PARENT)
    differences = weights(folder) - weights(parents_folder)
    assert 1e-5 < differences.abs().max() < 2e-3


def test_with_the_scaler_it_computes_what_the_parent_does(tmp_path):
    """In float64, where nothing is rounded: scaled, unscaled, clipped.

    The parent has a line that clips. Of the scaled gradients, little would be left.
    """
    step = "        self.optimizer.step()\n"
    clip = "        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)\n"
    parent = tmp_path / "parent"
    changes = [(step, clip + step)]
    train(PARENT, 2, 2, cwd=parent, changes=changes, hooks=[float64])
    train(NAME, 2, 2, *FP16, "--clip", 0.5, cwd=tmp_path, hooks=[float64])
    expected = weights(parent)
    torch.testing.assert_close(weights(tmp_path), expected, rtol=0, atol=1e-12)


def test_which_losses_are_in_float32():
    """Those of torch are, as the runs above show. Yours may be in the output's."""
    model = nn.Linear(20, 1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(8, 20)).square().mean()
    assert loss.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("precision", "taken"), [("auto", "torch.float16"), ("bf16", "torch.bfloat16")]
)
def test_all_ranks_take_the_same_where_one_lacks_bfloat16(tmp_path, precision, taken):
    """float16, unless bfloat16 is asked for."""

    def rank_1_lacks_it(script):
        replace(script, "has_bfloat16", lambda inner, device: dist.get_rank() != 1)

    hooks = [note_precision, rank_1_lacks_it]
    train(NAME, 1, 1, "--precision", precision, cwd=tmp_path, hooks=hooks)
    for rank in noted(tmp_path):
        assert rank["dtypes"]["Linear True"] == taken


def test_a_gpu_that_imitates_bfloat16_does_not_have_it(monkeypatch):
    """PyTorch is asked without emulation, and its answer counts. CPUs have it."""
    has_bfloat16 = import_script(NAME).has_bfloat16
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **how: how)
    assert has_bfloat16(torch.device("cuda")) == {"including_emulation": False}
    assert has_bfloat16(torch.device("cpu"))


def test_an_overflow_on_one_rank_skips_the_step_on_all(spoiled):
    """The scale halves, the weights stay, the training goes on."""
    folder, done = spoiled(*FP16)
    first, second = noted(folder)
    assert first == second
    scales = [65536, *first["scales"]]
    states = [None, *first["weights"]]
    skips = [step for step in range(1, len(scales)) if scales[step] < scales[step - 1]]
    for step in skips:
        assert scales[step] == scales[step - 1] / 2
        assert states[step] == states[step - 1] or step == 1
    # At the start the scale is too large for this model, for some steps.
    *at_the_start, last = skips
    assert at_the_start
    assert max(at_the_start) < 10
    assert last == SPOILED_STEP
    assert skipped(done) == [len(at_the_start), 1, 0, 0, 0]


def test_bfloat16_skips_no_step(spoiled):
    """Nothing is scaled. A gradient that is no number spoils all, and ends the run."""
    folder, done = spoiled()
    for rank in noted(folder):
        assert set(rank["scales"]) == {1}
    assert skipped(done) == [0, 0]
    assert re.search(r"train loss nan .* held-out loss nan", done.stdout)


@pytest.mark.waits
@pytest.mark.usefixtures("standin")
def test_a_loop_that_waits_once_and_counts_on_the_device(tmp_path):
    """It is the scaler that waits, to ask whether to skip. To count takes no other."""
    train(NAME, 1, 1, *FP16, cwd=tmp_path, hooks=[note_standin], **STANDIN)
    for seen in noted(tmp_path, "seen"):
        assert seen == {"copies that wait": 2, "waits": STEPS}


def test_resumed_in_float16_it_ends_with_the_same_bits(spoiled, tmp_path):
    """The scale, and the number of steps since it has changed."""
    hooks = [spoil_a_step, raise_error_in_step_80]
    train(NAME, 5, 2, *FP16, status=1, cwd=tmp_path, hooks=hooks)
    state = load(tmp_path)["SCALER_STATE"]
    assert state["_growth_tracker"] == 2 * STEPS - SPOILED_STEP
    done = train(NAME, 5, 2, *FP16, cwd=tmp_path)
    assert f"loss scale {state['scale']:g}\n" in done.stdout
    undisturbed, _ = spoiled(*FP16)
    assert_same_snapshot(tmp_path, undisturbed)


@pytest.mark.waits
@pytest.mark.parametrize("saved_by", [PARENT, NAME])
def test_each_precision_resumes_the_others(runs, tmp_path, saved_by):
    """In float16, where there is no scale, it is found again."""
    folder, saved = runs(saved_by)
    shutil.copy(folder / "snapshot.pt", tmp_path)
    done = train(NAME, 6, 6, *FP16, cwd=tmp_path)
    assert "loss scale 65536\n" in done.stdout
    _, held_out_loss_before = losses(saved)[-1]
    ((_, held_out_loss),) = losses(done)
    assert held_out_loss < held_out_loss_before


# What a reader adds


@pytest.mark.parametrize("case", ["together", "apart", "not frozen", "frozen"])
@in_a_fork
def test_what_is_clipped_together_must_be_one_optimizers(case):
    """The gradients of the first layer overflow, and so does a norm with them in it.

    If the other layer has an optimizer of its own, this one does not skip the step.
    """
    first = nn.Linear(4, 4)
    last = nn.Linear(4, 1)
    both = nn.Sequential(first, last)
    last.weight.data.fill_(1e35)
    first.requires_grad_(case != "frozen")
    scaler = torch.GradScaler("cpu", init_scale=32768.0)
    scaler.scale(both(torch.ones(8, 4)).mean()).backward()
    trained = [last] if "frozen" in case else [first, last]
    optimizers = [torch.optim.SGD(layer.parameters()) for layer in trained]
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    for module in trained if case == "apart" else [both]:
        nn.utils.clip_grad_norm_(module.parameters(), math.inf)
    for optimizer in optimizers:
        scaler.step(optimizer)
    is_spoiled = last.bias.isnan().item()
    assert is_spoiled == (case in ("together", "not frozen"))


def test_bad_option(tmp_path):
    done = run_script(ROOT / NAME, 5, 1, "--clip", "much", cwd=tmp_path)
    line = "argument --clip: invalid float value: 'much'"
    assert done == (2, "", f"mixed_precision.py: error: {line}\n")


def test_help(tmp_path):
    shown = help_of(NAME, tmp_path)
    assert "{auto,bf16,fp16} what autocast computes in (auto: bf16 if" in shown
    assert "--clip CLIP scale gradients of a larger norm down to this" in shown
