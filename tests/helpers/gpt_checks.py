"""A small GPT of mingpt/model.py or mingpt/modern.py, and what moves its logits."""

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
