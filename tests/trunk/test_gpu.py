"""On one GPU, the most telling first: what the tests on CPUs leave open.

    timeout --signal=INT 45m pytest --all -vrA --durations=0 tests/trunk/test_gpu.py

stops after 45 minutes, and ends with what each test has found, and how long it took. A
PyTorch that is built for no GPU takes the stand-in, so that no test fails for a reason
of its own: tests/standin.
"""

import json
import os
import re

import pytest
import torch

from tests.conftest import VISIBLE
from tests.helpers.text import sentences
from tools.run.launch import (
    HOOKS,
    environment,
    hooks_to_compare,
    launch,
    plant,
    task_of,
    train,
)
from tools.run.processes import Program
from tools.run.results import load, losses, same_bits
from tools.scripts import ROOT, SCRIPTS

# AMD's GPUs are "cuda", too.
KIND = str(torch.accelerator.current_accelerator() or "standin")
# All other tests hide the GPUs. NCCL would print lines among the script's.
ENV = {"CUDA_VISIBLE_DEVICES": (VISIBLE or "0").split(",")[0], "NCCL_DEBUG": None}
REAL = "a GPU's driver does not survive a fork"
NO_TIMER = "this comes nowhere"
if KIND == "standin":
    NO_TIMER = ".*Time stats are currently only collected for CPU and CUDA devices.*"
    ENV = {"PYTHONPATH": ROOT / "tests" / "standin", "STANDIN_DEVICES": 1}
    REAL = ""
BUILT_FOR = pytest.mark.skipif(
    not REAL, reason="compiles for GPUs: PyTorch is built for no GPU"
)
pytestmark = pytest.mark.waits
TEXT = ["--data", "text.txt", "--cache", "tokens"]


@pytest.fixture(scope="module", autouse=True)
def one_gpu(request, tmp_path_factory):
    if KIND == "standin":
        request.getfixturevalue("standin")
        return
    code = "import torch; print(torch.accelerator.device_count())"
    words = ["python", "-c", code]
    folder = tmp_path_factory.getbasetemp()
    done = Program(words, folder, real=True, **ENV).finish()
    if KIND != "cuda" or int(done.stdout) == 0:
        pytest.skip("PyTorch sees no GPU of NVIDIA or AMD")


def assert_close(found, expected, rtol=1e-3):
    """Losses are the same, as far as devices round alike."""
    assert len(found) > 0
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-4)
    apart = abs(torch.tensor(found) / torch.tensor(expected) - 1).max()
    print(f"losses within {apart:.0e} of the CPU's")


def run(*words, cwd, nprocs=None, status=0, **env):
    """Done of `python WORDS`, or of torchrun: on the GPU, unless `env` is another."""
    start = ["torchrun", "--standalone", f"--nproc-per-node={nprocs}"]
    words = [*(start if nprocs else ["python"]), *words]
    env = environment(ROOT / "multigpu.py", env or ENV)
    done = Program(words, cwd, REAL, **env).finish()
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_as_on_the_cpu(runs, name, tmp_path):
    """Its stderr is clean."""
    options, hooks = ("--batch-size", 64), hooks_to_compare(name)
    script = plant(name, tmp_path / "copy", hooks=hooks)
    done = train(script, 5, 2, *options, cwd=tmp_path, nprocs=1, real=REAL, **ENV)
    assert f"1 x {KIND}, batch 64 each: effective batch 64" in done.stdout
    assert_close(losses(done), losses(runs(task_of(name), 1, hooks)[1]))
    # torch.profiler logs there that it starts and stops.
    assert re.sub(f"(?m)^(USDT:.*|{NO_TIMER})?\n", "", done.stderr) == ""


OPTIONS = {
    "multigpu.py": [],
    "variants/fsdp.py": [],
    "variants/sharded_snapshot.py": [],
    "variants/mixed_precision.py": ["--precision", "fp16"],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_it_resumes_bit_for_bit(name, tmp_path):
    found = []
    for ends in [5], [2, 5]:
        (folder := tmp_path / f"{len(ends)}").mkdir()
        for end in ends:
            how = {"cwd": folder, "nprocs": 1, "real": REAL}
            train(ROOT / name, end, 2, *OPTIONS[name], **how, **ENV)
        found.append(load(folder / "snapshot.pt"))
    assert same_bits(*found)


LINES = {
    "multigpu.py": "2 processes, 1 accelerators: try more with",
    "multinode.py": f"cannot use {KIND}:1: .*invalid device ordinal.*Try",
}


@pytest.mark.parametrize("name", LINES)
def test_more_ranks_than_gpus_end_with_what_to_type(name, tmp_path):
    real = "a fork's torchrun waits for 30 s"
    done = launch(ROOT / name, 5, 2, cwd=tmp_path, real=real, **ENV)
    assert done.returncode != 0
    (line,) = [x for x in done.stderr.splitlines() if "error: " in x]
    assert re.fullmatch(f"{name}: error: {LINES[name]} --device cpu", line)


OTHERS = [f"variants/{x}.py" for x in ("ddp2", "diloco", "preemptible", "real_job")]


@pytest.mark.parametrize("name", ["multinode.py", *OTHERS])
def test_two_ranks_share_the_gpu(runs, name, tmp_path):
    """By gloo, which takes tensors of a GPU: NCCL refuses two ranks on one."""
    script = plant(name, tmp_path / "copy", hooks=["one_gpu"])
    done = train(script, 5, 2, "--batch-size", 32, cwd=tmp_path, real=REAL, **ENV)
    assert f"2 x {KIND}, " in done.stdout
    assert_close(losses(done), losses(runs(name)[1]))


CPU = {"OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": ""}
LOSSES = r"loss (\d\S+).* loss (\d\S+)"


def printed(done):
    """[(loss of the training, of the evaluation)]"""
    return [tuple(map(float, x)) for x in re.findall(LOSSES, done.stdout)]


def gpt(*options, cwd, script=("-m", "mingpt.train"), **how):
    cwd.mkdir(exist_ok=True)
    (cwd / "text.txt").write_text(sentences(1000))
    steps = ["--steps", 20, "--eval-every", 10]
    return run(*script, *TEXT, *steps, *options, cwd=cwd, **how)


FP32 = ["--precision", "fp32", "--compile", "off"]


@pytest.fixture(scope="module")
def gpt_losses(tmp_path_factory):
    return printed(gpt(*FP32, cwd=tmp_path_factory.mktemp("cpu"), **CPU))


@pytest.mark.parametrize("more", [[], ["--shard"]], ids=["whole", "shard"])
def test_mingpt_trains_as_on_the_cpu(more, gpt_losses, tmp_path):
    done = gpt(*FP32, *more, cwd=tmp_path, nprocs=1)
    assert f"1 x {KIND}, " in done.stdout
    assert_close(printed(done), gpt_losses, rtol=1e-2)
    words = ["mingpt.sample", "--tokens", 20, "--prompt", "The "]
    text = run("-m", *words, cwd=tmp_path).stdout
    assert text.startswith("The ") and len(text) > 20


COMPILED = [pytest.param(x, "on", marks=BUILT_FOR) for x in ("bf16", "fp16")]


@pytest.mark.parametrize(("precision", "compile"), [("fp16", "off"), *COMPILED])
def test_mingpt_resumes_after_sigterm_bit_for_bit(precision, compile, tmp_path):
    options = ["--precision", precision, "--compile", compile]
    whole = gpt(*options, cwd=tmp_path / "whole")
    print("losses {} and {}".format(*printed(whole)[-1]))
    how = {"script": [HOOKS / "gpt.py"], "status": os.EX_TEMPFAIL}
    ours = tmp_path / "ours"
    gpt(*options, cwd=ours, **how, **ENV, DO="sigterm", AT_STEP=12)
    gpt(*options, cwd=ours)
    assert same_bits(*(load(x / "mingpt.pt") for x in (ours, tmp_path / "whole")))


def test_the_converted_script_trains_as_on_the_cpu(tmp_path):
    """Two processes do with --no-cuda, beside a GPU that is for one."""
    found = []
    for options, nprocs in ([], 1), (["--no-cuda"], 1), (["--no-cuda"], 2):
        (folder := tmp_path / f"{len(found)}").mkdir()
        words = [
            ROOT / "docs/convert_your_script/after.py",
            "--epochs",
            2,
            "--compare",
            *options,
        ]
        done = run(*words, cwd=folder, nprocs=nprocs)
        lines = re.findall(r"^Test loss (\S+),", done.stdout, re.M)
        found.append([float(x) for x in lines])
    assert_close(found[0], found[1], rtol=1e-2)
    assert found[1] == found[2]


def test_preflight(tmp_path):
    script = ROOT / "cluster/preflight.py"
    done = run(script, "--standalone", "--nproc-per-node=1", cwd=tmp_path)
    print(done.stdout)
    assert "this cluster can train" in done.stdout


def test_the_shares_of_a_step_add_up(tmp_path):
    script = ROOT / "variants/profiled.py"
    how = {"cwd": tmp_path, "nprocs": 1, "real": REAL, **ENV}
    done = train(script, 6, 6, "--trace", "my", **how)
    print("\n".join(done.stdout.splitlines()[-8:]))
    (ms,) = json.loads((tmp_path / "my.json").read_text())["ms"]
    assert sum(ms.values()) == pytest.approx(2 * ms["step"])
    assert min(ms.values()) >= 0
