"""Two ranks that differ: torchrun --nproc-per-node=2 ranks_that_differ.py

utils.py must end a script whose ranks have other samples or other weights, and no other
script. What it says of them, `test_what_ranks_must_have_in_common` reads.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset

import utils


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(9))


def ends(check, *arguments):
    """Whether a check would end the script."""
    try:
        check(*arguments)
    except SystemExit:
        return True
    return False


def refuses_samples(train, held_out, batch=1):
    """train, held_out: how many samples rank 0 has, and how many rank 1."""
    rank = dist.get_rank()
    return ends(utils.check_data, range(train[rank]), range(held_out[rank]), batch)


def refuses_weights(*rows):
    """rows: the weights of a layer on rank 0, and those on rank 1."""
    model = nn.Linear(2, 1, bias=False)
    model.weight.data = torch.tensor(rows[dist.get_rank()])
    return ends(utils.check_state, [], model, "s.pt")


def refuses_a_head(frozen):
    """Ranks differ in the head, and not in a large table before it."""
    table = nn.Embedding(1000, 1000)
    nn.init.constant_(table.weight, 1000).requires_grad_(not frozen)
    head = nn.Linear(2, 1)
    nn.init.constant_(head.weight, 1)
    head.bias.data.fill_(1 + 1e-4 * dist.get_rank())
    model = nn.ModuleDict({"table": table, "head": head})
    return ends(utils.check_state, [], model, "s.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    utils.time.sleep = print  # (the others' time to speak)

    assert not refuses_samples((80, 80), (9, 9), batch=40)
    assert refuses_samples((80, 80), (9, 9), batch=41)
    assert refuses_samples((80, 80), (0, 0))
    assert refuses_samples((80, 81), (9, 9))
    assert refuses_samples((80, 80), (9, 10))
    assert ends(utils.check_data, Stream(), range(9), 1)

    assert not refuses_weights([1.0], [1.000009])
    assert refuses_weights([1.0], [1.000011])
    assert refuses_weights([-1.0], [1.0])
    assert refuses_weights([1.0], [torch.nan])
    # The gradients of a layer before a softmax add up to 0: its sum tells nothing.
    assert refuses_weights([1.0, 0.0], [1.0001, -0.0001])
    # What counts is the norm: the sum of these weights is 0.
    assert not refuses_weights([1.0, -1.0], [1.0, -0.9999999])
    assert refuses_weights([1.0, -1.0], [1.0, -0.99995])
    # The table does not drown it.
    assert refuses_a_head(frozen=False)
    assert refuses_a_head(frozen=True)
