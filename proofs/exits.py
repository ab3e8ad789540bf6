"""Does a run end well, every time, also when the machine is busy?

    python -m proofs.exits [--runs 50] [--at-once 3]

Runs multigpu.py, multinode.py and all that come from them again and again, several at
once so that each disturbs the others, and counts exit statuses and processes that hang.
Exit status 1 unless all end with 0. (A gloo thread that outlives the model may abort or
hang a run.)
"""

import collections
import concurrent.futures
import sys
import tempfile

from ladder.cli import Parser
from ladder.rungs import ROOT
from proofs.launch import DISTRIBUTED, launch
from proofs.processes import TimedOut


def run_once(name):
    """The exit status of one short run, or "hung"."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            why = "it is the end of an interpreter that may go wrong"
            done = launch(ROOT / name, 2, 1, cwd=folder, real=why)
        except TimedOut as error:
            print(error)
            return "hung"
        if done.returncode:
            print(done.stderr)
        return done.returncode


def main(runs, at_once):
    """{name: Counter of exit statuses} of `runs` runs of every distributed rung."""
    names = [name for _ in range(runs) for name in DISTRIBUTED]
    counts = {name: collections.Counter() for name in DISTRIBUTED}
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        for name, status in zip(names, pool.map(run_once, names), strict=True):
            counts[name][status] += 1
    return counts


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=3)
    args = parser.parse_args()
    counts = main(args.runs, args.at_once)
    for name, count in counts.items():
        print(f"{name}: {dict(count)} of {args.runs} runs, {args.at_once} at once")
    sys.exit(any(set(count) != {0} for count in counts.values()))
