"""Two ranks that differ: torchrun --nproc-per-node=2 ranks_that_differ.py

utils.py must end a script whose ranks have other samples or other weights, and no other
script. What it says of them, `test_what_ranks_must_have_in_common` reads.
"""

import torch
import torch.distributed as dist
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
    data = range(train[rank]), range(held_out[rank])
    return ends(utils.check_data, *data, batch)


def refuses_model(model):
    return ends(utils.check_state, [], model, "s.pt")


def refuses_weights(*weights):
    """weights: the only one of a model, of rank 0 and of rank 1."""
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(weights[dist.get_rank()])
    return refuses_model(model)


def refuses_row(*weights):
    """weights: the two of a layer, as this rank has them."""
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.data = torch.tensor([weights])
    return refuses_model(model)


def check_samples():
    assert not refuses_samples((80, 80), (9, 9), batch=40)
    assert refuses_samples((80, 80), (9, 9), batch=41)
    assert refuses_samples((80, 80), (0, 0))
    assert refuses_samples((80, 81), (9, 9))
    assert ends(utils.check_data, Stream(), range(9), 1)
    assert refuses_samples((80, 80), (9, 10))


def check_one_weight():
    assert not refuses_weights(1, 1.000009)
    assert refuses_weights(1, 1.000011)
    assert refuses_weights(-1, 1)
    assert refuses_weights(1, torch.nan)


def check_a_row():
    rank = dist.get_rank()
    # The gradients of a layer before a softmax add up to 0: its sum tells nothing.
    assert refuses_row(1.0 + 1e-4 * rank, -1e-4 * rank)
    # What counts is the norm: the sum of these weights is 0.
    assert not refuses_row(1.0, -1 + 1e-7 * rank)
    assert refuses_row(1.0, -1 + 5e-5 * rank)


def check_a_head(frozen):
    """A head that differs is not drowned by a table that does not."""
    table = torch.nn.Embedding(1000, 1000)
    head = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(table.weight, 1000)
    table.weight.requires_grad = not frozen
    torch.nn.init.constant_(head.weight, 1)
    head.bias.data.fill_(1 + 1e-4 * dist.get_rank())
    assert refuses_model(torch.nn.ModuleDict({"table": table, "head": head}))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    utils.time.sleep = print  # (the others' time to speak)
    check_samples()
    check_one_weight()
    check_a_row()
    check_a_head(frozen=False)
    check_a_head(frozen=True)
