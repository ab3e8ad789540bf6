"""Tokens to batches: which window of the text a step sees, on which rank."""

import itertools
import math

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler


class Blocks(Dataset):
    """Windows of `block_size` tokens. Item `start` is the window that begins there.

    The targets are the tokens that follow. After the last token, source is 0 and
    targets are -1, which the loss leaves out.
    """

    def __init__(self, tokens, block_size):
        self.tokens = tokens
        self.block_size = block_size

    def __getitems__(self, starts):
        """A whole batch, for DataLoader: int64, (len(starts), block_size) each."""
        starts = np.asarray(starts)
        source = self._gather(starts, padding=0)
        targets = self._gather(starts + 1, padding=-1)
        return source, targets

    def _gather(self, starts, padding):
        places = starts[:, None] + np.arange(self.block_size)
        past_the_end = places >= len(self.tokens)
        places[past_the_end] = 0
        batch = self.tokens[places].astype(np.int64)
        batch[past_the_end] = padding
        return torch.from_numpy(batch)


class StepSampler(Sampler):
    """Where the windows of each step begin, step after step without end.

    A step has batch_size * replicas windows, and this replica takes every replicas-th
    of them, so that the windows of all do not depend on their number. (A replica is a
    rank, or several that share a batch.) A pass over the text takes each window once,
    in an order that follows from seed and pass.
    """

    def __init__(self, n_tokens, block_size, batch_size, seed=0, replica=0, replicas=1):
        self.block_size = block_size
        self.batch_size = batch_size
        self.seed = seed
        self.replica = replica
        self.replicas = replicas
        # A window has a target more than it has tokens of its own.
        self.windows = max(1, (n_tokens - block_size) // block_size)
        self.shifts = n_tokens - self.windows * block_size
        self.start = 0  # how many windows all ranks together have trained already
        self.pass_number = None  # the latest pass over the text
        self.order = None  # where its windows begin

    def __iter__(self):
        for step in itertools.count():
            yield from self.starts(step)

    def starts(self, step):
        """This replica's windows of a step, which counts from `start`."""
        size = self.batch_size * self.replicas
        first = self.start + step * size
        numbers = range(first + self.replica, first + size, self.replicas)
        return [self._window(number) for number in numbers]

    def _window(self, number):
        """Where a window begins. `number` counts the windows of all passes."""
        pass_number, place = divmod(number, self.windows)
        if pass_number != self.pass_number:
            seed = hash((self.seed, pass_number))
            generator = torch.Generator().manual_seed(seed)
            shift = torch.randint(self.shifts, (), generator=generator)
            order = torch.randperm(self.windows, generator=generator)
            self.order = shift + order * self.block_size
            self.pass_number = pass_number
        return self.order[place].item()


def eval_starts(n_tokens, block_size, batch_size, replica=0, replicas=1):
    """Where this replica's windows for validation begin.

    Those of all replicas together predict each token once.
    """
    all_starts = range(0, n_tokens - 1, block_size)
    starts = list(all_starts[replica::replicas])
    # Windows past the end, which count nothing, make whole batches: torch.compile would
    # compile again for a batch of another size. All replicas have as many batches as
    # the first, because a sharded model gathers its weights in each.
    batches = math.ceil(len(all_starts) / (replicas * batch_size))
    return starts + (batches * batch_size - len(starts)) * [n_tokens]
