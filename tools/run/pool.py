"""Call a function that starts programs, two calls at a time."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor


def two_at_a_time(function, *lists):
    """Yield what `function` returns for the items of these lists, as `map` does."""
    # Imported here, because this imports torch: once for all workers.
    from tools.run import warm  # noqa: F401

    # Each worker is a process without threads, so that it may fork.
    forked = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(2, mp_context=forked) as pool:
        yield from pool.map(function, *lists)
