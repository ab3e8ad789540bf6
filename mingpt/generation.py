"""How a GPT writes, one token after another. For model.py and modern.py.

In the shapes below, B is the batch, T the tokens of a sequence and V the size of the
vocabulary.
"""

import torch


class KVCache:
    """The keys and values that one layer has computed, so that it does so only once."""

    length = 0  # how many tokens it has

    def extend(self, k, v):
        """Append k and v, (B, heads, T, head size) each. Return all of them."""
        if self.length:
            k = torch.cat((self.k, k), dim=2)
            v = torch.cat((self.v, v), dim=2)
        self.length = k.size(2)
        self.k = k
        self.v = v
        return k, v


@torch.no_grad()
def generate(
    model, idx, count, temperature=1.0, top_k=None, generator=None, use_cache=True
):
    """Continue each row of idx, (B, T), by `count` tokens, and return all.

    Below a temperature of 1, likely tokens become more likely; 0 takes the most likely
    one. With `top_k`, only the k most likely ones are drawn.
    """
    training = model.training
    model.eval()
    block_size = model.config.block_size
    caches = [KVCache() for _ in model.transformer.h] if use_cache else None
    for _ in range(count):
        if caches and idx.size(1) <= block_size:
            x = model.hidden(idx[:, caches[0].length :], caches)
        else:  # each token has another position now, so its cached key is wrong
            x = model.hidden(idx[:, -block_size:])
        logits = model.lm_head(x[:, -1]).float()
        token = sample(logits, temperature, top_k, generator)
        idx = torch.cat((idx, token), dim=1)
    model.train(training)
    return idx


def sample(logits, temperature, top_k, generator):
    """Choose a token by each row of logits, (B, V). Returns (B, 1)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None:
        best = logits.topk(min(top_k, logits.size(-1))).values
        logits = logits.masked_fill(logits < best[:, -1:], -torch.inf)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
