"""mixed_precision.py: autocast, the scaler and its state, clipping, skipped steps.

That it trains as its parent does but for the precision is shown by the tests of all
rungs: they run it in float64, which autocast leaves alone.
"""

import json
import math
import re
import shutil

import pytest
import torch
import torch.nn.functional as F

import utils
from ladder.rungs import ROOT
from proofs.hooks import digits
from proofs.launch import hooks_to_compare, launch, plant, run_script, train
from proofs.results import load, losses, same_bits, weights

NAME = "variants/mixed_precision.py"
PARENT = "multigpu.py"
FP16 = ("--precision", "fp16")
STEPS = 32  # of an epoch with an effective batch of 64
SPOILED = 40  # the step, of the second epoch, in which rank 1's samples are spoiled


def noted(folder):
    """What proofs/hooks/mixed_precision.py has noted, for each of two ranks."""
    return [json.loads((folder / f"noted.{x}.json").read_text()) for x in (0, 1)]


def skipped(done):
    """The skipped steps of each epoch, as printed."""
    return [int(x) for x in re.findall(r"skipped steps (\d+) ", done.stdout)]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    return plant(
        NAME, tmp_path_factory.mktemp("copy"), hooks=["mixed_precision", "in_step_80"]
    )


@pytest.fixture(scope="module")
def in_float16(script, tmp_path_factory):
    """(folder, Done) of five epochs; in step 40, samples of rank 1 are too large."""
    folder = tmp_path_factory.mktemp("float16")
    spoiled = f"{SPOILED} 1 1e6"
    return folder, train(script, 5, 2, *FP16, cwd=folder, SPOILED=spoiled, **CALM)


@pytest.fixture(scope="module")
def in_bfloat16(script, tmp_path_factory):
    """(folder, Done) of two epochs."""
    folder = tmp_path_factory.mktemp("bfloat16")
    return folder, train(script, 2, 1, cwd=folder, **CALM)


CALM = {"IN_STEP_80": "nothing"}


# The precision


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_computes_in_it_trains_and_evaluates(in_bfloat16, in_float16, name):
    """The model's output has the lower precision on each rank, the loss has not."""
    folder, done = in_bfloat16 if name == "bfloat16" else in_float16
    for rank in noted(folder):
        assert rank["outputs"] == [f"False torch.{name}", f"True torch.{name}"]
        assert rank["losses"] == ["False torch.float32", "True torch.float32"]
    scale = {"bfloat16": 1, "float16": 65536}[name]
    line = f"autocast to {name}, weights in float32, loss scale {scale}"
    assert done.stdout.splitlines()[2] == line
    snapshot = load(folder / "snapshot.pt")
    (momenta,) = {
        x["momentum_buffer"].dtype
        for x in snapshot["OPTIMIZER_STATE"]["state"].values()
    }
    dtypes = {x.dtype for x in snapshot["MODEL_STATE"].values()}
    assert {momenta, *dtypes} == {torch.float32}


def test_bfloat16_stays_near_float32(runs):
    """Weights after 5 epochs: within 0.002 of the parent's, and not the same.

    On 1, 2 and 4 processes they are within 0.001 of each other.
    """
    parents = weights(runs(PARENT)[0] / "snapshot.pt")
    mine = [weights(runs(NAME, nprocs)[0] / "snapshot.pt") for nprocs in (2, 1, 4)]
    for one in mine:
        assert 1e-5 < (one - parents).abs().max() < 2e-3
        assert (one - mine[0]).abs().max() < 1e-3


def test_float16_learns(tmp_path):
    """It gets within 10 % of the noise floor, too."""
    done = train(ROOT / NAME, 15, 15, *FP16, cwd=tmp_path)
    assert losses(done)[-1][1] == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reads_handwritten_digits(in_float32, tmp_path, precision):
    """With two layers: the held-out loss is within 2 % of the parent's."""
    options = ("--precision", precision)
    loss, accuracy = read_digits(NAME, tmp_path, *options)
    assert accuracy >= 0.965
    assert loss == pytest.approx(in_float32[0], rel=0.02)
    assert loss != in_float32[0]


@pytest.fixture(scope="module")
def in_float32(tmp_path_factory):
    return read_digits(PARENT, tmp_path_factory.mktemp("float32"))


def read_digits(name, folder, *options):
    """(held-out loss, accuracy) of 20 epochs; the accuracy is computed in float32."""
    pytest.importorskip("sklearn", reason="needs tests/requirements.txt")
    script = plant(name, folder / "copy", hooks=["digits"])
    done = train(script, 20, 20, "--batch-size", 30, *options, cwd=folder)
    _, eval_set, model, *_ = digits.around_load_train_objs(None)
    model.load_state_dict(load(folder / "snapshot.pt")["MODEL_STATE"])
    source, targets = eval_set[:]
    right = model(source).argmax(1) == targets
    return losses(done)[-1][1], right.double().mean()


def test_with_the_scaler_it_computes_what_the_parent_does(tmp_path):
    """In float64, where nothing is rounded: scaled, unscaled, clipped, to the bit.

    The parent has a line that clips.
    """
    step = "        self.optimizer.step()\n"
    clip = "        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)\n"
    hooks = hooks_to_compare(NAME)
    found = []
    for name, changes, options in [
        (PARENT, [(step, clip + step)], ()),
        (NAME, [], (*FP16, "--clip", 0.5)),
    ]:
        folder = tmp_path / name
        script = plant(name, folder / "copy", *changes, hooks=hooks)
        done = train(script, 2, 2, *options, cwd=folder)
        found.append((losses(done), weights(folder / "snapshot.pt")))
    assert "loss scale 65536" in done.stdout
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=1e-12)


def test_autocast_leaves_float64_alone():
    """So the tests of all rungs can compare this one with its parent."""
    model, source = torch.nn.Linear(20, 1).double(), torch.randn(8, 20).double()
    for dtype in utils.DTYPES.values():
        with torch.autocast("cpu", dtype):
            assert torch.equal(model(source), F.linear(source, *model.parameters()))
            assert model(source).dtype == torch.float64


def test_which_losses_are_in_float32():
    """Those of torch are. Yours may be in the precision of the model's output."""
    output = torch.nn.Linear(20, 10)
    targets = torch.zeros(8, dtype=torch.int64)
    for dtype in utils.DTYPES.values():
        with torch.autocast("cpu", dtype):
            logits = output(torch.randn(8, 20))
            assert F.cross_entropy(logits, targets).dtype == torch.float32
            assert F.mse_loss(logits, logits.detach()).dtype == torch.float32
            assert logits.square().mean().dtype == dtype
            assert logits.float().square().mean().dtype == torch.float32


# Which one `auto` takes


def test_all_ranks_take_float16_where_one_device_lacks_bfloat16(script, tmp_path):
    train(script, 1, 1, cwd=tmp_path, LACKING=1, **CALM)
    for rank in noted(tmp_path):
        assert rank["outputs"] == ["False torch.float16", "True torch.float16"]
    assert load(tmp_path / "snapshot.pt")["SCALER_STATE"]["scale"] > 1


def test_bf16_is_taken_if_it_is_asked_for(script, tmp_path):
    """Also on a device that only imitates it."""
    train(script, 1, 1, "--precision", "bf16", cwd=tmp_path, LACKING=1, **CALM)
    assert noted(tmp_path)[1]["outputs"][0] == "False torch.bfloat16"


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
@pytest.mark.parametrize("native", [True, False])
def test_a_gpu_that_imitates_bfloat16_does_not_have_it(monkeypatch, kind, native):
    def is_bf16_supported(including_emulation=True):
        return native or including_emulation

    module = getattr(torch, kind)
    monkeypatch.setattr(module, "is_bf16_supported", is_bf16_supported)
    assert utils.has_bfloat16(torch.device(kind)) == native
    assert utils.has_bfloat16(torch.device("cpu"))


# Skipped steps


def test_an_overflow_on_one_rank_skips_the_step_on_all(in_float16):
    """The scale halves, the weights stay, the training goes on."""
    folder, done = in_float16
    first, second = noted(folder)
    assert first["weights"] == second["weights"]
    assert first["scales"] == second["scales"]
    scales, values = [65536, *first["scales"]], first["weights"]
    skips = [i for i in range(1, len(scales)) if scales[i] < scales[i - 1]]
    # At the start the scale is too large for this model, for some steps.
    assert skips[-1] == SPOILED and 1 <= len(skips[:-1]) < 10
    assert max(skips[:-1]) < 10
    for step in skips:
        assert scales[step] == scales[step - 1] / 2
        if step > 1:
            assert values[step - 1] == values[step - 2]
    assert skipped(done) == [len(skips) - 1, 1, 0, 0, 0]
    assert all(math.isfinite(x) for pair in values for x in pair)
    curve = [held_out for _, held_out in losses(done)]
    assert curve == sorted(curve, reverse=True)


def test_bfloat16_skips_no_step(script, tmp_path):
    """Nothing is scaled. A gradient that is no number spoils all, and you see it."""
    done = train(script, 1, 1, cwd=tmp_path, SPOILED="5 1 inf", **CALM)
    first, second = noted(tmp_path)
    assert set(first["scales"] + second["scales"]) == {1}
    assert skipped(done) == [0]
    assert re.search(r"train loss nan .* held-out loss nan", done.stdout)


def test_one_wait_in_each_step(in_bfloat16, in_float16):
    """The scaler's own, which asks whether to skip. To count them takes no other."""
    for rank in noted(in_float16[0]):
        assert set(rank["waits"]) == {1}
    for rank in noted(in_bfloat16[0]):
        assert set(rank["waits"]) == {0}


def test_a_fused_optimizer_skips_and_is_counted(tmp_path):
    """The scaler calls it in each step, and it skips on the device."""
    fused = ("SGD, lr=0.001, momentum=0.9", "AdamW, lr=0.1, fused=True")
    hooks = ["mixed_precision"]
    script = plant(NAME, tmp_path / "copy", fused, hooks=hooks)
    done = train(script, 2, 1, *FP16, cwd=tmp_path, SPOILED=f"{SPOILED} 1 1e6")
    first, second = noted(tmp_path)
    assert first["weights"] == second["weights"]
    assert first["weights"][SPOILED - 1] == first["weights"][SPOILED - 2]
    assert first["scales"][SPOILED - 1] == first["scales"][SPOILED - 2] / 2
    assert skipped(done)[1] == 1
    assert set(first["waits"]) == {0}


def test_what_is_counted_stays_on_the_device(in_float16):
    """Else each step would copy from it. On a CPU, nothing else shows that."""
    for rank in noted(in_float16[0]):
        assert set(rank["zeros"]) == {"cpu"}


# Clipping


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_clips_the_true_gradients(script, tmp_path, precision):
    """Not the scaled ones, which are many thousand times as large."""
    options = ("--precision", precision, "--clip", 0.5)
    train(script, 1, 1, *options, cwd=tmp_path, **CALM)
    first, second = noted(tmp_path)
    assert first["norms"][-10:] == pytest.approx([0.5] * 10, rel=1e-4)
    assert first["norms"][-10:] == second["norms"][-10:]


def test_without_clip_gradients_stay_as_they_are(in_bfloat16):
    norms = noted(in_bfloat16[0])[0]["norms"]
    assert norms[0] > 5 > norms[-1]


# The scaler's state in the snapshot


def test_resumed_in_float16_it_ends_with_the_same_bits(in_float16, script, tmp_path):
    """The scale, and the number of steps since it has changed."""
    folder, undisturbed = in_float16
    spoiled = f"{SPOILED} 1 1e6"
    options = {"cwd": tmp_path, "SPOILED": spoiled, "real": ""}
    done = launch(script, 5, 2, *FP16, IN_STEP_80="raise", **options)
    assert done.returncode == 1
    state = load(tmp_path / "snapshot.pt")["SCALER_STATE"]
    assert state["_growth_tracker"] == 2 * STEPS - SPOILED
    shutil.copytree(tmp_path, tmp_path / "forgets")
    done = train(ROOT / NAME, 5, 2, *FP16, cwd=tmp_path)
    assert f"weights in float32, loss scale {state['scale']:g}\n" in done.stdout
    assert skipped(done) == [0, 0, 0]
    snapshots = [load(x / "snapshot.pt") for x in (tmp_path, folder)]
    assert same_bits(*snapshots)
    # Without it, the scale begins anew, and it costs steps to find it again.
    forgets = plant(
        NAME, tmp_path / "copy", ('if snapshot.get("SCALER_STATE")', "if False")
    )
    done = train(forgets, 5, 2, *FP16, cwd=tmp_path / "forgets")
    assert "loss scale 65536\n" in done.stdout
    assert not same_bits(load(tmp_path / "forgets" / "snapshot.pt"), snapshots[1])


@pytest.mark.parametrize("saved", ["float32", "bfloat16"])
def test_a_snapshot_without_a_scale_goes_on(runs, copy_of, saved):
    """It was saved by another rung, or in bfloat16: the scale is found again."""
    path = copy_of(runs(PARENT if saved == "float32" else NAME)[0])
    assert not load(path).get("SCALER_STATE")
    done = train(ROOT / NAME, 6, 6, *FP16, cwd=path.parent)
    assert "resuming from snapshot.pt: 5 of 6 epochs are finished" in done.stdout
    assert "loss scale 65536\n" in done.stdout
    assert load(path)["SCALER_STATE"]["scale"] > 1
    ((_, held_out),) = losses(done)
    assert held_out < 0.015


@pytest.mark.parametrize("name", [PARENT, NAME])
def test_others_go_on_from_float16(in_float16, copy_of, name):
    """Its parent, and itself in bfloat16, which has no use for a scale."""
    path = copy_of(in_float16[0])
    done = train(ROOT / name, 6, 6, cwd=path.parent)
    assert "resuming from snapshot.pt: 5 of 6 epochs are finished" in done.stdout
    ((_, held_out),) = losses(done)
    assert held_out < losses(in_float16[1])[-1][1]


# What a reader adds


def step_in_float16(model, optimizers, scaler, source, clip):
    """One step with the scaler; `clip`: the parameters that are clipped together."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        output = model(source)
    scaler.scale(output.float().mean()).backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    for parameters in clip:
        torch.nn.utils.clip_grad_norm_(parameters, math.inf)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


@pytest.fixture
def two_parts():
    """Two layers. With a loss scale of 32768 the gradients of the first overflow."""
    parts = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
    with torch.no_grad():
        parts[1].weight.fill_(1000)
    return torch.nn.Sequential(*parts), torch.amp.GradScaler("cpu", init_scale=32768.0)


@pytest.mark.parametrize("together", [True, False])
def test_two_optimizers_are_clipped_apart(two_parts, together):
    """One skips. Clipped with it, the other takes a step with gradients of nan."""
    model, scaler = two_parts
    before = model[0].weight.clone()
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.01) for x in model]
    clip = [model.parameters()] if together else [x.parameters() for x in model]
    step_in_float16(model, optimizers, scaler, torch.ones(8, 4), clip)
    assert scaler.get_scale() == 16384 and torch.equal(model[0].weight, before)
    assert model[1].bias.isnan().item() == together


@pytest.mark.parametrize("frozen", [True, False])
def test_what_no_optimizer_has_must_be_frozen(two_parts, frozen):
    """Its gradients overflow, no step is skipped, and the norm is infinite."""
    model, scaler = two_parts
    model[0].requires_grad_(not frozen)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.01)
    clip = [model.parameters()]
    step_in_float16(model, [optimizer], scaler, torch.ones(8, 4), clip)
    assert scaler.get_scale() == 32768
    assert model[1].bias.isnan().item() == (not frozen)


def test_batch_normalization_does_not_skip():
    """The weights stay, the running statistics are lost for good."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    source = torch.randn(8, 4)
    finite = []
    for factor in (1, 1e6, 1):
        clip = [model.parameters()]
        step_in_float16(model, [optimizer], scaler, factor * source, clip)
        weights_too = [x.isfinite().all().item() for x in model.parameters()]
        finite.append((all(weights_too), model[1].running_mean.isfinite().all().item()))
    assert finite == [(True, True), (True, False), (True, False)]
    assert scaler.get_scale() == 32
    assert model.eval()(source).isnan().any()


# The command line


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--precision fp8", "argument --precision: invalid choice: 'fp8'"),
        ("--clip 0", "argument --clip: '0' is not a number above 0"),
        ("--clip -1", "argument --clip: '-1' is not a number above 0"),
        ("--clip nan", "argument --clip: 'nan' is not a number above 0"),
        ("--clip much", "argument --clip: 'much' is not a number above 0"),
    ],
)
def test_bad_option(options, expected, tmp_path):
    done = run_script(ROOT / NAME, 5, 1, *options.split(), cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"mixed_precision.py: error: {expected}")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_help(tmp_path):
    words = " ".join(run_script(ROOT / NAME, "--help", cwd=tmp_path).stdout.split())
    assert "--precision {auto,bf16,fp16} what autocast computes in: bf16" in words
    assert "--clip MAX_NORM scale gradients of a larger norm down to this" in words
