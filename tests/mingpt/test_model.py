"""mingpt/model.py: causality, the loss, the cache, the sizes, the optimizer.

What holds for mingpt/modern.py, too, is tested of both.
"""

from types import SimpleNamespace

import pytest
import torch

from mingpt import cpu_attention, loading, modern, options
from mingpt import model as module
from tests.helpers.forked import in_a_fork
from tests.helpers.gpt_checks import awake, build, check_cache, check_causal, tokens

CAN_COMPILE = options.can_compile(torch.device("cpu"))
both = pytest.mark.parametrize("which", [module, modern], ids=["model", "modern"])


@both
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_causal(which, checkpoint, dropout):
    check_causal(awake(build(which, checkpoint=checkpoint, dropout=dropout)).train())


@pytest.mark.waits
@pytest.mark.skipif(not CAN_COMPILE, reason="torch.compile needs a C++ compiler")
@both
@in_a_fork
def test_causal_compiled(which):
    model = awake(build(which, n_layer=1, dropout=0.2)).train()
    check_causal(torch.compile(model))


def test_attention_in_bfloat16_on_a_cpu():
    """It is written out there. It gives what PyTorch's kernel gives."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 16, 8).bfloat16() for _ in range(3))
    y = cpu_attention.attention(q, k, v, 0.0)
    exact = module.attention(*(x.float() for x in (q, k, v)), 0.0)
    assert y.dtype == torch.bfloat16 and torch.allclose(y.float(), exact, atol=0.02)
    drawn = [cpu_attention.attention(q, k, v, 0.2).float() for _ in range(2000)]
    assert torch.allclose(torch.stack(drawn).mean(0), exact, atol=0.1)


@both
def test_it_is_chosen_for_bfloat16_on_a_cpu_alone(which, monkeypatch):
    args = dict.fromkeys(["init_from", "checkpoint"]) | options.PRESETS["nano"]
    args |= {"model": which.__name__, "dropout": 0.0, "weight_decay": 0.0}
    for precision, its in (("fp32", which), ("bf16", cpu_attention), ("bf16", which)):
        how = SimpleNamespace(**args, precision=precision), 31, torch.device("cpu")
        model, _ = loading.load_model(*how)
        assert model.transformer.h[0].attn.attention is its.attention
        if precision == "bf16":  # a model of your own may have no such field
            monkeypatch.delattr(which.GPTConfig, "attention", raising=False)


@pytest.mark.parametrize(
    ("its", "precision"),
    [
        ({}, "fp32"),  # a Mac says neither
        ({"amx_bf16": True, "avx512_bf16": True, "cpu_name": "Intel Xeon"}, "bf16"),
        ({"amx_bf16": False, "avx512_bf16": True, "cpu_name": "AMD EPYC"}, "bf16"),
        ({"amx_bf16": False, "avx512_bf16": True, "cpu_name": "Intel Xeon"}, "fp32"),
    ],
)
def test_auto_is_bfloat16_where_the_cpu_is_faster_in_it(monkeypatch, its, precision):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: its)
    args = SimpleNamespace(precision="auto", compile="off")
    options.settle(args, torch.device("cpu"))
    assert args.precision == precision


@both
def test_in_16_bits_the_attention_is_and_the_loss_is_not(which):
    seen = []

    def attend(*tensors):
        seen.append(which.attention(*tensors).dtype)
        return which.attention(*tensors)

    model = awake(build(which, attention=attend)).float()
    idx, targets = tokens(model), tokens(model, seed=7)
    exact = model(idx, targets)[1]
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(idx, targets)
    assert set(seen[model.config.n_layer :]) == {torch.bfloat16}
    assert (logits.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    assert abs(loss - exact) < 0.05 * exact
    if which is module:  # modern.py needs autocast: it rotates in float32
        assert model.bfloat16()(idx, targets)[1].dtype == torch.float32


@in_a_fork
def test_checkpoint_changes_the_memory_and_no_gradient():
    found = []
    for checkpoint in (False, True):
        kept = []
        model = awake(build(module, checkpoint=checkpoint, dropout=0.2)).train()
        idx, targets = tokens(model), tokens(model, seed=7)
        torch.manual_seed(8)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, kept=kept: kept.append(x.numel()) or x, lambda x: x
        ):
            loss = model(idx, targets)[1]
        loss.backward()
        found.append((sum(kept), loss, [p.grad for p in model.parameters()]))
    assert found[1][0] < found[0][0] / 2
    torch.testing.assert_close(found[1][1:], found[0][1:], rtol=0, atol=0)


@both
def test_cached_generation_equals_uncached(which):
    check_cache(awake(build(which)))


def test_generation_is_not_compiled():
    """A compiled model would be compiled anew for each length of the text."""
    graphs = []
    model = build(module)
    model.compile(backend=lambda graph, x: graphs.append(graph) or graph.forward)
    model.generate(tokens(model, length=3), 2)
    assert not graphs
    model(tokens(model))
    assert len(graphs) == 1


def test_temperature_and_top_k_choose():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]]).repeat(4000, 1)

    def shares(temperature, top_k):
        generator = torch.Generator().manual_seed(9)
        drawn = module.sample(logits, temperature, top_k, generator)
        assert drawn.shape == (4000, 1)
        return drawn.flatten().bincount(minlength=4) / 4000

    for temperature in (0.5, 2.0):
        expected = (logits[0] / temperature).softmax(0)
        assert (shares(temperature, None) - expected).abs().max() < 0.03
    assert shares(1.0, 2).gt(0).tolist() == [False, True, False, True]
    assert shares(1.0, 9).gt(0).all()
    assert shares(0, None).tolist() == shares(1.0, 1).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize(
    "preset, parameters", [("gpt2", 124_439_808), ("gpt2-xl", 1_557_611_200)]
)
def test_presets_have_the_parameters_of_gpt2(preset, parameters):
    sizes = {name: options.PRESETS[preset][name] for name in options.SIZES}
    with torch.device("meta"):
        model = module.GPT(module.GPTConfig(**sizes))
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_initial_weights_are_those_of_gpt2():
    model = build(module, n_embd=256, n_layer=8, vocab_size=500)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert p.count_nonzero() == 0
        elif p.dim() == 1:
            assert p.eq(1).all()
        else:
            expected = 0.02 / 4 if name.endswith("c_proj.weight") else 0.02
            assert p.std().item() == pytest.approx(expected, rel=0.05), name


def test_only_matrices_and_embeddings_decay():
    model = build(module)
    optimizer = module.make_optimizer(model, 1e-3, 0.1)
    names = {p: name for name, p in model.named_parameters()}
    decayed, others = (
        {names[p] for p in group["params"]} for group in optimizer.param_groups
    )
    assert decayed | others == set(names.values())
    assert {n for n in names.values() if n.endswith(".bias") or ".ln_" in n} == others
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    assert decays == [0.1, 0.0]
    for group in optimizer.param_groups:
        assert group["lr"] == group["initial_lr"] == 1e-3
        assert group["betas"] == (0.9, 0.95)
        assert group["fused"]
