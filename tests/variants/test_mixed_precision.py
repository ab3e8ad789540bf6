"""mixed_precision.py: autocast, the scaler and its state, clipping, skipped steps.

That it trains as its parent does but for the precision is shown by the tests of all
scripts: they run it in float64, which autocast leaves alone.
"""

import math
import re

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import once
from tests.helpers.checks import help_of, hooks_to_compare, import_script, noted
from tests.helpers.forked import in_a_fork
from tools.run.launch import launch, plant, run_script, train
from tools.run.results import load, losses, same_bits, weights
from tools.scripts import ROOT

NAME = "variants/mixed_precision.py"
PARENT = "multigpu.py"
FP16 = ("--precision", "fp16")
STEPS = 32  # of an epoch with an effective batch of 64
SPOILED_STEP = 40  # of the second epoch: samples of rank 1 are a million times as large
SPOILED = f"{SPOILED_STEP} 1 1e6"


def skipped(done):
    """The skipped steps of each epoch, as printed."""
    counts = re.findall(r"skipped steps (\d+)$", done.stdout, re.M)
    return [int(count) for count in counts]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    hooks = ["mixed_precision", "faults:in_step_80"]
    return plant(NAME, tmp_path_factory.mktemp("copy"), hooks=hooks)


@pytest.fixture(scope="module")
def in_float16(script, tmp_path_factory):
    """`in_float16()`: (folder, Done) of five epochs, with a spoiled step."""

    @once
    def run():
        folder = tmp_path_factory.mktemp("float16")
        return folder, train(script, 5, 2, *FP16, cwd=folder, SPOILED=SPOILED)

    return run


@pytest.fixture(scope="module")
def in_bfloat16(script, tmp_path_factory):
    """`in_bfloat16()`: (folder, Done) of an epoch: a gradient of rank 1 is infinite."""

    @once
    def run():
        folder = tmp_path_factory.mktemp("bfloat16")
        return folder, launch(script, 1, 1, cwd=folder, real="", SPOILED="5 1 inf")

    return run


# The precision


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_computes_in_it_trains_and_evaluates(in_bfloat16, in_float16, name):
    """The model's output has the lower precision on each rank, the loss has not."""
    folder, done = in_bfloat16() if name == "bfloat16" else in_float16()
    for rank in noted(folder):
        assert rank["outputs"] == [f"False torch.{name}", f"True torch.{name}"]
        assert rank["losses"] == ["False torch.float32", "True torch.float32"]
    scale = {"bfloat16": 1, "float16": 65536}[name]
    line = f"autocast to torch.{name}, weights in torch.float32, loss scale {scale}"
    assert done.stdout.splitlines()[2] == line


def test_bfloat16_stays_near_float32(runs):
    """Weights after 5 epochs: within 0.002 of the parent's, and not the same."""
    folder, _ = runs(NAME)
    parents_folder, _ = runs(PARENT)
    mine = weights(folder / "snapshot.pt")
    parents = weights(parents_folder / "snapshot.pt")
    assert 1e-5 < (mine - parents).abs().max() < 2e-3


def test_with_the_scaler_it_computes_what_the_parent_does(tmp_path):
    """In float64, where nothing is rounded: scaled, unscaled, clipped.

    The parent has a line that clips.
    """
    step = "        self.optimizer.step()\n"
    clip = "        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)\n"
    hooks = hooks_to_compare(NAME)
    folder = tmp_path / "parent"
    parent = plant(PARENT, folder / "copy", (step, clip + step), hooks=hooks)
    clipped = train(parent, 2, 2, cwd=folder)
    script = plant(NAME, tmp_path / "copy", hooks=hooks)
    done = train(script, 2, 2, *FP16, "--clip", 0.5, cwd=tmp_path)
    assert "loss scale 65536" in done.stdout
    assert losses(done) == losses(clipped)
    mine = weights(tmp_path / "snapshot.pt")
    parents = weights(folder / "snapshot.pt")
    torch.testing.assert_close(mine, parents, rtol=0, atol=1e-12)


def test_which_losses_are_in_float32():
    """Those of torch are. Yours may be in the precision of the model's output."""
    model = torch.nn.Linear(20, 10)
    targets = torch.zeros(8, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            logits = model(torch.randn(8, 20))
            assert F.cross_entropy(logits, targets).dtype == torch.float32
            assert F.mse_loss(logits, logits.detach()).dtype == torch.float32
            assert logits.square().mean().dtype == dtype


@pytest.mark.parametrize(
    ("precision", "taken"), [("auto", "float16"), ("bf16", "bfloat16")]
)
def test_all_ranks_take_the_same_where_one_lacks_bfloat16(
    script, tmp_path, precision, taken
):
    """float16, unless bfloat16 is asked for."""
    train(script, 1, 1, "--precision", precision, cwd=tmp_path, LACKING=1)
    for rank in noted(tmp_path):
        assert rank["outputs"] == [f"False torch.{taken}", f"True torch.{taken}"]
    has_scale = bool(load(tmp_path / "snapshot.pt")["SCALER_STATE"])
    assert has_scale == (taken == "float16")


@pytest.mark.parametrize("native", [True, False])
def test_a_gpu_that_imitates_bfloat16_does_not_have_it(monkeypatch, native):
    mixed_precision = import_script(NAME)

    def is_bf16_supported(including_emulation=True):
        return native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    assert mixed_precision.has_bfloat16(torch.device("cuda")) == native
    assert mixed_precision.has_bfloat16(torch.device("cpu"))


def test_an_overflow_on_one_rank_skips_the_step_on_all(in_float16):
    """The scale halves, the weights stay, the training goes on."""
    folder, done = in_float16()
    first, second = noted(folder)
    assert first["weights"] == second["weights"]
    assert first["scales"] == second["scales"]
    scale = 65536
    weights_before = None
    skips = []
    steps = zip(first["scales"], first["weights"], strict=True)
    for step, (new_scale, weights_after) in enumerate(steps, start=1):
        if new_scale < scale:
            skips.append(step)
            assert new_scale == scale / 2
            if step > 1:
                assert weights_after == weights_before
        scale = new_scale
        weights_before = weights_after
    # At the start the scale is too large for this model, for some steps.
    *at_the_start, last = skips
    assert at_the_start
    assert max(at_the_start) < 10
    assert last == SPOILED_STEP
    assert skipped(done) == [len(at_the_start), 1, 0, 0, 0]


def test_bfloat16_skips_no_step(in_bfloat16):
    """Nothing is scaled. A gradient that is no number spoils all, and ends the run."""
    folder, done = in_bfloat16()
    for rank in noted(folder):
        assert set(rank["scales"]) == {1}
    assert skipped(done) == [0]
    assert re.search(r"train loss nan .* held-out loss nan", done.stdout)
    assert done.returncode == 2
    assert not (folder / "snapshot.pt").exists()


def test_a_loop_that_waits_once_and_counts_on_the_device(in_bfloat16, in_float16):
    """It is the scaler that waits, to ask whether to skip. To count takes no other."""
    float16, _ = in_float16()
    bfloat16, _ = in_bfloat16()
    for folder, waits in ((float16, 1), (bfloat16, 0)):
        for rank in noted(folder):
            assert set(rank["waits"]) == {waits}
            assert set(rank["zeros"]) == {"cpu"}


def test_clips_the_true_gradients(script, in_float16, tmp_path):
    """Not the scaled ones, which are thousands of times as large."""
    train(script, 1, 1, *FP16, "--clip", 0.5, cwd=tmp_path)
    first, second = noted(tmp_path)
    assert first["norms"][-10:] == pytest.approx([0.5] * 10, rel=1e-4)
    assert first["norms"][-10:] == second["norms"][-10:]
    not_clipped, _ = in_float16()
    first, _ = noted(not_clipped)
    assert first["norms"][9] > 5


def test_resumed_in_float16_it_ends_with_the_same_bits(in_float16, script, tmp_path):
    """The scale, and the number of steps since it has changed."""
    env = {"SPOILED": SPOILED, "IN_STEP_80": "raise"}
    done = launch(script, 5, 2, *FP16, cwd=tmp_path, real="", **env)
    assert done.returncode == 1
    state = load(tmp_path / "snapshot.pt")["SCALER_STATE"]
    assert state["_growth_tracker"] == 2 * STEPS - SPOILED_STEP
    done = train(ROOT / NAME, 5, 2, *FP16, cwd=tmp_path)
    assert f"loss scale {state['scale']:g}\n" in done.stdout
    assert skipped(done) == [0, 0, 0]
    undisturbed, _ = in_float16()
    resumed = load(tmp_path / "snapshot.pt")
    assert same_bits(resumed, load(undisturbed / "snapshot.pt"))


@pytest.mark.waits
@pytest.mark.parametrize(
    ("saved_by", "resumed_by", "options"),
    [(PARENT, NAME, FP16), (NAME, NAME, FP16), ("float16", PARENT, ())],
)
def test_each_precision_resumes_the_others(
    runs, in_float16, copy_of, saved_by, resumed_by, options
):
    """Where there is no scale, it is found again; bfloat16 has no use for one."""
    folder, saved = in_float16() if saved_by == "float16" else runs(saved_by)
    path = copy_of(folder)
    done = train(ROOT / resumed_by, 6, 6, *options, cwd=path.parent)
    assert "\n5 of 6 epochs are finished in snapshot.pt\n" in done.stdout
    assert ("loss scale 65536\n" in done.stdout) == bool(options)
    ((_, held_out_loss),) = losses(done)
    _, held_out_loss_before = losses(saved)[-1]
    assert held_out_loss < held_out_loss_before


# What a reader adds


@pytest.mark.parametrize("case", ["together", "apart", "not frozen", "frozen"])
@in_a_fork
def test_what_is_clipped_together_must_be_one_optimizers(case):
    """The gradients of the first layer overflow, and so does a norm with them in it.

    If the other layer has an optimizer of its own, this one does not skip the step.
    """
    first = torch.nn.Linear(4, 4)
    last = torch.nn.Linear(4, 1)
    model = torch.nn.Sequential(first, last)
    with torch.no_grad():
        last.weight.fill_(1000)
    first.requires_grad_(case != "frozen")
    scaler = torch.GradScaler("cpu", init_scale=32768.0)
    trained = [first, last] if case in ("together", "apart") else [last]
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in trained]
    with torch.autocast("cpu", torch.float16):
        output = model(torch.ones(8, 4))
    scaler.scale(output.float().mean()).backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    clipped = [first, last] if case == "apart" else [model]
    for module in clipped:
        torch.nn.utils.clip_grad_norm_(module.parameters(), math.inf)
    for optimizer in optimizers:
        scaler.step(optimizer)
    is_spoiled = last.bias.isnan().item()
    assert is_spoiled == (case in ("together", "not frozen"))


@pytest.mark.parametrize("options", ["--precision fp8", "--clip much"])
def test_bad_option(options, tmp_path):
    done = run_script(ROOT / NAME, 5, 1, *options.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert not done.stdout
    assert not list(tmp_path.iterdir())
    option, value = options.split()
    line = rf"mixed_precision.py: error: argument {option}: invalid .*'{value}'.*\n"
    assert re.fullmatch(line, done.stderr)


def test_help(tmp_path):
    shown = help_of(NAME, tmp_path)
    assert "{auto,bf16,fp16} what autocast computes in (auto: bf16 if" in shown
    assert "--clip CLIP scale gradients of a larger norm down to this" in shown
