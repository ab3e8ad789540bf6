"""mingpt.train: the same training at every world size, and nothing lost."""

import csv
import math
import os
import re
from pydoc_data.topics import topics

import pytest
import torch

from mingpt.model import GPT, GPTConfig
from mingpt.tokenizer import read_tokenizer
from mingpt.train import lr_scale
from tests.helpers.text import sentences
from tests.mingpt.test_data import bpe  # noqa: F401  a fixture
from tools.run.processes import Program
from tools.run.results import load, same_bits, weights
from tools.scripts import ROOT

FAULTS = ROOT / "tests" / "hooks" / "gpt.py"
TINY = ["--n-layer", 2, "--n-head", 2, "--n-embd", 32, "--block-size", 16]
TINY += ["--batch-size", 8, "--compile", "off", "--precision", "fp32"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Options: a text of 20 kB, all of it ASCII, and the folder for its tokens."""
    folder = tmp_path_factory.mktemp("text")
    manual = "\n".join(topics[name] for name in sorted(topics))
    ascii_only = manual.encode("ascii", "ignore")
    (folder / "text.txt").write_bytes(ascii_only[:20_000])
    return ["--data", folder / "text.txt", "--cache", folder / "tokens"]


@pytest.fixture(scope="module")
def gpt(text):
    """`gpt(folder, *options, nprocs=, status=, **env)`: run mingpt.train there: Done.

    Without `nprocs` python starts it, else torchrun. status: how it must end. real: why
    a new interpreter must run it, and no fork can. DO and AT_STEP in the environment:
    see tests/hooks/gpt.py.
    """

    def run(folder, *options, nprocs=None, status=0, real="", **env):
        folder.mkdir(exist_ok=True)
        words = ["python"]
        if nprocs:
            words = ["torchrun", "--standalone", f"--nproc-per-node={nprocs}"]
        words += [FAULTS] if "DO" in env else ["-m", "mingpt.train"]
        words += [*text, *TINY, *options]
        env = {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1} | env
        done = Program(words, folder, real, **env).finish()
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return run


@pytest.fixture(scope="module")
def whole(gpt, tmp_path_factory):
    """A run of 12 steps with dropout, evaluated after 6 and 12: (folder, Done)."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, gpt(folder, *RESUMABLE)


RESUMABLE = ["--steps", 12, "--eval-every", 6, "--dropout", 0.1, "--seed", 2**70]


def snapshot(folder):
    return load(folder / "mingpt.pt")


def steps_run(folder):
    return snapshot(folder)["STEPS_RUN"]


def metrics(folder, name="mingpt.metrics.csv"):
    with open(folder / name, newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for column, value in row.items():
            row[column] = float(value)
    return rows


def check_runs(one, other, *losses):
    """Two runs in float64 end with the same weights, and have the same losses.

    one, other: their folders. losses: the names of columns.
    """
    found = weights(one / "mingpt.pt")
    expected = weights(other / "mingpt.pt")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for row, other_row in zip(metrics(one), metrics(other), strict=True):
        for name in losses:  # which are summed in float32
            assert math.isclose(row[name], other_row[name], rel_tol=1e-6)


def test_the_metrics_are_those_that_it_prints(whole):
    """The page shows what it prints. Tied weights are saved once.

    All characters of this text are ASCII, so that a token is a byte.
    """
    folder, done = whole
    state = snapshot(folder)["MODEL_STATE"]
    places = {tensor.data_ptr() for tensor in state.values()}
    assert len(places) == len(state) - 1
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [6, 12]
    for row in rows:
        assert f"val loss {row['val loss']:.4f} | bits per" in done.stdout
        bits = row["val loss"] / math.log(2)
        assert math.isclose(row["bits per byte"], bits, rel_tol=1e-9)


@pytest.mark.parametrize("nprocs", [2, pytest.param(4, marks=pytest.mark.waits)])
def test_world_sizes_train_the_same(gpt, tmp_path, nprocs):
    """And evaluate the same, at an effective batch of 8; also in micro-batches."""
    losses = ("train loss", "val loss", "bits per byte")
    options = ["--steps", 4, "--eval-every", 2]
    one = tmp_path / "one"
    ranks = tmp_path / "ranks"
    parts = tmp_path / "parts"
    gpt(one, *options, DO="float64")
    options += ["--batch-size", 8 // nprocs]
    gpt(ranks, *options, nprocs=nprocs, DO="float64")
    check_runs(ranks, one, *losses)
    options += ["--accumulate", 2]
    gpt(parts, *options, nprocs=nprocs, DO="float64")
    check_runs(parts, one, *losses)


@pytest.mark.parametrize(
    ("signal", "status", "resumes_at"),
    [("sigterm", os.EX_TEMPFAIL, 10), ("sigkill", -9, 6)],
)
def test_resume(gpt, whole, tmp_path, signal, status, resumes_at):
    folder, _ = whole
    gpt(tmp_path, *RESUMABLE, status=status, DO=signal, AT_STEP=8)
    assert (tmp_path / "mingpt.pt.preempted").exists() == (signal == "sigterm")
    assert steps_run(tmp_path) == resumes_at
    done = gpt(tmp_path, *RESUMABLE)
    assert f"{resumes_at} of 12 steps are finished in mingpt.pt\n" in done.stdout
    assert same_bits(snapshot(tmp_path), snapshot(folder))
    for row, expected in zip(metrics(tmp_path), metrics(folder), strict=True):
        assert row["val loss"] == expected["val loss"]


@pytest.mark.waits
def test_resume_compiled(gpt, tmp_path):
    """Also with two threads, which share the sum of an embedding's gradient."""
    whole = tmp_path / "whole"
    stopped = tmp_path / "stopped"
    options = [*RESUMABLE, "--compile", "on"]
    how = {"OMP_NUM_THREADS": 2, "real": "a fork has no pool that compiles"}
    done = gpt(whole, *options, **how)
    assert "\ncompiling: the first step takes a minute" in done.stdout
    fault = {"DO": "sigterm", "AT_STEP": 8}
    gpt(stopped, *options, status=os.EX_TEMPFAIL, **fault, **how)
    assert steps_run(stopped) == 10
    gpt(stopped, *options, **how)
    assert same_bits(snapshot(stopped), snapshot(whole))


@pytest.mark.waits
@pytest.mark.parametrize("model", ["model", "modern --shard"])
def test_one_rank_is_told_and_all_stop(gpt, tmp_path, model):
    """Under torchrun, told by one of two ranks; resumed, bit by bit the same."""
    reference = tmp_path / "reference"
    stopped = tmp_path / "stopped"
    options = [*RESUMABLE, *f"--model mingpt.{model}".split()]
    gpt(reference, *options, nprocs=2)
    fault = {"DO": "sigterm", "AT_STEP": 8, "RANK_ONLY": 1}
    done = gpt(stopped, *options, nprocs=2, status=1, **fault)  # torchrun's own
    assert "preempted after step 10\n" in done.stdout
    assert (stopped / "mingpt.pt.preempted").exists()
    gpt(stopped, *options, nprocs=2)
    assert same_bits(snapshot(stopped), snapshot(reference))


@pytest.mark.parametrize(
    ("fault", "nprocs", "step", "wrong"),
    [
        ("nan", None, 12, "the loss is nan"),
        pytest.param(
            "nan_sigterm",
            2,
            10,
            "transformer.wte.weight has weights that are not finite",
            marks=pytest.mark.waits,
        ),
        pytest.param(
            "apart",
            2,
            12,
            r"transformer.h.0.mlp.c_fc.weight differs by rank, sums \S+, \S+",
            marks=pytest.mark.waits,
        ),
    ],
)
def test_no_snapshot_of_a_wrong_model(gpt, tmp_path, fault, nprocs, step, wrong):
    """Also if it is so on one rank of two. The run fails, in one line."""
    fault = {"DO": fault, "AT_STEP": 8}
    status = 1 if nprocs else 2  # 1 is torchrun's own
    if nprocs:
        fault["RANK_ONLY"] = 1
    done = gpt(tmp_path, *RESUMABLE, nprocs=nprocs, status=status, **fault)
    line = f"train.py: error: step {step}: {wrong}: mingpt.pt stays at step 6\n"
    if nprocs:  # torchrun writes more
        assert len(re.findall(line, done.stderr)) == 1
    else:
        assert done.stderr == line
    assert steps_run(tmp_path) == 6
    assert [row["step"] for row in metrics(tmp_path)] == [6]
    assert len(list(tmp_path.iterdir())) == 2, "the snapshot and the metrics"


@pytest.mark.waits
def test_a_step_that_the_scaler_skips_ends_no_run(gpt, tmp_path):
    options = [*RESUMABLE, "--precision", "fp16"]
    gpt(tmp_path, *options, DO="nan_once", AT_STEP=8)
    assert steps_run(tmp_path) == 12
    scaler = snapshot(tmp_path)["SCALER_STATE"]
    assert scaler["scale"] == 2**15  # half of what it begins with
    assert weights(tmp_path / "mingpt.pt").isfinite().all()


@pytest.mark.waits
def test_sigterm_while_the_model_is_compiled(gpt, tmp_path):
    """There, an operation on a tensor raises, or becomes a part of the graph."""
    fault = {"DO": "sigterm_in_compile", "AT_STEP": 8}
    gpt(tmp_path, *RESUMABLE, status=os.EX_TEMPFAIL, **fault)
    assert steps_run(tmp_path) == 10


@pytest.mark.waits
def test_a_snapshot_does_not_see_later_steps(gpt, whole, tmp_path):
    """It is written while the next steps change the weights, here after all of them."""
    folder, _ = whole
    gpt(tmp_path, *RESUMABLE, DO="slow_disk")
    os.replace(tmp_path / "mingpt.pt.first", tmp_path / "mingpt.pt")
    assert steps_run(tmp_path) == 6
    gpt(tmp_path, *RESUMABLE)
    assert same_bits(snapshot(tmp_path), snapshot(folder))


SHORT = ["--steps", 2, "--eval-every", 2]


@pytest.fixture(scope="module")
def saved(gpt, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    gpt(folder, *SHORT)
    return folder / "mingpt.pt"


BAD = {
    "accumulate": (["--accumulate", 3], "--batch-size 8: no multiple of --accumulate"),
    "text": (["--block-size", 10**5], r"a text of \d+ tokens has no whole block"),
    "rate": (["--lr", -1], "argument --lr/--lr: -1 is not above 0"),
    "clip": (["--clip", 0], "argument --clip: 0 is not above 0"),
    "fraction": (
        ["--val-fraction", 1],
        "argument --val-fraction: 1 is not from 0 on and below 1",
    ),
    "no fraction": (["--val-fraction", 0], r"no text to validate on: \d+ bytes, .*"),
    "dropout": (["--dropout", 1], "argument --dropout: 1 is not from 0 on and below 1"),
    "shape": (["--n-embd", 64], "mingpt.pt: its config {.*}: choose another .*"),
    "vocabulary": (["--tokenizer", "bytes"], "mingpt.pt: its tokenizer is another .*"),
    "optimizer": (
        ["--model", "mingpt.modern"],
        "mingpt.pt: its model mingpt.model: .*",
    ),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.waits
def test_bad_input(gpt, saved, tmp_path, what):
    """One line, exit status 2, and the snapshot as it was."""
    options, message = BAD[what]
    before = saved.read_bytes()
    path = tmp_path / "mingpt.pt"
    path.write_bytes(before)
    done = gpt(tmp_path, *SHORT, *options, status=2)
    assert re.fullmatch(rf"train\.py: error: {message}\n", done.stderr), done.stderr
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.waits
def test_ranks_with_other_text_do_not_train(gpt, tmp_path):
    """Two machines, each with a file of its own under the same name."""
    for rank in (0, 1):
        folder = tmp_path / str(rank)
        folder.mkdir()
        text = f"{rank} is the rank of this text.\n" * (500 + 9 * rank)
        (folder / "text.txt").write_text(text)
    options = [*SHORT, "--data", "text.txt", "--cache", "tokens"]
    done = gpt(tmp_path, *options, nprocs=2, status=1, DO="own_folder")
    found = r"\['12628 \D+, \w+', '12852 \D+, .*\]"
    line = f"^train.py: error: ranks differ in text: {found}$"
    assert re.search(line, done.stderr, re.M)
    assert not list(tmp_path.glob("*/mingpt.pt"))


@pytest.mark.waits
def test_it_says_that_the_text_is_another_one(gpt, saved, tmp_path):
    """Another split of it, here: what was trained would validate in silence."""
    line = "was trained on another text, or another split"
    for fraction in (0.1, 0.3):
        (tmp_path / "mingpt.pt").write_bytes(saved.read_bytes())
        done = gpt(tmp_path, *SHORT, "--val-fraction", fraction)
        assert (line in done.stdout) == (fraction == 0.3)


@pytest.mark.waits
def test_another_batch_goes_on_after_what_is_trained(gpt, saved, tmp_path):
    (tmp_path / "mingpt.pt").write_bytes(saved.read_bytes())
    options = ["--steps", 5, "--eval-every", 5, "--batch-size", 4]
    gpt(tmp_path, *options)
    assert snapshot(tmp_path)["WINDOWS_RUN"] == 2 * 8 + 3 * 4


@pytest.mark.waits
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("more", [[], ["--shard"]])
def test_sixteen_bits(gpt, saved, tmp_path, precision, more):
    """It trains nearly what float32 trains, and resumes it. Only fp16 has a scaler."""
    gpt(tmp_path, *SHORT, "--precision", precision, *more)
    found = snapshot(tmp_path)
    assert found["CONFIGURATION"] == load(saved)["CONFIGURATION"]
    assert bool(found["SCALER_STATE"]) == (precision == "fp16")
    differences = weights(tmp_path / "mingpt.pt") - weights(saved)
    assert 0 < differences.abs().max() < 0.01


@pytest.mark.parametrize(
    "model", ["mingpt.model", pytest.param("mingpt.modern", marks=pytest.mark.waits)]
)
def test_sample(gpt, tmp_path, model):
    def write(prompt):
        words = ["python", "-m", "mingpt.sample", "--tokens", 20, "--seed", 2**70]
        words += ["--prompt", prompt]
        return Program(words, tmp_path, PYTHONPATH=ROOT).finish()

    gpt(tmp_path, *SHORT, "--model", model)
    done = write("def ")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def ")
    assert len(done.stdout) == len("def ") + 20 + len("\n")
    assert write("def ").stdout == done.stdout, "the seed is the same"
    bad = write("€")
    assert bad.returncode == 2
    assert "has no '€'" in bad.stderr


# The learning rate, and clipping


@pytest.mark.waits
@pytest.mark.parametrize("steps, model", [(1, "mingpt.model"), (7, "mingpt.modern")])
def test_the_learning_rate_of_each_step(gpt, tmp_path, steps, model):
    """It rises in two of ten steps. Then it falls to a tenth, along a cosine."""
    expected = {
        0: 0.5,
        1: 1,
        2: 1,
        4: 0.55 + 0.45 * 0.5**0.5,  # a quarter of the cosine's way
        6: 0.55,
        10: 0.1,
    }
    for step, scale in expected.items():
        assert lr_scale(step, steps=10, warmup=0.2) == pytest.approx(scale)
    assert lr_scale(0, steps=1, warmup=0.5) == 1

    lr = 0.01
    warmup = 0.4
    options = ["--steps", steps, "--lr", lr, "--warmup", warmup, "--model", model]
    gpt(tmp_path, *options)
    last = lr * lr_scale(steps - 1, steps, warmup)
    optimizer = snapshot(tmp_path)["OPTIMIZER_STATE"]
    for group in optimizer["param_groups"]:
        assert math.isclose(group["lr"], last)
        assert group["initial_lr"] == lr


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_clips_the_gradients_that_are_not_scaled(gpt, tmp_path, precision):
    """AdamW's first average of the gradients is a tenth of the first gradient."""
    clip = 0.01
    options = ["--steps", 1, "--precision", precision, "--clip", clip]
    gpt(tmp_path, *options)
    optimizer = snapshot(tmp_path)["OPTIMIZER_STATE"]
    square = 0
    for state in optimizer["state"].values():
        gradient = 10 * state["exp_avg"].double()
        square += gradient.square().sum()
    assert math.isclose(math.sqrt(square), clip, rel_tol=1e-3)


# The golden curve

GOLDEN = ROOT / "tests" / "golden"
# Its curve.csv is the mingpt.metrics.csv that this leaves in /tmp/golden:
# pytest --basetemp=/tmp/golden tests/mingpt/test_train.py::test_golden_curve
DEFAULT_RUN = ["--data", "text.txt", "--steps", 80, "--eval-every", 40]
DEFAULT_RUN += ["--precision", "fp32", "--compile", "off"]
# In float64: processors round differently, and Adam makes that 0.03 in float32.
# Processors without AVX2 begin with other weights, and fail here.
TOLERANCE = 1e-5


@pytest.mark.waits
def test_golden_curve(tmp_path):
    """The preset's own sizes, on a text that is the same with every Python."""
    env = {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1, "DO": "float64"}
    (tmp_path / "text.txt").write_text(sentences(1000))
    done = Program(["python", FAULTS, *DEFAULT_RUN], tmp_path, **env).finish()
    assert done.returncode == 0, done.stderr
    golden = metrics(GOLDEN, "curve.csv")
    for row, expected in zip(metrics(tmp_path), golden, strict=True):
        del row["tokens/s"]
        del expected["tokens/s"]
        assert row == pytest.approx(expected, abs=TOLERANCE)


# Start from GPT-2's weights


@pytest.mark.waits
def test_gpt2_writes_and_fine_tuning_starts_from_its_weights(gpt, bpe, tmp_path):  # noqa: F811
    """A small one, in Hugging Face's format, with a tokenizer of its own."""
    pytest.importorskip("safetensors", reason="mingpt/requirements.txt has it")
    from mingpt.gpt2_weights import save_gpt2  # it needs safetensors

    folder = tmp_path / "gpt2"
    torch.manual_seed(0)
    size = read_tokenizer(bpe).vocab_size
    config = GPTConfig(block_size=16, vocab_size=size, n_layer=2, n_head=2, n_embd=32)
    model = GPT(config)
    save_gpt2(model, folder)
    start = ["--init-from", folder, "--tokenizer", bpe]

    words = ["python", "-m", "mingpt.sample", "--tokens", 5, "--prompt", "class"]
    words += start
    done = Program(words, tmp_path, PYTHONPATH=ROOT).finish()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("class")

    gpt(tmp_path, *SHORT, *start, "--lr", 1e-12, "--weight-decay", 0)
    saved = snapshot(tmp_path)["MODEL_STATE"]
    for name, weight in model.state_dict().items():
        assert torch.allclose(saved[name], weight, rtol=0, atol=1e-9), name
