"""Run mingpt.train, with something done to it that the environment asks for.

    AT_STEP=7 DO=sigkill python tests/faults/gpt.py --steps 12

DO: sigterm or sigkill (this process gets it when the step begins), sigterm_in_compile
(while torch.compile traces, where operations compute nothing), slow_start (the first
step takes 3 s), slow_evaluation (each takes 2 s longer), float64 (the model has such
weights, so that sums in another order agree to the last digits), full_disk (the second
snapshot finds room for 10 kB), no_room_for_metrics (they find no room at all),
slow_disk (each snapshot takes a while, and the first is kept as mingpt.pt.first),
no_mask (attention sees the future), leak (the validation text is trained as well).
RANK_ONLY=1 does it on this rank alone.
"""

import errno
import os
import resource
import signal
import sys
import time

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import utils
from mingpt import options, train

DO = os.environ.get("DO", "")
AT_STEP = int(os.environ.get("AT_STEP", -1))
RANK = os.environ.get("RANK", "0")
run_batch, load = train.Trainer._run_batch, train.load_train_objs
evaluate, log_row = train.Trainer._evaluate, utils.log_row
save_atomically = utils.save_atomically
attention = torch.nn.functional.scaled_dot_product_attention
saved = []


def signal_at_step(self, source, targets):
    if self.steps_run == AT_STEP and os.environ.get("RANK_ONLY", RANK) == RANK:
        self._finish_writing()
        os.kill(os.getpid(), getattr(signal, DO.upper()))
    return run_batch(self, source, targets)


def sigterm_while_tracing(self, source, targets):
    if self.steps_run == AT_STEP:
        with FakeTensorMode():
            signal.raise_signal(signal.SIGTERM)
    return run_batch(self, source, targets)


def start_slowly(self, source, targets):
    if self.steps_run == 0:
        time.sleep(3)
    return run_batch(self, source, targets)


def evaluate_slowly(self):
    time.sleep(2)
    return evaluate(self)


def log_on_a_full_disk(*row, **how):
    def fsync(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.fsync = fsync
    log_row(*row, **how)


def load_float64(args):
    corpus, model, make_optimizer = load(args)
    return corpus, model.double(), make_optimizer


def load_leaking(args):
    corpus, model, make_optimizer = load(args)
    corpus.train = np.concatenate([corpus.train, corpus.val])
    return corpus, model, make_optimizer


def attention_without_mask(*tensors, is_causal, **how):
    return attention(*tensors, is_causal=False, **how)


def save_with_fault(snapshot, path):
    saved.append(path)
    if DO == "full_disk" and len(saved) == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    if DO == "slow_disk":
        time.sleep(1)
    save_atomically(snapshot, path)
    if DO == "slow_disk" and len(saved) == 1:
        os.link(path, f"{path}.first")


if DO == "sigterm_in_compile":
    train.Trainer._run_batch = sigterm_while_tracing
elif DO == "no_room_for_metrics":
    utils.log_row = log_on_a_full_disk
elif DO == "slow_start":
    train.Trainer._run_batch = start_slowly
elif DO == "slow_evaluation":
    train.Trainer._evaluate = evaluate_slowly
elif DO.startswith("sig"):
    train.Trainer._run_batch = signal_at_step
elif DO == "float64":
    train.load_train_objs = load_float64
elif DO == "leak":
    train.load_train_objs = load_leaking
elif DO == "no_mask":
    torch.nn.functional.scaled_dot_product_attention = attention_without_mask
elif DO:
    utils.save_atomically = save_with_fault
sys.argv[0] = train.__file__
train.main(options.parse(options.make_parser(train.__doc__)))
