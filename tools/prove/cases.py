"""Take many cases through many scripts, in one launch: what its ranks run.

A case makes what a script's `load_train_objs` returns. The ranks run the `main` of each
script again and again, in process groups between the same processes. This takes 50 ms,
where a launch takes seconds.
"""

import contextlib
import gc
import glob
import io
import json
import math
import os
import pickle
import sys
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

import utils
from tools.run import launch
from tools.run.processes import Done
from tools.run.results import losses, same_bits
from tools.scripts import ROOT, ancestry

collect = gc.collect
init_process_group, TCPStore = dist.init_process_group, dist.TCPStore
compiled = {}  # {script: its code, and that of its last block}


class Refused(Exception):
    """What `utils.error` raises here."""


class OwnStore(dist.HashStore):
    """In place of a script's TCPStore, whose processes are there already."""

    port = 0


class Ranks:
    """The `world` processes that train together. They also speak through `store`."""

    def __init__(self, store, rank, world):
        self.store, self.rank, self.world, self.calls = store, rank, world, 0

    def meet(self):
        """In a new process group."""
        leave()
        self.calls += 1
        store = dist.PrefixStore(f"group {self.calls}", self.store)
        who = {"rank": self.rank, "world_size": self.world}
        init_process_group("gloo", store=store, timeout=timedelta(seconds=60), **who)

    def exchange(self, mine):
        """What each rank has given."""
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
    if isinstance(state, dict):
        return {name: whole(x) for name, x in state.items()}
    if isinstance(state, (list, tuple)):
        return [whole(x) for x in state]
    if isinstance(state, DTensor):
        return state.full_tensor()
    return state.clone() if isinstance(state, torch.Tensor) else state


def run(name, ranks, replaced, path):
    """Train two epochs: [the model's last state, the optimizer's], the losses printed.

    The script runs as it is started, but for what `replaced` has. It resumes from
    `path` and saves to `path` + ".1" and ".2".
    """
    if name not in compiled:
        text, _, last = (ROOT / name).read_text().partition(launch.ENTRY)
        texts = text, f"if True:{last}"
        compiled[name] = [compile(x, ROOT / name, "exec") for x in texts]
    body, last = compiled[name]
    script, ended = {"__name__": "__main__"}, []
    exec(body, script)

    class Trainer(script["Trainer"]):
        def train(self, total_epochs):
            super().train(total_epochs)
            ended.append(whole([self.model.state_dict(), self.optimizer.state_dict()]))

        def _save_snapshot(self):
            self.snapshot_path = f"{path}.{self.epochs_run}"
            self.folder = ""  # of sharded_snapshot.py, which would remove epoch 1
            super()._save_snapshot()

    script |= {"Trainer": Trainer, "ddp_setup": lambda *_: None, **replaced}
    options = "--batch-size", launch.batch_size(name, 24, ranks.world)
    options += "--snapshot-path", path
    words = launch.command(ROOT / name, 2, 1, *options, nprocs=ranks.world)
    sys.argv = [str(ROOT / name), *words[words.index("2") :]]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(last, script)
    return ended[0], losses(Done(0, printed.getvalue(), ""))


def attempt(name, ranks, *arguments):
    """`run` on all ranks: (the first line of the first error, what `run` returns)."""
    fault = found = None
    try:
        found = run(name, ranks, *arguments)
    except Exception as error:
        fault = time.monotonic(), f"{type(error).__name__}: {error}".splitlines()[0]
    if fault:  # not before the error, and all that it holds, is gone
        leave()  # so that no rank waits for this one
    faults = [x for x in ranks.exchange(fault) if x]
    if faults and name in launch.DISTRIBUTED:
        ranks.meet()
    return min(faults)[1] if faults else None, found


def is_close(one, other):
    """Whether two states differ by rounding alone: bfloat16 has three digits."""
    try:
        for x, y in zip(tree_leaves(one), tree_leaves(other), strict=True):
            rough = getattr(x, "dtype", None) == torch.bfloat16
            assert_close(x, y, **({"rtol": 0.02, "atol": 0.02} if rough else {}))
    except AssertionError:
        return False
    return True


def distance(one, other):
    """How far the numbers of two models' states are apart, as a share of their norm."""
    apart, norm = 0, 0
    for x, y in zip(tree_leaves(one), tree_leaves(other), strict=True):
        if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()):
            apart += (x - y).abs().double().square().sum().item()
            norm += y.abs().double().square().sum().item()
    return math.sqrt(apart / norm)


def losses_agree(printed, others, state):
    """(whether two lists of printed losses do, the largest share by which they differ).

    state: of the model; bfloat16 rounds its losses, too.
    """
    kinds = [getattr(x, "dtype", None) for x in tree_leaves(state)]
    rounding = 5e-3 if torch.bfloat16 in kinds else 1e-5
    rows = zip(printed, others, strict=True)
    pairs = [pair for row in rows for pair in zip(*row, strict=True)]
    apart = max(abs(a / b - 1) for a, b in pairs)
    return apart < rounding, apart


def compare(mine, its):
    """A script with its parent, in words: (a model's state, the losses) of each.

    What differs does so by two shares: of the weights' norm, and of a loss.
    """
    (state, printed), (its_state, its_printed) = mine, its
    agree, apart = losses_agree(printed, its_printed, state)
    if agree and is_close(state, its_state):
        return "equal"
    return f"differs by {distance(state, its_state):.2g} and {apart:.2g}"


def outcome(name, ranks, replaced, path, others):
    """(how it went, in words; the model's last state and the losses).

    others: state and losses of its parent. One rank prints, and compares.
    """
    fault, found = attempt(name, ranks, replaced, path)
    if fault:
        saved = "saved, " if glob.glob(f"{path}.[12]*") and "Refused" in fault else ""
        return saved + fault, None
    mine, printed = found
    if not all(same_bits(x, mine) for x in ranks.exchange(mine)):
        return "ranks differ", None
    fault, found = attempt(name, ranks, replaced, f"{path}.1")
    if fault:
        return f"resumed, {fault}", None
    resumed, printed_later = found
    # On three ranks, the order of a sum depends on DDP's buckets, new after each start.
    same = is_close if ranks.world > 2 else same_bits
    if not all(ranks.exchange(same(resumed, mine))):
        return "resumed, it differs", None
    if printed and not losses_agree(printed_later, printed[1:], mine)[0]:
        return "resumed, its losses differ", None
    mine = mine[0], printed
    return compare(mine, others) if others and printed else "equal", mine


def take(makers, names, replaced, left_out, alone_first):
    """Write {script: {case: outcome}} to outcomes.json, and end the process.

    makers: {case: function that makes its objects}. names: scripts, parents first.
    replaced: {script: {name in it: what stands there}}. left_out: [(script, case)].
    alone_first: scripts to compare with themselves on one process.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store.set_timeout(timedelta(seconds=100))
    alone, together = Ranks(OwnStore(), 0, 1), Ranks(store, rank, world)
    prepare(rank)
    found, trained = {}, {}
    for name in names:
        ways = [together if name in launch.DISTRIBUTED else alone]
        for ranks in [alone] * (name in alone_first) + ways:
            found[name] = {}
            os.environ |= {"RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.world)}
            ranks.meet() if name in launch.DISTRIBUTED else leave()
            for case in [x for x in makers if (name, x) not in left_out]:
                others = [trained.get((x, case)) for x in ancestry(name)]
                others = [None, *(x for x in others if x and ranks in ways)]
                objects = {"load_train_objs": makers[case], **replaced.get(name, {})}
                path = os.path.abspath(f"{ranks.world} {name} {case}".replace("/", " "))
                path += f" {rank}" * (ranks is alone)
                how = outcome(name, ranks, objects, path, others[-1])
                found[name][case], trained[name, case] = how
    if rank == 0:
        with open("outcomes.json", "w") as file:
            json.dump(found, file)
    os._exit(0)  # there may be threads of groups that were left
