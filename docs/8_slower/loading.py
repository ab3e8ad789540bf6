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

RANKS, WORKERS, SAMPLES = 2, 2, 12
FILES, BYTES = 2000, 3072  # a small picture each


class Stream(IterableDataset):
    """Numbers instead of samples. A worker has no process group: give it the rank."""

    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        yield from range(SAMPLES)


class Shared(Stream):
    def __iter__(self):
        worker = get_worker_info()  # None if the rank loads by itself
        workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        readers, mine = RANKS * workers, self.rank + RANKS * number
        yield from itertools.islice(super().__iter__(), mine, None, readers)


def ms(read, order):
    began = time.perf_counter()
    for i in order:
        read(i)
    return (time.perf_counter() - began) * 1e3


def main():
    for kind in (Stream, Shared):
        loaders = [DataLoader(kind(x), num_workers=WORKERS) for x in range(RANKS)]
        seen = collections.Counter(int(x) for loader in loaders for x in loader)
        times = " or ".join(map(str, sorted(set(seen.values()))))
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
