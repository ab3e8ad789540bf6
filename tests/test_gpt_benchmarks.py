"""benchmarks.gpt and benchmarks.ablation measure the steps of mingpt.train."""

import math
from argparse import Namespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import ablation, gpt
from mingpt import data
from mingpt.model import GPT, GPTConfig
from tools.pages import explanations, parse

pytestmark = pytest.mark.waits


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
        assert theirs.seconds > 0 and ours.seconds > 0
    first, second = turns["plain loop"]
    assert second.loss < first.loss < math.log(120)


def test_flops_are_those_that_pytorch_counts():
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 100}
    model, idx = GPT(GPTConfig(**sizes, block_size=16)), torch.zeros(3, 16).long()
    # Of the other kernels for attention, it does not count all.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        model(idx, idx)[1].backward()
    assert gpt.flops_per_token(model) * idx.numel() == counted.get_total_flops()


def test_the_ablation_leaves_no_change_out():
    """test_gpt_modern.py trains each of its models."""
    places = explanations([parse("docs/modern_gpt.md")])[ablation.OLD, ablation.NEW]
    headings = {heading for _, heading, _ in places.values()}
    assert headings - {*ablation.CHANGES} == {"Name the parent and the sources"}


def test_the_ablation_goes_on_where_it_was(tmp_path, capsys):
    """It was killed in its last run, which it repeats."""
    path, lines = tmp_path / "results.csv", ablation.RESULTS.read_text().splitlines()
    path.write_text("\n".join(lines[:-1]) + "\n")
    results = ablation.Results(path)
    for kind in ("rate", "tokens", "time"):
        ablation.fill(results, kind, ablation.variants())
    assert capsys.readouterr().out.startswith("1/1 time: ")
    *run, loss, _ = lines[-1].split(",")
    *its_run, its_loss, _ = path.read_text().splitlines()[-1].split(",")
    assert its_run == run
    # The batches had another order then.
    assert float(its_loss) == pytest.approx(float(loss), abs=0.1)
