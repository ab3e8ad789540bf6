"""mingpt/modern.py: each change alone, all but each, and what each of them claims.

test_model.py shows of both models what both must do.
"""

import functools

import pytest
import torch

from benchmarks import ablation
from mingpt import modern as module
from tests.helpers.forked import in_a_fork
from tests.helpers.gpt_checks import (
    awake,
    build,
    check_cache,
    check_causal,
    check_overfits,
    tokens,
)

variants = functools.cache(ablation.variants)


def module_with(variant):
    return ablation.load(variant, variants()[variant])


@pytest.mark.waits
@pytest.mark.parametrize("which", ["one in", "one out"])
@pytest.mark.parametrize("change", ablation.CHANGES.values())
def test_each_change_works_alone_and_the_others_without_it(change, which):
    out = which == "one out"
    changes = [x for x in ablation.CHANGES.values() if (x == change) != out]
    made = module_with(f"{which}: {change}")
    model = awake(build(made, checkpoint=True))
    check_causal(model)
    check_cache(model)
    check_overfits(made)
    # The change is there, or all the others are.
    names = {name for name, _ in model.named_parameters()}
    assert ("transformer.wpe.weight" in names) == ("rotary positions" not in changes)
    assert ("transformer.ln_f.weight" in names) == ("RMSNorm" not in changes)
    assert ("transformer.h.0.mlp.c_fc.bias" in names) == ("no biases" not in changes)
    starts_at_zero = not build(made).transformer.h[0].mlp.c_proj.weight.any()
    assert starts_at_zero == ("zero init" in changes)
    optimizer = made.make_optimizer(model, 1e-3, 0.1)
    has_muon = not isinstance(optimizer, torch.optim.AdamW)
    assert has_muon == ("Muon" in changes)


# What each change claims


def test_rotary_scores_depend_on_the_distance_alone():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 6, 8, dtype=torch.float64)

    def scores(start):
        cos_sin = module.rotary(start, start + 6, 8, q.device)
        q_turned, k_turned = (module.apply_rotary(x, cos_sin) for x in (q, k))
        assert torch.allclose(q_turned.norm(dim=-1), q.norm(dim=-1))
        return q_turned @ k_turned.mT

    torch.testing.assert_close(scores(0), scores(50), rtol=0, atol=1e-5)


def test_rotary_angles_are_those_of_roformer():
    """From one position to the next, pair i of 4 turns by 10000 ** (-i / 4)."""
    cos, sin = module.rotary(3, 5, 8, "cpu")
    angles = torch.tensor([[3, 0.3, 0.03, 0.003], [4, 0.4, 0.04, 0.004]])
    torch.testing.assert_close((cos, sin), (angles.cos(), angles.sin()))


def test_queries_and_keys_are_turned():
    """Without positions, one layer would not see the order of earlier tokens."""
    model = awake(build(module, n_layer=1))
    idx = tokens(model)
    swapped = idx[:, [1, 0, *range(2, 16)]]
    moved = (model(idx)[0] - model(swapped)[0])[:, 2:].abs().amax(dim=(0, 2))
    assert moved.min() > 1e-6


def test_norms_have_no_parameters_and_do_not_center():
    model = build(module)
    norms = [m for m in model.modules() if isinstance(m, torch.nn.RMSNorm)]
    assert len(norms) == 2 * model.config.n_layer + 1
    assert not [p for norm in norms for p in norm.parameters()]
    x = 3 + 5 * torch.randn(4, 32, dtype=torch.float64)
    torch.testing.assert_close(norms[0](x), x / x.square().mean(1, True).sqrt())


def test_qk_norm_makes_scores_independent_of_the_size_of_queries_and_keys():
    model = awake(build(module))
    idx = tokens(model)
    before = model(idx)[0]
    for name, changed in (("queries", slice(0, 32)), ("values", slice(64, 96))):
        with torch.no_grad():
            model.transformer.h[0].attn.c_attn.weight[changed] *= 10
        same = torch.allclose(model(idx)[0], before)
        assert same == (name == "queries")


def test_squared_relu_is_quadratic():
    mlp = awake(build(module)).transformer.h[0].mlp
    x = torch.randn(4, 32, dtype=torch.float64)
    torch.testing.assert_close(mlp(2 * x), 4 * mlp(x))
    inner = x @ mlp.c_fc.weight.T
    expected = torch.where(inner > 0, inner**2, 0) @ mlp.c_proj.weight.T
    torch.testing.assert_close(mlp(x), expected)


def test_a_new_block_changes_nothing_and_the_head_is_the_embedding():
    model = build(module)
    x = model.transformer.wte(tokens(model))
    torch.testing.assert_close(model.hidden(tokens(model)), model.transformer.ln_f(x))
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.lm_head.weight.std() > 0.01


def test_only_matrices_are_left():
    assert {p.dim() for p in build(module).parameters()} == {2}


# The two optimizers behind one


def take_step(model, optimizer):
    idx = tokens(model, seed=0)
    model(idx[:, :-1], idx[:, 1:])[1].backward()
    optimizer.step()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.waits
def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest():
    made = module_with("one in: Muon")  # with biases and norms
    model = build(made)
    optimizer = made.make_optimizer(model, 1e-3, 0.1)
    names = {p: name for name, p in model.named_parameters()}
    muon, decay, rest = (
        [names[p] for p in group["params"]] for group in optimizer.param_groups
    )
    assert sorted(muon + decay + rest) == sorted(names.values())
    matrices = [n for n in names.values() if ".c_" in n and n.endswith(".weight")]
    assert muon == matrices
    assert decay == ["transformer.wte.weight", "transformer.wpe.weight"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0]
    for group in optimizer.param_groups:
        assert group["lr"] == group["initial_lr"] == 1e-3


@in_a_fork
def test_a_step_of_muon_is_orthogonal_and_as_large_as_one_of_adamw():
    model = awake(build(module)).float()
    optimizer = module.make_optimizer(model, 1e-2, 0.0)
    before = weights(model)
    take_step(model, optimizer)
    for (name, p), old in zip(model.named_parameters(), before, strict=True):
        step = (p.detach() - old) / 1e-2
        if name == "transformer.wte.weight":
            assert step.abs().max() == pytest.approx(1, abs=1e-3)
        else:
            values = torch.linalg.svdvals(step / (0.2 * max(step.shape) ** 0.5))
            assert values.max() < 1.4
            assert values.median() > 0.6


@pytest.mark.parametrize("name", ["transformer.wte", "transformer.h.1.mlp.c_fc"])
@in_a_fork
def test_a_scaler_skips_both_optimizers_or_none(name):
    """One infinite gradient, of either optimizer, and no weight of either moves."""
    model = build(module).float()
    optimizer = module.make_optimizer(model, 1e-2, 0.1)
    take_step(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    idx = tokens(model)
    for spoiled in (True, False):
        before = weights(model)
        optimizer.zero_grad()
        scaler.scale(model(idx[:, :-1], idx[:, 1:])[1]).backward()
        gradient = model.get_submodule(name).weight.grad
        if spoiled:
            gradient[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        pairs = zip(weights(model), before, strict=True)
        moved = [not torch.equal(a, b) for a, b in pairs]
        assert not any(moved) if spoiled else all(moved)
        assert scaler.get_scale() == 512
