"""Run a training command, and learn which silent mistakes it makes.

    python -m cluster.audit torchrun --standalone --nproc-per-node=2 train.py --epochs 2

The command runs as you typed it, and trains the same weights: your script is not
edited. When it has ended, a report names each mistake that it has made, with the line
of your code. To take this tool along, copy audit.py and audit_watch.py.

Exit status: 0 nothing is wrong, 1 something is, 2 the audit could not be made, or the
command failed, so that the audit proves nothing.
"""

import argparse
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
WATCH = Path(__file__).resolve().parent / "audit_watch.py"
DOCS = WATCH.parents[1] / "docs"
if not DOCS.exists():  # copied away
    DOCS = Path("docs")
SITE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("audit_watch", {watch!r})
module = sys.modules["audit_watch"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.begin({site!r})
"""

# A section is a check, in the order in which they are made. `rule` is a function below.
# Of the checks of a group, the first that finds something is told: the others would
# find what follows from it. Without `needs`, a check is of what few scripts use.
CHECKS = """
[settings]
rule = equal
group = weights
ok = all ranks' optimizers have the same settings
wrong = the optimizer's settings differ between the ranks
needs = two ranks
why = Each rank takes steps of another size, and the weights drift apart.
fix = Make the optimizer, the scheduler and every change of a rate on all ranks alike.
help = theory.md#the-effective-batch-and-the-learning-rate

[start]
rule = weights
group = weights
ok = all ranks begin with the same weights
wrong = the ranks begin with other weights
needs = two ranks
why = Averaged gradients keep equal weights equal, but do not make other weights equal.
fix = Wrap the model in DDP after all changes to its weights, or broadcast them.
help = 2_multigpu.md#wrap-the-model-in-ddp

[bypass]
rule = weights
group = weights
ok = each forward pass in training goes through the DDP wrapper
wrong = the model is called without its DDP wrapper, and the ranks' weights differ
needs = two ranks
why = Such a pass sends no gradients: each rank trains a model of its own, and one of
    them is saved.
fix = Call what DistributedDataParallel(model) returned, not the model inside it.
help = 2_multigpu.md#call-the-wrapper-in-the-training-step

[unsent]
rule = weights
group = weights
ok = the last backward pass before a step sends its gradients
wrong = the optimizer steps while the last gradients have not been averaged
needs = two ranks
why = Each rank steps by gradients of its own.
fix = Leave no_sync() for the last micro-batch before optimizer.step().
help = gradient_accumulation.md#add-up-the-gradients-and-send-them-once

[unwrapped]
rule = weights
group = weights
ok = each parameter that an optimizer trains is averaged over the ranks
wrong = the optimizer trains parameters that are in no DDP wrapper
needs = two ranks
why = DDP averages the gradients of what it wraps. Others, such as a loss with weights
    or layers that were frozen when DDP was made, become different on each rank.
fix = Wrap this module in DistributedDataParallel, too, after all layers are unfrozen.
    Of a bare parameter, sum the gradient over the ranks before the step, and divide it
    by their number.
help = ddp_by_hand.md#average-the-gradients-after-backward

[weights]
rule = weights
group = weights
ok = after each step, all ranks have the same weights
wrong = the ranks' weights differ
needs = two ranks
why = Each rank trains a model of its own on its part of the data, and one is saved.
fix = Average the gradients of all ranks before each step: wrap the model in DDP.
help = ddp_by_hand.md#average-the-gradients-after-backward

[state]
rule = state
group = weights
ok = all ranks evaluate the same model
wrong = the ranks evaluate models that differ
needs = an evaluation on two ranks
why = Buffers (batch normalization) or an average of the weights are each rank's own,
    so that the result is of other models than the one that is saved.
fix = Broadcast rank 0's buffers before you evaluate; update an average on every rank.
help = 2_multigpu.md#send-rank-0s-buffers-before-you-evaluate

[steps]
rule = equal
group = steps
ok = all ranks make the same number of steps
wrong = the ranks make other numbers of steps
needs = the end of two ranks
why = A rank that goes on alone waits for the others, or trains without them.
fix = Give all ranks equally many batches (drop_last=True), and let all of them stop.
help = it_hangs.md#find-the-rank-that-skipped-a-collective

[samples]
rule = samples
group = samples
ok = each rank trains on other samples
wrong = the ranks train on the same samples
needs = the batches of two ranks
why = An epoch then takes as many steps as on one device, and sees samples again.
fix = Give the loader sampler=DistributedSampler(train_set) instead of shuffle=True,
    without rank or seed of your own.
help = 2_multigpu.md#give-each-rank-its-share-of-the-samples

[inputs]
rule = differ
group = samples
ok = each rank's model gets other inputs
wrong = the ranks' models get the same inputs
needs = the inputs of two ranks
why = More processes then compute the same gradients again.
fix = Give each rank other samples, and noise from another seed: seed + rank.
help = 2_multigpu.md#give-each-rank-its-share-of-the-samples

[data]
rule = data
group = data
ok = all ranks have the same data set
wrong = the ranks' data sets differ
needs = two epochs of other orders with a DistributedSampler, and no augmentation
why = A sampler shares out numbers. If they mean other samples on each rank, some are
    trained twice, others never, and held-out ones may be among them.
fix = Make and split the data by one seed on all ranks; sort what comes from a folder.
help = troubleshooting.md#the-held-out-loss-is-too-good-to-be-true

[random]
rule = differ
group = samples
ok = each rank draws other random numbers in its forward passes
wrong = all ranks draw the same random numbers
needs = random numbers in a forward pass of two ranks
why = All drop the same units, or add the same noise, on different samples: the average
    over the ranks does not average this noise away.
fix = Seed each rank by itself after the model is made: torch.manual_seed(seed + rank).
help = 2_multigpu.md#shuffle-anew-in-every-epoch

[file]
rule = one_rank
group = file
ok = no two ranks write the same file
wrong = several ranks write one file
needs = a file that is saved, and two ranks
why = Two processes that write at once can leave a file that nobody can load.
fix = Save under `if rank == 0:`.
help = 2_multigpu.md#print-and-save-on-rank-0-only

[order]
rule = alone
group = order
ok = each epoch has another order of samples
wrong = all epochs have the same order of samples
needs = a second epoch
why = The same batches come again in every epoch, and the model learns their order.
fix = Call loader.sampler.set_epoch(epoch) before each epoch.
help = 2_multigpu.md#shuffle-anew-in-every-epoch

[once]
rule = once
group = once
ok = an evaluation counts each held-out sample once
wrong = an evaluation counts some held-out samples twice
needs = an evaluation with a loader on two ranks
why = DistributedSampler repeats samples until all ranks have equally many, so that the
    result depends on the number of processes.
fix = Evaluate Subset(test_set, range(rank, len(test_set), world_size)).
help = 2_multigpu.md#evaluate-each-held-out-sample-once

[met]
rule = met
group = met
ok = the results of all ranks' held-out samples are put together
wrong = each rank evaluates other samples, and the results are not put together
needs = the same evaluation twice on two ranks
why = Each rank prints, and decides by, the result of its own samples.
fix = Sum losses and counts over the ranks: dist.all_reduce(sums).
help = 2_multigpu.md#evaluate-each-held-out-sample-once

[learns]
rule = alone
group = learns
ok = the optimizer changes the weights
wrong = the optimizer changes no weight
needs = some steps
why = It may hold other parameters than those of the model that computes the loss.
fix = Make the optimizer from the parameters of the model that you train.
help = 1_single_gpu.md#choose-the-data-the-model-and-the-optimizer

[unheld]
rule = alone
group = learns
ok = an optimizer holds each parameter of the DDP model
wrong = a part of the model is in no optimizer
needs = a DDP wrapper
why = It has gradients, and keeps its first values for ever.
fix = Make the optimizer after the last layer is in its place, from all parameters;
    freeze what you do not train by requires_grad_(False).
help = adapt_your_script.md#look-up-the-parts-of-your-script

[zeroed]
rule = alone
group = learns
ok = gradients are set to zero between steps
wrong = the gradients of earlier steps are never set to zero
needs = some steps
why = Each step moves by the sum of all gradients since the start.
fix = Call optimizer.zero_grad() before each backward(), for each optimizer.
help = 1_single_gpu.md#train-one-batch

[mode]
rule = alone
group = mode
ok = the model trains in training mode
wrong = the model trains in evaluation mode
needs = some steps
why = Nothing is dropped, and batch normalization does not follow the data. (If you
    fine-tune in eval() on purpose, this is none.)
fix = Call model.train() at the start of each epoch.
help = 1_single_gpu.md#evaluate

[no_sync]
rule = alone
group = sends
ok = no_sync() stands around forward passes, too
wrong = no_sync() has no effect
needs =
why = DDP decides in the forward pass whether it sends: around backward alone, no_sync()
    does nothing, and the gradients are sent each time.
fix = Put the forward pass into no_sync(), too.
help = gradient_accumulation.md#add-up-the-gradients-and-send-them-once

[twice]
rule = alone
group = sends
ok = the gradients of a step are sent once
wrong = the gradients of one step are sent several times
needs = a DDP wrapper that is called
why = Each time costs the communication of a whole step.
fix = Use no_sync() for all micro-batches but the last.
help = gradient_accumulation.md#add-up-the-gradients-and-send-them-once

[clip]
rule = alone
group = clip
ok = gradients are unscaled before they are clipped
wrong = gradients are clipped before they are unscaled
needs =
why = Scaled gradients are thousands of times too large, so that each step is tiny.
fix = Call scaler.unscale_(optimizer) before you clip.
help = mixed_precision.md#autocast-scale-unscale-clip-step-update

[keys]
rule = alone
group = keys
ok = saved keys have no prefix of a wrapper
wrong = a wrapper's state_dict() is saved
needs = a snapshot of the trained weights
why = A script without the wrapper cannot load it, or loads nothing with strict=False.
fix = Save model.state_dict(), not ddp_model.state_dict().
help = troubleshooting.md#unexpected-keys-in-state_dict

[optimizer]
rule = alone
group = optimizer
ok = a snapshot has the optimizer's state
wrong = a snapshot lacks an optimizer's state
needs = two snapshots of one file, and an optimizer that has a state
why = A resumed run begins without momentum, and its loss jumps.
fix = Save optimizer.state_dict() of each optimizer, too, and load it.
help = 1_single_gpu.md#save-and-resume

[in_place]
rule = alone
group = in_place
ok = a new snapshot is written beside the last one, and renamed
wrong = the last snapshot is overwritten in place
needs = a snapshot
why = A kill while it is written leaves no snapshot at all.
fix = torch.save(snapshot, path + ".tmp"), then os.replace(path + ".tmp", path).
help = 1_single_gpu.md#save-and-resume

[nan]
rule = alone
group = nan
ok = no snapshot holds NaN
wrong = a snapshot holds NaN
needs = a snapshot
why = A resumed run has lost its weights, and the good snapshot is overwritten.
fix = Stop before the save if the loss is not finite.
help = 1_single_gpu.md#save-and-resume

[destroyed]
rule = alone
group = destroyed
ok = the process group is destroyed at the end
wrong = the process group is never destroyed
needs = a process group, and a command that ends well
why = The exit may hang or abort, so that a run that has succeeded counts as failed.
fix = Call dist.destroy_process_group() at the end.
help = 2_multigpu.md#shut-down-cleanly
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

    def __init__(self, folder, status=0):
        self.status = status
        self.torch = False  # whether any process has imported it
        self.failed = []  # errors of the watch
        ranks = {}
        for path in sorted(Path(folder).glob("*.jsonl")):  # the oldest first
            whole = path.read_text().rpartition("\n")[0]
            events = [
                json.loads(line, object_hook=Event) for line in whole.splitlines()
            ]
            self.torch = True
            self.failed += [event for event in events if event.kind == "failed"]
            if any(event.kind == "weights" for event in events):
                rank = [event.rank for event in events if "rank" in event][-1]
                ranks[rank] = events  # after a restart, the last process counts
                for event in events:
                    event["rank"] = rank
        self.ranks = {rank: ranks[rank] for rank in sorted(ranks)}
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

    def pairs(self, kind):
        """Events of each two ranks that may be compared: [(event, event), ...]"""
        found = []
        for by_rank in self.of(kind).values():
            found += itertools.combinations(by_rank.values(), 2)
        return found


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
        numbers = all(isinstance(value, (int, float)) for value in pair)
        close = numbers and math.isclose(*pair, rel_tol=ROUNDING, abs_tol=1e-12)
        if not close and str(pair[0]) != str(pair[1]):  # NaN equals NaN
            found.append(name)
    return found


def tell(name, mine, its):
    when = f"after step {mine.step}" if mine.step else "before the first step"
    values = []
    for event in (mine, its):
        value = event.value[name]
        shown = f"{value:.7g}" if isinstance(value, float) else value
        values.append(f"{shown} on rank {event.rank}")
    return f"{name} was {' and '.join(values)} {when}; they must be equal"


def equal(run, kind):
    for mine, its in needed(run.pairs(kind)):
        for name in differences(mine.value, its.value):
            yield mine, tell(name, mine, its)


def state(run, kind):
    need_own_batches(run)  # a plain tensor may be a part of one that is split
    yield from equal(run, kind)


def need_own_batches(run):
    """Ranks of a tensor parallel model take one batch, and that is right."""
    inputs = run.pairs("inputs")
    shared = inputs and all(mine.value == its.value for mine, its in inputs)
    for mine, its in run.pairs("weights"):
        names = differences(mine.value, its.value)
        if shared and 0 < len(names) < len(mine.value):  # layers split by hand
            raise Unseen("ranks that have whole models")
    if run.events("parallel"):
        raise Unseen("ranks that share no batch")


def differ(run, kind):
    need_own_batches(run)
    histories = {}
    for mine, its in needed(run.pairs(kind)):
        place = str(mine.key[0]), mine.rank, its.rank
        histories.setdefault(place, []).append((mine, its))
    for pairs in histories.values():
        same = [mine for mine, its in pairs if mine.value == its.value]
        distinct = {str(event.value) for event in same}
        if len(distinct) > max(2, len(pairs) / 2):
            yield same[0], f"equal on two ranks in {len(same)} of {len(pairs)} steps"


def alone(run, kind):
    needed(kind != "destroyed" or not run.status)  # an error is told anyway
    for event in needed(run.events(kind)):
        if event.wrong:
            yield event, f"rank {event.rank}: {event.wrong}"


def one_rank(run, kind):
    needed(len(run.ranks) > 1)
    for path, by_rank in needed(run.of(kind)).items():
        if len(by_rank) > 1:
            yield by_rank.popitem()[1], f"several ranks wrote {path}"


def weights(run, kind):
    """A difference that stays, if `kind` is its cause."""
    histories = {}
    for mine, its in needed(run.pairs("weights")):
        names = differences(mine.value, its.value)
        place = mine.optimizer, mine.rank, its.rank
        histories.setdefault(place, []).append((names, mine, its))
    for history in histories.values():
        while history and not history[0][0]:
            history.pop(0)
        if not history or not all(names for names, _, _ in history):
            continue  # never apart; or together again, as in DiLoCo
        need_own_batches(run)
        names, mine, its = history[0]
        event = mine
        cause = "weights"
        hints = run.events("bypass") + run.events("unsent")
        hints = [hint for hint in hints if hint.step <= mine.step]
        if mine.step == 0:
            cause = "start"
        elif hints:
            event = hints[0]
            cause = event.kind
        elif set(names) <= set(mine.unwrapped):
            event = Event(mine, lines=mine.unwrapped_lines)
            cause = "unwrapped"
        if cause == kind:
            yield event, tell(names[0], mine, its)


def samples(run, kind):
    need_own_batches(run)
    for mine, its in needed(run.pairs("trained")):
        count = len(its.value)
        same = set(mine.value) & set(its.value)
        replaced = len(set(its.value)) < count  # drawn so, they meet by chance
        if len(same) > max(len(run.ranks), count / 20) and not replaced:
            seen = f"{len(same)} of {count} samples of rank {its.rank}"
            yield mine, f"{seen} were also rank {mine.rank}'s"


def data(run, kind):
    """Under one number, a sample is the same for each rank, or augmented."""
    values = {}
    for event in run.events(kind):
        values.setdefault((event.rank, str(event.key)), []).append(event.value)
    again = [both for both in values.values() if len(both) > 1]
    if not again or any(each != both[0] for both in again for each in both):
        raise Unseen
    yield from equal(run, kind)


def once(run, kind):
    for mine, its in needed(run.pairs("evaluated")):
        double = set(mine.value) & set(its.value)
        if mine.shared and double and set(mine.value) != set(its.value):
            yield mine, f"two ranks evaluated sample {int(double.pop())}"


def met(run, kind):
    for mine, its in needed(run.pairs(kind)):
        common = set(mine.value) & set(its.value)
        if mine.alone and its.alone and 2 * len(common) < len(mine.value):
            yield mine, "no collective followed before the next step or the end"


RULES = {
    rule.__name__: rule
    for rule in (
        equal,
        state,
        weights,
        samples,
        differ,
        data,
        one_rank,
        once,
        met,
        alone,
    )
}


# The report


def judge(run):
    """([finding, ...], what is right, {what was not checked: what that needs})"""
    checks = configparser.RawConfigParser()
    checks.read_string(CHECKS)
    findings = {}  # by group
    fine = []
    unchecked = {}
    for kind in checks.sections():
        check = {key: " ".join(text.split()) for key, text in checks[kind].items()}
        if check["group"] in findings:
            continue
        try:
            found = next(RULES[check["rule"]](run, kind), None)
        except Exception as lack:  # Unseen, or an error of our own
            needs = str(lack) or check["needs"]
            if needs:
                unchecked[check["ok"]] = needs
            continue
        if found is None:
            fine.append(check["ok"])
        else:
            event, seen = found
            lines = event.lines or ["a line of no file of yours:0"]
            finding = Event(
                check, mistake=kind, lines=lines, seen=seen, step=event.step
            )
            finding["code"] = code_at(lines[0])
            finding["help"] = f"{DOCS}/{check['help']}"
            findings[check["group"]] = finding
    return list(findings.values()), fine, unchecked


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


def verdict(run, findings, fine, unchecked):
    """(the last line, the exit status)"""
    if findings:
        places = ", ".join(short(finding.lines[0]) for finding in findings)
        return f"AUDIT FAILED: {counted(len(findings), 'mistake')} ({places})", 1
    if run.status:
        failed = f"your command failed with {run.status}, so that nothing is proven"
        return f"AUDIT INCOMPLETE: {failed}", 2
    if len(run.ranks) < 2:
        several = "type a command that starts several, such as torchrun's"
        return f"AUDIT INCOMPLETE: one process, so no ranks to compare; {several}", 0
    checked = f"no mistakes in {len(fine)} checks; {len(unchecked)} not checked"
    return f"AUDIT PASSED: {checked}", 0


def tell_list(title, items):
    if items:
        print(f"\n{title}:")
        print(*[f"  {item}" for item in items], sep="\n")


def report(run, as_json):
    """Print what a run has shown; returns the exit status."""
    findings, fine, unchecked = judge(run)
    last, status = verdict(run, findings, fine, unchecked)
    if as_json:
        whole = {"findings": findings, "ok": fine, "not checked": unchecked}
        whole |= {"verdict": last, "steps": run.steps, "status": run.status}
        print(json.dumps(whole | {"failed": run.failed}, indent=1))
        return status
    count = counted(len(findings), "mistake").upper()
    print(f"\nAUDIT: {count}, {len(fine)} ok, {len(unchecked)} not checked.", end=" ")
    ranks = counted(len(run.ranks), "rank")
    print(f"{run.steps} steps on {ranks}; your command exited with {run.status}.")
    for number, finding in enumerate(findings, 1):
        print(f"{short(finding.lines[0])}: MISTAKE {number}: {finding.wrong}")
    for number, finding in enumerate(findings, 1):
        print(f"\nMISTAKE {number}  ", ", called from ".join(map(short, finding.lines)))
        for row in ("code", "seen", "why", "fix", "help"):
            print(f"  {row.capitalize():<5} {finding[row]}")
    lacks = [f"{title} (needs {lack})" for title, lack in unchecked.items()]
    tell_list(f"NOT CHECKED ({len(lacks)}), could still be wrong", lacks)
    tell_list(f"OK ({len(fine)})", fine)
    for event in run.failed:
        print(f"\nThe audit itself failed in a process: {event.what}")
    print(f"\n{last}")
    return status


# Starting the command


def environment(folder, **settings):
    """The variables that put the watch into each process of a command."""
    site = Path(folder) / "site"
    site.mkdir(parents=True, exist_ok=True)
    text = SITE.format(watch=str(WATCH), site=str(site))
    (site / "sitecustomize.py").write_text(text)
    path = [str(site), os.environ.get("PYTHONPATH")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "AUDIT": json.dumps({"folder": str(folder), **settings}),
    }


def start(command, folder, **settings):
    """Run a command under watch, to its end: its exit status."""
    if list(folder.glob(f"*-{socket.gethostname()}-*.jsonl")):
        raise BadInput(f"{folder} holds an earlier audit: name another folder")
    env = {**os.environ, **environment(folder, **settings)}
    try:
        process = subprocess.Popen(command, env=env)
    except OSError as error:
        raise BadInput(f"cannot start {command[0]}: {error.strerror}") from error
    try:
        while process.poll() is None:
            try:
                process.wait()
            except KeyboardInterrupt:
                continue  # the command has received it, too, and ends
    finally:
        if process.poll() is None:  # somebody ends the audit
            process.terminate()
            process.wait()
    return process.returncode


# Against another command


def first_difference(one, other, words, offsets):
    """(event, what), where the weights of two processes begin to differ, or None.

    one, other: events. words: what the two are called. offsets: {optimizer: how many
    steps the other did not make}.
    """
    theirs = {}
    for event in other:
        if event.kind == "weights":
            step = event.step + offsets.get(event.optimizer, 0)
            theirs[event.optimizer, step] = event
    before = None
    for mine in one:
        its = theirs.get((mine.optimizer, mine.step))
        if mine.kind != "weights" or its is None:
            continue
        if len(mine.value) != len(its.value):
            raise BadInput(f"the optimizers hold other weights in {words[1]}")
        values = dict(zip(mine.value, its.value.values(), strict=True))
        names = differences(mine.value, values)
        if names:
            pair = f"{mine.value[names[0]]:.10g} in {words[0]}, "
            pair += f"{values[names[0]]:.10g} in {words[1]}"
            when = f"{names[0]} after step {mine.step} was {pair}"
            return its, f"{when}: {cause(before)}"
        before = mine, its
    return None


def cause(before):
    """What usually makes such a difference, from the last equal weights on."""
    if before is None:
        return "they begin with other weights, so that the rest cannot be compared"
    one, other = before
    if one.rate != other.rate:
        rates = f"learning rates {one.rate} and {other.rate}"
        return f"{rates}: does the scheduler count the same steps?"
    larger = max(one.gradients, other.gradients)
    ratio = larger / (min(one.gradients, other.gradients) or 1)
    if round(ratio) > 1 and math.isclose(ratio, round(ratio), rel_tol=ROUNDING):
        return f"gradients {round(ratio)} times as large: a sum, not a mean?"
    return "other samples (is the batch divided?), or a mean of unequal means"


def tell_comparison(args, found, fine):
    """Print how a comparison ended; returns the exit status."""
    last = f"AUDIT PASSED: {fine}"
    if found:
        event, what = found
        last = f"AUDIT FAILED: {what}"
        if event.lines:
            line = event.lines[0]
            last = f"{short(line)}: {code_at(line)}\n{last}"
    print(json.dumps({"findings": found or [], "verdict": last}) if args.json else last)
    return 1 if found else 0


def like(args, folder, settings):
    """Run two commands in the same arithmetic; 0 if their weights are equal."""
    settings = settings | {"like": True, "every_step": True}
    runs = []
    for name, command in (("other", shlex.split(args.like)), ("this", args.command)):
        status = start(command, folder / name, **settings)
        run = Run(folder / name, status)
        if not run.ranks:
            why = "has it resumed from the snapshot of the other command?"
            if status:
                why = "its error is above; the audit computes in float64"
            raise BadInput(f"{shlex.join(command)} made no step: {why}")
        runs.append(run)
    one, other = [next(iter(run.ranks.values())) for run in runs]
    found = first_difference(one, other, ["--like", "the command"], {})
    if found is None and runs[0].steps != runs[1].steps:
        found = one[-1], f"--like made {runs[0].steps} steps, not {runs[1].steps}"
    if found and any(run.events("noise") for run in runs):
        noise = "the steps draw random numbers, so that no two runs can be compared"
        raise BadInput(f"{noise}: turn noise and augmentation off for --like")
    fine = f"the weights of both are equal in {runs[0].steps} steps"
    return tell_comparison(args, found, fine)


# After a kill


def survive(args, folder, settings):
    """Kill a rank, start again, and compare with a run that nobody has killed."""
    if not args.snapshot:
        raise BadInput("--kill needs --snapshot FILE, from which your script resumes")
    aside = Path(f"{args.snapshot}.before-audit")
    if aside.exists():
        raise BadInput(f"{aside} is there, from an audit that was cut short: move it")
    had_one = args.snapshot.exists()
    if had_one:
        args.snapshot.rename(aside)
    runs = []
    try:
        for name in ("whole", "killed", "again"):
            print(f"audit: the {name} run begins", file=sys.stderr)
            kill = {"kill": args.kill} if name == "killed" else {}
            how = {**settings, **kill, "every_step": True}
            status = start(args.command, folder / name, **how)
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
    one, other = [next(iter(run.ranks.values())) for run in (whole, last)]
    steps = [last_steps(events) for events in (one, other)]
    offsets = {
        number: count - steps[1].get(number, 0) for number, count in steps[0].items()
    }
    found = first_difference(one, other, ["the whole run", "the resumed one"], offsets)
    if not any(offsets.values()):
        found = Event(), "the command began again: it did not resume"
    fine = f"resumed at step {max(offsets.values())}, with the weights of a whole run"
    return tell_comparison(args, found, fine)


def last_steps(events):
    """{optimizer: how many steps it has made}"""
    return {event.optimizer: event.step for event in events if event.kind == "weights"}


def parse():
    parser = argparse.ArgumentParser(
        prog="audit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--like", metavar="COMMAND", help="compare with this command")
    add("--batches", type=int, help="end each epoch after so many")
    add("--json", action="store_true", help="print JSON")
    add("--folder", type=Path, help="keep the events there")
    add("--read", type=Path, help="report what a folder holds")
    add("--kill", type=int, metavar="N", help="kill a rank after step N")
    add("--snapshot", type=Path, help="what --kill puts aside")
    add("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if not args.command and not args.read:
        parser.error("type the command that starts your training, too")
    return args


def watch(args, folder, settings):
    """Run the command once, and report."""
    status = 0
    if not args.read:
        status = start(args.command, folder, **settings)
    run = Run(folder, status)
    if not run.ranks:
        seen = "made a step of an optimizer" if run.torch else "imported torch"
        ignored = "" if run.torch else "; python -E and -I ignore the audit"
        raise BadInput(f"no process of the command {seen} (status {status}){ignored}")
    return report(run, args.json)


def main():
    args = parse()
    settings = {"batches": args.batches} if args.batches else {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # and end the command, too
    with tempfile.TemporaryDirectory(prefix="audit-") as temporary:
        folder = args.read or args.folder or Path(temporary)
        folder = folder.resolve()
        how = watch
        if args.like:
            how = like
        elif args.kill:
            how = survive
        try:
            status = how(args, folder, settings)
        except BadInput as error:
            print(f"audit: error: {error}", file=sys.stderr)
            status = 2
    sys.exit(status)


if __name__ == "__main__":
    main()
