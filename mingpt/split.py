"""Split each layer of a GPT over a group of ranks: tensor parallelism.

Source: Shoeybi et al., "Megatron-LM" (2019), https://arxiv.org/abs/1909.08053. The N
ranks of a group take the same batch. Each computes 1/N of the heads and of the MLPs'
features. All else is whole on each rank, with the same gradients.
"""

from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import utils
from mingpt.strategy import Strategy


def check_split(configuration, model):
    """End with one line if --split does not fit the model, the ranks or the options."""
    if configuration.module != "mingpt.model":  # nor its optimizer, as Muon
        utils.error(f"--split cannot cut {configuration.module}, only mingpt.model")
    if configuration.precision == "fp16":
        utils.error("--split: choose --precision fp32 or bf16, not fp16")
    counts = {"ranks": dist.get_world_size(), "heads": model.config.n_head}
    for name, count in counts.items():
        if count % configuration.split:
            utils.error(f"--split {configuration.split} does not divide {count} {name}")


def column_wise(layer, group, x):
    """A part of a Linear's outputs, (B, T, O / N), from all its inputs, (B, T, I)."""

    def sum_over_group(grad):
        total = grad.clone()
        dist.all_reduce(total, group=group)
        return total

    x = x.view_as(x)  # so that its gradient comes from this layer alone
    if x.requires_grad:  # Megatron's f: x gets the gradients of all ranks' parts
        x.register_hook(sum_over_group)
    return F.linear(x, layer.weight, layer.bias)


def row_wise(layer, group, x):
    """All outputs of a Linear, (B, T, O), from a part of its inputs, (B, T, I / N)."""
    y = F.linear(x, layer.weight)
    # Megatron's g: unseen by autograd, so that each part gets the sum's gradient.
    dist.all_reduce(y.detach(), group=group)
    return y + layer.bias.to(y.dtype)  # once, not on each rank


@torch.compiler.disable  # it would compile again for each seed
def attend(attention, rank, q, k, v, dropout):
    """`attention` with this rank's dropout. Later, all draw the same numbers again."""
    seed = int(torch.randint(2**62, ()))
    devices = [] if q.device.type == "cpu" else [q.device]
    with torch.random.fork_rng(devices, device_type=q.device.type):
        torch.manual_seed(seed + rank)
        return attention(q, k, v, dropout)


class Split(Strategy):
    """Each rank has a part of each layer. `replica_size` neighbours have all parts."""

    def __init__(self, replica_size):
        self.replica_size = replica_size
        # {a weight that is cut: (along which dimension, how many matrices are in it)}
        self.cuts = {}

    def distribute(self, model, device):
        """Move this rank's part to the device. All start from rank 0's weights."""
        ranks = torch.arange(dist.get_world_size()).view(-1, self.replica_size)
        minutes = timedelta(minutes=5)
        self.group, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), minutes)
        columns = ranks.T.tolist()  # the ranks of a column have the same part
        self.data_group, _ = dist.new_subgroups_by_enumeration(columns, minutes)
        for block in model.transformer.h:
            self._split_block(block.attn, block.mlp)
        for weight in model.parameters():
            whole = weight.data.to(device)
            dist.broadcast(whole, src=0)
            weight.data = self.part_of(whole, weight)

    def _split_block(self, attn, mlp):
        # A Linear's weight has its outputs along dimension 0, and its inputs along 1.
        for layer, matrices in ((attn.c_attn, 3), (mlp.c_fc, 1)):  # 3: of q, k and v
            layer.forward = partial(column_wise, layer, self.group)
            self.cuts[layer.weight] = (0, matrices)
            self.cuts[layer.bias] = (0, matrices)
        for layer in (attn.c_proj, mlp.c_proj):
            layer.forward = partial(row_wise, layer, self.group)
            self.cuts[layer.weight] = (1, 1)
        attn.n_head //= self.replica_size
        if attn.dropout:
            attn.attention = partial(attend, attn.attention, self.group.rank())

    def part_of(self, saved, weight):
        """A copy of a part, or `saved` itself if it is not cut."""
        if not self._is_cut(saved, weight):
            return saved
        dim, matrices = self.cuts[weight]
        whole = saved.unflatten(dim, (matrices, -1))
        part = whole.chunk(self.replica_size, dim + 1)[self.group.rank()]
        return part.flatten(dim, dim + 1).clone()

    def whole_of(self, value, weight):
        if self._is_cut(value, weight):
            dim, matrices = self.cuts[weight]
            parts = [torch.empty_like(value) for _ in range(self.replica_size)]
            dist.all_gather(parts, value, group=self.group)
            parts = [part.unflatten(dim, (matrices, -1)) for part in parts]
            value = torch.cat(parts, dim + 1).flatten(dim, dim + 1)
        return super().whole_of(value, weight)

    def _is_cut(self, value, weight):
        return weight in self.cuts and value.dim() > 0  # a count of steps is not

    def named_weights(self, model):
        for name, weight in model.named_parameters():
            part = f"part {self.group.rank()} of " if weight in self.cuts else ""
            yield part + name, weight

    def clip_grad_norm_(self, model, max_norm):
        """Clip the gradients by the norm of the whole model, which all ranks know."""
        parts = []
        others = []
        for weight in model.parameters():
            if weight in self.cuts:
                parts.append(weight.grad)
            else:
                others.append(weight.grad)
        square = get_total_norm(parts) ** 2
        dist.all_reduce(square, group=self.group)
        norm = (square + get_total_norm(others) ** 2).sqrt()
        clip_grads_with_norm_(model.parameters(), max_norm, norm)
