"""On one GPU, the most telling first: what the tests on CPUs leave open.

    timeout --signal=INT 45m pytest --all -vrA --durations=0 tests/trunk/test_gpu.py

stops after 45 minutes, and ends with what each test has found, and how long it took.
Where no GPU of NVIDIA or AMD answers, it takes the stand-in, so that no test fails for
a reason of its own: tests/standin.
"""

import json
import os
import re

import pytest
import torch

from tests.helpers.checks import STANDIN, assert_same_snapshot, hooks_to_compare
from tests.helpers.forked import in_a_fork
from tests.helpers.hidden_gpus import VISIBLE
from tests.helpers.scripts import task_of
from tests.hooks.accelerators import share_one_gpu
from tools.run.launch import (
    UNDER_TORCHRUN,
    copy_script,
    environment,
    torchrun_words,
    train,
)
from tools.run.processes import Program
from tools.run.results import losses
from tools.scripts import ROOT, SCRIPTS, calls


@in_a_fork
def gpus():
    """How many answer, of those that hidden_gpus.py hides from all other tests."""
    del os.environ["CUDA_VISIBLE_DEVICES"]
    if VISIBLE is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = VISIBLE
    return torch.cuda.device_count()  # AMD's are "cuda", too


KIND = "cuda" if gpus() else "standin"
# NCCL would print lines among the script's.
ENV = {"CUDA_VISIBLE_DEVICES": (VISIBLE or "0").split(",")[0], "NCCL_DEBUG": None}
REAL = True  # a GPU's driver does not survive a fork
# torch.profiler logs that it starts and stops. torch 2.11 says of each profiler with a
# schedule that it clears events, though nothing is lost.
NOISE = r"USDT:.*|.*Warning: Profiler clears events.*\n  _warn_once\("
if KIND == "standin":
    NOISE += "|.*Time stats are currently only collected for CPU and CUDA devices.*"
    NOISE += r"|(WARNING|INFO|ERROR):.*\.cpp:.*"  # CUDA's profiler finds no GPU
    ENV = {**STANDIN, "STANDIN_DEVICES": 1}
    REAL = False
ONE = {"nprocs": 1, "real": REAL, **ENV}
needs_gpu = pytest.mark.skipif(
    KIND == "standin", reason="compiles for GPUs: no GPU answers"
)
pytestmark = pytest.mark.waits
TEXT = ["--data", ROOT / "LICENSE"]


@pytest.fixture(scope="module", autouse=True)
def gpu_or_standin(request):
    if KIND == "standin":
        request.getfixturevalue("standin")


def assert_near(found, expected, rtol=1e-3):
    """Losses are the same, as far as devices round alike."""
    assert len(found) > 0
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-4)
    ratios = torch.tensor(found) / torch.tensor(expected)
    apart = (ratios - 1).abs().max()
    print(f"losses within {apart:.0e} of the CPU's")


def run_on_gpu(*words, cwd, nprocs=None, status=0, **env):
    """Done of `python WORDS`, or of torchrun: on the GPU, unless `env` is another."""
    start = torchrun_words(nprocs) if nprocs else ["python"]
    env = environment(ROOT / "multigpu.py", env or ENV)
    return Program([*start, *words], cwd, REAL, **env).end_with(status)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_as_on_the_cpu(runs, name, tmp_path):
    """Its stderr is clean."""
    hooks = hooks_to_compare(name)
    done = train(name, 5, 2, cwd=tmp_path, hooks=hooks, **ONE)
    assert f"1 x {KIND}, batch 64 each: effective batch 64" in done.stdout
    _, on_the_cpu = runs(task_of(name), 1, hooks)
    assert_near(losses(done), losses(on_the_cpu))
    assert re.sub(f"(?m)^({NOISE})?\n", "", done.stderr) == ""


OPTIONS = {
    "multigpu.py": [],
    "variants/fsdp.py": [],
    "variants/sharded_snapshot.py": [],
    "variants/mixed_precision.py": ["--precision", "fp16"],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_it_resumes_bit_for_bit(name, tmp_path):
    def trained(folder, *ends):
        for end in ends:
            train(name, end, 2, *OPTIONS[name], cwd=folder, **ONE)

    trained(tmp_path / "undisturbed", 5)
    trained(tmp_path / "resumed", 2, 5)
    assert_same_snapshot(tmp_path / "resumed", tmp_path / "undisturbed")


IN_PARTS = {"fully_shard", "parallelize_module"}  # which gloo cannot do on GPUs
BY_GLOO = [name for name in UNDER_TORCHRUN if not IN_PARTS & {*calls(name)}]


@pytest.mark.parametrize("name", BY_GLOO)
def test_two_ranks_share_the_gpu(runs, name, tmp_path):
    """By gloo, which takes tensors of a GPU: NCCL refuses two ranks on one."""
    hooks = [share_one_gpu]
    done = train(name, 5, 2, cwd=tmp_path, real=REAL, hooks=hooks, **ENV)
    assert f"2 x {KIND}, " in done.stdout
    _, on_the_cpu = runs(name)
    assert_near(losses(done), losses(on_the_cpu))


CPU = {"OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": ""}


def printed(done):
    """[(loss of the training, of the evaluation)]"""
    pairs = re.findall(r"loss (\d\S+).* loss (\d\S+)", done.stdout)
    return [tuple(map(float, pair)) for pair in pairs]


def gpt(*options, cwd, script=("-m", "mingpt.train"), **how):
    steps = ["--steps", 20, "--eval-every", 10]
    return run_on_gpu(*script, *TEXT, *steps, *options, cwd=cwd, **how)


FP32 = ["--precision", "fp32", "--compile", "off"]


def test_mingpt_trains_as_on_the_cpu(tmp_path):
    on_the_cpu = printed(gpt(*FP32, cwd=tmp_path / "cpu", **CPU))
    for more in ([], ["--shard"]):
        folder = tmp_path / "-".join(["gpu", *more])
        done = gpt(*FP32, *more, cwd=folder, nprocs=1)
        assert f"1 x {KIND}, " in done.stdout
        assert_near(printed(done), on_the_cpu, rtol=1e-2)
        words = "-m mingpt.sample --tokens 20 --prompt The"
        text = run_on_gpu(*words.split(), cwd=folder).stdout
        assert text.startswith("The")
        assert len(text) > 20


@pytest.mark.parametrize(
    ("precision", "compiled"),
    [
        ("fp16", "off"),
        pytest.param("fp16", "on", marks=needs_gpu),
        pytest.param("bf16", "on", marks=needs_gpu),
    ],
)
def test_mingpt_resumes_after_sigterm(precision, compiled, tmp_path):
    """Bit for bit; if it is compiled, to rounding.

    Compiled kernels add up an embedding's gradient in any order.
    """
    options = ["--precision", precision, "--compile", compiled]
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    expected = gpt(*options, cwd=whole)
    script = [ROOT / "tests/helpers/stopped_gpt.py"]
    gpt(*options, cwd=parts, script=script, status=os.EX_TEMPFAIL, **ENV)
    found = gpt(*options, cwd=parts)
    if compiled == "off":
        assert_same_snapshot(parts / "mingpt.pt", whole / "mingpt.pt")
    assert_near(printed(found)[-1:], printed(expected)[-1:], rtol=1e-2)


def test_the_converted_script_trains_as_on_the_cpu(tmp_path):
    seed = "    torch.manual_seed(args.seed)\n"
    script = copy_script(
        "docs/convert_your_script/after.py",
        tmp_path / "copy",
        (seed, f"{seed}    torch.set_default_dtype(torch.float64)\n"),
        ("nn.Dropout(0.2)", "nn.Dropout(0.0)"),
    )

    def converted(folder, *options):
        done = run_on_gpu(script, "--epochs", 2, *options, cwd=folder, nprocs=1)
        found = re.findall(r"^test loss (\S+),", done.stdout, re.M)
        return [float(loss) for loss in found]

    on_the_gpu = converted(tmp_path / "gpu")
    on_the_cpu = converted(tmp_path / "cpu", "--no-cuda")
    assert_near(on_the_gpu, on_the_cpu, rtol=1e-2)


def test_preflight(tmp_path):
    script = ROOT / "cluster/preflight.py"
    done = run_on_gpu(script, "--standalone", "--nproc-per-node=1", cwd=tmp_path)
    print(done.stdout)
    assert "this cluster can train" in done.stdout


def test_the_shares_of_a_step_add_up(tmp_path):
    script = ROOT / "variants/profiled.py"
    done = train(script, 6, 6, "--trace", "my", cwd=tmp_path, **ONE)
    print("\n".join(done.stdout.splitlines()[-8:]))
    (ms,) = json.loads((tmp_path / "my.json").read_text())["ms"]
    assert sum(ms.values()) == pytest.approx(2 * ms["step"])
    assert min(ms.values()) >= 0
