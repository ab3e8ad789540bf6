"""DDP, accumulation and DiLoCo over a slow link: the loss, the bytes and the time.

    python -m benchmarks.diloco

Two hosts with a rank each train mingpt's smallest GPT on the same number of windows of
text, from the same weights. Accumulation makes an eighth of the steps, of eight times
as many windows. DiLoCo's ranks average after every 16 steps.

The losses do not depend on the link. Each way trains to the end on a fast one, and then
makes SLOW steps over the slow one, which says how long a window takes. Evaluations do
not count. It needs Linux and root, and a quarter of an hour.
"""

import itertools
import json
import math
import os
import re
import sys
import time
from collections import namedtuple

import torch

from benchmarks import report
from benchmarks.measured_epoch import sent_by_cards
from mingpt import options, train
from tools.cli import error
from tools.run.hosts import Hosts, why_not
from tools.run.processes import temporary_folder
from tools.scripts import ROOT
from variants.diloco import OuterOptimizer

MBIT = 10  # per second, of the slow link
SLOW = 16  # steps over it
LOCAL_STEPS = 16
OUTER_LR = 0.7
OUTER_MOMENTUM = 0.8
# {name: (how many steps of DDP one step stands for, options)}
WAYS = {
    "DDP": (1, []),
    "accumulation": (8, ["--accumulate=8", "--batch-size=96", "--lr=4.2e-3"]),
    "DiLoCo": (1, ["--outer"]),
}
# At an evaluation, of all steps before. computes: seconds of the thread.
Found = namedtuple("Found", "loss windows seconds computes sent weights")


class Trainer(train.Trainer):
    """mingpt's, and it says at each evaluation what the steps so far took."""

    took = torch.zeros(3, dtype=torch.float64)

    def _run_steps(self):
        before = clocks()
        result = super()._run_steps()
        self.took = self.took + clocks() - before
        return result

    def _evaluate(self):
        found = super()._evaluate()
        weights = sum(weight.numel() for weight in self.model.parameters())
        facts = Found(found["val loss"], self.windows_run, *self.took.tolist(), weights)
        self._print(f"found {json.dumps(facts)}")
        return found

    def _save_snapshot(self):
        pass


class DiLoCo(Trainer):
    """Each rank steps by itself, and all take an outer step after LOCAL_STEPS."""

    def __init__(self, **objects):
        super().__init__(**objects)
        self.outer = OuterOptimizer(self.model, OUTER_LR, OUTER_MOMENTUM)

    def _stop_if_told(self):  # it asks the other rank
        pass

    def _run_batch(self, source, targets):
        with self.wrapped_model.no_sync():  # it sends nothing
            loss = super()._run_batch(source, targets)
        if (self.steps_run + 1) % LOCAL_STEPS == 0:
            self.outer.step()
        return loss


def clocks():
    """Seconds by the clock, those of this thread, and the bytes that were sent."""
    now = time.perf_counter(), time.thread_time(), sent_by_cards()
    return torch.tensor(now, dtype=torch.float64)


def worker():
    parser = options.make_parser(__doc__)
    parser.add_argument("--outer", action="store_true")
    args = parser.parse_args()
    train.Trainer = DiLoCo if vars(args).pop("outer") else Trainer
    train.main(options.resolve(args))


def run(hosts, *words):
    """[Found] of rank 0, at each evaluation."""
    command = ["torchrun", f"--nnodes={len(hosts)}", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=node0", "-m", "benchmarks.diloco", "--compile=off"]
    env = {"PYTHONPATH": ROOT, "GLOO_SOCKET_IFNAME": "eth0"}
    jobs = [host.start([*command, *words], **env) for host in hosts]
    status = [job.finish().returncode for job in jobs]
    if any(status):
        sys.exit(f"{jobs[0].output}\nerror: mingpt failed: see above")
    lines = re.findall("^found (.*)", jobs[0].output, re.M)
    return [Found(*json.loads(line)) for line in lines]


def reach(curve, loss):
    """After how many windows the loss is reached, between two evaluations, or NaN."""
    for one, other in itertools.pairwise(curve):
        if other.loss <= loss:
            share = (one.loss - loss) / (one.loss - other.loss)
            return one.windows + share * (other.windows - one.windows)
    return math.nan


def main(args):
    reason = why_not()
    if reason:
        error(reason)
    report.print_setting(f"{args.steps} steps of DDP, {MBIT} Mbit/s each way", "torch")
    curves = {}
    slow = {}  # {way: what its steps over the slow link took}
    hosts = Hosts(2, temporary_folder())
    for way, (size, words) in WAYS.items():
        curves[way] = run(hosts, *words, f"--steps={args.steps // size}")
        for host in hosts:
            host.slow(f"{MBIT}mbit")
        few = SLOW // size
        (slow[way],) = run(hosts, *words, f"--steps={few}", f"--eval-every={few}")
        for host in hosts:
            host.mend()
    target = max(curves["DDP"][-1].loss, curves["DiLoCo"][-1].loss)
    heads = "val loss", "MB", "seconds", f"MB to {target:.3f}", "seconds", "DDP's / its"
    print(f"\n{'':12}", *(f"{head:>12}" for head in heads))
    first = reach(curves["DDP"], target) * slow["DDP"].seconds / slow["DDP"].windows
    for way, curve in curves.items():
        few = slow[way]
        sent = few.sent / few.windows
        seconds = few.seconds / few.windows
        goal = reach(curve, target)
        line = f"{way:12} {curve[-1].loss:12.4f}"
        for windows in curve[-1].windows, goal:
            line += f" {sent * windows / 1e6:12,.1f} {seconds * windows:12,.1f}"
        print(f"{line} {first / (goal * seconds):12.1f}")


if __name__ == "__main__" and "RANK" in os.environ:
    worker()
elif __name__ == "__main__":
    counts = {"steps": (2000, "steps of DDP; the others take as many windows")}
    main(report.make_parser(__doc__, **counts).parse_args())
