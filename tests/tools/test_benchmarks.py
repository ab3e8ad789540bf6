"""The benchmarks measure what they say, on the scripts as they are now."""

import math
import re
from argparse import Namespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import diloco, gpt, variants
from mingpt import data
from mingpt.model import GPT, GPTConfig
from tests.helpers.forked import in_a_fork
from tools.run.hosts import Hosts
from tools.run.processes import Program
from tools.scripts import ROOT

pytestmark = pytest.mark.waits
reason = variants.why_no_networks("cpu")
needs_networks = pytest.mark.skipif(reason is not None, reason=str(reason))
WEIGHTS = 809_001  # of the model, with its hidden layers


def tables(*words):
    """What a benchmark prints, and {row: its medians} of its tables."""
    done = Program(["python", "-m", *words], ROOT).finish()
    assert done.returncode == 0, done.stdout + done.stderr
    cell = r" +([\d.,]+)%? \(\S+ \.\. \S+\)"
    rows = re.findall(f"^(.*?\\S){3 * cell}", done.stdout, re.M)
    numbers = {name: [float(x.replace(",", "")) for x in row] for name, *row in rows}
    return done.stdout, numbers


@needs_networks
def test_a_variant_is_measured_beside_its_parent():
    name = "variants/gradient_accumulation.py"
    options = name, "--steps", 2, "--batch-size", 32, "--rounds", 1
    text, found = tables("benchmarks.variants", *options)
    losses = re.search(r"loss (\S+) of the parent, (\S+) of the variant", text)
    assert float(losses[1]) == pytest.approx(float(losses[2]), abs=2e-6)
    _, _, sent = found["parent"]
    assert found["variant"][2] == pytest.approx(sent, rel=0.05), "as many bytes"


@needs_networks
@pytest.mark.parametrize("hosts", [1, 3])
def test_the_bytes_of_a_ring_are_counted(tmp_path, hosts):
    """Each of W ranks sends 2 (W - 1) / W times the gradients, and TCP's headers."""
    with Hosts(hosts, tmp_path) as found:
        networks = [f"/proc/{host.pid}/ns/net" for host in found]
        three = variants.Edge("multigpu.py", tmp_path / "edge", networks, "cpu", 3)
        figures = three.run("multigpu.py", 2 * 3 * 8, 8)
    ring = 2 * 4 * WEIGHTS * 4 / 3  # in two steps
    assert ring < figures["sent_bytes"] < 1.06 * ring


@needs_networks
def test_scaling_is_measured_and_predicted():
    options = "variants/fsdp.py", "--rounds", 1, "--steps", 2, "--batch-size", 256
    text, found = tables("benchmarks.scaling", *options)
    assert found["1 rank"][1] == found["2 devices"][1] == 1
    assert found["1 rank"][2] > 80, "percent: it waits for nobody"
    assert found["hosts, 100M"][1] < found["hosts, 1000M"][1] < 1
    errors = re.findall(r"predicted \d+ \(([-+]\d+)%\)", text)
    assert len(errors) == 3 and all(abs(int(x)) <= 25 for x in errors)


@needs_networks
def test_diloco_sends_less(tmp_path):
    """An outer step sends what DDP sends in each of its steps."""
    steps = [f"--{name}={diloco.LOCAL_STEPS * 2}" for name in ("steps", "eval-every")]
    with Hosts(2, tmp_path) as hosts:
        (ddp,), (ours,) = (diloco.run(hosts, *steps, *x) for x in ([], ["--outer"]))
    assert ours.windows == ddp.windows
    assert ddp.sent / ours.sent == pytest.approx(diloco.LOCAL_STEPS, rel=0.1)
    assert ours.loss < 4, "it learns: a guess has more than 4.5"


# Those of mingpt


def test_versions_train_the_same(tmp_path):
    pytest.importorskip("transformers", reason="it is what is compared with")
    data.prepare(cache=str(tmp_path / "tokens"))
    of_a = {"preset": "nano", "batch_size": 12, "vocab_size": None}
    how = {"device": "cpu", "threads": 1, "rounds": 2, "steps": 2, "folder": tmp_path}
    kinds = "plain loop", "transformers", "mingpt"
    # Compiling takes longer than all else here.
    versions = {kind: gpt.Version(kind, "fp32", False) for kind in kinds}
    turns = gpt.race(versions, Namespace(**how, **of_a))
    for theirs, hugging_face, ours in zip(*turns.values(), strict=True):
        assert theirs.loss == pytest.approx(ours.loss, abs=1e-5)
        assert theirs.loss == pytest.approx(hugging_face.loss, abs=1e-5)
        assert theirs.flops == hugging_face.flops == ours.flops > 0
        assert theirs.tokens == ours.tokens == 2 * 12 * 64
    first, second = turns["plain loop"]
    assert second.loss < first.loss < math.log(120)


@in_a_fork
def test_flops_are_those_that_pytorch_counts():
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 100}
    model, idx = GPT(GPTConfig(**sizes, block_size=16)), torch.zeros(3, 16).long()
    # Of the other kernels for attention, it does not count all.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        model(idx, idx)[1].backward()
    assert gpt.flops_per_token(model) * idx.numel() == counted.get_total_flops()


ABLATION = """
from benchmarks import ablation
(results := ablation.Results()).read()
run = ablation.Run("modern.py", 0, results.rate("modern.py"), ablation.STEPS)
print(ablation.measure(ablation.variants()["modern.py"], run), results.loss[run])
"""


def test_the_ablation_repeats_a_run(tmp_path):
    (tmp_path / "once.py").write_text(ABLATION)
    done = Program(["python", tmp_path / "once.py"], ROOT, PYTHONPATH=ROOT).finish()
    assert done.returncode == 0, done.stderr
    loss, recorded = map(float, done.stdout.split())
    # The batches had another order then.
    assert loss == pytest.approx(recorded, abs=0.1)
