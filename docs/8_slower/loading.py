"""How often a sample of an IterableDataset comes to two ranks with two workers each.

python docs/8_slower/loading.py
"""

import collections
import itertools

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

RANKS = 2
WORKERS = 2
SAMPLES = 12


class Stream(IterableDataset):
    """Numbers instead of samples. A worker has no process group: give it the rank."""

    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        yield from range(SAMPLES)


class Shared(Stream):
    def __iter__(self):
        worker = get_worker_info()  # None if the rank loads by itself
        workers = worker.num_workers if worker else 1
        number = worker.id if worker else 0
        readers = RANKS * workers
        mine = self.rank + RANKS * number
        yield from itertools.islice(super().__iter__(), mine, None, readers)


def main():
    for kind in (Stream, Shared):
        seen = collections.Counter()
        for rank in range(RANKS):
            loader = DataLoader(kind(rank), num_workers=WORKERS)
            seen.update(int(sample) for sample in loader)
        (times,) = set(seen.values())
        print(f"{kind.__name__}: {len(seen)} samples, each comes {times} times")


if __name__ == "__main__":
    main()
