"""Run a training command, and learn which silent mistakes it makes.

    python -m cluster.audit torchrun --standalone --nproc-per-node=2 train.py --epochs 2

The command runs as you typed it, and trains the same weights: your script is not
edited. When it has ended, a report names each mistake that it has made, with the line
of your code. To take this tool along, copy audit.py and audit_watch.py.

Exit status: 0 no mistake was seen, 1 one was (with --strict, also a risk or a cost),
2 the audit could not be made, or the command failed, so that the audit proves nothing.
"""

import argparse
import collections
import configparser
import itertools
import json
import linecache
import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROUNDING = 1e-6  # by this share of their size, means of equal weights may differ
LEVELS = ("MISTAKE", "RISK", "COST")  # the worst first
WATCH = Path(__file__).resolve().parent / "audit_watch.py"
DOCS = WATCH.parents[1] / "docs"
if not (DOCS / "convert_your_script").is_dir():  # copied away
    DOCS = None
PYTORCH = "https://docs.pytorch.org/docs/stable"
SITE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("audit_watch", {watch!r})
module = sys.modules["audit_watch"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.begin({site!r})
"""

# A section is a check, in the order in which they are made, the worst first. `rule` is
# a function below. Of the checks of a group, the first that finds something is told:
# the others would find what follows from it (and two checks speak for more groups).
# `level`: a MISTAKE changes what is trained, evaluated or saved; a RISK may cost a
# snapshot or an exit; a COST is time.
# Without `ok`, a check finds the cause of what another one sees. Without `needs`, it is
# of what few scripts use. `help` is a section of our pages, `see` a page of PyTorch's.
CHECKS = """
[skips]
level = MISTAKE
rule = equal
group = steps, weights and zeroed
wrong = a rank leaves out optimizer steps that others make
why = All ranks ran the same backward passes, and got the same gradients. If only some
    make the step, each trains a model of its own.
fix = Call optimizer.step() on all ranks, not under `if rank == 0:`. If your code leaves
    out steps, let it decide on a value that all ranks share: all_reduce the loss first.
help = ddp_by_hand.md#average-the-gradients-after-backward
see = notes/ddp.html

[load]
level = MISTAKE
rule = alone
group = load
ok = a state that is loaded has names of the model
wrong = a model loads a state, and no name in it is one of the model's
needs =
why = strict=False leaves out all names that do not fit, so that the model keeps the
    weights that it had.
fix = Make the names equal: remove the prefix ("module." is DDP's), and let strict=True
    raise an error for the others.
help = troubleshooting.md#unexpected-keys-in-state_dict
see = generated/torch.nn.Module.html

[start]
level = MISTAKE
rule = weights
group = weights
ok = all ranks begin with the same weights
wrong = the ranks begin with different weights
needs = two ranks that hold the same tensors
why = Averaging gradients keeps equal weights equal. It cannot make different weights
    equal.
fix = Wrap the model in DDP after all changes to its weights, or broadcast them.
help = 2_multigpu.md#wrap-the-model-in-ddp
see = generated/torch.nn.parallel.DistributedDataParallel.html

[skipped]
level = MISTAKE
rule = weights
group = weights and zeroed
wrong = a rank leaves out optimizer steps that others make
why = All ranks ran the same backward passes, and got the same gradients. If only some
    make the step, each trains a model of its own.
fix = Call optimizer.step() on all ranks, not under `if rank == 0:`. If your code leaves
    out steps, let it decide on a value that all ranks share: all_reduce the loss first.
help = ddp_by_hand.md#average-the-gradients-after-backward
see = notes/ddp.html

[bypass]
level = MISTAKE
rule = weights
group = weights
wrong = the model is called without its DDP wrapper, and the ranks' weights differ
why = A call without DDP sends no gradients: each rank trains a model of its own, and
    only one of them is saved.
fix = Call what DistributedDataParallel(model) returned, not the model inside it.
help = 2_multigpu.md#call-the-wrapper-in-the-training-step
see = generated/torch.nn.parallel.DistributedDataParallel.html

[unsent]
level = MISTAKE
rule = weights
group = weights
wrong = the optimizer steps while the last gradients have not been averaged
why = Each rank steps with its own gradients, and the weights drift apart.
fix = Run forward and backward of the last micro-batch before each optimizer.step()
    outside of no_sync(), also at the end of an epoch.
help = gradient_accumulation.md#add-up-the-gradients-and-send-them-once
see = generated/torch.nn.parallel.DistributedDataParallel.html

[unwrapped]
level = MISTAKE
rule = weights
group = weights
wrong = the optimizer trains parameters that are in no DDP wrapper
why = DDP averages the gradients of what it wraps. Others, such as a loss with weights
    or layers that were frozen when DDP was made, become different on each rank.
fix = Wrap this module in DistributedDataParallel, too, after all layers are unfrozen.
    For a bare parameter, all_reduce the gradient before the step, and divide it by the
    number of ranks.
help = ddp_by_hand.md#average-the-gradients-after-backward
see = generated/torch.nn.parallel.DistributedDataParallel.html

[converted]
level = MISTAKE
rule = weights
group = weights
wrong = the model went to another device or type after it was wrapped in DDP
why = Its parameters get gradients in another place, which DDP does not average: each
    rank trains a model of its own.
fix = Call to(), cpu(), cuda() or float() before DistributedDataParallel(model), or wrap
    the model again.
help = 2_multigpu.md#wrap-the-model-in-ddp
see = generated/torch.nn.parallel.DistributedDataParallel.html

[rate]
level = MISTAKE
rule = weights
group = weights
wrong = the ranks' learning rates differ, and then their weights
why = Each rank takes steps of a different size, and the weights drift apart.
fix = Use the same scheduler, and the same changes of the rate, on all ranks.
help = theory.md#the-effective-batch-and-the-learning-rate
see = generated/torch.nn.parallel.DistributedDataParallel.html

[moved]
level = MISTAKE
rule = weights
group = weights
wrong = weights were changed on one rank between two steps
why = DDP averages gradients only. Any other change of a weight must be the same on all
    ranks.
fix = Change the weights by the same numbers on each rank, or broadcast them afterwards.
help = ddp_by_hand.md#average-the-gradients-after-backward
see = generated/torch.nn.parallel.DistributedDataParallel.html

[apart]
level = MISTAKE
rule = weights
group = weights
wrong = the ranks' weights differ, although the model is wrapped
why = Each rank trains a model of its own on its part of the data, and one is saved.
fix = Look for what changes gradients on one rank alone, after backward() or in it: a
    communication hook, a clip by the rank's own norm. If the gradients were equal, look
    at the optimizer: its state differs if one rank skipped a step, as under Join.
help = ddp_by_hand.md#average-the-gradients-after-backward
see = notes/ddp.html

[weights]
level = MISTAKE
rule = weights
group = weights
ok = in all steps that were read, all ranks have the same weights
wrong = the ranks' weights differ
needs = two ranks that hold the same tensors
why = Each rank trains a model of its own on its part of the data, and one is saved.
fix = Average the gradients of all ranks before each step: wrap the model in DDP, or
    call fully_shard() on its blocks and on the whole model.
help = ddp_by_hand.md#average-the-gradients-after-backward
see = generated/torch.nn.parallel.DistributedDataParallel.html

[drift]
level = MISTAKE
rule = scaled_alone
group = weights
wrong = a part that all ranks of a split model should share becomes different
why = The ranks have multiplied its gradient by different numbers, and then compute with
    different weights in a layer that should be one.
fix = Clip all parts, on all ranks, by one number: the norm of the whole model.
help = tensor_parallel.md#count-replicas-not-ranks
see = distributed.tensor.parallel.html

[state]
level = MISTAKE
rule = equal
group = weights
ok = all ranks evaluate the same model
wrong = the ranks evaluate models that differ
needs = ranks that evaluate different samples with the same tensors
why = Buffers (batch normalization) or averaged weights differ between the ranks, so
    that the result is not that of the saved model.
fix = Broadcast rank 0's buffers before you evaluate; update an average on every rank.
help = 2_multigpu.md#send-rank-0s-buffers-before-you-evaluate
see = generated/torch.nn.parallel.DistributedDataParallel.html

[steps]
level = MISTAKE
rule = equal
group = steps
ok = all ranks make the same number of steps
wrong = the ranks make different numbers of steps
needs = two ranks that ran to the end
why = A rank that goes on alone waits for the others, or trains without them.
fix = Give all ranks equally many batches (drop_last=True), and let all of them stop.
    If a rank leaves out steps by itself, let it decide on a value that all ranks share.
help = it_hangs.md#find-the-rank-that-skipped-a-collective
see = generated/torch.nn.parallel.DistributedDataParallel.html

[samples]
level = MISTAKE
rule = samples
group = samples
ok = each rank trains on different samples
wrong = the ranks train on the same samples
needs = the batches of two ranks
why = Each epoch takes as many steps as on one device, and trains on samples twice.
fix = Give the loader sampler=DistributedSampler(train_set) instead of shuffle=True,
    without rank or seed of your own. In a stream, let each worker of each rank yield
    every n-th sample.
help = 2_multigpu.md#give-each-rank-its-share-of-the-samples
see = data.html

[inputs]
level = MISTAKE
rule = differ
group = samples
ok = each rank's model gets different inputs
wrong = the ranks' models get the same inputs
needs = the inputs of two ranks
why = More processes then compute the same gradients again.
fix = Give each rank different samples, and noise from a different seed: seed + rank.
help = 2_multigpu.md#give-each-rank-its-share-of-the-samples
see = data.html

[data]
level = MISTAKE
rule = data
group = data
ok = all ranks have the same data set
wrong = the ranks' data sets differ
needs = two epochs in different orders with a DistributedSampler, and no augmentation
why = A sampler distributes indices. If an index means a different sample on each rank,
    some are trained twice, others never, and held-out ones may be among them.
fix = Make and split the data by one seed on all ranks; sort what comes from a folder.
help = troubleshooting.md#the-held-out-loss-is-too-good-to-be-true
see = data.html

[order]
level = MISTAKE
rule = order
group = order
ok = each epoch has a different order of samples
wrong = all epochs have the same order of samples
needs = two passes over one loader that shuffles numbered samples
why = The same batches come again in every epoch, and the model learns their order.
fix = Call loader.sampler.set_epoch(epoch) before each epoch.
help = 2_multigpu.md#shuffle-anew-in-every-epoch
see = data.html

[workers]
level = MISTAKE
rule = alone
group = order
ok = the loader's workers know the epoch of their data set
wrong = the loader's workers keep the first epoch
needs =
why = Each worker has a copy of the data set, made when it started, and
    persistent_workers=True keeps it. What you change here does not reach it, so that
    each epoch has the order, or the augmentation, of the first.
fix = Set persistent_workers=False, or make the epoch a shared tensor,
    torch.tensor(0).share_memory_(), and change it by fill_(epoch), not by =.
help = 2_multigpu.md#shuffle-anew-in-every-epoch
see = data.html

[once]
level = MISTAKE
rule = once
group = once
ok = an evaluation counts no held-out sample twice
wrong = an evaluation counts some held-out samples twice
needs = an evaluation with a loader on two ranks
why = DistributedSampler repeats samples until all ranks have equally many, so that the
    result depends on the number of processes.
fix = Evaluate Subset(test_set, range(rank, len(test_set), world_size)). Then a rank may
    have one batch less: call ddp_model.module, after broadcasting rank 0's buffers.
help = 2_multigpu.md#evaluate-each-held-out-sample-once
see = data.html

[met]
level = MISTAKE
rule = met
group = met
ok = a collective follows each evaluation; what it combines is not checked
wrong = each rank evaluates different samples, and the results are not combined
needs = the same evaluation twice on two ranks
why = Each rank prints, and acts on, the result of its own samples only.
fix = Sum losses and counts over the ranks: dist.all_reduce(sums).
help = 2_multigpu.md#evaluate-each-held-out-sample-once
see = distributed.html

[early]
level = MISTAKE
rule = learns
group = learns
wrong = the optimizer was made before the model was sharded
why = fully_shard() replaces the model's parameters. The optimizer holds the old ones,
    which get no gradients.
fix = Make the optimizer after the last call of fully_shard().
help = 7_sharding.md#shard-each-block-then-the-model
see = distributed.fsdp.fully_shard.html

[hidden]
level = MISTAKE
rule = learns
group = learns
wrong = FSDP does not find the outputs of the model
why = It looks for tensors in what forward() returns, to know when gradients come. In an
    object of your own it finds none, so that the gradients are not averaged.
fix = Return tensors, or a tuple, list, dict or dataclass that PyTorch can look into.
help = shard_your_model.md#use-the-same-parameters-on-all-ranks
see = distributed.fsdp.fully_shard.html

[learns]
level = MISTAKE
rule = learns
group = learns
ok = the optimizer changes the weights
wrong = the optimizer changes no weight
needs = some steps
why = It may hold other parameters than those of the model that computes the loss, its
    step() may do nothing, or the loss does not depend on the weights.
fix = Make the optimizer from the parameters of the model that you train. Print a
    gradient: if it is zero, look at the loss, and else at step().
help = 1_single_gpu.md#choose-the-data-the-model-and-the-optimizer
see = optim.html

[dead]
level = MISTAKE
rule = alone
group = learns
ok = the first layers that run get gradients, as those behind them do
wrong = a layer is called, and its parameters never get a gradient
needs = some steps
why = Something detaches it from the loss, such as detach(), no_grad() or a conversion
    to a number, so that it keeps its first values.
fix = Remove that. If you want it, freeze the layer by requires_grad_(False).
help = adapt_your_script.md#look-up-the-parts-of-your-script
see = notes/autograd.html

[unheld]
level = MISTAKE
rule = alone
group = learns
ok = an optimizer holds each parameter of the DDP model
wrong = a part of the model is in no optimizer that steps
needs = a DDP wrapper, and eight steps
why = It gets gradients, but is never updated.
fix = Call step() of each optimizer. Make it after the last layer is in its place, from
    all parameters; freeze what you do not train by requires_grad_(False).
help = adapt_your_script.md#look-up-the-parts-of-your-script
see = optim.html

[lost]
level = MISTAKE
rule = alone
group = zeroed
ok = no zero_grad() stands between repeated backward passes
wrong = gradients are set to zero between the micro-batches of a step
needs = some steps
why = Only the last micro-batch counts. The others are computed for nothing.
fix = Call optimizer.zero_grad() right after optimizer.step(), and not in each
    micro-batch.
help = gradient_accumulation.md#add-up-the-gradients-and-send-them-once
see = notes/amp_examples.html

[zeroed]
level = MISTAKE
rule = alone
group = zeroed
ok = gradients are set to zero between steps
wrong = the gradients of earlier steps are never set to zero
needs = some steps
why = Each step moves by the sum of all gradients since the start.
fix = Call optimizer.zero_grad() before each backward(), for each optimizer.
help = 1_single_gpu.md#train-one-batch
see = optim.html

[scaled]
level = MISTAKE
rule = alone
group = scaled
ok = a GradScaler makes the steps
wrong = the optimizer steps by scaled gradients
needs =
why = They are thousands of times too large, and infinite ones are not left out.
fix = Call scaler.step(optimizer), not optimizer.step().
help = mixed_precision.md#autocast-scale-unscale-clip-step-update
see = notes/amp_examples.html

[clip]
level = MISTAKE
rule = alone
group = scaled
ok = gradients are unscaled before they are clipped
wrong = gradients are clipped before they are unscaled
needs =
why = Scaled gradients are thousands of times too large, so that each step is tiny.
fix = Call scaler.unscale_(optimizer) before you clip.
help = mixed_precision.md#autocast-scale-unscale-clip-step-update
see = notes/amp_examples.html

[mode]
level = MISTAKE
rule = alone
group = mode
ok = the model trains in training mode
wrong = the model trains in evaluation mode
needs = some steps
why = Dropout is off, and batch normalization does not follow the data. (If you
    fine-tune in eval() on purpose, ignore this.)
fix = Call model.train() at the start of each epoch.
help = 1_single_gpu.md#evaluate
see = notes/autograd.html

[nan]
level = MISTAKE
rule = alone
group = nan
ok = no snapshot holds NaN
wrong = a snapshot holds NaN
needs = a snapshot
why = The good snapshot is overwritten, and a resumed run begins with NaN.
fix = Stop before the save if the loss is not finite, and look where it first was.
help = 1_single_gpu.md#save-and-resume
see = notes/serialization.html

[parts]
level = MISTAKE
rule = alone
group = parts
ok = no snapshot holds the part of one rank alone
wrong = a snapshot holds one rank's part of the weights
needs = a snapshot of the trained weights
why = FSDP and DTensor leave each rank a part, and only this one is saved.
fix = Save get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)),
    which all ranks call, or let torch.distributed.checkpoint save all parts.
help = 7_sharding.md#gather-the-snapshot
see = distributed.checkpoint.html

[file]
level = RISK
rule = one_rank
group = file
ok = no two ranks write the same file
wrong = several ranks write one file
needs = a file that is saved, and two ranks
why = Two processes that write at once can leave a file that nobody can load.
fix = Save under `if rank == 0:`, or what is in parts under a name for each rank.
help = 2_multigpu.md#print-and-save-on-rank-0-only
see = notes/serialization.html

[in_place]
level = RISK
rule = alone
group = in_place
ok = a new snapshot is written beside the last one, and renamed
wrong = the last snapshot is overwritten in place
needs = a snapshot that is saved again, or renamed
why = A kill while it is written leaves no snapshot at all.
fix = torch.save(snapshot, path + ".tmp"), then os.replace(path + ".tmp", path).
help = 1_single_gpu.md#save-and-resume
see = notes/serialization.html

[sparse]
level = RISK
rule = alone
group = sparse
wrong = gradients are sparse
why = NCCL has no operation for them: DDP raises an error on GPUs.
fix = Make the layer with sparse=False, or average its gradients by gloo.
help = adapt_your_script.md#look-up-the-parts-of-your-script
see = distributed.html

[rows]
level = RISK
rule = alone
group = rows
wrong = a batch has tensors of one row and of many
why = If the row was meant for one sample, the code still runs: broadcasting repeats it
    for all.
fix = Let collate_fn stack one row for each sample: torch.stack(), not torch.cat().
help = adapt_your_script.md#look-up-the-parts-of-your-script
see = data.html

[chance]
level = RISK
rule = alone
group = chance
ok = an evaluation draws no random numbers
wrong = an evaluation draws random numbers
needs = an evaluation
why = The same weights get a different result each time.
fix = Dropout in forward() needs training=self.training: F.dropout() and
    scaled_dot_product_attention() drop in eval(), too. If you want the noise, seed it.
help = 1_single_gpu.md#evaluate
see = generated/torch.nn.functional.dropout.html

[destroyed]
level = RISK
rule = alone
group = destroyed
ok = the process group is destroyed at the end
wrong = the process group is never destroyed
needs = a process group that your code makes, and a command that ends well
why = The exit may hang or abort, so that a run that has succeeded counts as failed.
fix = Call dist.destroy_process_group() at the end.
help = 2_multigpu.md#shut-down-cleanly
see = distributed.html

[random]
level = COST
rule = differ
group = samples
ok = each rank draws different random numbers in its forward passes
wrong = all ranks draw the same random numbers
needs = dropout or noise in a forward pass of two ranks
why = All ranks drop the same neurons, or add the same noise, on different samples: the
    average over the ranks does not average this noise away, so that more steps are
    needed.
fix = Seed each rank by itself after the model is made: torch.manual_seed(seed + rank).
help = 2_multigpu.md#shuffle-anew-in-every-epoch
see = notes/randomness.html

[no_sync]
level = COST
rule = alone
group = sends
ok = no_sync() also covers the forward passes
wrong = no_sync() has no effect
needs =
why = DDP decides in the forward pass whether to send gradients: around backward alone,
    no_sync() does nothing.
fix = Run the forward pass in no_sync(), too.
help = gradient_accumulation.md#add-up-the-gradients-and-send-them-once
see = generated/torch.nn.parallel.DistributedDataParallel.html

[twice]
level = COST
rule = alone
group = sends
ok = the gradients of a step are sent once
wrong = gradients are sent after each micro-batch of a step
needs = a DDP wrapper that is called
why = Each time costs as much communication as a whole step. (If you use the gradients
    in between, as SAM does, ignore this.)
fix = Run forward and backward of all micro-batches but the last in ddp_model.no_sync().
help = gradient_accumulation.md#add-up-the-gradients-and-send-them-once
see = generated/torch.nn.parallel.DistributedDataParallel.html
"""


class Unseen(Exception):
    """The run has not shown what a check needs."""


class BadInput(Exception):
    """The audit cannot be made."""


class Event(dict):
    """Its entries are attributes; one that it lacks is None."""

    __getattr__ = dict.get


class Run:
    """A command that has ended: the events of its processes that trained."""

    def __init__(self, folder):
        statuses = [int(path.read_text()) for path in folder.glob("*.status")]
        # The command's exit status, on one machine that failed if there is one
        self.status = max(statuses, key=abs, default=None)
        self.failed = []  # errors of the watch and of the rules
        ranks = {}
        for path in sorted(folder.glob("*.jsonl")):  # the oldest first
            whole = path.read_text().rpartition("\n")[0]
            events = [
                json.loads(line, object_hook=Event) for line in whole.splitlines()
            ]
            self.failed += [event for event in events if event.kind == "failed"]
            if any(event.kind in ("weights", "skips") for event in events):
                rank = [event.rank for event in events if "rank" in event][-1]
                ranks[rank] = events  # after a restart, the last process counts
                for event in events:
                    event["rank"] = rank
        self.ranks = dict(sorted(ranks.items()))
        self.every = sum(self.ranks.values(), [])  # events, by rank
        self.steps = max([event.step for event in self.every], default=0)

    def events(self, kind):
        return [event for event in self.every if event.kind == kind]

    def of(self, kind):
        """{key: {rank: event}}: events that may be compared.

        If a rank has several with one key, their lists are joined, or the last counts.
        """
        found = {}
        for event in self.events(kind):
            by_rank = found.setdefault(str(event.key), {})
            if isinstance(event.value, list):
                joined = by_rank.setdefault(event.rank, Event(event, value=[]))
                joined.value.extend(event.value)
            else:
                by_rank[event.rank] = event
        return found

    def last(self, kind):
        """The same as a list."""
        return [each for by_rank in self.of(kind).values() for each in by_rank.values()]

    def pairs(self, kind):
        """Events of each two ranks that may be compared: [(event, event), ...]"""
        found = []
        for by_rank in self.of(kind).values():
            found += itertools.combinations(by_rank.values(), 2)
        return found

    def histories(self, kind):
        """[[(event, event), ...], ...]: of one place, and two ranks with one model."""
        found = {}
        for mine, its in self.pairs(kind):
            if mine.model == its.model:
                place = str(mine.key[0]), mine.rank, its.rank
                found.setdefault(place, []).append((mine, its))
        return [*found.values()]


# Rules: each yields (event, what was seen) for a mistake of a kind


def needed(found):
    if not found:
        raise Unseen
    return found


def differences(one, other):
    """The names whose values are not equal; some may be in one of both alone."""
    found = []
    for name in one:
        pair = one[name], other.get(name, one[name])
        close = math.isclose(*pair, rel_tol=ROUNDING, abs_tol=1e-12)
        if not close and str(pair[0]) != str(pair[1]):  # NaN equals NaN
            found.append(name)
    return found


def tell(name, mine, its):
    step = max(mine.step, its.step)
    when = f"after step {step}" if step else "before the first step"
    values = [f"{each.value[name]:.7g} on rank {each.rank}" for each in (mine, its)]
    return f"{name} was {' and '.join(values)} {when}; they must be equal"


def equal(run, kind):
    if kind == "state":  # a plain tensor may be a part of one that is split
        need_own_batches(run)
    unclear = False
    for mine, its in needed(run.pairs(kind)):
        names = differences(mine.value, its.value)
        if names and (not mine.inputs or mine.inputs != its.inputs):
            yield mine, tell(names[0], mine, its)
        unclear = unclear or names or mine.value.keys() != its.value.keys()
    needed(not unclear)  # each rank may evaluate everything, or have parts


def need_own_batches(run):
    """Ranks of a tensor parallel model take one batch, and that is right."""
    lack = one_batch_for_all(run)
    if lack:
        raise Unseen(lack)


def one_batch_for_all(run):
    """What a check of other batches would need, or "" if ranks have their own."""
    if run.events("parallel"):
        return "ranks that share no batch"
    inputs = run.pairs("inputs")
    if inputs and all(mine.value == its.value for mine, its in inputs):
        for mine, its in run.pairs("weights"):
            names = differences(mine.value, its.value)
            split = mine.unwrapped is None and 0 < len(names) < len(mine.value)
            if split:  # layers split by hand
                return "ranks that have whole models"
    return ""


def differ(run, kind):
    need_own_batches(run)
    for pairs in needed(run.histories(kind)):
        same = [mine for mine, its in pairs if mine.value == its.value]
        distinct = {str(event.value) for event in same}
        if len(distinct) > max(2, len(pairs) / 2):
            yield same[0], f"equal on two ranks in {len(same)} of {len(pairs)} steps"


def alone(run, kind):
    needed(kind != "destroyed" or run.status == 0)  # an error is told anyway
    events = needed(run.last(kind))
    # If all ranks do it, each may save its own.
    needed(kind != "parts" or {event.rank for event in events} < set(run.ranks))
    for event in events:
        if event.wrong:
            yield event, f"rank {event.rank}: {event.wrong}"


def one_rank(run, kind):
    needed(len(run.ranks) > 1)
    for path, by_rank in needed(run.of(kind)).items():
        if len(by_rank) > 1:
            yield by_rank.popitem()[1], f"several ranks wrote {path}"


def weights(run, kind):
    """A difference that stays or is covered up, if `kind` is its cause."""
    need_own_batches(run)
    averaged = ""
    for pairs in needed(run.histories("weights")):
        names = [differences(mine.value, its.value) for mine, its in pairs]
        at = next((at for at, each in enumerate(names) if each), None)
        if at is None:
            continue
        again = next((i for i in range(at, len(pairs)) if not names[i]), None)
        if again and not replaced(*pairs[again - 1], *pairs[again]):
            steps = f"step {pairs[at][0].step} to {pairs[again][0].step}"
            averaged = f"ranks that are never apart: here they were, from {steps}"
            continue
        mine, its = pairs[at]
        cause, lines = cause_of(pairs, at, names[at])
        if kind == cause:
            seen = tell(names[at][0], mine, its)
            if cause in ("apart", "rate"):
                one, other = pairs[at - 1]
                seen += (
                    f"; gradients {one.gradients or 0:.7g} and "
                    f"{other.gradients or 0:.7g}, learning rates {mine.rate:.7g} and "
                    f"{its.rate:.7g}"
                )
            yield Event(mine, lines=lines), seen
    both = run.pairs("weights")
    needed(all(mine.value.keys() == its.value.keys() for mine, its in both))
    if averaged and kind == "weights":
        raise Unseen(averaged)


def scaled_alone(run, kind):
    """Gradients of one direction and of other sizes, which only copies have."""
    needed(one_batch_for_all(run))
    times = collections.Counter()
    for mine, its in needed(run.pairs("weights")):
        its_slopes = its.slopes or {}
        for name, (size, way) in (mine.slopes or {}).items():
            its_size, its_way = its_slopes.get(name, (size, way))
            alike = abs(way) < 1 and math.isclose(way, its_way, rel_tol=1e-5)
            if alike and not math.isclose(size, its_size, rel_tol=1e-3):
                times[name] += 1
                pair = f"{size:.3g} on rank {mine.rank}, {its_size:.3g} on {its.rank}"
                if times[name] == 3:
                    yield mine, f"the gradient of {name} was scaled to {pair}"


def learns(run, kind):
    """The weights of an optimizer have stayed the same since some step."""
    since = {}  # {(rank, optimizer): the steps since its weights have changed}
    for event in needed(run.events("weights")):
        if event.slopes is None:
            continue  # this one is after a step
        same = since.setdefault((event.rank, event.optimizer), [event])
        if event.value != same[0].value and event.gradients != 0:  # no mere decay
            same[:] = [event]
        elif event.rate and sum(event.value.values()) > 0:
            same.append(event)
    some_learn = any(same[0].step for same in since.values())
    for first, *others in since.values():
        if len(others) < 3:
            continue
        last = others[-1]
        if some_learn and not last.gradients:
            raise Unseen("gradients for each optimizer")  # one waits for its turn
        cause, lines = "learns", last.lines
        if last.sharded and last.gradients is None and not first.step:
            cause, lines = last.sharded
        if kind == cause:
            seen = f"rank {last.rank}: no gradient changed a weight after {first.step}"
            yield Event(last, lines=lines), f"{seen} steps"
    needed(some_learn)


def replaced(mine, its, mine_then, its_then):
    """Whether one rank kept its weights when they became equal: they are no average."""
    return mine.value == mine_then.value or its.value == its_then.value


def cause_of(pairs, at, names):
    """(what made these weights differ, its lines)"""
    mine, its = pairs[at]
    if not mine.step:
        return "start", mine.lines
    if set(names) <= set(mine.unwrapped or ()):
        return "unwrapped", mine.unwrapped[names[0]]
    if mine.clock != its.clock:
        return "skipped", mine.lines
    for kind in ("bypass", "unsent", "converted"):
        lines = mine.hints.get(kind) or its.hints.get(kind)
        if lines:
            return kind, lines
    if pairs[at - 1][0].step == mine.step:
        return "moved", mine.lines
    if mine.rate != its.rate:
        return "rate", mine.lines
    for later, _ in pairs[at:]:
        if "bypass" in later.hints:  # before a wrapper was made
            return "bypass", later.hints["bypass"]
    return ("weights" if mine.unwrapped is None else "apart"), mine.lines


def samples(run, kind):
    need_own_batches(run)
    unclear = False
    pairs = needed(run.pairs("trained"))
    # One may be padding, or somebody has looked at it.
    batch = max(len(event.value) for event in run.events("trained"))
    for mine, its in pairs:
        same = set(mine.value) & set(its.value)
        count = len(its.value)
        if len(same) > max(batch, count / 10):
            times = collections.Counter(its.value)
            few = count - len(times) < count / 20
            if few or len(set(times.values())) == 1:
                seen = f"{len(same)} of {len(times)} samples of rank {its.rank}"
                yield mine, f"{seen} were also rank {mine.rank}'s"
            unclear = True
    if unclear:
        raise Unseen("samples that are not drawn by chance: these meet anyway")


def data(run, kind):
    """Under one number, a sample is the same for each rank, or augmented."""
    rows = [event.value for event in run.last(kind)]
    needed(any(len(each) > 1 for each in rows))
    needed(all(len(set(each)) == 1 for each in rows))
    for mine, its in needed(run.pairs(kind)):
        if mine.value[0] != its.value[0]:
            yield mine, f"sample {mine.key[1]} is another one on rank {its.rank}"


def order(run, kind):
    """Two passes over a loader that begin with the same samples."""
    before = {}  # {(rank, loader): the first samples of the last pass}
    compared = False
    for event in run.last("trained"):
        begin = [sample[:9] for sample in event.value[:8]]  # no noise that is added
        place = event.rank, event.key[0]
        if event.indexed and len(begin) == 8 and begin != sorted(begin):
            if begin == before.get(place):
                seen = [int(each) for each in begin[:3]]
                yield event, f"two epochs began with the samples {seen}"
            compared |= place in before
            before[place] = begin
    needed(compared)


def once(run, kind):
    for mine, its in needed(run.pairs("evaluated")):
        double = set(mine.value) & set(its.value)
        if double and set(mine.value) != set(its.value):
            needed(mine.shared)  # others may share out by chance
            yield mine, f"two ranks evaluated sample {int(double.pop())}"


def met(run, kind):
    for mine, its in needed(run.pairs(kind)):
        common = set(mine.value) & set(its.value)
        if 2 * len(common) < len(mine.value) and not (mine.met or its.met):
            yield mine, "no collective followed before the next step or the end"


# The report


def judge(run):
    """([finding, ...], what is right, {what was not checked: what that needs})"""
    checks = configparser.RawConfigParser()
    checks.read_string(CHECKS)
    findings = []
    fine = []
    unchecked = {}
    for kind in checks.sections():
        texts = {key: " ".join(text.split()) for key, text in checks[kind].items()}
        check = Event(texts, mistake=kind)
        if any(check.group in finding.group for finding in findings):
            continue
        try:
            found = next(globals()[check.rule](run, kind), None)
        except Unseen as lack:
            needs = str(lack) or check.needs
            if check.ok and needs:
                unchecked[check.ok] = needs
        except Exception as error:
            run.failed.append(Event(wrong=f"{error!r} in the check [{kind}]"))
        else:
            if found:
                event, check["seen"] = found
                check["lines"] = event.lines or ["a line of no file of yours:0"]
                check["code"] = code_at(check.lines[0])
                check["help"] = (
                    f"{DOCS}/{check.help}" if DOCS else f"{PYTORCH}/{check.see}"
                )
                findings.append(check)
            elif check.ok:
                fine.append(check.ok)
    return findings, fine, unchecked


def code_at(line):
    """The code that stands at FILE:LINE."""
    path, _, number = line.rpartition(":")
    return linecache.getline(path, int(number)).strip()


def short(line):
    path, _, number = line.rpartition(":")
    near = os.path.relpath(path)
    return f"{path if near.startswith('../..') else near}:{number}"


def counted(number, word):
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def levels(findings):
    """How many there are of each level, in words."""
    found = collections.Counter(finding.level for finding in findings)
    return ", ".join(counted(found[level], level.lower()) for level in LEVELS)


def ended(run):
    if run.status is None:
        return "nobody has written down how your command ended"
    return f"your command exited with {run.status}"


def verdict(run, findings, unchecked, strict=False):
    """(the last line, the exit status)"""
    fail = [each for each in findings if strict or each.level == "MISTAKE"]
    if fail:
        places = ", ".join(short(finding.lines[0]) for finding in fail)
        return f"AUDIT FAILED: {levels(findings)} ({places})", 1
    if run.failed:
        return "AUDIT INCOMPLETE: the audit itself failed, as it says above", 2
    if run.status != 0:
        return f"AUDIT INCOMPLETE: {ended(run)}, so that nothing is proven", 2
    world = max([event.world for event in run.events("group")], default=1)
    if len(run.ranks) < max(2, world):
        why = "one process, so no ranks to compare; type a command that starts several"
        if world > 1:
            why = f"of {world} processes, {len(run.ranks)} made steps"
        return f"AUDIT INCOMPLETE: {why}", 0
    return f"AUDIT PASSED: {levels(findings)}; {len(unchecked)} not checked", 0


def tell_list(title, items):
    if items:
        print("\n  ".join([f"\n{title}:", *items]))


def report(run, strict):
    """Print what a run has shown; returns the exit status."""
    findings, fine, unchecked = judge(run)
    last, status = verdict(run, findings, unchecked, strict)
    ranks = counted(len(run.ranks), "rank")
    print(
        f"\nAUDIT: {levels(findings)}; {len(fine)} ok, {len(unchecked)} not checked."
        f" {run.steps} steps on {ranks}; {ended(run)}."
    )
    for number, finding in enumerate(findings, 1):
        place, *callers = map(short, finding.lines)
        print(f"\n{place}: {finding.level} {number}: {finding.wrong}")
        for row in ("code", "seen", "why", "fix", "help"):
            print(f"  {row.capitalize():<5} {finding[row]}")
        for caller in callers:
            print(f"  From  {caller}")
    lacks = [f"{title} (needs {lack})" for title, lack in unchecked.items()]
    tell_list(f"NOT CHECKED ({len(lacks)}), could still be wrong", lacks)
    tell_list(f"OK ({len(fine)})", fine)
    for event in run.failed:
        print(f"\nThe audit itself failed (is PyTorch newer than it?): {event.wrong}")
    print(f"\n{last}")
    return status


# Starting the command


def environment(folder, **settings):
    """The variables that put the watch into each process of a command."""
    site = folder / "site"
    site.mkdir(parents=True, exist_ok=True)
    text = SITE.format(watch=str(WATCH), site=str(site))
    (site / "sitecustomize.py").write_text(text)
    path = [str(site), os.environ.get("PYTHONPATH")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "AUDIT": json.dumps({"folder": str(folder), **settings}),
    }


def start(command, folder, **settings):
    """Run a command under watch, to its end."""
    if list(folder.glob(f"*-{socket.gethostname()}-*.jsonl")):
        raise BadInput(f"{folder} holds an earlier audit: name another folder")
    env = os.environ | environment(folder, **settings)
    try:
        process = subprocess.Popen(command, env=env)
    except OSError as error:
        raise BadInput(f"cannot start {command[0]}: {error.strerror}") from error
    try:
        process.wait()
    finally:
        process.terminate()  # if somebody ends the audit
        process.wait()
    (folder / f"{socket.gethostname()}.status").write_text(str(process.returncode))


# Against another command

NOISE = """the steps draw random numbers, so that no two runs can be compared: seed them
anew in each epoch, or turn noise and augmentation off (for --kill, nn.Dropout, too:
--like turns it off by itself)"""


def weights_of(run):
    """{optimizer: {step: event}} of one process."""
    found = {}
    for event in next(iter(run.ranks.values())):
        if event.kind == "weights":
            found.setdefault(event.optimizer, {})[event.step] = event
    return found


def first_difference(one, other, words, offset=0):
    """(event, what), where the weights of two runs begin to differ, or None.

    one, other: {step: event} of an optimizer. words: what the two are called. offset:
    how many steps the other did not make.
    """
    before = None
    for step, mine in one.items():
        its = other.get(step - offset)
        if its is None:
            continue
        if len(mine.value) != len(its.value):
            raise BadInput(f"the optimizers hold other weights in {words[1]}")
        values = dict(zip(mine.value, its.value.values(), strict=True))
        for name in differences(mine.value, values):
            pair = f"{mine.value[name]:.10g} in {words[0]}, "
            pair += f"{values[name]:.10g} in {words[1]}"
            return its, f"{name} after step {step} was {pair}: {cause(before)}"
        before = mine, its
    return None


def cause(before):
    """What usually makes such a difference, from the last equal weights on."""
    if before is None:
        return "they begin with other weights, so that the rest cannot be compared"
    one, other = before
    if one.noise and one.drawn[1] != other.drawn[1]:
        raise BadInput(NOISE)
    if one.rate != other.rate:
        rates = f"learning rates {one.rate} and {other.rate}"
        return f"{rates}: does the scheduler count the same steps?"
    larger = max(one.gradients, other.gradients)
    ratio = larger / (min(one.gradients, other.gradients) or 1)
    if round(ratio) > 1 and math.isclose(ratio, round(ratio), rel_tol=ROUNDING):
        return f"gradients {round(ratio)} times as large: a sum, not a mean?"
    samples = "other samples (is the batch divided?), or augmentation"
    return f"{samples}, or a mean of unequal means"


def tell_comparison(found, fine):
    """Print how a comparison ended; returns the exit status."""
    if not found:
        print(f"AUDIT PASSED: {fine}")
        return 0
    event, what = found
    if event.lines:
        print(f"{short(event.lines[0])}: {code_at(event.lines[0])}")
    print(f"AUDIT FAILED: {what}")
    return 1


def like(args, folder, settings):
    """Run two commands in the same arithmetic; 0 if their weights are equal."""
    settings = settings | {"like": True, "every_step": True}
    runs = []
    for name, command in (("other", shlex.split(args.like)), ("this", args.command)):
        start(command, folder / name, **settings)
        run = Run(folder / name)
        if run.status or not run.ranks:
            raise BadInput(
                f"{shlex.join(command)} made no step or failed: has it failed in "
                "float64, or resumed from the other's snapshot?"
            )
        runs.append(run)
    found = None
    other = weights_of(runs[1])
    for number, events in weights_of(runs[0]).items():
        words = "--like", "the command"
        found = found or first_difference(events, other.get(number, {}), words)
    if not found and runs[0].steps != runs[1].steps:
        found = Event(), f"--like made {runs[0].steps} steps, not {runs[1].steps}"
    if found and any(run.events("noise") for run in runs):
        raise BadInput(NOISE)
    fine = f"the weights of both are equal in {runs[0].steps} steps"
    return tell_comparison(found, fine)


# After a kill


def survive(args, folder, settings):
    """Kill a rank, start again, and compare with a run that nobody has killed."""
    if not args.snapshot:
        raise BadInput("--kill needs --snapshot FILE, from which your script resumes")
    if args.snapshot.exists():
        raise BadInput(f"{args.snapshot} is there, and would be resumed: move it away")
    runs = []
    for name in ("whole", "killed", "again"):
        print(f"audit: the {name} run begins", file=sys.stderr)
        kill = args.kill if name == "killed" else 0
        how = settings | {"every_step": True, "kill": kill}
        start(args.command, folder / name, **how)
        runs.append(Run(folder / name))
        if name != "killed" and args.snapshot.exists():
            shutil.move(args.snapshot, folder / name / "snapshot")
    whole, killed, again = runs
    if not (folder / "killed" / "killed").exists():
        raise BadInput(f"the command made less than {args.kill} steps")
    last = again if again.ranks else killed  # torchrun may have restarted it
    if again.status:
        raise BadInput("the command failed when it was started again")
    for number, events in weights_of(last).items():
        begin, found = resumed(weights_of(whole)[number], events)
        if found:
            break
    fine = f"resumed at step {begin}, with the weights of a whole run"
    return tell_comparison(found, fine)


def resumed(one, other):
    """(the step at which the other run went on, what differs): of one optimizer."""
    left, made = max(one), max(other)
    first = next(iter(other.values()))
    begins = [step for step in one if not differences(first.value, one[step].value)]
    # Weights may stand still: then the step that leaves as many as were made.
    begin = min(begins, key=lambda step: abs(left - step - made), default=None)
    what = ""
    if begin is None:
        what = "the run began again with weights that the whole run never had"
    elif not begin:
        what = "the command began again: it found no snapshot, or did not load all"
    elif begin + made != left:
        what = f"resumed with the weights of step {begin}, and made {made} steps"
        what += f", not {left - begin}: is an epoch repeated?"
    if what:
        return begin, (Event(), what)
    words = "the whole run", "the resumed one"
    return begin, first_difference(one, other, words, begin)


def parse():
    parser = argparse.ArgumentParser(
        prog="audit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--like", metavar="COMMAND", help="compare with this command")
    add("--batches", type=int, help="end each epoch after so many")
    add("--strict", action="store_true", help="fail for a risk or a cost, too")
    add("--folder", type=Path, help="keep the events there")
    add("--read", type=Path, help="report what a folder holds")
    add("--kill", type=int, metavar="N", help="kill a rank after step N")
    add("--snapshot", type=Path, help="what --kill puts aside")
    add("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if bool(args.command) == bool(args.read):
        parser.error("type the command that starts your training, or --read alone")
    return args


def watch(args, folder, settings):
    """Run the command once, and report."""
    if not args.read:
        start(args.command, folder, **settings)
    run = Run(folder)
    if not run.ranks:
        raise BadInput(
            "no step of a torch optimizer was seen (python -E and -I ignore the "
            f"audit); {ended(run)}"
        )
    return report(run, args.strict)


def main():
    args = parse()
    settings = {"batches": args.batches}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # and end the command, too
    signal.signal(signal.SIGINT, lambda *_: None)  # the command ends by it, too
    with tempfile.TemporaryDirectory(prefix="audit-") as temporary:
        folder = (args.read or args.folder or Path(temporary)).resolve()
        how = like if args.like else watch if args.kill is None else survive
        try:
            status = how(args, folder, settings)
        except BadInput as error:
            print(f"audit: error: {error}", file=sys.stderr)
            status = 2
    sys.exit(status)


if __name__ == "__main__":
    main()
