"""mingpt.train: the same training at every world size, and nothing lost."""

import csv
import math
import os
import re

import pytest
import torch

from mingpt.train import lr_scale
from tests.helpers.text import sentences
from tools.run.processes import Program
from tools.run.results import load, same_bits, weights
from tools.scripts import ROOT

FAULTS = ROOT / "tests" / "hooks" / "gpt.py"
TINY = ["--n-layer", 2, "--n-head", 2, "--n-embd", 32, "--block-size", 16]
TINY += ["--batch-size", 8, "--compile", "off", "--precision", "fp32"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Options: a text of 20 kB, all of it ASCII, and the folder for its tokens."""
    from pydoc_data.topics import topics

    folder = tmp_path_factory.mktemp("text")
    whole = "\n".join(topics[name] for name in sorted(topics))
    (folder / "text.txt").write_bytes(whole.encode("ascii", "ignore")[:20_000])
    return ["--data", folder / "text.txt", "--cache", folder / "tokens"]


@pytest.fixture(scope="module")
def gpt(text):
    """`gpt(*options, cwd=, nprocs=, **env)`: run mingpt.train in forks: Done.

    Without `nprocs` python starts it, else torchrun. real: why a new interpreter must.
    DO and AT_STEP in the environment: see tests/hooks/gpt.py.
    """

    def get(*options, cwd, nprocs=None, real="", **env):
        cwd.mkdir(exist_ok=True)
        script = [FAULTS] if "DO" in env else ["-m", "mingpt.train"]
        words = ["python"]
        if nprocs:
            words = ["torchrun", "--standalone", f"--nproc-per-node={nprocs}"]
        env = {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1} | env
        words += [*script, *text, *TINY, *options]
        return Program(words, cwd, real, **env).finish()

    return get


def trained(gpt, *options, **how):
    done = gpt(*options, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def whole(gpt, tmp_path_factory):
    """A run of 12 steps with dropout, evaluated after 6 and 12: (folder, Done)."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, trained(gpt, *RESUMABLE, cwd=folder)


RESUMABLE = ["--steps", 12, "--eval-every", 6, "--dropout", 0.1, "--seed", 2**70]


def metrics(folder, name="mingpt.metrics.csv"):
    with open(folder / name, newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: float(value) for name, value in row.items()} for row in rows]


def check_runs(one, other, *losses):
    """Two runs in float64 end with the same weights, and have the same losses."""
    one, other = ((weights(x / "mingpt.pt"), metrics(x)) for x in (one, other))
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=1e-12)
    for rows in zip(one[1], other[1], strict=True):
        values = [[row[name] for name in losses] for row in rows]
        torch.testing.assert_close(*values, rtol=1e-6, atol=0)  # summed in float32


def test_the_metrics_are_those_that_it_prints(whole):
    """The page shows what it prints. Tied weights are saved once.

    All characters of this text are ASCII, so that a token is a byte.
    """
    folder, done = whole
    state = load(folder / "mingpt.pt")["MODEL_STATE"]
    assert len({x.data_ptr() for x in state.values()}) == len(state) - 1
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [6, 12]
    for row in rows:
        assert f"val loss {row['val loss']:.4f} | bits per" in done.stdout
        bits = row["val loss"] / math.log(2)
        assert math.isclose(row["bits per byte"], bits, rel_tol=1e-9)


@pytest.mark.parametrize("nprocs", [2, pytest.param(4, marks=pytest.mark.waits)])
def test_world_sizes_train_the_same(gpt, tmp_path, nprocs):
    """And evaluate the same, at an effective batch of 8; also in micro-batches."""
    options = ["--steps", 4, "--eval-every", 2]
    runs = {"one": (None, 1), "ranks": (nprocs, 1), "parts": (nprocs, 2)}
    for name, (count, accumulate) in runs.items():
        folder = tmp_path / name
        batch = ["--batch-size", 8 // (count or 1), "--accumulate", accumulate]
        trained(gpt, *options, *batch, cwd=folder, nprocs=count, DO="float64")
        check_runs(folder, tmp_path / "one", "train loss", "val loss", "bits per byte")


@pytest.mark.parametrize(
    ("signal", "status", "resumes_at"),
    [("sigterm", os.EX_TEMPFAIL, 9), ("sigkill", -9, 6)],
)
def test_resume(gpt, whole, tmp_path, signal, status, resumes_at):
    done = gpt(*RESUMABLE, cwd=tmp_path, DO=signal, AT_STEP=8)
    assert done.returncode == status, done.stderr
    assert (tmp_path / "mingpt.pt.preempted").exists() == (signal == "sigterm")
    assert load(tmp_path / "mingpt.pt")["STEPS_RUN"] == resumes_at
    done = trained(gpt, *RESUMABLE, cwd=tmp_path)
    assert f"{resumes_at} of 12 steps are finished in mingpt.pt\n" in done.stdout
    assert same_bits(load(tmp_path / "mingpt.pt"), load(whole[0] / "mingpt.pt"))
    ours, theirs = metrics(tmp_path), metrics(whole[0])
    assert [x["val loss"] for x in ours] == [x["val loss"] for x in theirs]


@pytest.mark.waits
def test_resume_compiled(gpt, tmp_path):
    """Also with two threads, which share the sum of an embedding's gradient."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = [*RESUMABLE, "--compile", "on"]
    env = {"OMP_NUM_THREADS": 2, "real": "a fork has no pool that compiles"}
    trained(gpt, *options, cwd=whole, **env)
    gpt(*options, cwd=parts, DO="sigterm", AT_STEP=8, **env)
    assert load(parts / "mingpt.pt")["STEPS_RUN"] == 9
    trained(gpt, *options, cwd=parts, **env)
    assert same_bits(load(parts / "mingpt.pt"), load(whole / "mingpt.pt"))


@pytest.mark.waits
@pytest.mark.parametrize("model", ["model", "modern --shard"])
def test_one_rank_is_told_and_all_stop(gpt, tmp_path, model):
    """Under torchrun, told by one of two ranks; resumed, bit by bit the same."""
    reference, stopped = tmp_path / "a", tmp_path / "b"
    options = [*RESUMABLE, *f"--model mingpt.{model}".split()]
    trained(gpt, *options, cwd=reference, nprocs=2)
    env = {"DO": "sigterm", "AT_STEP": 8, "RANK_ONLY": 1}
    done = gpt(*options, cwd=stopped, nprocs=2, **env)
    assert done.returncode == 1, "torchrun's own status"
    assert "preempted after step 9\n" in done.stdout
    assert (stopped / "mingpt.pt.preempted").exists()
    trained(gpt, *options, cwd=stopped, nprocs=2)
    assert same_bits(load(stopped / "mingpt.pt"), load(reference / "mingpt.pt"))


@pytest.mark.parametrize(
    "fault, nprocs, step",
    [("nan", None, 12), pytest.param("nan_sigterm", 2, 9, marks=pytest.mark.waits)],
)
def test_no_snapshot_of_a_model_that_is_nan(gpt, tmp_path, fault, nprocs, step):
    """Also if it is so on one rank of two. The run fails, in one line."""
    env = {"DO": fault, "AT_STEP": 8, "RANK_ONLY": nprocs and 1}
    done = gpt(*RESUMABLE, cwd=tmp_path, nprocs=nprocs, **env)
    assert done.returncode == (1 if nprocs else 2), done.stderr
    line = f"train.py: error: step {step}: the loss or a weight is not finite:"
    assert done.stderr.count(f"{line} mingpt.pt stays at step 6\n") == 1
    assert nprocs or done.stderr.count("\n") == 1
    assert load(tmp_path / "mingpt.pt")["STEPS_RUN"] == 6
    assert [row["step"] for row in metrics(tmp_path)] == [6]
    assert len(list(tmp_path.iterdir())) == 2, "the snapshot and the metrics"


@pytest.mark.waits
def test_a_step_that_the_scaler_skips_ends_no_run(gpt, tmp_path):
    options = [*RESUMABLE, "--precision", "fp16"]
    trained(gpt, *options, cwd=tmp_path, DO="nan_once", AT_STEP=8)
    snapshot = load(tmp_path / "mingpt.pt")
    assert (snapshot["STEPS_RUN"], snapshot["SCALER_STATE"]["scale"]) == (12, 2**15)
    assert weights(tmp_path / "mingpt.pt").isfinite().all()


@pytest.mark.waits
def test_sigterm_while_the_model_is_compiled(gpt, tmp_path):
    """There, an operation on a tensor raises, or becomes a part of the graph."""
    done = gpt(*RESUMABLE, cwd=tmp_path, DO="sigterm_in_compile", AT_STEP=8)
    assert done.returncode == os.EX_TEMPFAIL, done.stderr
    assert load(tmp_path / "mingpt.pt")["STEPS_RUN"] == 9


@pytest.mark.waits
def test_a_snapshot_does_not_see_later_steps(gpt, whole, tmp_path):
    """It is written while the next steps change the weights, here after all of them."""
    trained(gpt, *RESUMABLE, cwd=tmp_path, DO="slow_disk")
    os.replace(tmp_path / "mingpt.pt.first", tmp_path / "mingpt.pt")
    assert load(tmp_path / "mingpt.pt")["STEPS_RUN"] == 6
    trained(gpt, *RESUMABLE, cwd=tmp_path)
    assert same_bits(load(tmp_path / "mingpt.pt"), load(whole[0] / "mingpt.pt"))


SHORT = ["--steps", 2, "--eval-every", 2]


@pytest.fixture(scope="module")
def saved(gpt, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    trained(gpt, *SHORT, cwd=folder)
    return folder / "mingpt.pt"


BAD = {
    "accumulate": (["--accumulate", 3], "--batch-size 8: no multiple of --accumulate"),
    "model": (["--model", "no.such"], "--model no.such: No module named 'no'"),
    "text": (["--block-size", 10**5], r"a text of \d+ tokens has no whole block"),
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
    (tmp_path / "mingpt.pt").write_bytes(before)
    done = gpt(*SHORT, *options, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.fullmatch(rf"train\.py: error: {message}\n", done.stderr), done.stderr
    assert (tmp_path / "mingpt.pt").read_bytes() == before
    assert [x.name for x in tmp_path.iterdir()] == ["mingpt.pt"]


@pytest.mark.waits
def test_ranks_with_other_text_do_not_train(gpt, tmp_path):
    """Two machines, each with a file of its own under the same name."""
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        text = f"{rank} is the rank of this text.\n" * (500 + 9 * rank)
        (tmp_path / str(rank) / "text.txt").write_text(text)
    own = ["--data", "text.txt", "--cache", "tokens"]
    done = gpt(*SHORT, *own, cwd=tmp_path, nprocs=2, DO="own_folder")
    line = (
        r"^train.py: error: ranks differ in text: \['12628 \D+, \w+', '12852 \D+, .*\]$"
    )
    assert re.search(line, done.stderr, re.M)
    assert not list(tmp_path.glob("*/mingpt.pt"))


@pytest.mark.waits
def test_it_says_that_the_text_is_another_one(gpt, saved, tmp_path):
    """Another split of it, here: what was trained would validate in silence."""
    said = "was trained on another text, or another split"
    for fraction in (0.1, 0.3):
        (tmp_path / "mingpt.pt").write_bytes(saved.read_bytes())
        done = trained(gpt, *SHORT, "--val-fraction", fraction, cwd=tmp_path)
        assert (said in done.stdout) == (fraction == 0.3)


@pytest.mark.waits
def test_another_batch_goes_on_after_what_is_trained(gpt, saved, tmp_path):
    (tmp_path / "mingpt.pt").write_bytes(saved.read_bytes())
    options = ["--steps", 5, "--eval-every", 5, "--batch-size", 4]
    trained(gpt, *options, cwd=tmp_path)
    assert load(tmp_path / "mingpt.pt")["WINDOWS_RUN"] == 2 * 8 + 3 * 4


@pytest.mark.waits
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("more", [[], ["--shard"]])
def test_sixteen_bits(gpt, saved, tmp_path, precision, more):
    """It trains nearly what float32 trains, and resumes it. Only fp16 has a scaler."""
    trained(gpt, *SHORT, "--precision", precision, *more, cwd=tmp_path)
    snapshot = load(tmp_path / "mingpt.pt")
    assert snapshot["CONFIGURATION"] == load(saved)["CONFIGURATION"]
    assert bool(snapshot["SCALER_STATE"]) == (precision == "fp16")
    difference = (weights(tmp_path / "mingpt.pt") - weights(saved)).abs().max()
    assert 0 < difference < 0.01


@pytest.mark.parametrize(
    "model", ["mingpt.model", pytest.param("mingpt.modern", marks=pytest.mark.waits)]
)
def test_sample(gpt, tmp_path, model):
    trained(gpt, *SHORT, "--model", model, cwd=tmp_path)
    words = ["python", "-m", "mingpt.sample", "--tokens", 20, "--prompt", "def "]
    words += ["--seed", 2**70]
    done = Program(words, tmp_path, PYTHONPATH=ROOT).finish()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def ")
    assert len(done.stdout) == len("def ") + 20 + len("\n")
    same = Program(words, tmp_path, PYTHONPATH=ROOT).finish()
    assert same.stdout == done.stdout, "the seed is the same"
    bad = Program([*words, "--prompt", "€"], tmp_path, PYTHONPATH=ROOT).finish()
    assert bad.returncode == 2 and "has no '€'" in bad.stderr


# The learning rate, and clipping


@pytest.mark.waits
@pytest.mark.parametrize("steps, model", [(1, "mingpt.model"), (7, "mingpt.modern")])
def test_the_learning_rate_of_each_step(gpt, tmp_path, steps, model):
    """It rises in two of ten steps. Then it falls to a tenth, along a cosine."""
    rates = [lr_scale(step, 10, 0.2) for step in (0, 1, 2, 4, 6, 10)]
    assert rates == pytest.approx([0.5, 1, 1, 0.55 + 0.45 * 0.5**0.5, 0.55, 0.1])
    assert lr_scale(0, 1, 0.5) == 1
    options = ["--steps", steps, "--lr", 0.01, "--warmup", 0.4, "--model", model]
    trained(gpt, *options, cwd=tmp_path)
    for group in load(tmp_path / "mingpt.pt")["OPTIMIZER_STATE"]["param_groups"]:
        last = lr_scale(steps - 1, steps, 0.4)
        assert math.isclose(group["lr"], 0.01 * last)
        assert group["initial_lr"] == 0.01


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_clips_the_gradients_that_are_not_scaled(gpt, tmp_path, precision):
    """AdamW's first average of the gradients is a tenth of the first gradient."""
    clip = 0.01
    options = ["--steps", 1, "--precision", precision, "--clip", clip]
    trained(gpt, *options, cwd=tmp_path)
    state = load(tmp_path / "mingpt.pt")["OPTIMIZER_STATE"]["state"]
    squares = sum(x["exp_avg"].double().square().sum() for x in state.values())
    assert math.isclose(10 * math.sqrt(squares), clip, rel_tol=1e-3)


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
    both = metrics(tmp_path), metrics(GOLDEN, "curve.csv")
    for ours, golden in zip(*both, strict=True):
        del ours["tokens/s"], golden["tokens/s"]
        assert ours == pytest.approx(golden, abs=TOLERANCE)


# Start from GPT-2's weights


@pytest.mark.waits
def test_gpt2_writes_and_fine_tuning_starts_from_its_weights(gpt, text, tmp_path):
    """A small one, in Hugging Face's format, with a tokenizer of its own."""
    reason = "mingpt/requirements.txt is not installed"
    tokenizers = pytest.importorskip("tokenizers", reason=reason)
    pytest.importorskip("safetensors", reason=reason)
    from mingpt.gpt2_weights import save_gpt2
    from mingpt.model import GPT, GPTConfig

    folder = tmp_path / "gpt2"
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16}
    model = GPT(GPTConfig(vocab_size=300, **sizes))
    save_gpt2(model, folder)
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train([str(text[1])], vocab_size=300)
    tokenizer.save(str(folder / "tokenizer.json"))
    start = ["--init-from", folder, "--tokenizer", folder / "tokenizer.json"]

    words = ["python", "-m", "mingpt.sample", "--tokens", 5, "--prompt", "class"]
    done = Program([*words, *start], tmp_path, PYTHONPATH=ROOT).finish()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("class")

    trained(gpt, *SHORT, *start, "--lr", 1e-12, "--weight-decay", 0, cwd=tmp_path)
    saved = load(tmp_path / "mingpt.pt")["MODEL_STATE"]
    for name, weight in model.state_dict().items():
        assert torch.allclose(saved[name], weight, rtol=0, atol=1e-9), name
