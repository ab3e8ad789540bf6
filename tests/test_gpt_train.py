"""mingpt.train: the same training at every world size, and nothing lost."""

import csv
import ctypes
import math
import os
import re
import sys

import pytest
import torch

from ladder.rungs import ROOT
from mingpt import options, report
from proofs.results import load, same_bits, weights
from proofs.warm import Fork

FAULTS = ROOT / "tests" / "faults" / "gpt.py"
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

    Without `nprocs` python starts it, else torchrun. DO and AT_STEP in the environment:
    see tests/faults/gpt.py.
    """

    def get(*options, cwd, nprocs=None, **env):
        script = [FAULTS] if "DO" in env else ["-m", "mingpt.train"]
        words = ["python"]
        if nprocs:
            words = ["torchrun", "--standalone", f"--nproc-per-node={nprocs}"]
        env = {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1} | env
        return Fork([*words, *script, *text, *TINY, *options], cwd, **env).finish()

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


RESUMABLE = ["--steps", 12, "--eval-every", 6, "--dropout", 0.1]


def metrics(folder, name="mingpt.metrics.csv"):
    with open(folder / name, newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: float(value) for name, value in row.items()} for row in rows]


def test_what_a_person_sees(whole):
    folder, done = whole
    lines = done.stdout.splitlines()
    assert re.match(r"text: .*text\.txt: [\d,]+ bytes", lines[0])
    assert re.match(r"model: mingpt\.model, 0\.03 M parameters, 2 layers", lines[1])
    assert re.match(
        r"run: 1 x cpu, fp32, not compiled, batch 8 blocks each: 128", lines[2]
    )
    assert lines[3] == "starting with step 1: no step is finished in mingpt.pt"
    progress = (
        r"step 1/12 \| loss \d\.\d{4} \| \d+ min \d\d s left \| [\d,]+ tokens/s"
        r" \| MFU \d+% of \S+ TFLOP/s \(measured\)"
    )
    assert re.fullmatch(progress, lines[4])
    evaluation = (
        r"step 6/12 \| train loss \d\.\d{4} \| val loss \d\.\d{4} \| bits per byte"
        r" \d\.\d{4} \| [\d,]+ tokens/s"
    )
    assert any(re.fullmatch(evaluation, x) for x in lines)
    assert lines[-1] == "saving step 12 to mingpt.pt"
    assert "\r" not in done.stdout, "no terminal, no line that is written over"
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [6, 12]
    assert f"val loss {rows[-1]['val loss']:.4f}" in done.stdout


def test_the_speed_does_not_count_compiling(gpt, tmp_path):
    """The first step takes 3 s here, as where torch.compile works in it."""
    options = ["--steps", 40, "--eval-every", 40]
    done = trained(gpt, *options, cwd=tmp_path, DO="slow_start")
    (first,) = re.findall(r"step 2/40 .* ([\d,]+) tokens/s", done.stdout)
    assert int(first.replace(",", "")) > 2 * 8 * 16 / 3


def test_bits_per_byte(whole):
    """All characters of this text are ASCII, so that a token is a byte."""
    for row in metrics(whole[0]):
        bits = row["val loss"] / math.log(2)
        assert math.isclose(row["bits per byte"], bits, rel_tol=1e-9)


@pytest.mark.parametrize("nprocs", [2, 4])
def test_world_sizes_train_the_same(gpt, tmp_path, nprocs):
    """And evaluate the same, at an effective batch of 8; also in micro-batches."""
    options = ["--steps", 4, "--eval-every", 2]
    found = []
    for count, accumulate in ((None, 1), (nprocs, 1), (nprocs, 2)):
        folder = tmp_path / f"{count}.{accumulate}"
        folder.mkdir()
        batch = ["--batch-size", 8 // (count or 1), "--accumulate", accumulate]
        trained(gpt, *options, *batch, cwd=folder, nprocs=count, DO="float64")
        found.append((weights(folder / "mingpt.pt"), metrics(folder)))
    for state, rows in found[1:]:
        assert torch.allclose(state, found[0][0], rtol=0, atol=1e-12)
        for row, other in zip(rows, found[0][1], strict=True):
            for name in ("train loss", "val loss", "bits per byte"):
                # Losses are summed in float32.
                assert math.isclose(row[name], other[name], rel_tol=1e-6), name


@pytest.mark.parametrize(
    ("signal", "status", "resumes_at"),
    [
        ("sigterm", os.EX_TEMPFAIL, 9),
        ("sigkill", -9, 6),
    ],
)
def test_resume(gpt, whole, tmp_path, signal, status, resumes_at):
    done = gpt(*RESUMABLE, cwd=tmp_path, DO=signal, AT_STEP=8)
    assert done.returncode == status, done.stderr
    assert (tmp_path / "mingpt.pt.preempted").exists() == (signal == "sigterm")
    assert load(tmp_path / "mingpt.pt")["STEPS_RUN"] == resumes_at
    done = trained(gpt, *RESUMABLE, cwd=tmp_path)
    line = f"resuming from mingpt.pt: {resumes_at} of 12 steps are finished"
    assert line in done.stdout
    assert same_bits(load(tmp_path / "mingpt.pt"), load(whole[0] / "mingpt.pt"))
    ours, theirs = metrics(tmp_path), metrics(whole[0])
    assert [x["val loss"] for x in ours] == [x["val loss"] for x in theirs]


def test_another_learning_rate_does_not_count_after_a_resume(gpt, tmp_path):
    trained(gpt, *SHORT, "--lr", 0.001, cwd=tmp_path)
    again = ["--steps", 4, "--eval-every", 2]
    done = gpt(*again, "--lr", 0.5, cwd=tmp_path, DO="sigterm", AT_STEP=2)
    assert "the learning rate stays 0.001, as saved, not 0.5\n" in done.stdout
    groups = load(tmp_path / "mingpt.pt")["OPTIMIZER_STATE"]["param_groups"]
    assert {group["initial_lr"] for group in groups} == {0.001}
    done = trained(gpt, *again, "--lr", 0.001, cwd=tmp_path)
    assert "the learning rate stays" not in done.stdout


def test_modern_resumes(gpt, tmp_path):
    """Its two optimizers, Muon and AdamW, are saved and loaded as one."""
    reference, stopped = tmp_path / "a", tmp_path / "b"
    options = [*RESUMABLE, "--model", "mingpt.modern"]
    for folder in (reference, stopped):
        folder.mkdir()
    trained(gpt, *options, cwd=reference)
    assert gpt(*options, cwd=stopped, DO="sigterm", AT_STEP=8).returncode == 75
    trained(gpt, *options, cwd=stopped)
    assert same_bits(load(stopped / "mingpt.pt"), load(reference / "mingpt.pt"))


def test_one_rank_is_told_and_all_stop(gpt, tmp_path):
    """Under torchrun, told by one of two ranks; resumed, bit by bit the same."""
    reference, stopped = tmp_path / "a", tmp_path / "b"
    reference.mkdir()
    stopped.mkdir()
    trained(gpt, *RESUMABLE, cwd=reference, nprocs=2)
    env = {"DO": "sigterm", "AT_STEP": 8, "RANK_ONLY": 1}
    done = gpt(*RESUMABLE, cwd=stopped, nprocs=2, **env)
    assert done.returncode == 1, "torchrun's own status"
    assert "preempted after step 9\n" in done.stdout
    assert (stopped / "mingpt.pt.preempted").exists()
    trained(gpt, *RESUMABLE, cwd=stopped, nprocs=2)
    assert same_bits(load(stopped / "mingpt.pt"), load(reference / "mingpt.pt"))


def test_sigterm_while_the_model_is_compiled(gpt, tmp_path):
    """There, an operation on a tensor raises, or becomes a part of the graph."""
    done = gpt(*RESUMABLE, cwd=tmp_path, DO="sigterm_in_compile", AT_STEP=8)
    assert done.returncode == os.EX_TEMPFAIL, done.stderr
    assert load(tmp_path / "mingpt.pt")["STEPS_RUN"] == 9


def test_an_evaluation_does_not_slow_the_next_steps(gpt, tmp_path):
    """What is printed as tokens/s, MFU and time left is of training alone."""
    done = trained(gpt, *RESUMABLE, cwd=tmp_path, DO="slow_evaluation")
    ((minutes, seconds),) = re.findall(r"step 7/.* (\d+) min (\d+) s left", done.stdout)
    assert int(minutes) * 60 + int(seconds) < 3


def test_a_full_disk_leaves_the_old_snapshot(gpt, tmp_path):
    done = gpt(*RESUMABLE, cwd=tmp_path, DO="full_disk")
    assert done.returncode == 2
    assert done.stderr == (
        f"train.py: error: File too large: {tmp_path}/mingpt.pt is not written, the old"
        " one is kept\n"
    )
    assert load(tmp_path / "mingpt.pt")["STEPS_RUN"] == 6
    assert [x.name for x in tmp_path.glob("*.tmp")] == []


def test_no_room_for_the_metrics(gpt, tmp_path):
    done = gpt(*RESUMABLE, cwd=tmp_path, DO="no_room_for_metrics")
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        f"train.py: error: No space left on device: {tmp_path}/mingpt.metrics.csv is"
        " not written, the old one is kept\n"
    )


def test_a_snapshot_does_not_see_later_steps(gpt, whole, tmp_path):
    """It is written while the next steps change the weights, here after all of them."""
    trained(gpt, *RESUMABLE, cwd=tmp_path, DO="slow_disk")
    os.replace(tmp_path / "mingpt.pt.first", tmp_path / "mingpt.pt")
    assert load(tmp_path / "mingpt.pt")["STEPS_RUN"] == 6
    trained(gpt, *RESUMABLE, cwd=tmp_path)
    assert same_bits(load(tmp_path / "mingpt.pt"), load(whole[0] / "mingpt.pt"))


# Bad input: one line, exit status 2, and every file as it was

SHORT = ["--steps", 2, "--eval-every", 2]
ANOTHER = "choose another --snapshot-path"
BAD = {
    "accumulate": (
        ["--accumulate", 3],
        r"--batch-size 8 cannot be cut into 3 equal micro-batches \(--accumulate\)",
    ),
    "heads": (
        ["--n-head", 3],
        "--n-embd 32 cannot be cut into --n-head 3 equal heads",
    ),
    "no such model": (
        ["--model", "no.such.module"],
        "--model no.such.module: No module named 'no'",
    ),
    "too long a block": (
        ["--block-size", 100_000],
        r"the text has \d+ tokens to train on, and a block of 100000 needs 100001:"
        " choose a smaller block or a longer text",
    ),
    "too large a batch": (
        ["--batch-size", 10_000],
        r"one step takes 1 x 10000 samples and there are \d+: lower --batch-size or the"
        " number of processes",
    ),
    "no folder": (
        ["--snapshot-path", "no/such/snapshot.pt"],
        "cannot write no/such/snapshot.pt: No such file or directory",
    ),
    "device": (["--device", "tpu"], "--device tpu: here PyTorch can only use cpu"),
    "decay": (
        ["--weight-decay", -1],
        "argument --weight-decay: '-1' is not a number from 0 on",
    ),
    "dropout": (["--dropout", 1], "argument --dropout: 1 is not below 1"),
    "seed": (
        ["--seed", "-1"],
        "argument --seed: '-1' is not a whole number above 0",
    ),
    "another shape": (
        ["--n-embd", 64, "--seed", 1],
        f"mingpt.pt was saved with seed 0, not 1, n_embd 32, not 64: {ANOTHER}",
    ),
    "another vocabulary": (
        ["--tokenizer", "bytes"],
        rf"mingpt.pt was saved with vocab_size \d+, not 256: {ANOTHER}",
    ),
    "another optimizer": (
        ["--model", "mingpt.modern"],
        f"mingpt.pt was saved with model mingpt.model, not mingpt.modern: {ANOTHER}",
    ),
}


@pytest.fixture(scope="module")
def saved(gpt, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    trained(gpt, *SHORT, cwd=folder)
    return folder / "mingpt.pt"


@pytest.mark.parametrize("what", BAD)
def test_bad_input(gpt, saved, tmp_path, what):
    options, message = BAD[what]
    before = saved.read_bytes()
    (tmp_path / "mingpt.pt").write_bytes(before)
    done = gpt(*SHORT, *options, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.fullmatch(rf"train\.py: error: {message}\n", done.stderr), done.stderr
    assert (tmp_path / "mingpt.pt").read_bytes() == before
    assert [x.name for x in tmp_path.iterdir()] == ["mingpt.pt"]


OWN = """
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class GPTConfig:
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    dropout: float = 0.0
    checkpoint: bool = False


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.lstm = nn.LSTM(config.n_embd, config.n_embd, batch_first=True)
        self.head = nn.Linear(config.n_embd, config.vocab_size)

    def forward(self, idx, targets=None):
        logits = self.head(self.lstm(self.embedding(idx))[0])
        if targets is None:
            return logits, None
        scores = logits.flatten(0, 1)
        return logits, F.cross_entropy(scores, targets.flatten(), ignore_index=-1)

    def generate(self, idx, n, temperature=1.0, top_k=None, generator=None):
        for _ in range(n):
            chances = (self(idx)[0][:, -1] / temperature).softmax(dim=-1)
            new = torch.multinomial(chances, 1, generator=generator)
            idx = torch.cat((idx, new), dim=1)
        return idx

    def flops_per_token(self):
        return 6 * sum(x.numel() for x in self.parameters())


def make_optimizer(model, lr, weight_decay):
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=weight_decay)
    optimizer.param_groups[0]["initial_lr"] = lr
    return optimizer
"""


def test_a_model_of_ones_own(gpt, tmp_path):
    """An LSTM: it trains, resumes and writes."""
    (tmp_path / "own.py").write_text(OWN)
    env = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    own = ["--model", "own", "--eval-every", 2]
    trained(gpt, *own, "--steps", 2, cwd=tmp_path, **env)
    done = trained(gpt, *own, "--steps", 4, cwd=tmp_path, **env)
    assert "2 of 4 steps are finished" in done.stdout
    words = ["python", "-m", "mingpt.sample", "--tokens", 5]
    assert Fork(words, tmp_path, **env).finish().returncode == 0
    (tmp_path / "own.py").unlink()
    done = Fork(words, tmp_path, PYTHONPATH=ROOT).finish()
    assert done.returncode == 2
    assert done.stderr == (
        "sample.py: error: mingpt.pt has a model of own: No module named 'own'\n"
    )


TRIED = re.escape(
    " (tried with the targets [[0], [-1]], where -1 is a token that does not count)"
)
OWN_FAULTS = {
    "def make_optimizer": ("def make", "the module has no make_optimizer"),
    "@dataclass": ("", "GPTConfig is no dataclass"),
    "    n_layer: int\n": ("", "GPTConfig lacks n_layer"),
    "def generate": ("def write", "GPT has no method generate"),
    "self.config = config": ("", "GPT does not keep its config as self.config"),
    '["initial_lr"] = lr': (
        '["lr"] = lr',
        'make_optimizer gives its parameter groups no "initial_lr"',
    ),
    ", ignore_index=-1": ("", f"IndexError: Target -1 is out of bounds.{TRIED}"),
    "ignore_index=-1)": (
        "ignore_index=0)",
        f"(the loss is .*|IndexError: .*){TRIED}",
    ),
}


@pytest.mark.parametrize("fault", OWN_FAULTS)
def test_what_a_model_of_ones_own_lacks(gpt, tmp_path, fault):
    changed, message = OWN_FAULTS[fault]
    assert OWN.count(fault) == 1
    (tmp_path / "own.py").write_text(OWN.replace(fault, changed))
    env = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = gpt(*SHORT, "--model", "own", cwd=tmp_path, **env)
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(rf"train\.py: error: --model own: {message}\n", done.stderr)
    assert not list(tmp_path.glob("mingpt*"))


def test_a_snapshot_of_another_script(gpt, tmp_path):
    torch.save({"MODEL_STATE": {}, "EPOCHS_RUN": 1}, tmp_path / "mingpt.pt")
    done = gpt(*SHORT, cwd=tmp_path)
    assert done.returncode == 2
    assert (
        done.stderr
        == f"train.py: error: mingpt.pt is not what mingpt.train saves: {ANOTHER}\n"
    )


def test_ranks_with_other_text_do_not_train(gpt, tmp_path):
    """Two machines, each with a file of its own under the same name."""
    store = torch.distributed.TCPStore("localhost", 0, is_master=True)
    forks = []
    for rank in (0, 1):
        folder = tmp_path / str(rank)
        folder.mkdir()
        (folder / "text.txt").write_text(f"{rank} is the rank of this text.\n" * 500)
        env = {
            "RANK": rank,
            "LOCAL_RANK": 0,
            "WORLD_SIZE": 2,
            "MASTER_PORT": store.port,
        }
        env |= {"MASTER_ADDR": "localhost", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        env |= {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1}
        words = ["python", "-m", "mingpt.train", "--data", "text.txt", *TINY, *SHORT]
        forks.append(Fork(words, folder, **env))
    for fork in forks:
        done = fork.finish()
        assert done.returncode == 2, done.stderr
        assert re.fullmatch(
            r"train\.py: error: text is \w+ on rank 1 \(\S+\) and \w+ on rank 0"
            r" \(\S+\): all need the same\n",
            done.stderr,
        )
    assert not list(tmp_path.glob("*/mingpt.pt"))


# What else there is


def test_it_resumes_with_other_settings_and_says_so(gpt, saved, tmp_path):
    (tmp_path / "mingpt.pt").write_bytes(saved.read_bytes())
    options = ["--steps", 4, "--eval-every", 2, "--lr", 0.001]
    done = trained(gpt, *options, cwd=tmp_path)
    assert "lr is 0.003, as in mingpt.pt, not 0.001, as in the script\n" in done.stdout
    assert load(tmp_path / "mingpt.pt")["STEPS_RUN"] == 4


def test_it_says_that_the_text_is_another_one(gpt, saved, tmp_path):
    """Another split of it, here: what was trained would validate in silence."""
    said = "was trained on another text, or on another part of this one"
    for fraction in (0.1, 0.3):
        (tmp_path / "mingpt.pt").write_bytes(saved.read_bytes())
        done = trained(gpt, *SHORT, "--val-fraction", fraction, cwd=tmp_path)
        assert (said in done.stdout) == (fraction == 0.3)


def test_another_batch_goes_on_after_what_is_trained(gpt, saved, tmp_path):
    (tmp_path / "mingpt.pt").write_bytes(saved.read_bytes())
    options = ["--steps", 5, "--eval-every", 5, "--batch-size", 4]
    trained(gpt, *options, cwd=tmp_path)
    assert load(tmp_path / "mingpt.pt")["WINDOWS_RUN"] == 2 * 8 + 3 * 4


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits(gpt, saved, tmp_path, precision):
    """It trains nearly what float32 trains, and a scaler is there for fp16 alone."""
    trained(gpt, *SHORT, "--precision", precision, cwd=tmp_path)
    snapshot = load(tmp_path / "mingpt.pt")
    assert bool(snapshot["SCALER_STATE"]) == (precision == "fp16")
    difference = (weights(tmp_path / "mingpt.pt") - weights(saved)).abs().max()
    assert 0 < difference < 0.01


@pytest.mark.parametrize("model", ["mingpt.model", "mingpt.modern"])
def test_sample(gpt, tmp_path, model):
    trained(gpt, *SHORT, "--model", model, cwd=tmp_path)
    words = ["python", "-m", "mingpt.sample", "--tokens", 20, "--prompt", "def "]
    done = Fork(words, tmp_path, PYTHONPATH=ROOT).finish()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def ")
    assert len(done.stdout) == len("def ") + 20 + len("\n")
    same = Fork(words, tmp_path, PYTHONPATH=ROOT).finish()
    assert same.stdout == done.stdout, "the seed is the same"
    bad = Fork([*words, "--prompt", "€"], tmp_path, PYTHONPATH=ROOT).finish()
    assert bad.returncode == 2 and "has no '€'" in bad.stderr
    bad = Fork([*words, "--tokenizer", "x.json"], tmp_path, PYTHONPATH=ROOT).finish()
    assert bad.returncode == 2 and "a snapshot has its own tokenizer" in bad.stderr


PEAKS = {
    "NVIDIA A100-SXM4-80GB": 312e12,
    "Tesla T4": 65e12,
    "NVIDIA L4": 121e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 NVL": 835e12,
    # In their names stands that of a faster one.
    "NVIDIA L40": 0,
    "NVIDIA T400 4GB": 0,
    "NVIDIA RTX A1000 Laptop GPU": 0,
    "NVIDIA GeForce RTX 4090 Laptop GPU": 0,
    "NVIDIA GeForce RTX 4090 D": 0,
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": 0,
}


@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_of_a_gpu(monkeypatch, name):
    """0 stands for one that is measured."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(report, "measure_flops", lambda *_: 0)
    assert report.peak_flops(torch.device("cuda"), torch.bfloat16)[0] == PEAKS[name]


def test_an_older_glibc_gets_the_threshold_that_it_takes(monkeypatch):
    """Up to 2.34, glibc refuses more than 32 MB, and the first call ends its own."""
    settings = {}

    class Older:
        def mallopt(self, what, value):
            fits = what != -3 or value <= 2**25
            settings.update({what: value} if fits else {})
            return int(fits)

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Older())
    monkeypatch.setattr(sys, "platform", "linux")
    options.keep_memory()
    assert settings == {-1: 2**31 - 1, -3: 2**25}


def test_plot(whole, tmp_path):
    pytest.importorskip("matplotlib", reason="mingpt/requirements.txt is not installed")
    path = whole[0] / "mingpt.metrics.csv"
    words = ["python", "-m", "mingpt.plot", path, path, "--out", "curve.svg"]
    done = Fork(words, tmp_path, PYTHONPATH=ROOT).finish()
    assert done.returncode == 0, done.stderr
    assert "</svg>" in (tmp_path / "curve.svg").read_text()
    words[3] = whole[0] / "mingpt.pt"
    bad = Fork(words, tmp_path, PYTHONPATH=ROOT).finish()
    assert bad.returncode == 2
    assert re.fullmatch(r"plot\.py: error: .* is no CSV file: .*\n", bad.stderr)


def test_tensorboard(gpt, tmp_path):
    pytest.importorskip(
        "tensorboard", reason="mingpt/requirements.txt is not installed"
    )
    trained(gpt, *SHORT, "--tensorboard", "board", cwd=tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    (point,) = events.Scalars("val loss")
    assert point.step == 2
    assert math.isclose(point.value, metrics(tmp_path)[0]["val loss"], rel_tol=1e-6)


# The golden curve

GOLDEN = ROOT / "tests" / "golden"
# What the file of the curve was made with, in tests/golden:
# python -m mingpt.train --data text.txt --steps 80 --eval-every 40 --precision fp32
#     --compile off (its mingpt.metrics.csv)
DEFAULT_RUN = ["--data", GOLDEN / "text.txt", "--steps", 80, "--eval-every", 40]
DEFAULT_RUN += ["--precision", "fp32", "--compile", "off"]
# Other instruction sets and numbers of threads moved it by 0.0005, bfloat16 by 0.017.
TOLERANCE = 0.002


def distance(folder):
    """How far a run's losses are from the golden ones, at most."""
    ours, golden = metrics(folder), metrics(GOLDEN, "curve.csv")
    assert [row["step"] for row in ours] == [row["step"] for row in golden] == [40, 80]
    names = "train loss", "val loss", "bits per byte"
    pairs = zip(ours, golden, strict=True)
    return max(abs(a[name] - b[name]) for a, b in pairs for name in names)


def default_run(folder, *options, **env):
    """The preset's own sizes, on a text that is the same with every Python: Done."""
    script = [FAULTS] if env else ["-m", "mingpt.train"]
    env |= {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1}
    return Fork(["python", *script, *DEFAULT_RUN, *options], folder, **env).finish()


def test_golden_curve(tmp_path):
    assert default_run(tmp_path).returncode == 0
    assert distance(tmp_path) < TOLERANCE


@pytest.mark.parametrize("fault", ["learning rate", "weight decay", "mask", "split"])
def test_golden_curve_misses_no_fault(tmp_path, fault):
    options = {"learning rate": ["--lr", 0.0031], "weight decay": ["--weight-decay", 1]}
    env = {"mask": {"DO": "no_mask"}, "split": {"DO": "leak"}}
    done = default_run(tmp_path, *options.get(fault, []), **env.get(fault, {}))
    assert done.returncode == 0, done.stderr
    assert distance(tmp_path) > 2 * TOLERANCE


# Start from GPT-2's weights


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory, text):
    """A folder with a small GPT-2 in Hugging Face's format, and its tokenizer."""
    reason = "mingpt/requirements.txt is not installed"
    tokenizers = pytest.importorskip("tokenizers", reason=reason)
    pytest.importorskip("safetensors", reason=reason)
    from mingpt.gpt2_weights import save_gpt2
    from mingpt.model import GPT, GPTConfig

    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train([str(text[1])], vocab_size=300)
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16}
    model = GPT(GPTConfig(vocab_size=tokenizer.get_vocab_size(), **sizes))
    save_gpt2(model, folder)
    return folder, model


def fine_tune(gpt, folder, *options, cwd):
    weights = ["--init-from", folder, "--tokenizer", folder / "tokenizer.json"]
    return gpt(*SHORT, *weights, *options, cwd=cwd)


def test_fine_tuning_starts_from_these_weights(gpt, gpt2, tmp_path):
    folder, model = gpt2
    done = fine_tune(gpt, folder, "--lr", 1e-12, "--weight-decay", 0, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    saved = load(tmp_path / "mingpt.pt")["MODEL_STATE"]
    for name, weight in model.state_dict().items():
        assert torch.allclose(saved[name], weight, rtol=0, atol=1e-9), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--n-layer", 3], "has n_layer 2, not 3"),
        (["--n-embd", 64], "has n_embd 32, not 64"),
        (["--tokenizer", "bytes"], "has a vocabulary of 300 tokens, and --tokenizer"),
    ],
)
def test_weights_of_another_size(gpt, gpt2, tmp_path, options, message):
    done = fine_tune(gpt, gpt2[0], *options, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"train.py: error: {gpt2[0]} {message}")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "mingpt.pt").exists()


def test_gpt2_writes(gpt2, tmp_path):
    folder, _ = gpt2
    words = ["python", "-m", "mingpt.sample", "--tokens", 5, "--init-from", folder]
    words += ["--prompt", "class", "--tokenizer", folder / "tokenizer.json"]
    done = Fork(words, tmp_path, PYTHONPATH=ROOT).finish()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("class")
