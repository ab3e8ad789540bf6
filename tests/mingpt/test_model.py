"""mingpt/model.py: causality, the loss, the cache, the sizes, the choices.

What holds for mingpt/modern.py, too, is tested of both.
"""

import pytest
import torch
from torch.testing import assert_close

from mingpt import generation, loading, modern, options
from mingpt import model as module
from tests.helpers.forked import in_a_fork
from tests.helpers.gpt_checks import (
    build,
    moved_by,
    tokens,
    with_large_weights,
)

CAN_COMPILE = options.can_compile(torch.device("cpu"))
both = pytest.mark.parametrize("which", [module, modern], ids=["model", "modern"])


def check_causal(model):
    """A changed token moves no logit before it, but its own and all later ones."""
    idx = tokens(model)
    for place in (1, 8, 15):
        changed = idx.clone()
        changed[:, place] = (idx[:, place] + 1) % model.config.vocab_size
        moved = moved_by(model, idx, changed)
        assert moved[:place].max() < 1e-12, f"token {place} moved a logit before it"
        assert moved[place:].min() > 1e-6, f"token {place} moved no logit after it"


@both
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_causal(which, checkpoint, dropout):
    model = build(which, checkpoint=checkpoint, dropout=dropout)
    check_causal(with_large_weights(model).train())


@pytest.mark.waits
@pytest.mark.skipif(not CAN_COMPILE, reason="torch.compile needs a C++ compiler")
@both
@in_a_fork
def test_causal_compiled(which):
    model = build(which, n_layer=1, dropout=0.2)
    check_causal(torch.compile(with_large_weights(model).train()))


@both
def test_in_16_bits_the_attention_is_and_the_loss_is_not(which):
    dtypes = []

    def attend(*tensors):
        y = which.attention(*tensors)
        dtypes.append(y.dtype)
        return y

    model = with_large_weights(build(which)).float()
    for block in model.transformer.h:
        block.attn.attention = attend
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(tokens(model), tokens(model, seed=7))
    assert set(dtypes) == {torch.bfloat16}
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32


@in_a_fork
def test_checkpoint_changes_the_memory_and_no_gradient():
    def step(checkpoint):
        """(how many numbers are kept for the backward pass, the gradients)"""
        model = build(module, checkpoint=checkpoint, dropout=0.2)
        with_large_weights(model)
        kept = []

        def keep(tensor):
            kept.append(tensor.numel())
            return tensor

        torch.manual_seed(8)  # the same dropout each time
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            _, loss = model(tokens(model), tokens(model, seed=7))
        loss.backward()
        return sum(kept), [weight.grad for weight in model.parameters()]

    all_kept, expected = step(checkpoint=False)
    few_kept, found = step(checkpoint=True)
    assert few_kept < all_kept / 2
    assert_close(found, expected, rtol=0, atol=0)


@both
def test_cached_generation_equals_uncached(which):
    """Also past block_size."""
    model = with_large_weights(build(which))
    idx = tokens(model, length=5)

    def text(use_cache):
        generator = torch.Generator().manual_seed(4)
        return model.generate(idx, 32, use_cache=use_cache, generator=generator)

    cached = text(use_cache=True)
    assert torch.equal(cached[:, :5], idx)
    assert torch.equal(cached, text(use_cache=False))


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
    torch.manual_seed(9)

    def shares(temperature, top_k=None):
        """How often each of the four tokens is drawn."""
        drawn = generation.sample(row.repeat(4000, 1), temperature, top_k, None)
        return drawn.flatten().bincount(minlength=4) / 4000

    assert_close(shares(2), (row / 2).softmax(0), rtol=0, atol=0.03)
    assert shares(1, top_k=2).count_nonzero() == 2
    assert shares(1, top_k=9).all()
    assert shares(0).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize(
    "preset, parameters, accumulate",
    [("gpt2", 124_439_808, 4), ("gpt2-xl", 1_557_611_200, 32)],
)
def test_presets_have_the_parameters_of_gpt2(preset, parameters, accumulate):
    """And eight processes take as many tokens in a step as the page says."""
    words = ["--preset", preset, "--device=cpu", "--compile=off"]
    run = options.resolve(options.make_parser("").parse_args(words))
    assert 8 * run.batch_size * run.block_size == 524_288
    assert run.accumulate == accumulate
    with torch.device("meta"):
        model = loading.load_model(run, vocab_size=50257)
    assert sum(weight.numel() for weight in model.parameters()) == parameters
