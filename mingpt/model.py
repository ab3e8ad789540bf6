"""GPT-2, with the names that readers of nanoGPT know.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
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


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.n_head = config.n_head
        self.c_attn = nn.Linear(C, 3 * C)
        self.c_proj = nn.Linear(C, C)
        self.dropout = config.dropout
        self.attention = attention

    def forward(self, x, cache):
        qkv = self.c_attn(x).unflatten(2, (3, self.n_head, -1))
        q, k, v = qkv.unbind(2)  # (B, T, heads, head size) each
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # (B, heads, T, head size)
        if cache is not None:
            k, v = cache.extend(k, v)
        y = self.attention(q, k, v, self.dropout * self.training)
        y = self.c_proj(y.transpose(1, 2).flatten(2))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.c_fc = nn.Linear(C, 4 * C)
        self.c_proj = nn.Linear(4 * C, C)
        self.dropout = config.dropout

    def forward(self, x):
        x = F.gelu(self.c_fc(x), approximate="tanh")
        return F.dropout(self.c_proj(x), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x, cache=None):
        x = x + self.attn(self.ln_1(x), cache)
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
                "wpe": nn.Embedding(config.block_size, C),
                "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                "ln_f": nn.LayerNorm(C),
            }
        )
        self.lm_head = nn.Linear(C, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight  # one matrix for both
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):  # its output is added to the residual
                nn.init.normal_(p, std=0.02 / (2 * config.n_layer) ** 0.5)
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
        x = x + self.transformer.wpe.weight[start:end]
        x = F.dropout(x, self.config.dropout, self.training)
        for i, block in enumerate(self.transformer.h):
            cache = caches[i] if caches else None
            if self.config.checkpoint:
                x = checkpoint(block, x, cache, use_reentrant=False)
            else:
                x = block(x, cache)
        return self.transformer.ln_f(x)

    def generate(self, idx, count, **how):
        """Continue each row of idx, (B, T), by `count` tokens: see generation.py."""
        return generation.generate(self, idx, count, **how)


def make_optimizer(model, lr, weight_decay):
    """AdamW for all parameters. Matrices and embeddings decay, biases and norms do not.

    Each parameter group has its "initial_lr", so that a schedule can scale its "lr".
    """
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    for group in optimizer.param_groups:
        group["initial_lr"] = lr
    return optimizer
