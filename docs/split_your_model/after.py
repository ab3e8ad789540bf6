"""before.py, ready to be split. Parent: docs/split_your_model/before.py

torchrun --standalone --nproc-per-node=2 docs/split_your_model/after.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, parallel

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
        self.q = nn.Linear(WIDTH, HEADS * HEAD_SIZE)
        self.k = nn.Linear(WIDTH, KEY_HEADS * HEAD_SIZE)
        self.v = nn.Linear(WIDTH, KEY_HEADS * HEAD_SIZE)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, tokens, _ = x.shape
        q = self.q(x).view(batch, tokens, -1, HEAD_SIZE).transpose(1, 2)
        k = self.k(x).view(batch, tokens, -1, HEAD_SIZE).transpose(1, 2)
        v = self.v(x).view(batch, tokens, -1, HEAD_SIZE).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            rotate(q), rotate(k), v, is_causal=True, enable_gqa=True
        )
        return self.out(y.transpose(1, 2).reshape(batch, tokens, -1))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))  # SwiGLU


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


PLAN = {}
for name in ("attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.up"):
    PLAN[f"blocks.*.{name}"] = parallel.ColwiseParallel()
for name in ("attn.out", "mlp.down"):
    PLAN[f"blocks.*.{name}"] = parallel.RowwiseParallel()
for name in ("attn", "mlp"):  # the gradient of its input is added up once
    PLAN[f"blocks.*.{name}"] = parallel.PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Replicate()
    )


def convert(state):
    """The weights of before.py's model, {name: value}, under the names of this file."""
    sizes = [HEADS * HEAD_SIZE, KEY_HEADS * HEAD_SIZE, KEY_HEADS * HEAD_SIZE]
    converted = {}
    for name, value in state.items():
        if ".qkv." in name:
            for new, part in zip("qkv", value.split(sizes), strict=True):
                converted[name.replace("qkv", new)] = part
        elif ".gate_up." in name:
            for new, part in zip(("gate", "up"), value.chunk(2), strict=True):
                converted[name.replace("gate_up", new)] = part
        else:
            converted[name] = value
    return converted


if __name__ == "__main__":
    import before
    from check import check

    torch.manual_seed(0)  # the same weights and samples on each rank
    tokens = torch.randint(VOCABULARY, (2, 16))
    check(before.Model(), Model(), convert, PLAN, tokens, tokens, TokenLoss())
