"""Tokens to batches: which window of the text a step sees, on which rank."""

import itertools

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
        return self._gather(starts, 0), self._gather(starts + 1, -1)

    def _gather(self, starts, padding):
        places = starts[:, None] + np.arange(self.block_size)
        past = places >= len(self.tokens)
        places[past] = 0
        batch = self.tokens[places].astype(np.int64)
        batch[past] = padding
        return torch.from_numpy(batch)


class StepSampler(Sampler):
    """Where the windows of each step begin, step after step without end.

    A step has batch_size * world_size windows, and this rank takes every world_size-th
    of them, so that the windows of all ranks do not depend on world_size. A pass over
    the text takes each window once, in an order that follows from seed and pass.
    """

    def __init__(self, n_tokens, block_size, batch_size, seed=0, rank=0, world_size=1):
        self.block_size, self.batch_size, self.seed = block_size, batch_size, seed
        self.rank, self.world_size = rank, world_size
        # A window has a target more than it has tokens of its own.
        self.windows = max(1, (n_tokens - block_size) // block_size)
        self.shifts = n_tokens - self.windows * block_size
        self.start = 0  # how many windows all ranks together have trained already
        self.order = None, None  # of the latest pass: (number, windows)

    def __iter__(self):
        return itertools.chain.from_iterable(map(self.starts, itertools.count()))

    def starts(self, step):
        """This rank's windows of a step, which counts from `start`."""
        size = self.batch_size * self.world_size
        first = self.start + step * size
        places = range(first + self.rank, first + size, self.world_size)
        return [self._window(*divmod(place, self.windows)) for place in places]

    def _window(self, number, place):
        if self.order[0] != number:
            generator = torch.Generator().manual_seed(hash((self.seed, number)))
            shift = torch.randint(self.shifts, (), generator=generator)
            order = torch.randperm(self.windows, generator=generator)
            self.order = number, shift + order * self.block_size
        return self.order[1][place].item()


def eval_starts(n_tokens, block_size, batch_size, rank=0, world_size=1):
    """Where this rank's windows for validation begin: each token is predicted once."""
    # Windows past the end, which count nothing, make whole batches: torch.compile would
    # compile again for a batch of another size. All ranks have as many batches as rank
    # 0, because a sharded model gathers its weights in each.
    starts = range(rank * block_size, n_tokens - 1, world_size * block_size)
    most = len(range(0, n_tokens - 1, world_size * block_size))
    return [*starts, *[n_tokens] * (most + -most % batch_size - len(starts))]
