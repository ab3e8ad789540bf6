"""What the ranks of a launch run that takes many cases through many scripts.

A case is a `load_train_objs` and a `make_optimizer`. The ranks run the `main` of each
script again and again, in process groups between the same processes. This takes 50 ms,
where a launch takes seconds.
"""

import contextlib
import gc
import glob
import io
import json
import os
import pickle
import shutil
import sys
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves, tree_map_only

import utils
from tools.run import launch, warm
from tools.run.processes import Done
from tools.run.results import losses, same_bits
from tools.scripts import ROOT, ancestry

# Kept, because `prepare` puts others in their place
collect = gc.collect
TCPStore = dist.TCPStore


class Refused(Exception):
    """`utils.error` raises this here, and does not end the process."""


class OwnStore(dist.HashStore):
    """A script gets this in place of its TCPStore: its processes have met already."""

    port = 0


@dataclass
class Ranks:
    """The `world` processes that train together. They also speak through `store`."""

    store: dist.Store
    rank: int
    world: int
    calls: int = 0

    def meet(self):
        """Make a new process group. Of some hundred, gloo fails to connect one."""
        for _ in range(5):
            leave()
            self.calls += 1
            fault = None
            try:
                dist.init_process_group(
                    "gloo",
                    store=dist.PrefixStore(f"group {self.calls}", self.store),
                    rank=self.rank,
                    world_size=self.world,
                    timeout=timedelta(seconds=60),
                )
            except RuntimeError as error:
                fault = str(error)
            if not any(self.exchange(fault)):
                return
        raise ConnectionError("gloo does not connect the ranks")

    def exchange(self, mine):
        """Give `mine` to all ranks; return a list of what each has given."""
        self.calls += 1
        self.store.set(f"{self.calls} of {self.rank}", pickle.dumps(mine))
        keys = [f"{self.calls} of {rank}" for rank in range(self.world)]
        return [pickle.loads(self.store.get(key)) for key in keys]


def leave():
    """End the process group: ranks that wait for this one get an error."""
    collect()  # what still holds it would end it later, and may then hang
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()


def prepare(rank):
    """Leave out what only costs time here, or would end the process or its group."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed = torch.default_generator.manual_seed  # the CPU's alone
    os.fsync = lambda file: None
    shutil.rmtree = lambda *_, **__: None  # sharded_snapshot.py would remove epoch 1
    gc.freeze()
    gc.collect = lambda: 0

    def refuse(message):
        raise Refused(message)

    utils.error = refuse
    utils.spawn = lambda main, arguments, nprocs: main(rank, *arguments)
    dist.TCPStore = lambda *_, **__: OwnStore()
    dist.destroy_process_group = lambda: None
    del os.environ["TORCHELASTIC_RUN_ID"]  # the scripts that spawn refuse it


def whole(state):
    """A copy of `state`, whose sharded tensors are put together."""

    def copy(tensor):
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()

    return tree_map_only(torch.Tensor, copy, state)


class Trained(NamedTuple):
    """What a script has at the end of its training."""

    states: list  # of the model and of the optimizer, as state_dict() has them
    losses: list  # [(train loss, held-out loss) of each epoch], if this rank prints


def run(name, ranks, replaced, path):
    """Train two epochs: what the script has Trained.

    The script runs as it is started, except for the functions that `replaced` has. It
    resumes from `path` and saves to `path` + ".1" and ".2".
    """
    ended = []

    def change(script):
        class Trainer(script["Trainer"]):
            def train(self, total_epochs):
                super().train(total_epochs)
                states = [self.model.state_dict(), self.optimizer.state_dict()]
                ended.append(whole(states))

            def _save_snapshot(self):
                self.snapshot_path = f"{path}.{self.epochs_run}"
                super()._save_snapshot()

        script["Trainer"] = Trainer
        script["ddp_setup"] = lambda *_: None
        script.update(replaced)

    script = ROOT / name
    how = {"nprocs": ranks.world, "batch": 24}
    words = launch.command(script, 2, 1, "--snapshot-path", path, **how)
    sys.argv = [str(script), *words[words.index("2") :]]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        warm.execute(script, "__main__", [change])
    return Trained(ended[0], losses(Done(0, printed.getvalue(), "")))


def attempt(name, ranks, *arguments):
    """`run` on all ranks: (the first line of the first error or None, Trained)."""
    fault = None
    trained = None
    try:
        trained = run(name, ranks, *arguments)
    except (Exception, CheckpointException) as error:  # which is no Exception
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        fault = (time.monotonic(), line)
    if fault:  # not before the error, and all that it holds, is gone
        leave()  # so that no rank waits for this one
    faults = [*filter(None, ranks.exchange(fault))]
    if not faults:
        return None, trained
    if name in launch.DISTRIBUTED:
        ranks.meet()
    _, first = min(faults)
    return first, None


def leaves_of(one, other):
    """[(a tensor or number of a state, that of another state at its place)]."""
    return zip(tree_leaves(one), tree_leaves(other), strict=True)


def is_bfloat16(leaf):
    return getattr(leaf, "dtype", None) == torch.bfloat16


def is_close(one, other):
    """Whether two states differ by rounding alone: bfloat16 has three digits."""
    try:
        for leaf, other_leaf in leaves_of(one, other):
            # None: assert_close's own for this type, the closest that are usual.
            tolerance = 0.02 if is_bfloat16(leaf) else None
            assert_close(leaf, other_leaf, rtol=tolerance, atol=tolerance)
    except AssertionError:
        return False
    return True


def losses_agree(printed, others, states):
    """Whether two lists of printed losses agree; `states`: bfloat16 rounds them."""
    rounding = 5e-3 if any(map(is_bfloat16, tree_leaves(states))) else 1e-5
    shares = [abs(loss / other - 1) for loss, other in leaves_of(printed, others)]
    return max(shares) < rounding


def agree(one, other):
    """Whether two scripts have Trained one model, with the same losses."""
    model, _ = one.states
    other_model, _ = other.states
    same_losses = losses_agree(one.losses, other.losses, model)
    return same_losses and is_close(model, other_model)


def outcome(name, ranks, replaced, path, others):
    """(how it went, in words; what was Trained, or None if this went wrong).

    others: what its parent has Trained, or None. One rank prints, and compares.
    """
    fault, trained = attempt(name, ranks, replaced, path)
    if fault:
        if "Refused" in fault and glob.glob(f"{path}.[12]*"):
            fault = f"saved, {fault}"
        return fault, None
    states, printed = trained
    if not all(same_bits(theirs, states) for theirs in ranks.exchange(states)):
        return "ranks differ", None
    fault, resumed = attempt(name, ranks, replaced, f"{path}.1")
    if fault:
        return f"resumed, {fault}", None
    # On three ranks, the order of a sum depends on DDP's buckets, new after each start.
    same = is_close if ranks.world > 2 else same_bits
    if not all(ranks.exchange(same(resumed.states, states))):
        return "resumed, it differs", None
    if printed and not losses_agree(resumed.losses, printed[1:], states):
        return "resumed, its losses differ", None
    if others and printed and not agree(trained, others):
        return "differs", trained
    return "equal", trained


def enter(ranks, name):
    """Set the variables and the process group with which this script begins."""
    os.environ["RANK"] = str(ranks.rank)
    os.environ["WORLD_SIZE"] = str(ranks.world)
    if name in launch.DISTRIBUTED:
        ranks.meet()
    else:
        leave()


def run_cases(makers, names, replaced, left_out, alone_first):
    """Write {script: {case: outcome}} to outcomes.json, and end the process.

    makers: {case: {name: function of the script}}. names: scripts, parents first.
    replaced: {script: {name in it: what stands there}}. left_out: [(script, case)].
    alone_first: scripts to compare with themselves on one process.
    """
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store.set_timeout(timedelta(seconds=100))
    alone = Ranks(OwnStore(), rank=0, world=1)
    together = Ranks(store, rank, world)
    prepare(rank)
    found = {}
    trained = {}  # {(script, case): Trained, or None}

    def train_all(name, ranks, parents):
        """parents: the scripts to compare with, the nearest first."""
        folder = f"{name.replace('/', ' ')} {rank if ranks is alone else 'together'}"
        enter(ranks, name)
        os.makedirs(folder, exist_ok=True)
        found[name] = {}
        for case, functions in makers.items():
            if (name, case) in left_out:
                continue
            ended = [trained.get((parent, case)) for parent in parents]
            others = next(filter(None, ended), None)
            objects = {**functions, **replaced.get(name, {})}
            path = os.path.abspath(f"{folder}/{case}.pt")
            how, trained[name, case] = outcome(name, ranks, objects, path, others)
            found[name][case] = how

    for name in names:
        parents = ancestry(name)[-2::-1]
        if name in alone_first:
            train_all(name, alone, parents=[])
            parents = [name, *parents]
        ranks = together if name in launch.DISTRIBUTED else alone
        train_all(name, ranks, parents)
    if rank == 0:
        with open("outcomes.json", "w") as file:
            json.dump(found, file)
    os._exit(0)  # there may be threads of groups that were left
