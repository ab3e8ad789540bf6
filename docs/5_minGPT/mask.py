"""Train a small GPT with a wrong causal mask and with the right one, on random tokens.

python docs/5_minGPT/mask.py

Nobody can predict a random token. So no honest loss is below ln V, where V is the
number of different tokens.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

V = 16  # different tokens
T = 12  # tokens in a sequence
WIDTH = 32  # size of a vector

MASKS = {
    # Meant as 1: may look, 0: may not. But a mask of floats is ADDED to the scores.
    "wrong": torch.tril(torch.ones(T, T)),
    # nn.MultiheadAttention takes True as: may not look.
    "right": torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=1),
}


class TinyGPT(nn.Module):
    """One layer of attention: from tokens (B, T) to logits (B, T, V)."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask
        self.token = nn.Embedding(V, WIDTH)
        self.position = nn.Embedding(T, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, num_heads=1, batch_first=True)
        self.head = nn.Linear(WIDTH, V)

    def forward(self, tokens):
        x = self.norm(self.token(tokens) + self.position.weight)
        attended, _ = self.attention(x, x, x, attn_mask=self.mask, need_weights=False)
        return self.head(x + attended)


def train(mask):
    """A model that was trained on random tokens, and its loss on other ones."""
    torch.manual_seed(0)
    model = TinyGPT(mask)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(400):
        loss = loss_of(model, batch=64)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return model, loss_of(model, batch=4096).item()


def loss_of(model, batch):
    tokens = torch.randint(V, (batch, T + 1))
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def past_moves(model):
    """How far the logits of the first half move if the second half is replaced."""
    tokens = torch.randint(V, (64, T))
    changed = tokens.clone()
    changed[:, T // 2 :] = torch.randint(V, (64, T - T // 2))
    moved = (model(tokens) - model(changed)).abs()
    return moved[:, : T // 2].max().item()


if __name__ == "__main__":
    print(f"a guess: loss {math.log(V):.3f} = ln V")
    for name, mask in MASKS.items():
        model, loss = train(mask)
        print(
            f"{name} mask: loss {loss:.3f} on new tokens; another future moves the"
            f" logits of the past by up to {past_moves(model):.1f}"
        )
