"""How often a sample of an IterableDataset comes, and what small files cost.

python docs/8_slower/loading.py
"""

import collections
import itertools
import tempfile
import time
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

RANKS = 2
WORKERS = 2
SAMPLES = 12
FILES = 2000
BYTES = 3072  # of each file: a small picture


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


def ms(read, order):
    began = time.perf_counter()
    for i in order:
        read(i)
    return (time.perf_counter() - began) * 1e3


def main():
    for kind in (Stream, Shared):
        seen = collections.Counter()
        for rank in range(RANKS):
            loader = DataLoader(kind(rank), num_workers=WORKERS)
            seen.update(int(sample) for sample in loader)
        counts = sorted(set(seen.values()))
        times = " or ".join(map(str, counts))
        print(f"{kind.__name__}: {len(seen)} samples, each comes {times} times")
    with tempfile.TemporaryDirectory() as folder:
        samples = np.random.default_rng(0).integers(
            256, size=(FILES, BYTES), dtype="u1"
        )
        for i, sample in enumerate(samples):
            sample.tofile(Path(folder, f"{i}"))
        np.save(Path(folder, "all.npy"), samples)
        order = np.random.default_rng(1).permutation(FILES)
        packed = np.load(Path(folder, "all.npy"), mmap_mode="r")
        many = ms(lambda i: np.fromfile(Path(folder, f"{i}"), dtype="u1"), order)
        one = ms(lambda i: np.array(packed[i]), order)
    print(f"{FILES} samples from as many files: {many:.1f} ms, from one: {one:.1f} ms")


if __name__ == "__main__":
    main()
