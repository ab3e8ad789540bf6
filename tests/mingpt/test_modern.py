"""mingpt/modern.py: each change alone, all but each, and what each of them claims.

test_model.py shows of both models what both must do.
"""

import functools

import pytest
import torch

import utils
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
    made = module_with(f"{which}: {change}")
    model = awake(build(made, checkpoint=True))
    check_causal(model)
    check_cache(model)
    check_overfits(made)

    # The change is there, or all the others are.
    changes = {change}
    if which == "one out":
        changes = {*ablation.CHANGES.values()} - {change}
    names = {name for name, _ in model.named_parameters()}
    assert ("transformer.wpe.weight" in names) == ("rotary positions" not in changes)
    assert ("transformer.ln_f.weight" in names) == ("RMSNorm" not in changes)
    assert ("transformer.h.0.mlp.c_fc.bias" in names) == ("no biases" not in changes)
    block = build(made).transformer.h[0]
    starts_at_zero = not block.mlp.c_proj.weight.any()
    assert starts_at_zero == ("zero init" in changes)
    optimizer = made.make_optimizer(model, lr=1e-3, weight_decay=0.1)
    has_muon = not isinstance(optimizer, torch.optim.AdamW)
    assert has_muon == ("Muon" in changes)


# What each change claims


def test_rotary_scores_depend_on_the_distance_alone():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 6, 8, dtype=torch.float64)

    def scores(start):
        cos_sin = module.rotary(start, start + 6, head_size=8, device="cpu")
        q_turned = module.apply_rotary(q, cos_sin)
        k_turned = module.apply_rotary(k, cos_sin)
        assert torch.allclose(q_turned.norm(dim=-1), q.norm(dim=-1))
        return q_turned @ k_turned.mT

    torch.testing.assert_close(scores(0), scores(50), rtol=0, atol=1e-5)


def test_rotary_angles_are_those_of_roformer():
    """From one position to the next, pair i of 4 turns by 10000 ** (-i / 4)."""
    with torch.device("meta"):  # tensors without a device come here, without values
        cos, sin = module.rotary(start=3, end=5, head_size=8, device="cpu")
    angles = torch.tensor([[3, 0.3, 0.03, 0.003], [4, 0.4, 0.04, 0.004]])
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())


def test_queries_and_keys_are_turned():
    """Without positions, one layer would not see the order of earlier tokens."""
    model = awake(build(module, n_layer=1))
    idx = tokens(model)
    swapped = idx.clone()
    swapped[:, 0] = idx[:, 1]
    swapped[:, 1] = idx[:, 0]
    before, _ = model(idx)
    after, _ = model(swapped)
    moved = (after - before).abs().amax(dim=(0, 2))  # of each place
    assert moved[2:].min() > 1e-6


def test_norms_have_no_parameters_and_do_not_center():
    model = build(module)
    norms = [part for part in model.modules() if isinstance(part, torch.nn.RMSNorm)]
    assert len(norms) == 2 * model.config.n_layer + 1
    assert not any(list(norm.parameters()) for norm in norms)
    x = 3 + 5 * torch.randn(4, 32, dtype=torch.float64)
    root_mean_square = x.square().mean(dim=1, keepdim=True).sqrt()
    torch.testing.assert_close(norms[0](x), x / root_mean_square)


def test_qk_norm_makes_scores_independent_of_the_size_of_queries_and_keys():
    model = awake(build(module))
    idx = tokens(model)
    before, _ = model(idx)
    weight = model.transformer.h[0].attn.c_attn.weight.detach()
    queries, keys, values = weight.chunk(3)
    queries *= 10
    keys *= 10
    after, _ = model(idx)
    assert torch.allclose(after, before)
    values *= 10
    after, _ = model(idx)
    assert not torch.allclose(after, before)


def test_squared_relu_is_quadratic():
    model = awake(build(module))
    mlp = model.transformer.h[0].mlp
    x = torch.randn(4, 32, dtype=torch.float64)
    torch.testing.assert_close(mlp(2 * x), 4 * mlp(x))
    inner = x @ mlp.c_fc.weight.T
    inner = torch.where(inner > 0, inner**2, 0)
    torch.testing.assert_close(mlp(x), inner @ mlp.c_proj.weight.T)


def test_a_new_block_changes_nothing_and_the_head_is_the_embedding():
    model = build(module)
    idx = tokens(model)
    embedded = model.transformer.wte(idx)
    expected = model.transformer.ln_f(embedded)
    torch.testing.assert_close(model.hidden(idx), expected)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.lm_head.weight.std() > 0.01


def test_only_matrices_are_left():
    model = build(module)
    assert {weight.dim() for weight in model.parameters()} == {2}


# The two optimizers behind one


def take_step(model, optimizer):
    loss_of(model, seed=0).backward()
    optimizer.step()


def loss_of(model, seed=2):
    idx = tokens(model, seed=seed)
    _, loss = model(idx[:, :-1], idx[:, 1:])
    return loss


def copies(model):
    return [weight.detach().clone() for weight in model.parameters()]


@pytest.mark.waits
def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest():
    made = module_with("one in: Muon")  # with biases and norms
    model = build(made)
    optimizer = made.make_optimizer(model, lr=1e-3, weight_decay=0.2)
    names = {weight: name for name, weight in model.named_parameters()}

    def names_in(group):
        return [names[weight] for weight in group["params"]]

    muon, decay, rest = map(names_in, optimizer.param_groups)
    assert sorted(muon + decay + rest) == sorted(names.values())
    in_blocks = [name for name in names.values() if ".c_" in name]
    assert muon == [name for name in in_blocks if name.endswith(".weight")]
    assert decay == ["transformer.wte.weight", "transformer.wpe.weight"]
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    assert decays == [0.2, 0.2, 0]


def test_a_snapshot_of_two_optimizers_is_not_loaded_into_one():
    model = build(module)
    both = module.make_optimizer(model, lr=1e-3, weight_decay=0.1)
    alone = module.Together(both.optimizers[0])
    state = both.state_dict()
    with pytest.raises(ValueError):
        alone.load_state_dict(state)


def test_settings_that_a_snapshot_replaces_are_printed(capsys):
    model = build(module)
    saved = module.make_optimizer(model, 1e-3, weight_decay=0.1).state_dict()
    here = module.make_optimizer(model, 1e-3, weight_decay=0.2).state_dict()
    utils.print_replaced(saved, here, "mingpt.pt")
    # Each of the two optimizers has a group with weight decay.
    assert capsys.readouterr().out.count("weight_decay is 0.1 as in mingpt.pt") == 2


@in_a_fork
def test_a_step_of_muon_is_orthogonal_and_as_large_as_one_of_adamw():
    model = awake(build(module)).float()
    lr = 1e-2
    optimizer = module.make_optimizer(model, lr, weight_decay=0.0)
    names = [name for name, _ in model.named_parameters()]
    before = copies(model)
    take_step(model, optimizer)
    for name, old, new in zip(names, before, copies(model), strict=True):
        step = (new - old) / lr
        if name == "transformer.wte.weight":
            assert step.abs().max() == pytest.approx(1, abs=1e-3)
        else:
            # torch.optim.Muon multiplies its step by this with "match_rms_adamw".
            factor = 0.2 * max(step.shape) ** 0.5
            values = torch.linalg.svdvals(step / factor)
            assert values.max() < 1.4
            assert values.median() > 0.6


@pytest.mark.parametrize("name", ["transformer.wte", "transformer.h.1.mlp.c_fc"])
@in_a_fork
def test_a_scaler_skips_both_optimizers_or_none(name):
    """One infinite gradient, of either optimizer, and no weight of either moves."""
    model = build(module).float()
    optimizer = module.make_optimizer(model, lr=1e-2, weight_decay=0.1)
    take_step(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for spoiled in (True, False):
        before = copies(model)
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        if spoiled:
            gradient = model.get_submodule(name).weight.grad
            gradient[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        stayed = list(map(torch.equal, copies(model), before))
        if spoiled:
            assert all(stayed)
        else:
            assert not any(stayed)
        assert scaler.get_scale() == 512  # halved by the infinite gradient
