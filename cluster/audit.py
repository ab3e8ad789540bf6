"""Run a training command, and learn which silent mistakes it makes.

    python -m cluster.audit torchrun --standalone --nproc-per-node=2 train.py --epochs 2

The command runs as you typed it, and trains the same weights: your script is not
edited. When it has ended, a report names each mistake that it has made, with the line
of your code. To take this tool along, copy audit.py and audit_watch.py.

Exit status: 0 nothing is wrong, 1 something is, 2 the audit could not be made.
"""

import argparse
import collections
import itertools
import json
import linecache
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROUNDING = 1e-6  # by this share of their size, sums of equal weights may differ
WATCH = Path(__file__).resolve().parent / "audit_watch.py"
SITE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("audit_watch", {path!r})
module = sys.modules["audit_watch"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.begin()
"""
CHECKS = {}  # {name of a check: (its function, its page)}


class Unseen(Exception):
    """The run has not shown what a check needs."""


class Event(dict):
    """Its entries are attributes; one that it lacks is None."""

    __getattr__ = dict.get


class BadInput(Exception):
    """The audit cannot be made."""


def check(page):
    """A check of a run: it yields (lines, step, numbers seen) for each mistake.

    Its docstring begins with what is so if nothing is wrong. The rest says what the
    mistake does to the model.
    """

    def add(function):
        CHECKS[function.__name__] = (function, page)
        return function

    return add


# What a run has left


class Process:
    """The events of one process, sorted."""

    def __init__(self, events):
        self.of = collections.defaultdict(list)  # {kind of event: [event, ...]}
        for event in events:
            self.of[event.kind].append(event)
        start = events[0]
        group = self.of["group"] or [{}]
        self.rank = group[-1].get("rank", int(start.RANK or 0))
        self.host = start.host
        self.time = start.time
        self.steps = self.by_optimizer("step")
        self.weights = {}  # {optimizer: {steps made: [[sum, size] of each]}}
        for number, found in self.by_optimizer("weights").items():
            self.weights[number] = {event.step: event.sums for event in found}
        self.rows = {}  # {optimizer: [[name, lines, numbers, part, averaged], ...]}
        for event in self.of["parameters"]:
            self.rows[event.optimizer] = event.rows
        self.loaders = {}  # {(loader, iteration): event}
        for event in self.of["iterate"]:
            self.loaders[event.loader, event.iteration] = event
        self.trained = collections.defaultdict(list)  # {(loader, iteration): batches}
        self.contents = {}  # {loader: {number of a sample: its hash, each time}}
        self.passes = []  # evaluations: {"batches", "lines", "before", "after"}
        self.sort_batches(events)

    def by_optimizer(self, kind):
        found = collections.defaultdict(list)
        for event in self.of[kind]:
            found[event.optimizer].append(event)
        return dict(found)

    def sort_batches(self, events):
        """Tell batches that were trained on from those of an evaluation.

        A batch that is looked at and thrown away is neither: the loader begins anew.
        """
        waiting = []
        evaluates = False
        current = None
        for event in events:
            if event.kind == "batch":
                hashes = self.contents.setdefault(event.loader, {})
                for index, row in zip(
                    event.indices or (), event.rows or (), strict=False
                ):
                    hashes.setdefault(index, []).append(row)
                if evaluates:
                    current.batches += waiting
                    waiting = []
                    evaluates = False
                waiting.append(event)
            elif event.kind == "eval":
                if current is None:
                    current = Event(batches=[], lines=event.lines)
                    current["before"] = event.meetings
                    current["buffers"] = event.buffers
                    self.passes.append(current)
                evaluates = True
            elif event.kind == "train":
                newest = {batch.loader: batch.iteration for batch in waiting}
                for batch in waiting:
                    key = batch.loader, batch.iteration
                    if newest[key[0]] == key[1]:
                        self.trained[key].append(batch)
                waiting = []
                evaluates = False
                if current:
                    current["after"] = event.meetings
                    current = None
        if evaluates:
            current.batches += waiting
        if current:
            current["after"] = events[-1]["meetings"]

    def indices(self, batches):
        """The samples' numbers; [] if some are not known."""
        found = []
        for batch in batches:
            if batch.indices is None:
                return []
            found += batch.indices
        return found


class Run:
    """A command that has ended: its processes that trained, by rank."""

    def __init__(self, folder, status=0):
        self.status = status
        self.ranks = {}
        self.torch = False
        self.broken = []
        for path in sorted(Path(folder).glob("*.jsonl")):
            text = path.read_text()
            lines = text[: text.rfind("\n") + 1].splitlines()
            if not lines:
                continue
            process = Process([json.loads(line, object_hook=Event) for line in lines])
            self.torch = True
            self.broken += process.of["broken"]
            # After a restart, the last process of a rank counts.
            before = self.ranks.get(process.rank)
            if process.steps and (not before or before.time < process.time):
                self.ranks[process.rank] = process
        self.found = []  # names of the checks that have found something
        self.apart = list(self.differences())

    def each(self):
        return [self.ranks[rank] for rank in sorted(self.ranks)]

    def several(self):
        """All processes; Unseen if there is but one."""
        if len(self.ranks) < 2:
            raise Unseen("a second process")
        return self.each()

    def events(self, kind):
        """[(rank, event), ...]"""
        found = []
        for rank in sorted(self.ranks):
            found += [(rank, event) for event in self.ranks[rank].of[kind]]
        return found

    def differences(self):
        """Yield (step, optimizer, [(name, {rank: mean size}, averaged?), ...]).

        Only ranks that have the same part of a tensor are compared.
        """
        processes = self.each()
        for number in processes[0].weights if len(processes) > 1 else ():
            rows = [process.rows.get(number, []) for process in processes]
            names = [[row[0] for row in part] for part in rows]
            if any(part != names[0] for part in names):
                continue
            reads = [set(process.weights.get(number, ())) for process in processes]
            for step in sorted(set.intersection(*reads)):
                apart = []
                for place, row in enumerate(rows[0]):
                    values = {}
                    for process, its in zip(processes, rows, strict=True):
                        pair = process.weights[number][step][place]
                        values.setdefault(its[place][3], {})[process.rank] = pair
                    for by_rank in values.values():
                        if differ(by_rank.values()):
                            sizes = {
                                rank: pair[1] / max(1, row[2])
                                for rank, pair in by_rank.items()
                            }
                            apart.append((row[0], sizes, row[4]))
                yield step, number, apart

    def first_apart(self):
        """The first of `differences` in which something differs, or None."""
        if len(self.ranks) > 1 and (not self.apart or self.splits_by_hand()):
            raise Unseen("the same weights on two ranks")
        for step, number, apart in self.apart:
            if apart:
                later = [
                    its
                    for other, its_number, its in self.apart
                    if its_number == number and other > step
                ]
                if [] not in later:  # else ranks meet every few steps, as in DiLoCo
                    return step, number, apart
        return None

    def splits_by_hand(self):
        """Whether ranks take the same batches, and some weights are parts of one."""
        lists = []
        for process in self.each()[:2]:
            seen = [event.inputs for event in process.of["train"] if event.inputs]
            lists.append(seen)
        if not self.apart or not lists[0] or lists[0] != lists[-1]:
            return False
        _, number, apart = self.apart[-1]
        return 0 < len(apart) < len(self.each()[0].rows[number])

    def step_lines(self, number, step):
        for event in self.each()[0].steps[number]:
            if event.step >= step and "lines" in event:
                return event.lines
        return self.each()[0].steps[number][0].lines


def differ(pairs):
    """Whether [sum, size] of tensors are those of different tensors."""
    first, *others = pairs
    for other in others:
        limit = ROUNDING * max(first[1], other[1])
        if any(abs(a - b) > limit for a, b in zip(first, other, strict=True)):
            return True
    return False


def tell(step, apart):
    """In words: by how much the first of these weights differ, after which step."""
    name, sizes, _ = max(apart, key=lambda item: max(item[1].values()))
    values = [f"rank {rank} had {size:.7g}" for rank, size in sizes.items()]
    when = f"after step {step}" if step else "before the first step"
    return f"{', '.join(values[:4])} in {name} {when} (mean size)"


# Checks across ranks


@check("2_multigpu.md#wrap-the-model-in-ddp")
def same_start(run):
    """all ranks begin with the same weights

    Averaged gradients keep equal weights equal; they do not make different ones equal.
    """
    run.several()
    found = run.first_apart()
    if found and found[0] == 0:
        step, number, apart = found
        yield run.step_lines(number, 0), 0, tell(step, apart)


@check("2_multigpu.md#call-the-wrapper-in-the-training-step")
def wrapper_called(run):
    """each forward pass in training goes through the DDP wrapper

    A pass around the wrapper sends no gradients, so that each rank trains a model of
    its own.
    """
    run.several()
    if not any(
        row[4] for process in run.each() for row in sum(process.rows.values(), [])
    ):
        raise Unseen("a DDP wrapper")
    found = run.first_apart()
    if found:
        for _, event in run.events("bypass")[:1]:
            yield event.lines, event.step + 1, tell(found[0], found[2])


@check("gradient_accumulation.md#add-up-the-gradients-and-send-them-once")
def gradients_sent(run):
    """the gradients of a step are sent before it

    Without the averages of the last backward pass, each rank steps by its own
    gradients.
    """
    run.several()
    found = run.first_apart()
    for process in run.each()[:1]:
        for steps in process.steps.values():
            unsent = [event for event in steps if event.unsent]
            if found and 2 * len(unsent) > len(steps):
                yield unsent[0].lines, unsent[0].step, tell(found[0], found[2])


@check("troubleshooting.md#weights-by-rank--not-saved-to")
def all_averaged(run):
    """each parameter that an optimizer trains is averaged over the ranks

    DDP averages the gradients of the module that it wraps. Parameters of another
    module, such as a loss with weights, become different on each rank.
    """
    run.several()
    found = run.first_apart()
    if found and not any(averaged for _, _, averaged in found[2]):
        rows = sum(run.each()[0].rows.values(), [])
        if any(row[4] for row in rows) and "wrapper_called" not in run.found:
            names = [name for name, _, _ in found[2]]
            lines = [row[1] for row in rows if row[0] in names and row[1]]
            lines = lines or [run.step_lines(found[1], found[0])]
            yield lines[0], found[0], tell(found[0], found[2])


@check("theory.md#the-effective-batch-and-the-learning-rate")
def same_settings(run):
    """all ranks' optimizers have the same learning rate and settings

    Each rank takes steps of another size, and the weights drift apart.
    """
    first, *others = run.several()
    for number, steps in first.steps.items():
        groups = {event.step: event for event in steps if "groups" in event}
        for process in others:
            for event in process.steps.get(number, []):
                mine = groups.get(event.step)
                if mine and event.get("groups", mine.groups) != mine.groups:
                    what = f"rank 0 had {shown(mine['groups'], event['groups'])}, "
                    what += f"rank {process.rank} "
                    what += shown(event.groups, mine.groups)
                    yield event.lines, event.step, what


def shown(groups, others):
    """The first entry of optimizer groups that others have not."""
    for group, other in zip(groups, others, strict=False):
        for key, value in group.items():
            if other.get(key) != value:
                return f"{key} {value}"
    return f"{len(groups)} groups"


@check("it_hangs.md#find-the-rank-that-skipped-a-collective")
def same_number_of_steps(run):
    """all ranks make the same number of steps

    The rank that goes on alone waits for the others, or trains without them.
    """
    processes = run.several()
    if not all(process.of["end"] for process in processes):
        raise Unseen("the end of every rank")
    if run.events("uneven"):
        return  # DDP's join is made for that
    for number in processes[0].steps:
        steps = [
            process.steps.get(number, [Event(step=0)])[-1] for process in processes
        ]
        counts = [event.step for event in steps]
        if len(set(counts)) > 1:
            what = f"steps by rank: {counts}"
            yield run.step_lines(number, 0), min(counts), what


@check("ddp_by_hand.md#average-the-gradients-after-backward")
def same_weights(run):
    """after each step, all ranks have the same weights

    Each rank trains a model of its own on its part of the data, and one is saved.
    """
    run.several()
    found = run.first_apart()
    if found:
        if run.found:
            raise Unseen("that the mistakes above are mended")
        step, number, apart = found
        yield run.step_lines(number, step), step, tell(step, apart)


def share_a_batch(run, one, other):
    """Whether two ranks have different parts of one model, as tensor parallel ones."""
    if run.splits_by_hand():
        return True
    for number, rows in one.rows.items():
        its = other.rows.get(number, [])
        for row, its_row in zip(rows, its, strict=False):
            if row[3] != its_row[3] and not row[5]:
                return True
    return False


def is_augmented(contents):
    """Whether some sample was another one when it came again."""
    return any(len(set(hashes)) > 1 for hashes in contents)


def overlap(one, other, key):
    """(how many samples of `other` are samples of `one`, how many it has)."""
    mine = one.indices(one.trained[key])
    theirs = other.indices(other.trained[key])
    if len(set(theirs)) < len(theirs):  # drawn with replacement: they meet by chance
        return 0, len(theirs)
    common = set(mine) & set(theirs)
    contents = one.contents.get(key[0], {})
    others = other.contents.get(key[0], {})
    if not is_augmented(
        contents.values()
    ):  # each rank may have data of its own under the same numbers
        common = [
            index
            for index in common
            if set(contents.get(index, ())) & set(others.get(index, ()))
            or index not in contents
        ]
    return len(common), len(theirs)


@check("2_multigpu.md#give-each-rank-its-share-of-the-samples")
def own_samples(run):
    """each rank trains on samples of its own

    More processes then compute the same gradients again, and an epoch is no faster.
    """
    first, *others = run.several()
    compared = False
    for other in others:
        if share_a_batch(run, first, other):
            continue
        for key in first.trained:
            same, count = overlap(first, other, key)
            compared = compared or count > 0
            if same > max(len(run.ranks), count / 20):
                what = f"{same} of {count} samples of rank {other.rank} were rank 0's"
                yield first.loaders[key].lines, None, f"{what} as well"
        inputs = [
            [event.inputs for event in process.of["train"] if event.inputs]
            for process in (first, other)
        ]
        compared = compared or bool(inputs[0])
        if inputs[0] == inputs[1] and len(set(inputs[0])) > 2:
            what = f"rank {other.rank} had the inputs of rank 0 in each step"
            yield first.of["train"][0].lines, 1, what
    if not compared:
        raise Unseen("the samples of two ranks")


@check("troubleshooting.md#the-held-out-loss-is-too-good-to-be-true")
def same_data(run):
    """all ranks have the same data set

    A sampler shares out numbers. If they mean other samples on each rank, some samples
    are trained twice, others never, and held-out ones may be among them.
    """
    first, *others = run.several()
    for key, event in first.loaders.items():
        if "Distributed" not in event.sampler:
            continue
        contents = first.contents.get(key[0], {})
        for other in others:
            its = other.loaders.get(key, event)
            if its.subset != event.subset or its.length != event.length:
                what = f"rank 0 and rank {other.rank} split off other samples"
                yield event.lines, None, what
            theirs = other.contents.get(key[0], {})
            seen = [index for index in contents if index in theirs]
            hashes = [*contents.values(), *theirs.values()]
            other_ones = [
                index for index in seen if contents[index][0] != theirs[index][0]
            ]
            known = any(len(values) > 1 for values in hashes)  # it comes as before
            if other_ones and known and not is_augmented(hashes):
                what = f"sample {other_ones[0]} of rank {other.rank} is not rank 0's"
                yield event.lines, None, what


@check("2_multigpu.md#shuffle-anew-in-every-epoch")
def own_random_numbers(run):
    """each rank draws random numbers of its own

    All ranks drop the same units, or add the same noise, on different samples: the
    average over the ranks does not average this noise away.
    """
    processes = run.several()
    if "own_samples" in run.found or share_a_batch(run, *processes[:2]):
        raise Unseen("ranks with different samples")
    drawn = []
    same = []
    for number, steps in processes[0].steps.items():
        mine = {event.step: event for event in steps if "random" in event}
        for event in processes[1].steps.get(number, []):
            pair = event.random
            other = mine.get(event.step, Event()).random
            if pair and other and pair[0] != pair[1] and other[0] != other[1]:
                drawn.append(event)
                if pair[1] == other[1]:
                    same.append(event)
    if not drawn:
        raise Unseen("random numbers in a step")
    if len(same) > max(1, len(drawn) / 2):
        what = f"ranks 0 and 1 drew the same in {len(same)} of {len(drawn)} steps"
        lines = processes[0].of["train"][0].lines if processes[0].of["train"] else []
        yield lines or same[0].lines, same[0].step, what


@check("2_multigpu.md#send-rank-0s-buffers-before-you-evaluate")
def same_buffers(run):
    """all ranks evaluate with the same buffers

    Batch normalization counts on each rank by itself, so that each rank evaluates
    another model than the one that is saved.
    """
    lists = []
    for process in run.several():
        lists.append([each for each in process.passes if each.buffers])
    if not all(lists):
        raise Unseen("an evaluation with buffers on two ranks")
    for passes in zip(*lists, strict=False):
        for name in passes[0].buffers:
            pairs = [each.buffers.get(name, [0, 0]) for each in passes]
            if differ(pairs):
                what = f"{name} is {pairs[0][0]:.7g} on rank 0, {pairs[1][0]:.7g} on "
                yield passes[0].lines, None, f"{what}rank 1 (sums)"


@check("2_multigpu.md#print-and-save-on-rank-0-only")
def one_writer(run):
    """no two ranks write the same file

    Two processes that write at once can leave a file that nobody can load.
    """
    run.several()
    writers = {}
    for rank, event in run.events("save") + run.events("move"):
        if event.path:
            key = run.ranks[rank].host, event.path
            ranks = writers.setdefault(key, {})
            ranks.setdefault(rank, event)
    if not writers:
        raise Unseen("a file that is saved")
    for (_, path), ranks in writers.items():
        if len(ranks) > 1:
            event = min(ranks.values(), key=lambda each: each.kind == "move")
            what = f"ranks {sorted(ranks)} wrote {os.path.basename(path)}"
            yield event.lines, event.step, what


def evaluations(run):
    """Yield the passes of all ranks over held-out samples, as {rank: [key, ...]}."""
    lists = []
    for process in run.several():
        lists.append([each for each in process.passes if each.batches])
    if not all(lists):
        raise Unseen("an evaluation on two ranks")
    for passes in zip(*lists, strict=False):
        samples = []
        for process, each in zip(run.each(), passes, strict=True):
            batch = each.batches[0]
            loader = process.loaders.get((batch.loader, batch.iteration), Event())
            prefix = loader.subset
            found = process.indices(each.batches)
            samples.append([(batch.loader, prefix, index) for index in found])
        if not all(samples):
            raise Unseen("the numbers of held-out samples")
        yield passes, samples


@check("2_multigpu.md#evaluate-each-held-out-sample-once")
def counted_once(run):
    """an evaluation counts each held-out sample once

    DistributedSampler repeats samples until all ranks have equally many, so that the
    result depends on the number of processes.
    """
    for passes, samples in evaluations(run):
        batch = passes[0].batches[0]
        loader = run.each()[0].loaders.get((batch.loader, batch.iteration), Event())
        if "Distributed" not in (loader.sampler or ""):
            continue  # a sampler of yours may pad, and leave the padding out again
        sets = [set(each) for each in samples]
        count = sum(map(len, sets))
        distinct = len(set.union(*sets))
        if any(each != sets[0] for each in sets) and distinct < count:
            what = f"{count - distinct} of {distinct} samples were counted twice"
            yield passes[0].lines, None, what


@check("2_multigpu.md#evaluate-each-held-out-sample-once")
def sums_meet(run):
    """what ranks find on their shares of the held-out samples is put together

    Each rank prints, and decides by, the result of its own share.
    """
    for passes, samples in evaluations(run):
        shares = set(samples[0]) & set(samples[1])
        alone = all(each.before == each.after for each in passes)
        if alone and 2 * len(shares) < len(samples[0]):
            counts = [len(each) for each in samples]
            what = f"ranks evaluated {counts} samples, and then sent nothing"
            yield passes[0].lines, None, what


# Checks of one rank


@check("1_single_gpu.md#choose-the-data-the-model-and-the-optimizer")
def learns(run):
    """the optimizer changes the weights

    The optimizer may hold other parameters than the model that computes the loss.
    """
    process = run.each()[0]
    for number, weights in process.weights.items():
        rates = []
        for event in process.steps[number]:
            rates += [group["lr"] for group in event.get("groups", ()) if "lr" in group]
        values = list(weights.values())
        if len(values) > 3 and any(rates) and all(each == values[0] for each in values):
            what = (
                f"no weight of optimizer {number} has changed in {max(weights)} steps"
            )
            yield run.step_lines(number, 1), 1, what


@check("2_multigpu.md#shuffle-anew-in-every-epoch")
def new_order(run):
    """each epoch has an order of its own

    The same batches come again in every epoch, and the model learns their order.
    """
    compared = False
    for process in run.each():
        for key in process.trained:
            one = process.indices(process.trained[key])
            other = process.trained.get((key[0], key[1] + 1), [])
            other = process.indices(other)
            count = min(len(one), len(other))
            compared = compared or count > 7
            shuffled = one != sorted(one)
            if count > 7 and shuffled and one[:count] == other[:count]:
                what = f"epoch {key[1] + 1} began with the samples {other[:3]} ..., "
                lines = process.loaders[key].lines
                yield lines, None, f"{what}as the epoch before"
    if not compared:
        raise Unseen("a second epoch")


@check("gradient_accumulation.md#add-up-the-gradients-and-send-them-once")
def sent_once(run):
    """the gradients of a step are sent once

    Each sending costs the time of a step's communication, and only the last one counts.
    """
    process = run.each()[0]
    if "backward_in_no_sync" in run.found:
        return
    for steps in process.steps.values():
        several = [event for event in steps if event.sends > 1]
        if 2 * len(several) > len(steps):
            lines = json.loads(several[0].sent_from.replace("'", '"'))
            yield lines, several[0].step, f"sent {several[0]['sends']} times"


def said(run, kind, what):
    """Yield the first event of this kind, which is a mistake by itself."""
    for rank, event in run.events(kind)[:1]:
        yield event.lines, event.step + 1, f"rank {rank} {what}"


@check("gradient_accumulation.md#add-up-the-gradients-and-send-them-once")
def backward_in_no_sync(run):
    """no_sync stands around forward passes, too

    DDP decides in the forward pass whether it sends: around backward alone, no_sync
    does nothing, and the gradients are sent each time.
    """
    yield from said(run, "no_sync", "called backward in no_sync, forward outside")


@check("mixed_precision.md#autocast-scale-unscale-clip-step-update")
def clip_after_unscale(run):
    """gradients are unscaled before they are clipped

    The scaled gradients are thousands of times too large, so that each is clipped.
    """
    yield from said(run, "clip", "clipped gradients that a GradScaler had scaled")


@check("troubleshooting.md#gpu-0-is-full-and-the-others-are-not")
def load_to_cpu(run):
    """what is loaded goes to the rank's own device

    All ranks load to the device that has saved, which fills up.
    """
    yield from said(run, "load", "called torch.load without map_location")


def snapshots(run):
    saved = run.events("save")
    found = [pair for pair in saved if pair[1].numbers or pair[1].optimizer]
    if not found:
        raise Unseen("a snapshot")
    return found


@check("troubleshooting.md#unexpected-keys-in-state_dict")
def plain_keys(run):
    """saved keys have no prefix of a wrapper

    A script without the wrapper cannot load them.
    """
    for _, event in snapshots(run):
        if event.prefix:
            yield event.lines, event.step, f"{event['prefix']} was saved"


@check("1_single_gpu.md#save-and-resume")
def optimizer_saved(run):
    """a snapshot has the optimizer's state

    A resumed run begins without momentum, and its loss jumps.
    """
    found = snapshots(run)
    needed = 0
    for process in run.each():
        for rows in process.rows.values():
            needed = max(needed, sum(row[2] for row in rows))
    last = max(process.steps[0][-1].step for process in run.each())
    early = []
    for _, event in found:
        if event.optimizer:
            return
        if event.step < last and event.numbers >= needed:
            early.append(event)
    if run.events("parts"):
        raise Unseen("a snapshot that is one file")
    if not early:
        raise Unseen("a snapshot before the end")
    what = f"{os.path.basename(early[0]['path'] or 'a snapshot')} has weights alone"
    yield early[0].lines, early[0].step, what


@check("1_single_gpu.md#save-and-resume")
def written_beside(run):
    """a new snapshot is written beside the last one, and renamed

    A kill while it is written leaves no snapshot at all.
    """
    for _, event in snapshots(run):
        if event.again:
            what = f"{os.path.basename(event['path'])} was overwritten in place"
            yield event.lines, event.step, what


@check("1_single_gpu.md#save-and-resume")
def finite(run):
    """no snapshot holds NaN

    A resumed run has lost its weights, and the good snapshot is overwritten.
    """
    for _, event in snapshots(run):
        if event.broken:
            yield event.lines, event.step, f"{event['broken']} is not finite"


@check("2_multigpu.md#shut-down-cleanly")
def group_destroyed(run):
    """the process group is destroyed at the end

    The exit may hang or abort, so that a run that has succeeded counts as failed.
    """
    seen = False
    for process in run.each() if run.status == 0 else ():  # an error is told anyway
        for event in process.of["end"]:
            seen = seen or bool(process.of["group"])
            if event.initialized:
                lines = process.of["group"][0].lines
                yield lines, None, f"rank {process.rank} left its process group open"
    if not seen:
        raise Unseen("the end of a process group")


# The report


def code_at(line):
    """FILE:LINE, and the code that stands there."""
    path, _, number = line.rpartition(":")
    return linecache.getline(path, int(number)).strip()


def short(line):
    path, _, number = line.rpartition(":")
    near = os.path.relpath(path)
    return f"{path if near.startswith('../..') else near}:{number}"


def judge(run):
    """(findings, what is fine, {what was not seen: why})"""
    findings = []
    fine = []
    unseen = {}
    for name, (function, page) in CHECKS.items():
        title, _, why = function.__doc__.partition("\n\n")
        try:
            found = list(itertools.islice(function(run), 1))  # one is enough
        except Unseen as lack:
            unseen[title] = str(lack)
            continue
        for lines, step, what in found:
            finding = {
                "mistake": name,
                "lines": lines,
                "code": code_at(lines[0]) if lines else "",
                "step": step,
                "seen": what,
                "why": " ".join(why.split()),
                "page": f"docs/{page}",
            }
            findings.append(finding)
            run.found.append(name)
        if not found:
            fine.append(title)
    return findings, fine, unseen


def rates(run):
    """The learning rates of rank 0; whether they are right is yours to say."""
    found = []
    last = None
    for event in run.each()[0].steps[0]:
        rate = event.groups and event.groups[0].lr
        if rate not in (None, last):
            last = rate
            found.append(f"{rate:.6g} from step {event.step}")
    return [*found[:6], f"{len(found) - 6} others"] if len(found) > 7 else found


def report(run, as_json):
    """Print what a run has shown; True if nothing is wrong."""
    findings, fine, unseen = judge(run)
    steps = max(process.steps[0][-1].step for process in run.each())
    if as_json:
        whole = {"findings": findings, "ok": fine, "not seen": unseen, "steps": steps}
        whole |= {"status": run.status, "broken": run.broken}
        print(json.dumps(whole, indent=1))
        return not findings
    count = len(findings)
    verdict = f"{count} mistake{'s' * (count != 1)}" if count else "No mistake"
    print(f"\n{verdict} in {steps} steps of {len(run.ranks)} processes;", end=" ")
    print(f"the command's exit status is {run.status}")
    for finding in findings:
        step = f", step {finding['step']}" if finding["step"] else ""
        places = [short(line) for line in finding["lines"]]
        print(f"\nMISTAKE  {places[0] if places else '?'}{step}: {finding['code']}")
        if places[1:]:
            print(f"  called from {', '.join(places[1:])}")
        for key in ("seen", "why", "page"):
            print(f"  {finding[key]}")
    lacks = [f"{title} (needs {lack})" for title, lack in unseen.items()]
    for name, items in (("fine", fine), ("not seen", lacks), ("rates", rates(run))):
        print(f"\n{name}:")
        print(
            textwrap.fill(
                "; ".join(items), 88, initial_indent="  ", subsequent_indent="  "
            )
        )
    for event in run.broken:
        print(f"the audit itself failed in a process: {event['what']}")
    return not findings


def environment(folder, **settings):
    """The variables that put the watch into each process of a command."""
    site = Path(folder) / "site"
    site.mkdir(parents=True, exist_ok=True)
    (site / "sitecustomize.py").write_text(SITE.format(path=str(WATCH)))
    path = [str(site), os.environ.get("PYTHONPATH")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "AUDIT": json.dumps({"folder": str(folder), **settings}),
    }


def start(command, folder, **settings):
    """Run a command under watch, to its end: its exit status."""
    env = {**os.environ, **environment(folder, **settings)}
    try:
        process = subprocess.Popen(command, env=env)
    except OSError as error:
        raise BadInput(f"cannot start {command[0]}: {error.strerror}") from error
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue  # the command has received it, too, and ends


# Against another command


def compare(one, other, names, offset=0):
    """Yield (lines, step, what) where two runs' weights begin to differ.

    one, other: processes; names: what they are called. offset: how many steps the
    other did not make.
    """
    for number, weights in one.weights.items():
        rows = one.rows[number]
        its_rows = other.rows.get(number, [])
        if [row[2] for row in rows] != [row[2] for row in its_rows]:
            raise BadInput(f"optimizer {number} holds other weights in {names[1]}")
        its_weights = other.weights[number]
        for step in sorted(weights):
            pairs = weights[step], its_weights.get(step - offset)
            if pairs[1] is None:
                continue
            for row, mine, its in zip(rows, *pairs, strict=True):
                if differ([mine, its]):
                    mean, its_mean = mine[1] / row[2], its[1] / row[2]
                    what = f"{names[0]} had {mean:.10g}, {names[1]} {its_mean:.10g} "
                    what += f"in {row[0]} after step {step} (mean size); "
                    what += cause(one, other, number, step)
                    yield its_lines(other, number, step - offset), step, what


def its_lines(process, number, step):
    events = [event for event in process.steps[number] if event.step >= step]
    return events[0].lines if events else []


def cause(one, other, number, step):
    """What usually makes such a difference, from what both did in this step."""
    if step == 0:
        return "they begin with other weights: the rest cannot be compared"
    pair = []
    for process in (one, other):
        events = [event for event in process.steps[number] if event.step == step]
        if not events:
            return "the other one had ended"
        pair += events
    rates = [event.groups[0].get("lr") for event in pair]
    if rates[0] != rates[1]:
        return f"learning rates {rates}: does the scheduler count the same steps?"
    sizes = [sum(size for _, size in event.grads) for event in pair]
    ratio = sizes[1] / sizes[0] if sizes[0] else 0
    if abs(ratio - round(ratio)) < 1e-6 < ratio and round(ratio) != 1:
        return f"gradients {round(ratio)} times as large: a sum, not a mean?"
    if ratio and abs(1 / ratio - round(1 / ratio)) < 1e-6 and round(1 / ratio) != 1:
        return f"gradients {round(1 / ratio)} times smaller: divided twice?"
    return "other samples (is the batch divided?), or a mean of unequal means"


def like(args, folder, settings):
    """Run two commands in the same arithmetic; True if their weights are equal."""
    settings |= {"like": True, "every_step": True}
    runs = []
    for name, command in (("other", shlex.split(args.like)), ("this", args.command)):
        status = start(command, folder / name, **settings)
        run = Run(folder / name, status)
        if not run.ranks:
            raise BadInput(f"{shlex.join(command)} made no step (status {status})")
        runs.append(run.each()[0])
    steps = [len(process.steps[0]) for process in runs]
    found = list(compare(*runs, ["--like", "the command"]))
    if not found and steps[0] != steps[1]:
        found = [([], min(steps), f"--like made {steps[0]} steps, not {steps[1]}")]
    tell_comparison(args, found, f"the weights of both are equal in {steps[0]} steps")
    return not found


def tell_comparison(args, found, fine):
    if args.json:
        print(json.dumps({"findings": found, "ok": [] if found else [fine]}))
        return
    for lines, step, what in found:
        place = f"{short(lines[0])}: {code_at(lines[0])}" if lines else ""
        print(f"\nDIFFERENT from step {step} on  {place}\n  {what}")
    if not found:
        print(f"\n{fine}")


# After a kill


def survive(args, folder, settings):
    """Kill a rank, start again, and compare with a run that nobody has killed."""
    if not args.snapshot:
        raise BadInput(
            "--kill needs --snapshot, the file that your script resumes from"
        )
    aside = Path(f"{args.snapshot}.before-audit")
    if aside.exists():
        raise BadInput(f"{aside} is there, from an audit that was cut short: move it")
    settings |= {"every_step": True}
    had_one = args.snapshot.exists()
    if had_one:
        args.snapshot.rename(aside)
    runs = []
    try:
        for name in ("whole", "killed", "again"):
            kill = {"kill": args.kill} if name == "killed" else {}
            status = start(args.command, folder / name, **settings, **kill)
            runs.append(Run(folder / name, status))
            if name == "whole" and args.snapshot.exists():
                shutil.move(args.snapshot, folder / "whole.pt")
    finally:
        if args.snapshot.exists():
            shutil.move(args.snapshot, folder / "again.pt")
        if had_one:
            aside.rename(args.snapshot)
    whole, killed, again = runs
    if not whole.ranks:
        raise BadInput("the command made no step")
    if not (folder / "killed" / "killed").exists():
        raise BadInput(f"the command made less than {args.kill} steps")
    last = again if again.ranks else killed  # torchrun may have restarted it
    one, other = whole.each()[0], last.each()[0]
    offset = one.steps[0][-1].step - other.steps[0][-1].step
    found = list(compare(one, other, ["uninterrupted", "resumed"], offset))
    if not offset:
        found = [([], 1, "the command began again: it did not resume")]
    fine = (
        f"resumed at step {offset}, it ended with the weights of an uninterrupted run"
    )
    tell_comparison(args, found, fine)
    return not found


def parse():
    parser = argparse.ArgumentParser(
        prog="audit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--like", metavar="COMMAND", help="compare with this command")
    parser.add_argument("--batches", type=int, help="end each epoch after so many")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--folder", type=Path, help="keep the events there")
    parser.add_argument("--read", type=Path, help="report what a folder holds")
    parser.add_argument(
        "--kill", type=int, metavar="N", help="kill a rank after step N"
    )
    parser.add_argument("--snapshot", type=Path, help="what --kill puts aside")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if not args.command and not args.read:
        parser.error("type the command that starts your training, too")
    return args


def watch(args, folder, settings):
    """Run the command once, and report; True if nothing is wrong."""
    status = 0
    if not args.read:
        status = start(args.command, folder, **settings)
    run = Run(folder, status)
    if not run.ranks:
        seen = "made a step of an optimizer" if run.torch else "imported torch"
        raise BadInput(f"no process of the command {seen} (status {status})")
    return report(run, args.json)


def main():
    args = parse()
    settings = {"batches": args.batches} if args.batches else {}
    with tempfile.TemporaryDirectory(prefix="audit-") as temporary:
        folder = args.read or args.folder or Path(temporary)
        try:
            folder = folder.resolve()
            if args.like:
                fine = like(args, folder, settings)
            elif args.kill:
                fine = survive(args, folder, settings)
            else:
                fine = watch(args, folder, settings)
        except BadInput as error:
            print(f"audit: error: {error}", file=sys.stderr)
            sys.exit(2)
    sys.exit(not fine)


if __name__ == "__main__":
    main()
