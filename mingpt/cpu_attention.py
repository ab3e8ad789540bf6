"""Attention in bfloat16 on a CPU, where PyTorch's kernel is slow.

Its backward takes 2 to 10 times as long. `mingpt.loading.load_model` chooses this
function when a run starts.
"""

import torch
import torch.nn.functional as F

from mingpt import model


def attention(q, k, v, dropout):
    """What `mingpt.model.attention` gives."""
    B, heads, T, head_size = q.shape
    if v.dtype != torch.bfloat16 or T == 1:
        return model.attention(q, k, v, dropout)
    # No token sees the tokens after it.
    mask = torch.full((T, T), -torch.inf, dtype=v.dtype).triu(1)
    scores = torch.baddbmm(
        mask, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=head_size**-0.5
    )
    weights = scores.float().softmax(dim=-1)
    weights = F.dropout(weights, dropout, training=dropout > 0)
    weights = weights.to(v.dtype)
    return weights.view(B, heads, T, T) @ v
