"""Tokens to batches: which window of the text a step sees, on which rank."""

import itertools
import os

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

ROUNDS = 8  # of `permute`: with 4, some orders of a few windows come too often


class Blocks(Dataset):
    """Windows of `block_size` tokens. Item `start` is the window that begins there.

    An item is (source, targets), both int64 of shape (block_size,). The targets are the
    tokens that follow. After the last token, source is 0 and targets are -1, which the
    loss leaves out.
    """

    def __init__(self, tokens, block_size):
        self.tokens = tokens
        self.block_size = block_size

    def __len__(self):
        return max(0, len(self.tokens) - 1)

    def __getitem__(self, start):
        source, targets = self.__getitems__([start])
        return source[0], targets[0]

    def __getitems__(self, starts):
        """A whole batch at once, of shape (len(starts), block_size): for DataLoader."""
        starts = np.asarray(starts)
        return self._gather(starts, 0), self._gather(starts + 1, -1)

    def _gather(self, starts, padding):
        places = starts[:, None] + np.arange(self.block_size)
        past = places >= len(self.tokens)
        places[past] = 0
        batch = self.tokens[places].astype(np.int64)
        batch[past] = padding
        return torch.from_numpy(batch)

    def __reduce__(self):
        # A worker that is no fork gets the file's name instead of all tokens.
        tokens = self.tokens
        if isinstance(tokens, np.memmap) and is_whole(tokens):
            return open_blocks, (tokens.filename, tokens.dtype, self.block_size)
        return Blocks, (tokens, self.block_size)


def is_whole(tokens):
    """Whether a mapped array is its whole file, and not a part of it."""
    return tokens.nbytes == os.path.getsize(tokens.filename)


def open_blocks(path, dtype, block_size):
    return Blocks(np.memmap(path, dtype, "r"), block_size)


def take(batch):
    """The collate_fn for `Blocks`, whose batches are in one piece already."""
    return batch


class StepSampler(Sampler):
    """Where the windows of each step begin, step after step without end.

    A step has batch_size * world_size windows, and this rank takes every world_size-th
    of them. They follow from seed and step alone: if batch_size * world_size is the
    same, so are they. A pass over the text takes each of its windows once. The order of
    the windows, and where the first of them begins, follow from seed and pass.

    A step may begin in one pass and end in the next. Nothing is kept between steps, and
    a loader that fetches ahead loses nothing: to resume, call `set_step` with the
    number of finished steps.
    """

    def __init__(self, n_tokens, block_size, batch_size, seed=0, rank=0, world_size=1):
        if n_tokens <= block_size:
            raise ValueError(f"{n_tokens} tokens have no window of {block_size} + 1")
        self.block_size = block_size
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.windows = count_windows(n_tokens, block_size)
        self.shifts = n_tokens - self.windows * block_size
        self.step = self.offset = 0

    def set_step(self, step):
        """Let the next iteration begin with this step."""
        self.step, self.offset = step, 0

    def set_start(self, windows):
        """Let it begin after so many windows, where steps were larger or smaller."""
        self.step, self.offset = divmod(windows, self.batch_size * self.world_size)

    def __iter__(self):
        at_once = max(1, 1024 // self.batch_size)  # NumPy is slow on a few numbers
        for step in itertools.count(self.step, at_once):
            yield from self.starts(step, at_once).tolist()

    def starts(self, step, steps=1):
        """This rank's windows of some steps: an array of batch_size * steps numbers."""
        size = self.batch_size * self.world_size
        first = self.offset + step * size
        places = first + np.arange(self.rank, steps * size, self.world_size)
        passes, places = np.divmod(places, self.windows)
        starts = np.empty_like(places)
        for number in np.unique(passes):
            random = np.random.SeedSequence([self.seed, int(number)])
            shift, *keys = random.generate_state(1 + ROUNDS, np.uint64)
            here = passes == number
            windows = permute(places[here], self.windows, keys)
            starts[here] = int(shift) % self.shifts + windows * self.block_size
        return starts


def eval_starts(n_tokens, block_size, batch_size, rank=0, world_size=1):
    """Where this rank's windows for validation begin: each token is predicted once.

    They are filled up to whole batches with windows past the end, which count nothing:
    a batch of another size would make torch.compile compile once more.
    """
    starts = range(rank * block_size, n_tokens - 1, world_size * block_size)
    return [*starts, *[n_tokens] * (-len(starts) % batch_size)]


def count_windows(n_tokens, block_size):
    """How many windows a pass has.

    So many fit even if the first begins at token block_size - 1. Each has a target more
    than it has tokens of its own.
    """
    return max(1, (n_tokens - block_size) // block_size)


def permute(places, size, keys):
    """The numbers at some places of a random permutation of range(size).

    The permutation is computed, because a list of it would be as long as the text has
    windows. This is a Feistel network: each round mixes one half of a number's bits
    into the other half, which can be undone, so that no two numbers become one. Numbers
    of `size` or more go through again. https://en.wikipedia.org/wiki/Feistel_cipher
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))  # in bits
    mask = (np.uint64(1) << half) - np.uint64(1)
    numbers = places.astype(np.uint64)
    again = np.ones(len(numbers), bool)
    while again.any():
        left, right = numbers[again] >> half, numbers[again] & mask
        for key in keys:
            left, right = right, left ^ (mix(right + key) & mask)
        numbers[again] = left << half | right
        again = numbers >= size
    return numbers.astype(np.int64)


def mix(x):
    """Random bits that follow from x, an array of uint64: SplitMix64's last step.

    Steele, Lea, Flood 2014: https://doi.org/10.1145/2660193.2660195
    """
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def prefetch(loader, device):
    """Yield (source, targets) on the device, in the loader's order.

    Before a batch is computed, the next batch is fetched, and its copy to the
    accelerator starts. The copy comes from pinned memory, so that Python does not wait
    for it. A CPU needs no copy, and would only do the same work earlier.
    """
    if device.type == "cpu":
        yield from loader
        return
    present = None
    for batch in loader:
        if device.type != "mps":  # MPS cannot pin
            batch = [x.pin_memory() for x in batch]
        batch = tuple(x.to(device, non_blocking=True) for x in batch)
        if present:
            yield present
        present = batch
    if present:
        yield present
