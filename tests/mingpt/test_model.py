"""mingpt/model.py: causality, the loss, the cache, the sizes, the optimizer.

What holds for mingpt/modern.py, too, is tested of both.
"""

import pytest
import torch

from mingpt import cpu_attention, generation, loading, modern, options
from mingpt import model as module
from tests.helpers.forked import in_a_fork
from tests.helpers.gpt_checks import awake, build, check_cache, check_causal, tokens

CAN_COMPILE = options.can_compile(torch.device("cpu"))
both = pytest.mark.parametrize("which", [module, modern], ids=["model", "modern"])


@both
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_causal(which, checkpoint, dropout):
    model = build(which, checkpoint=checkpoint, dropout=dropout)
    check_causal(awake(model).train())


@pytest.mark.waits
@pytest.mark.skipif(not CAN_COMPILE, reason="torch.compile needs a C++ compiler")
@both
@in_a_fork
def test_causal_compiled(which):
    model = build(which, n_layer=1, dropout=0.2)
    check_causal(torch.compile(awake(model).train()))


def test_attention_in_bfloat16_on_a_cpu():
    """It is written out there. It gives what PyTorch's kernel gives."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 16, 8).bfloat16()
    exact = module.attention(q.float(), k.float(), v.float(), dropout=0.0)

    y = cpu_attention.attention(q, k, v, dropout=0.0)
    assert y.dtype == torch.bfloat16
    assert torch.allclose(y.float(), exact, atol=0.02)

    # The mean over many draws of the dropout is what there is without it.
    mean = torch.zeros_like(exact)
    for _ in range(2000):
        mean += cpu_attention.attention(q, k, v, dropout=0.2).float() / 2000
    assert torch.allclose(mean, exact, atol=0.1)


@both
def test_it_is_chosen_for_bfloat16_on_a_cpu_alone(which, monkeypatch):
    def chosen(precision):
        words = ["--model", which.__name__, "--precision", precision]
        words += ["--device", "cpu", "--compile", "off"]
        configuration = options.resolve(options.make_parser("").parse_args(words))
        model = loading.load_model(configuration, vocab_size=31)
        return model.transformer.h[0].attn.attention

    assert chosen("fp32") is which.attention
    assert chosen("bf16") is cpu_attention.attention
    # A model of your own may have no such field.
    monkeypatch.delattr(which.GPTConfig, "attention")
    assert chosen("bf16") is which.attention


@pytest.mark.parametrize(
    ("cpu_name", "amx_bf16", "precision"),
    [
        (None, False, "fp32"),  # a Mac says neither
        ("Intel Xeon", True, "bf16"),
        ("AMD EPYC", False, "bf16"),
        ("Intel Xeon", False, "fp32"),
    ],
)
def test_auto_is_bfloat16_where_the_cpu_is_faster_in_it(
    monkeypatch, cpu_name, amx_bf16, precision
):
    capabilities = {}
    if cpu_name:
        capabilities = {
            "cpu_name": cpu_name,
            "amx_bf16": amx_bf16,
            "avx512_bf16": True,
        }
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert options.fast_precision(torch.device("cpu")) == precision


def test_a_preset_gives_what_is_not_typed():
    def resolve(*words):
        words = ["--device", "cpu", "--preset", "gpt2", *words]
        return options.resolve(options.make_parser("").parse_args(words))

    found = resolve("--n-layer", "2", "--lr", "0.5")
    assert (found.n_layer, found.block_size) == (2, 1024)
    assert (found.lr, found.batch_size) == (0.5, 64)
    assert (found.steps, found.eval_every) == (20_000, 2000)
    assert found.precision in options.DTYPES
    assert isinstance(found.compile, bool)
    # GPT-2's weights know their own size.
    found = resolve("--init-from", "gpt2", "--n-head", "12")
    assert (found.n_layer, found.n_head) == (None, 12)
    assert found.batch_size == 64


@both
def test_in_16_bits_the_attention_is_and_the_loss_is_not(which):
    dtypes = []

    def attend(*tensors):
        y = which.attention(*tensors)
        dtypes.append(y.dtype)
        return y

    model = awake(build(which, attention=attend)).float()
    idx = tokens(model)
    targets = tokens(model, seed=7)
    _, exact = model(idx, targets)
    dtypes.clear()
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(idx, targets)
    assert set(dtypes) == {torch.bfloat16}
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert abs(loss - exact) < 0.05 * exact
    if which is module:  # modern.py needs autocast: it rotates in float32
        _, loss = model.bfloat16()(idx, targets)
        assert loss.dtype == torch.float32


@in_a_fork
def test_checkpoint_changes_the_memory_and_no_gradient():
    def step(checkpoint):
        """(how many numbers are kept for the backward pass, the loss, the gradients)"""
        model = awake(build(module, checkpoint=checkpoint, dropout=0.2)).train()
        kept = 0

        def keep(tensor):
            nonlocal kept
            kept += tensor.numel()
            return tensor

        def use(tensor):
            return tensor

        torch.manual_seed(8)  # the same dropout each time
        with torch.autograd.graph.saved_tensors_hooks(keep, use):
            _, loss = model(tokens(model), tokens(model, seed=7))
        loss.backward()
        return kept, loss, [weight.grad for weight in model.parameters()]

    all_kept, *expected = step(checkpoint=False)
    few_kept, *found = step(checkpoint=True)
    assert few_kept < all_kept / 2
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@both
def test_cached_generation_equals_uncached(which):
    check_cache(awake(build(which)))


@in_a_fork
def test_generation_is_not_compiled():
    """A compiled model would be compiled anew for each length of the text."""
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    model = build(module, n_layer=1)
    model.compile(backend=backend)
    model.generate(tokens(model, length=3), 2)
    assert not graphs
    model(tokens(model))
    assert len(graphs) == 1


def test_temperature_and_top_k_choose():
    row = torch.tensor([0.0, 3.0, 1.0, 2.0])
    logits = row.repeat(4000, 1)

    def shares(temperature, top_k):
        """How often each of the four tokens is drawn."""
        generator = torch.Generator().manual_seed(9)
        drawn = generation.sample(logits, temperature, top_k, generator)
        assert drawn.shape == (4000, 1)
        return drawn.flatten().bincount(minlength=4) / 4000

    for temperature in (0.5, 2.0):
        expected = (row / temperature).softmax(0)
        found = shares(temperature, top_k=None)
        assert torch.allclose(found, expected, rtol=0, atol=0.03)
    are_drawn = shares(1.0, top_k=2) > 0
    assert are_drawn.tolist() == [False, True, False, True]
    assert shares(1.0, top_k=9).all()
    assert shares(0, top_k=None).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize(
    "preset, parameters", [("gpt2", 124_439_808), ("gpt2-xl", 1_557_611_200)]
)
def test_presets_have_the_parameters_of_gpt2(preset, parameters):
    sizes = dict(zip(options.SIZES, options.PRESETS[preset], strict=False))
    with torch.device("meta"):
        model = module.GPT(module.GPTConfig(**sizes))
    assert sum(weight.numel() for weight in model.parameters()) == parameters


def test_initial_weights_are_those_of_gpt2():
    model = build(module, n_embd=256, n_layer=8, vocab_size=500)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            assert not weight.any()
        elif weight.dim() == 1:
            assert weight.eq(1).all()
        else:
            expected = 0.02
            if name.endswith("c_proj.weight"):  # the root of 2 * 8 layers is 4
                expected = 0.02 / 4
            assert weight.std().item() == pytest.approx(expected, rel=0.05), name


def test_only_matrices_and_embeddings_decay():
    model = build(module)
    optimizer = module.make_optimizer(model, lr=1e-3, weight_decay=0.1)
    matrices = set()
    vectors = set()
    for name, weight in model.named_parameters():
        if name.endswith(".bias") or ".ln_" in name:
            vectors.add(weight)
        else:
            matrices.add(weight)
    decayed, others = optimizer.param_groups
    assert set(decayed["params"]) == matrices
    assert set(others["params"]) == vectors
    assert decayed["weight_decay"] == 0.1
    assert others["weight_decay"] == 0.0
