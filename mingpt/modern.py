"""GPT-2 with what became common after it. Parent: mingpt/model.py

Rotary positions: Su et al., "RoFormer" (2021). RMSNorm: Zhang and Sennrich, "Root Mean
Square Layer Normalization" (2019). QK-norm: Henry et al., "Query-Key Normalization for
Transformers" (2020). Squared ReLU: So et al., "Primer" (2021). Zero-initialised
projections: Zhang et al., "Fixup Initialization" (2019). No biases: Chowdhery et al.,
"PaLM" (2022). Muon: Jordan et al., https://kellerjordan.github.io/posts/muon (2024).

The head is the token embedding, so it cannot start at zero. At first, a new model
expects each token once more, and the loss of a wide one starts above ln V.

In the shapes below, B is the batch, T the tokens of a sequence, C the width (n_embd)
and V the size of the vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from mingpt import generation


def attention(q, k, v, dropout):
    """Each token looks at itself and at earlier ones: (B, heads, T, head size) each."""
    # A single token is the last one, so it may see every key. is_causal would show it
    # the first key only.
    causal = q.size(2) > 1
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)


@dataclass
class GPTConfig:
    """The size of a model. The defaults are those of the smallest GPT-2."""

    block_size: int = 1024  # the most tokens that the model sees at once
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    checkpoint: bool = False  # saves memory: activations are computed twice


def rotary(start, end, head_size, device):
    """(cos, sin) of the angles by which the positions start to end - 1 turn a channel.

    Each is (end - start, head_size / 2), for the pairs of channels of a head. From one
    position to the next, the angle of pair i grows by 10000 ** (-2 i / head_size).
    """
    positions = torch.arange(start, end, device=device)
    steps = 10000 ** (-torch.arange(0, head_size, 2, device=device) / head_size)
    angles = torch.outer(positions, steps)
    return angles.cos(), angles.sin()


def apply_rotary(x, cos_sin):
    """Turn x, (B, heads, T, head size). Channels i and i + head size / 2 are a pair."""
    cos, sin = cos_sin
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.n_head = config.n_head
        self.c_attn = nn.Linear(C, 3 * C, bias=False)
        self.c_proj = nn.Linear(C, C, bias=False)
        self.dropout = config.dropout
        self.attention = attention

    def forward(self, x, cos_sin, cache):
        qkv = self.c_attn(x).unflatten(2, (3, self.n_head, -1))
        q, k, v = qkv.unbind(2)  # (B, T, heads, head size) each
        q = F.rms_norm(q, q.shape[-1:])
        k = F.rms_norm(k, k.shape[-1:])
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # (B, heads, T, head size)
        q = apply_rotary(q, cos_sin)
        k = apply_rotary(k, cos_sin)
        if cache is not None:
            k, v = cache.extend(k, v)
        y = self.attention(q, k, v, self.dropout * self.training)
        y = self.c_proj(y.transpose(1, 2).flatten(2))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.c_fc = nn.Linear(C, 4 * C, bias=False)
        self.c_proj = nn.Linear(4 * C, C, bias=False)
        self.dropout = config.dropout

    def forward(self, x):
        x = F.relu(self.c_fc(x)).square()
        return F.dropout(self.c_proj(x), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.RMSNorm(config.n_embd, elementwise_affine=False)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.RMSNorm(config.n_embd, elementwise_affine=False)
        self.mlp = MLP(config)

    def forward(self, x, cos_sin, cache=None):
        x = x + self.attn(self.ln_1(x), cos_sin, cache)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A GPT-2 with random weights. `config` is a GPTConfig."""

    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, C),
                "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                "ln_f": nn.RMSNorm(C, elementwise_affine=False),
            }
        )
        self.lm_head = nn.Linear(C, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight  # one matrix for both
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):  # its output is added to the residual
                nn.init.zeros_(p)  # so that a new block changes nothing
            elif p.dim() == 2:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, idx, targets=None):
        """Predict each next token: (logits, loss), of shapes (B, T, V) and ().

        idx: tokens, (B, T). targets: those that follow, -1 for one that does not count.
        The loss is the mean cross-entropy in nats per token, in float32.
        """
        logits = self.lm_head(self.hidden(idx))
        if targets is None:
            return logits, None
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss

    def hidden(self, idx, caches=None):
        """The input of the head, (B, T, C). caches: a KVCache for each layer."""
        start = caches[0].length if caches else 0
        end = start + idx.size(1)
        if end > self.config.block_size:
            raise ValueError(f"{end} tokens: block_size is {self.config.block_size}")
        x = self.transformer.wte(idx)
        head_size = self.config.n_embd // self.config.n_head
        cos_sin = rotary(start, end, head_size, x.device)
        x = F.dropout(x, self.config.dropout, self.training)
        for i, block in enumerate(self.transformer.h):
            cache = caches[i] if caches else None
            if self.config.checkpoint:
                x = checkpoint(block, x, cos_sin, cache, use_reentrant=False)
            else:
                x = block(x, cos_sin, cache)
        return self.transformer.ln_f(x)

    def generate(self, idx, count, **how):
        """Continue each row of idx, (B, T), by `count` tokens: see generation.py."""
        return generation.generate(self, idx, count, **how)


class Together:
    """Several optimizers as one, for a schedule, a scaler and a snapshot."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    @property
    def param_groups(self):
        groups = []
        for optimizer in self.optimizers:
            groups += optimizer.param_groups
        return groups

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self):
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        groups = []
        for state in states:
            groups += state["param_groups"]
        return {"param_groups": groups, "optimizers": states}

    def load_state_dict(self, state):
        for optimizer, own in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)


def make_optimizer(model, lr, weight_decay):
    """Muon for the matrices of the blocks, AdamW for all else. Biases, norms: no decay.

    Each parameter group has its "initial_lr", so that a schedule can scale its "lr".
    """
    matrices = [p for p in model.transformer.h.parameters() if p.dim() == 2]
    in_muon = set(matrices)
    params = [p for p in model.parameters() if p not in in_muon]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    # With this adjust_lr_fn, a step of Muon is as large as one of AdamW, so that both
    # share one lr (Liu et al., "Muon is Scalable for LLM Training", 2025).
    muon = torch.optim.Muon(
        matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    optimizer = Together(muon, optimizer)
    for group in optimizer.param_groups:
        group["initial_lr"] = lr
    return optimizer
