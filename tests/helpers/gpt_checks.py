"""What must hold for mingpt/model.py and mingpt/modern.py alike.

`module` is one of them, or any module with the same names.
"""

import torch

from tests.helpers.forked import in_a_fork


def build(module, **options):
    """A small GPT in float64, so that a comparison can be tight."""
    options = {
        "block_size": 16,
        "vocab_size": 31,
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 32,
        **options,
    }
    torch.manual_seed(0)
    return module.GPT(module.GPTConfig(**options)).double()


def awake(model):
    """`model` with weights so large, and none zero, that every part of it matters."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)
    return model


def tokens(model, length=16, seed=2):
    """Two rows of random tokens, by default as long as a model of `build` can see."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (2, length), generator=generator)


def check_causal(model):
    """A changed token moves no logit before it, and moves its own and all later ones.

    model: as it is, or compiled.
    """

    def logits_of(idx):
        torch.manual_seed(3)  # the same dropout each time
        logits, _ = model(idx)
        return logits.detach()

    idx = tokens(model)
    before = logits_of(idx)
    length = idx.size(1)
    for place in (1, length // 2, length - 1):
        changed = idx.clone()
        changed[:, place] = (idx[:, place] + 1) % model.config.vocab_size
        moved = logits_of(changed) - before
        moved = moved.abs().amax(dim=(0, 2))  # of each place
        assert moved[:place].max() < 1e-12, f"token {place} moved a logit before it"
        assert moved[place:].min() > 1e-6, f"token {place} moved no logit after it"


def check_cache(model):
    """Generation with and without the cache agrees, also past block_size."""
    idx = tokens(model, length=5)
    steps = 2 * model.config.block_size
    for options in ({"temperature": 0}, {}, {"temperature": 0.7, "top_k": 5}):
        texts = []
        for use_cache in (True, False):
            generator = torch.Generator().manual_seed(4)
            text = model.generate(
                idx, steps, use_cache=use_cache, generator=generator, **options
            )
            texts.append(text)
        cached, uncached = texts
        assert cached.shape == (2, 5 + steps)
        assert torch.equal(cached[:, :5], idx)
        assert torch.equal(cached, uncached)


@in_a_fork
def check_overfits(module, steps=80):
    """It learns one batch by heart, whose rows differ from their first token on."""
    model = build(module).float().train()
    optimizer = module.make_optimizer(model, lr=1e-2, weight_decay=0.0)
    torch.manual_seed(5)
    text = torch.randint(31, (4, 17))
    text[:, 0] = torch.arange(4)
    losses = []
    for _ in range(steps):
        _, loss = model(text[:, :-1], text[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 3
    assert losses[-1] < 0.05
