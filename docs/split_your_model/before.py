"""A transformer for one device, as many write it."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 64
WIDTH = 32
BLOCKS = 2
HEADS = 4
KEY_HEADS = 2  # grouped queries: each head of keys serves two of queries
HEAD_SIZE = WIDTH // HEADS
HIDDEN = 96


def rotate(x):
    """Rotary embedding of the positions of x, (batch, heads, tokens, head size)."""
    frequencies = 10000 ** -torch.arange(0, 1, 2 / HEAD_SIZE, device=x.device)
    angles = torch.outer(torch.arange(x.shape[2], device=x.device), frequencies)
    sin, cos = angles.sin(), angles.cos()
    left, right = x.chunk(2, dim=-1)
    turned = torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)
    return turned.type_as(x)  # the angles are in float32


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KEY_HEADS) * HEAD_SIZE)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, tokens, _ = x.shape
        heads = self.qkv(x).view(batch, tokens, HEADS + 2 * KEY_HEADS, HEAD_SIZE)
        heads = heads.transpose(1, 2)
        q, k, v = heads.split([HEADS, KEY_HEADS, KEY_HEADS], dim=1)
        y = F.scaled_dot_product_attention(
            rotate(q), rotate(k), v, is_causal=True, enable_gqa=True
        )
        return self.out(y.transpose(1, 2).reshape(batch, tokens, WIDTH))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)  # SwiGLU


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1 = nn.RMSNorm(WIDTH)
        self.attn = Attention()
        self.norm_2 = nn.RMSNorm(WIDTH)
        self.mlp = MLP()

    def forward(self, x):
        x = x + self.attn(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        """Logits, (batch, tokens, VOCABULARY)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class TokenLoss(nn.Module):
    def forward(self, logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
