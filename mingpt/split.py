"""Split each layer of a GPT over a group of ranks: tensor parallelism.

Source: Shoeybi et al., "Megatron-LM" (2019), https://arxiv.org/abs/1909.08053. The N
ranks of a group take the same batch. Each computes 1/N of the heads and of the MLPs'
features. All else is whole on each rank, with the same gradients.
"""

import functools
from datetime import timedelta

import torch
import torch.distributed as dist

import utils
from mingpt.model import GPT


def check(args, model, optimizer):
    """End with one line if --split does not fit the model, the ranks or the options."""
    if args.split == 1:
        return
    # AdamW does not need whole matrices, as Muon does.
    fits = isinstance(model, GPT) and isinstance(optimizer, torch.optim.AdamW)
    if not fits or args.shard or args.precision == "fp16":
        utils.error("--split: only mingpt.model with AdamW, no --shard, fp32 or bf16")
    counts = {"ranks": dist.get_world_size(), "heads": model.config.n_head}
    counts["features of an MLP"] = model.transformer.h[0].mlp.c_fc.out_features
    for name, count in counts.items():
        if count % args.split:
            utils.error(f"--split {args.split} does not divide {count} {name}")


def column_wise(layer, group, x):
    """A part of a Linear's outputs, (B, T, O / N), from all its inputs, (B, T, I)."""

    def sum_over_group(grad):
        dist.all_reduce(grad := grad.clone(), group=group)
        return grad

    x = x.view_as(x)  # so that its gradient comes from this layer alone
    if x.requires_grad:  # Megatron's f: x gets the gradients of all ranks' parts
        x.register_hook(sum_over_group)
    return torch.nn.functional.linear(x, layer.weight, layer.bias)


def row_wise(layer, group, x):
    """All outputs of a Linear, (B, T, O), from a part of its inputs, (B, T, I / N)."""
    y = torch.nn.functional.linear(x, layer.weight)
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


def cut(model, optimizer, size, device):
    """Move this rank's part to the device. Return the group that averages gradients.

    Before, each rank has the whole model, on the CPU. All start from rank 0's weights.
    """
    ranks, minutes = torch.arange(dist.get_world_size()), timedelta(minutes=5)
    ranks = ranks.view(-1, size)  # neighbours are in a group
    group, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), minutes)
    data_group, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), minutes)
    for attn, mlp in [(x.attn, x.mlp) for x in model.transformer.h]:
        for layer, forward, dim, matrices in (
            (attn.c_attn, column_wise, 0, 3),  # those of q, k and v, in one weight
            (attn.c_proj, row_wise, 1, 1),
            (mlp.c_fc, column_wise, 0, 1),
            (mlp.c_proj, row_wise, 1, 1),
        ):
            layer.forward = functools.partial(forward, layer, group)
            layer.weight.cut = dim, matrices, group
            if dim == 0:  # a sum over the ranks needs all of its bias
                layer.bias.cut = layer.weight.cut
        attn.n_head //= size
        if attn.dropout:
            attn.attention = functools.partial(attend, attn.attention, group.rank())
    mark_state(optimizer)
    for state in optimizer.state.values():
        state |= {k: part(x, *x.cut) for k, x in state.items() if hasattr(x, "cut")}
    for x in model.parameters():
        dist.broadcast(value := x.data.to(device), src=0)
        x.data = part(value, *x.cut) if hasattr(x, "cut") else value
    optimizer.load_state_dict(optimizer.state_dict())  # to where the parameters are
    optimizer.register_state_dict_pre_hook(mark_state)
    return data_group


def mark_state(optimizer):
    """Note how the optimizer's tensors are cut: as the parameters that they are for."""
    for x, state in optimizer.state.items():
        for y in state.values():
            if hasattr(x, "cut") and y.shape == x.shape:
                y.cut = x.cut


def part(x, dim, matrices, group):
    """A copy of what this rank has of x: its share of each of the matrices."""
    shares = x.unflatten(dim, (matrices, group.size(), -1))
    return shares.select(dim + 1, group.rank()).flatten(dim, dim + 1).clone()


def whole(x, dim, matrices, group):
    """The tensor of which each rank of the group has its part as x."""
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    shares = [y.unflatten(dim, (matrices, -1)) for y in parts]
    return torch.stack(shares, dim + 1).flatten(dim, dim + 2)


def clip_grad_norm_(parameters, max_norm):
    """Clip the gradients by the norm of the whole model, which all ranks know."""
    parts = [x for x in parameters if hasattr(x, "cut")]
    square = torch.nn.utils.get_total_norm([x.grad for x in parts]) ** 2
    dist.all_reduce(square, group=parts[0].cut[-1])
    others = [x.grad for x in parameters if not hasattr(x, "cut")]
    norm = (square + torch.nn.utils.get_total_norm(others) ** 2).sqrt()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
