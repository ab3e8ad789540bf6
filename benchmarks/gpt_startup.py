"""Seconds from `python -m mingpt.train` to its first step, for benchmarks.gpt.

The command runs in a process of its own, and stamps.py notes when its phases begin and
end. After the first step the process is ended.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import report
from ladder.rungs import ROOT

HERE = Path(__file__).parent
RUNNER = """
import stamps
import runpy, sys
import mingpt.train  # imports all that the program does
from mingpt import data, options, report
stamps.stamp("end imports")
stamps.stamp_calls(data, "prepare")
stamps.stamp_calls(options, "settle")
stamps.stamp_calls(report, "peak_flops")
stamps.end_after(report.Progress, "step")
del sys.modules["mingpt.train"]
runpy.run_module("mingpt.train", run_name="__main__", alter_sys=True)
"""
PHASES = {  # {what: the stamps that it begins and ends with}
    "Python": ("launched", "begin process"),
    "import torch": ("begin torch", "end torch"),
    "other imports": ("end torch", "end imports"),
    "data": ("begin prepare", "end prepare"),
    "model and checks": ("end prepare", "end settle"),
    "process group, Trainer": ("end settle", "begin peak_flops"),
    "peak, for MFU": ("begin peak_flops", "end peak_flops"),
    "first step": ("end peak_flops", "end step"),
    "all": ("launched", "end step"),
}
TIMEOUT_S = 600


def run(folder, *options):
    """{phase: seconds} of one start. What earlier starts have cached is in `folder`."""
    (folder / "stamps").unlink(missing_ok=True)
    environment = {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    launched = time.monotonic()
    done = subprocess.run(
        [sys.executable, "runner.py", "--device", "cpu", *options],
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\ngpt.py: error: mingpt.train has failed: see above")
    when = {"launched": launched}
    for line in (folder / "stamps").read_text().splitlines():
        _, seconds, what = line.split(" ", 2)
        when.setdefault(what, float(seconds))
    return {name: when[end] - when[begin] for name, (begin, end) in PHASES.items()}


def start(rounds, *options, kept=True):
    """[{phase: seconds} of each round]. `kept`: the caches of an earlier start."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + kept):
            place = Path(folder, "0" if kept else str(number))
            place.mkdir(exist_ok=True)
            shutil.copy(HERE / "stamps.py", place)
            (place / "runner.py").write_text(RUNNER)
            found.append(run(place, *options))
    return found[kept:]  # the first one fills the caches


def main(rounds):
    report.print_setting("torch")
    print(f"plan      {rounds} starts of each kind\n", flush=True)
    kinds = {
        "first start": start(rounds, kept=False),
        "later starts": start(rounds),
        "not compiled": start(rounds, "--compile", "off"),
    }
    print(f"{'seconds, median':24}" + "".join(f"{name:>14}" for name in kinds))
    for phase in PHASES:
        medians = [statistics.median(x[phase] for x in its) for its in kinds.values()]
        print(f"{phase:24}" + "".join(f"{x:14.2f}" for x in medians))
