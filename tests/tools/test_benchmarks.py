"""The benchmarks measure what they say, on the scripts as they are now."""

import re
from argparse import Namespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import gpt, scaling
from mingpt import data
from mingpt.model import GPT, GPTConfig
from tests.helpers.forked import in_a_fork
from tests.helpers.needs import needs_hosts
from tools.run.hosts import Hosts
from tools.run.processes import TIMEOUT_S, Program
from tools.scripts import ROOT

pytestmark = pytest.mark.waits
BYTES_OF_GRADIENTS = 4 * 809_001  # the model's weights, with its hidden layers


@needs_hosts
def test_the_bytes_of_a_ring_are_counted(tmp_path):
    """Each of W ranks sends 2 (W - 1) / W times the gradients, and TCP's headers."""
    with Hosts(3, tmp_path) as hosts:
        # Two steps, in which each of three ranks takes 8 samples
        samples = 2 * 3 * 8
        figures = scaling.run("multigpu.py", tmp_path, 3, samples, 3 * 8, hosts=hosts)
    ring = 2 * (2 * (3 - 1) / 3 * BYTES_OF_GRADIENTS)  # in two steps
    assert ring < figures["sent_bytes"] < 1.06 * ring


@needs_hosts
def test_scaling_is_measured_and_predicted():
    command = "python -m benchmarks.scaling variants/fsdp.py"
    command += " --rounds=3 --steps=2 --batch-size=256"
    done = Program(command.split(), ROOT).succeed()
    median = r" +([\d.,]+)%? \(\S+ \.\. \S+\)"
    found = {}
    for name, *row in re.findall(f"(?m)^(.*?\\S){3 * median}", done.stdout):
        found[name] = [float(number.replace(",", "")) for number in row]
    assert found["1 rank"][1] == found["2 devices"][1] == 1
    assert found["1 rank"][2] > 80, "percent: it waits for nobody"
    assert found["hosts, 100M"][1] < found["hosts, 1000M"][1] < 1
    errors = re.findall(r"predicted \d+ \(([-+]\d+)%\)", done.stdout)
    assert len(errors) == 3
    assert all(abs(int(percent)) <= 25 for percent in errors)


@needs_hosts
def test_diloco_sends_less(tmp_path):
    """In ten steps, as many bytes as DDP in three: two averages, one of the state."""
    options = ("--local-steps", 5)
    with Hosts(2, tmp_path) as hosts:
        samples = 10 * 2 * 8
        name = "variants/diloco.py"
        figures = scaling.run(name, tmp_path, 2, samples, 2 * 8, *options, hosts=hosts)
    ring = 3 * BYTES_OF_GRADIENTS
    assert ring < figures["sent_bytes"] < 1.06 * ring


# The tool that kills at random: two short runs of it


def chaos(options):
    words = f"python -W ignore -m benchmarks.chaos {options}".split()
    done = Program(words, ROOT, real=True).succeed(8 * TIMEOUT_S)
    assert "final weights and optimizer state: the same bits" in done.stdout
    return done.stdout


@needs_hosts
def test_each_kill_of_a_worker_costs_one_restart():
    """Also while it starts or saves: 8 restarts are enough for 8 kills."""
    assert "8 kills; 0 agents were started again" in chaos("--kills=8 --workers")


@needs_hosts
def test_a_worker_an_agent_and_a_host_are_killed_and_nothing_is_lost():
    out = chaos("--kills=3 --seed=7")
    kinds = re.findall(r"s  (\w+), \d+ epochs saved", out)
    assert sorted(kinds) == ["agent", "host", "worker"]


# Those of mingpt


def test_versions_train_the_same(tmp_path):
    data.prepare(cache=str(tmp_path / "tokens"))
    args = Namespace(
        preset="nano",
        batch_size=12,
        vocab_size=None,
        device="cpu",
        precision="fp32",
        rounds=2,
        steps=2,
        folder=tmp_path,
    )
    kinds = ("plain loop", "mingpt")
    # Compiling takes longer than all else here.
    versions = {kind: gpt.Version(kind, False) for kind in kinds}
    turns = gpt.race(versions, args)
    for theirs, ours in zip(*turns.values(), strict=True):
        assert theirs.loss == pytest.approx(ours.loss, abs=1e-5)
        assert theirs.flops == ours.flops > 0
        assert theirs.tokens == ours.tokens == 2 * 12 * 64


@in_a_fork
def test_flops_are_those_that_pytorch_counts():
    config = GPTConfig(n_layer=2, n_head=2, n_embd=64, vocab_size=100, block_size=16)
    model = GPT(config)
    idx = torch.zeros(3, 16).long()
    # Of the other kernels for attention, it does not count all.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        _, loss = model(idx, idx)
        loss.backward()
    assert gpt.flops_per_token(model) * idx.numel() == counted.get_total_flops()
