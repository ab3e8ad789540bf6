"""Run mingpt.train, with something done to it that the environment asks for.

    AT_STEP=7 DO=sigkill python tests/hooks/gpt.py --steps 12

DO: sigterm or sigkill (this process gets it when the step begins), nan (the weights are
NaN from then on), nan_sigterm (both), nan_once (in this step alone), apart (one weight
is another from then on), sigterm_in_compile
(while torch.compile traces, where operations compute nothing), float64 (the model has
such weights, so that sums in another order agree to the last digits), own_folder (each
rank is in a folder of its own, as on a machine of its own),
slow_disk (each snapshot takes a while, and the first is kept as mingpt.pt.first).
GPT=own: the class GPT of the module `own` takes the place of mingpt.model's.
RANK_ONLY=1 does it on this rank alone. ASK_EVERY=1: whether one was told to stop.
"""

import importlib
import os
import signal
import sys
import time

from torch._subclasses.fake_tensor import FakeTensorMode

import utils
from mingpt import model, options, train

DO = os.environ.get("DO", "")
AT_STEP = int(os.environ.get("AT_STEP", -1))
RANK = os.environ.get("RANK", "0")
train.Trainer.ask_every = int(os.environ.get("ASK_EVERY", 10))
run_batch = train.Trainer._run_batch
load_train_objs = train.load_train_objs
save_atomically = utils.save_atomically


def fault_at_step(self, source, targets):
    if self.steps_run != AT_STEP or os.environ.get("RANK_ONLY", RANK) != RANK:
        return run_batch(self, source, targets)
    self._finish_writing()
    weight = self.model.lm_head.weight.data
    good = weight.clone()
    if "nan" in DO:
        weight.fill_(float("nan"))
    if DO == "apart":
        self.model.transformer.h[0].mlp.c_fc.weight.data.mul_(1.01)
    if DO == "sigkill":
        signal.raise_signal(signal.SIGKILL)
    if DO == "sigterm_in_compile":
        with FakeTensorMode():
            signal.raise_signal(signal.SIGTERM)
    elif "sigterm" in DO:
        signal.raise_signal(signal.SIGTERM)
    loss = run_batch(self, source, targets)
    if DO == "nan_once":
        weight.copy_(good)
    return loss


def load_float64(configuration):
    corpus, model = load_train_objs(configuration)
    return corpus, model.double()


def save_slowly(snapshot, path):
    time.sleep(1)
    save_atomically(snapshot, path)
    if not os.path.exists(f"{path}.first"):
        os.link(path, f"{path}.first")


if DO.startswith(("sig", "nan", "apart")):
    train.Trainer._run_batch = fault_at_step
elif DO == "float64":
    train.load_train_objs = load_float64
elif DO == "own_folder":
    os.chdir(RANK)
elif DO == "slow_disk":
    utils.save_atomically = save_slowly
if "GPT" in os.environ:
    model.GPT = importlib.import_module(os.environ["GPT"]).GPT
sys.argv[0] = train.__file__
args = options.make_parser(train.__doc__).parse_args()
train.main(options.resolve(args))
