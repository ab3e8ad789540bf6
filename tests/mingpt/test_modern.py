"""mingpt/modern.py: what each of its changes claims.

test_model.py shows of both models what both must do.
"""

import re
from copy import deepcopy

import pytest
import torch
from torch.testing import assert_close

from mingpt import modern as module
from tests.helpers.forked import in_a_fork
from tests.helpers.gpt_checks import build, moved_by, tokens, with_large_weights


def loss_of(model):
    idx = tokens(model)
    _, loss = model(idx[:, :-1], idx[:, 1:])
    return loss


@in_a_fork
def test_it_learns_a_batch_by_heart():
    model = build(module, checkpoint=True).float()
    optimizer = module.make_optimizer(model, lr=1e-2, weight_decay=0.0)
    for _ in range(80):
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05


# What each change claims


def test_rotary_scores_depend_on_the_distance_alone():
    block = with_large_weights(build(module)).transformer.h[0]
    x = torch.randn(1, 6, 32, dtype=torch.float64)

    def output(start):
        return block(x, module.rotary(start, start + 6, head_size=16, device="cpu"))

    assert_close(output(0), output(50), rtol=0, atol=1e-3)


def test_rotary_angles_are_those_of_roformer():
    """From one position to the next, pair i of 4 turns by 10000 ** (-i / 4)."""
    with torch.device("meta"):  # tensors without a device come here, without values
        cos, sin = module.rotary(start=3, end=5, head_size=8, device="cpu")
    angles = torch.tensor([[3, 0.3, 0.03, 0.003], [4, 0.4, 0.04, 0.004]])
    assert_close(cos, angles.cos())
    assert_close(sin, angles.sin())


def test_queries_and_keys_are_turned():
    """Without positions, one layer would not see the order of earlier tokens."""
    model = with_large_weights(build(module, n_layer=1))
    idx = tokens(model)
    swapped = idx.clone()
    swapped[:, [0, 1]] = idx[:, [1, 0]]
    assert moved_by(model, idx, swapped)[2:].min() > 1e-6


def test_norms_do_not_center():
    model = build(module).transformer
    x = 3 + 5 * torch.randn(4, 32, dtype=torch.float64)
    expected = x / x.square().mean(dim=1, keepdim=True).sqrt()
    for norm in (model.h[0].ln_1, model.h[0].ln_2, model.ln_f):
        assert_close(norm(x), expected)


def test_qk_norm_makes_scores_independent_of_the_size_of_queries_and_keys():
    model = with_large_weights(build(module))
    idx = tokens(model)
    before, _ = model(idx)
    weight = model.transformer.h[0].attn.c_attn.weight.detach()
    weight[:64] *= 10  # above the values'
    after, _ = model(idx)
    assert_close(after, before)


def test_squared_relu_is_quadratic():
    mlp = with_large_weights(build(module)).transformer.h[0].mlp
    x = torch.randn(4, 32, dtype=torch.float64)
    inner = mlp.c_fc(x).clamp(min=0)
    assert_close(mlp(x), mlp.c_proj(inner**2))


def test_a_new_block_changes_nothing_and_the_head_is_the_embedding():
    model = build(module)
    idx = tokens(model)
    embedded = model.transformer.wte(idx)
    assert_close(model.hidden(idx), model.transformer.ln_f(embedded))
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.lm_head.weight.std() > 0.01


def test_only_matrices_are_left():
    model = build(module)
    assert {weight.dim() for weight in model.parameters()} == {2}
    assert "wpe" not in model.transformer


# The two optimizers behind one


@pytest.mark.waits
def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest():
    model = build(module)
    layer = model.transformer.h[0].mlp.c_fc
    layer.bias = torch.nn.Parameter(torch.zeros(len(layer.weight)))
    optimizer = module.make_optimizer(model, lr=1e-3, weight_decay=0.2)
    names = {weight: name for name, weight in model.named_parameters()}
    muon, decay, rest = [
        {names[weight] for weight in group["params"]}
        for group in optimizer.param_groups
    ]
    assert muon == {name for name in names.values() if re.search("c_.*weight", name)}
    assert decay == {"transformer.wte.weight"}
    assert rest == {"transformer.h.0.mlp.c_fc.bias"}
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    assert decays == [0.2, 0.2, 0]


def test_a_snapshot_of_two_optimizers_is_not_loaded_into_one():
    both = module.make_optimizer(build(module), lr=1e-3, weight_decay=0.1)
    alone = module.Together(both.optimizers[0])
    with pytest.raises(ValueError):
        alone.load_state_dict(both.state_dict())


@in_a_fork
def test_a_step_of_muon_is_orthogonal_and_as_large_as_one_of_adamw():
    model = with_large_weights(build(module)).float()
    optimizer = module.make_optimizer(model, lr=1e-2, weight_decay=0.0)
    before = deepcopy(model.state_dict())
    loss_of(model).backward()
    optimizer.step()
    for name, weight in model.named_parameters():
        step = (weight.detach() - before[name]) / 1e-2
        if name == "transformer.wte.weight":
            assert step.abs().max() == pytest.approx(1, abs=1e-3)
        else:
            # torch.optim.Muon multiplies its step by this with "match_rms_adamw".
            factor = 0.2 * max(step.shape) ** 0.5
            values = torch.linalg.svdvals(step / factor)
            assert values.max() < 1.4
            assert values.median() > 0.6


@in_a_fork
def test_a_scaler_skips_both_optimizers_or_none():
    """One infinite gradient, of either optimizer, and no weight of either moves."""
    model = with_large_weights(build(module)).float()
    optimizer = module.make_optimizer(model, lr=1e-2, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for spoiled in ("transformer.wte", "transformer.h.1.mlp.c_fc", None):
        before = deepcopy(model.state_dict())
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        if spoiled:
            model.get_submodule(spoiled).weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        for name, weight in model.state_dict().items():
            assert torch.equal(weight, before[name]) == bool(spoiled), name
