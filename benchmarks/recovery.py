"""Seconds from the kill of a process to the first step of the next attempt.

    python -m benchmarks.recovery

Beside it stands the floor: starting the same job fresh, from the launch of torchrun to
the first step. In each round torchrun starts multinode.py on this machine, and then one
of its processes is killed with SIGKILL at a random moment, `--kills` times. The clock
stops when the last process has done its first `Trainer._run_batch`, optimizer step
included. What runs is a copy of multinode.py with a time stamp put in.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import utils
from benchmarks import report
from benchmarks.startup import spread
from proofs.launch import plant

TIMEOUT = 120  # seconds that an attempt may take to its first step


def parse_args():
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = utils.fail
    for name, default, text in (
        ("--rounds", 5, "fresh starts"),
        ("--kills", 3, "kills after each of them"),
        ("--nprocs", 2, "processes that torchrun starts"),
    ):
        parser.add_argument(
            name, type=utils.positive_int, default=default, help=f"{text} ({default})"
        )
    return parser.parse_args()


def first_steps(folder, nprocs, known):
    """({process id: time of its first step} of `nprocs` new ones, the last time)."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        files = [x for x in folder.glob("step.*") if x.suffix != ".new"]
        new = {int(x.suffix[1:]): float(x.read_text()) for x in files if x not in known}
        if len(new) == nprocs:
            known.update(files)
            return new, max(new.values())
        time.sleep(0.01)
    sys.exit(f"recovery.py: error: no first step within {TIMEOUT} s")


def one_round(folder, nprocs, kills):
    """(seconds of a fresh start, [seconds of each recovery])."""
    for file in folder.glob("s*.*"):
        if file.name.startswith(("step.", "snapshot.pt")):
            file.unlink()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={nprocs}", f"--max-restarts={kills}"]
    launched, known = time.monotonic(), set()
    process = subprocess.Popen(
        [*command, "multinode.py", "1000000", "1"],
        cwd=folder,
        env=os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        workers, when = first_steps(folder, nprocs, known)
        fresh, recoveries = when - launched, []
        for _ in range(kills):
            time.sleep(random.uniform(0.5, 1.5))
            killed = time.monotonic()
            os.kill(random.choice(list(workers)), signal.SIGKILL)
            workers, when = first_steps(folder, nprocs, known)
            recoveries.append(when - killed)
    finally:
        process.terminate()
        process.wait(TIMEOUT)
    return fresh, recoveries


def main(args):
    report.print_setting("torch")
    print(
        f"plan      {args.rounds} fresh starts after 1 to warm up, {args.kills} kills"
        f" after each, {args.nprocs} processes\n",
        flush=True,
    )
    random.seed(0)
    rounds = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plant("multinode.py", folder, hooks=["note_first_step"])
        for number in range(args.rounds + 1):
            both = one_round(folder, args.nprocs, args.kills if number else 1)
            if number:  # round 0 warms up: it brings the files into memory
                rounds.append(both)
    floor = [fresh for fresh, _ in rounds]
    recoveries = [x for _, some in rounds for x in some]
    middle = statistics.median(floor)
    print("seconds to the first step, median (min .. max)")
    print(f"{'fresh start':16} {spread(floor)}")
    print(f"{'after a kill':16} {spread(recoveries)}")
    print(f"{'ratio':16} {spread([x / middle for x in recoveries])}")


if __name__ == "__main__":
    main(parse_args())
