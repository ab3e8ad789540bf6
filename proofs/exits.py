"""Does a run end well, every time, also when the machine is busy?

    python -m proofs.exits [--runs 50] [--at-once 3]

Runs multigpu.py and multinode.py again and again, several at once so that each disturbs
the others, and counts exit statuses and processes that hang. Exit status 1 unless all
end with 0. (A gloo thread that outlives the model may abort or hang a run.)
"""

import argparse
import collections
import concurrent.futures
import sys
import tempfile
from pathlib import Path

from ladder.rungs import ROOT
from proofs.launch import DISTRIBUTED, launch
from proofs.processes import finish, start


def one(name):
    """The exit status of one short run, or "hung"."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = finish(start(launch(ROOT / name, 2, 1), folder))
        except AssertionError as error:
            print(error)
            return "hung"
        if done.returncode:
            print(done.stderr)
        return done.returncode


def main(runs, at_once):
    """{name: Counter of exit statuses} of `runs` runs of every distributed rung."""
    assert all(Path(ROOT, name).exists() for name in DISTRIBUTED)
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        names = [name for _ in range(runs) for name in DISTRIBUTED]
        statuses = list(pool.map(one, names))
    return {
        name: collections.Counter(
            status for x, status in zip(names, statuses, strict=True) if x == name
        )
        for name in DISTRIBUTED
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=3)
    args = parser.parse_args()
    counts = main(args.runs, args.at_once)
    for name, count in counts.items():
        print(f"{name}: {dict(count)} of {args.runs} runs, {args.at_once} at once")
    sys.exit(any(set(count) != {0} for count in counts.values()))
