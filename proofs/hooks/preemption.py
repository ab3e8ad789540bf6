"""For preemptible.py: it notes its steps, and is told to stop at an exact place.

Each rank appends the samples of each step to the file `trained`, and writes the
time-out and the backend of the group in which ranks agree to the files `timeout` and
`backend`, and the backend of the last barrier's group to `barrier`. The default group
has another name for its backend, as it would have on GPUs. A rank sends SIGTERM to
itself

- where TOLD is "EPOCHS_RUN SAMPLES_RUN RANK": as that step begins, or the evaluation,
  before which all samples of the epoch are run;
- where LATE is "N RANK": when that rank has just learned, before its Nth step, that no
  rank was told to stop.

The model has dropout with the probability P in front.
"""

import os
import pathlib
import signal

import torch
import torch.distributed as dist
from hooks import replace
from hooks.noted import Noted


def around_load_train_objs(load_train_objs):
    train_set, eval_set, model, *rest = load_train_objs()
    dropout = torch.nn.Dropout(float(os.environ["P"]))
    model = torch.nn.Sequential(dropout, model)
    return Noted(train_set), eval_set, model, *rest


def tell():
    os.kill(os.getpid(), signal.SIGTERM)


class Trainer:
    def _run_batch(self, source, targets):
        seen = self.train_data.dataset.seen[-len(source) :]
        with open("trained", "a") as file:
            print(self.epochs_run, self.samples_run, *seen, file=file)
        self._maybe_tell()
        return super()._run_batch(source, targets)

    def _evaluate(self):
        self._maybe_tell()
        return super()._evaluate()

    def _maybe_tell(self):
        here = f"{self.epochs_run} {self.samples_run} {dist.get_rank()}"
        if os.environ.get("TOLD") == here:
            tell()


asked = 0


def note_agreement(all_reduce, *arguments, group=None, **options):
    global asked
    all_reduce(*arguments, group=group, **options)
    if group is not None:
        asked += 1
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        pathlib.Path("timeout").write_text(str(timeout.total_seconds()))
        pathlib.Path("backend").write_text(dist.get_backend(group))
        if os.environ.get("LATE") == f"{asked} {dist.get_rank()}":
            tell()


def note_barrier(barrier, group=None):
    pathlib.Path("barrier").write_text(dist.get_backend(group))
    barrier(group)


def another_name(_get_default_backend_for_device, _device):
    return "cpu:gloo"


replace(dist, "get_default_backend_for_device", another_name)
replace(dist, "all_reduce", note_agreement)
replace(dist, "barrier", note_barrier)
