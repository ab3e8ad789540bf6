"""Seconds from the launch of multigpu.py to its first training step.

    python -m benchmarks.startup

Beside it stands the floor, floor.py: a script that imports torch and spawns equally
many processes which do nothing. The two take turns, in both orders.

The clock starts when the command is launched. For multigpu.py it stops when the last of
its processes has done its first `Trainer._run_batch`, optimizer step included; for the
floor, when the last of its processes has entered its empty function. What runs is a
copy of multigpu.py as a person would run it, with two lines added: the first import is
stamps.py, which notes the times, and `Trainer._run_batch` has its first call wrapped.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import utils
from benchmarks import report
from ladder.files import edit
from ladder.rungs import ROOT

HERE = os.path.dirname(os.path.abspath(__file__))
SCRIPTS = ("floor.py", "multigpu.py")
TIMEOUT = 300  # seconds that one run may take


def parse_args():
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = utils.fail
    for name, default, text in (
        ("--rounds", 5, "how often each script is run"),
        ("--nprocs", 2, "processes that each script spawns"),
    ):
        parser.add_argument(
            name, type=utils.positive_int, default=default, help=f"{text} ({default})"
        )
    return parser.parse_args()


def copy_scripts(folder):
    """Put both scripts and what they import into `folder`, ready to be timed."""
    for name in ("stamps.py", "floor.py"):
        shutil.copy(os.path.join(HERE, name), folder)
    shutil.copy(utils.__file__, folder)
    script = Path(shutil.copy(ROOT / "multigpu.py", folder))
    first_import, main_block = "\nimport functools\n", '\nif __name__ == "__main__":'
    edit(
        script,
        (first_import, f"\nimport stamps{first_import}"),
        (main_block, f"\nstamps.stamp_first_step(Trainer)\n{main_block}"),
    )


def run(folder, script, nprocs):
    """Run `script` to its end; return the seconds of each phase until it was "done".

    The phases are those of the process that is launched, until its last child begins,
    then those of the child that is done last. They add up to the total.
    """
    command = [sys.executable, script, *(["1", "1"] if script == "multigpu.py" else [])]
    for leftover in ("stamps", "snapshot.pt"):
        if os.path.exists(os.path.join(folder, leftover)):
            os.remove(os.path.join(folder, leftover))
    launched = time.monotonic()
    process = subprocess.Popen(
        [*command, "--nprocs", str(nprocs)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        sys.exit(f"startup.py: error: {script} has not ended in {TIMEOUT} s")
    finally:
        process.kill()  # if it still runs; its children end with it
    if process.returncode != 0:
        last_line = output.strip().rpartition("\n")[2]
        print(f"startup.py: error: {script} failed: {last_line}", file=sys.stderr)
        sys.exit(process.returncode)
    stamps = defaultdict(dict)  # process id: {what happened: when}
    with open(os.path.join(folder, "stamps")) as file:
        for line in file:
            pid, when, what = line.rstrip("\n").split(" ", 2)
            stamps[int(pid)][what] = float(when)
    parent = stamps.pop(process.pid)
    child = max(stamps.values(), key=lambda its: its["done"])
    phases = {}
    for name, its, begin, end in (
        ("parent", parent, launched, child["begin process"]),
        ("child", child, child["begin process"], child["done"]),
    ):
        rest = end - begin
        for module in ("torch", "torch._dynamo"):
            took = its.get(f"end {module}", 0) - its.get(f"begin {module}", 0)
            phases[f"{name}: import {module}"] = took
            rest -= took
        phases[f"{name}: rest"] = rest
    return phases


def main(args):
    report.print_setting("torch")
    print(
        f"plan      {args.rounds} rounds after 1 to warm up, "
        f"{args.nprocs} processes spawned\n",
        flush=True,
    )
    runs = {script: [] for script in SCRIPTS}
    with tempfile.TemporaryDirectory() as folder:
        copy_scripts(folder)
        for number in range(args.rounds + 1):
            for script in SCRIPTS if number % 2 else reversed(SCRIPTS):
                phases = run(folder, script, args.nprocs)
                if number > 0:  # round 0 warms up: it brings the files into memory
                    runs[script].append(phases)
    totals = {
        script: [sum(phases.values()) for phases in runs[script]] for script in SCRIPTS
    }
    print("seconds from launch, median (min .. max)")
    for script, seconds in totals.items():
        print(f"{script:16} {spread(seconds)}")
    ratios = [
        all_of_it / least for least, all_of_it in zip(*totals.values(), strict=True)
    ]
    print(f"{'ratio':16} {spread(ratios)}")
    print(
        f"\n{'where they go, medians in s':30} {'floor':>8} {'multigpu':>8} {'more':>8}"
    )
    for phase in runs["floor.py"][0]:
        least, all_of_it = (
            statistics.median(phases[phase] for phases in runs[script])
            for script in SCRIPTS
        )
        print(f"{phase:30} {least:8.2f} {all_of_it:8.2f} {all_of_it - least:8.2f}")


def spread(values):
    """The median and the extremes of `values`."""
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:6.2f} ({low:.2f} .. {high:.2f})"


if __name__ == "__main__":
    main(parse_args())
