"""What must hold for mingpt/model.py and mingpt/modern.py alike.

`module` is one of them, or any module with the same names.
"""

import torch


def build(module, **options):
    """A small GPT in float64, so that a comparison can be tight."""
    size = {"block_size": 16, "vocab_size": 31, "n_layer": 2, "n_head": 2, "n_embd": 32}
    torch.manual_seed(0)
    return module.GPT(module.GPTConfig(**size | options)).double()


def with_large_weights(model):
    """The model, with large weights, none of them zero: every part of it matters."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)
    return model


def tokens(model, length=16, seed=2):
    """Two rows of random tokens, by default as long as a model of `build` can see."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (2, length), generator=generator)


def moved_by(model, before, after):
    """How far the logits of each place move when one text takes another's place.

    model: as it is, or compiled.
    """

    def logits_of(idx):
        torch.manual_seed(3)  # the same dropout each time
        logits, _ = model(idx)
        return logits.detach()

    moved = logits_of(after) - logits_of(before)
    return moved.abs().amax(dim=(0, 2))


def check_causal(model):
    """A changed token moves no logit before it, but its own and all later ones."""
    idx = tokens(model)
    for place in (1, 8, 15):
        changed = idx.clone()
        changed[:, place] = (idx[:, place] + 1) % model.config.vocab_size
        moved = moved_by(model, idx, changed)
        assert moved[:place].max() < 1e-12, f"token {place} moved a logit before it"
        assert moved[place:].min() > 1e-6, f"token {place} moved no logit after it"


def check_cache(model):
    """Generation with and without the cache agrees, also past block_size."""
    idx = tokens(model, length=5)

    def text(use_cache):
        generator = torch.Generator().manual_seed(4)
        return model.generate(idx, 32, use_cache=use_cache, generator=generator)

    cached = text(use_cache=True)
    assert torch.equal(cached[:, :5], idx)
    assert torch.equal(cached, text(use_cache=False))
