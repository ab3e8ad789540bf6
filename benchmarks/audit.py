"""What it costs to watch a training: three commands alone, and below cluster/audit.py.

    python -m benchmarks.audit

Each turn starts a command anew, and its whole time counts, from the start of Python to
the report. The watched side is told `--batches 50`; no epoch here has more batches.
"""

import tempfile
import time

from benchmarks import report
from tools.run.processes import Program
from tools.scripts import ROOT

TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node=2"]
GPT = ["--data", f"{ROOT}/LICENSE", "--steps", 100, "--eval-every", 50]
GPT += ["--compile", "off", "--device", "cpu"]
AFTER = f"{ROOT}/docs/convert_your_script/after.py"
COMMANDS = {
    "mingpt.train, 100 steps": [*TORCHRUN, "-m", "mingpt.train", *GPT],
    "a convolutional net, 5 epochs of 16 steps": [*TORCHRUN, AFTER],
    "multinode.py, 60 epochs of 32 steps": [*TORCHRUN, f"{ROOT}/multinode.py", 60, 60],
}
AUDIT = ["python", "-m", "cluster.audit", "--batches", 50]


def seconds(*words):
    """The time of a command in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        done = Program(words, folder, real=True, PYTHONPATH=ROOT, OMP_NUM_THREADS=1)
        result = done.finish(timeout_s=1800)
        took_s = time.monotonic() - began
    assert result.returncode == 0, result.stdout + result.stderr
    return took_s


def main(args):
    report.print_setting(f"{args.rounds} rounds, two processes, CPU", "torch")
    for name, command in COMMANDS.items():
        contestants = {
            "alone": lambda command=command: seconds(*command),
            "watched": lambda command=command: seconds(*AUDIT, *command),
        }
        turns = report.take_turns(contestants, args.rounds, warm_up=0)
        report.print_table(name, turns, s=(".1f", float))


if __name__ == "__main__":
    main(report.make_parser(__doc__, rounds=(5, "turns of each side")).parse_args())
