"""What audit.py puts into each process of a training run: it watches, and writes.

A generated sitecustomize.py calls `begin` when Python starts. As soon as the process
has imported torch, PyTorch's own hooks and a few wrapped functions note what happens:
one line of JSON for each event, in a file of the process's own. Nothing here sends
anything to another rank, draws a random number, or changes a number in a tensor. An
error in here is an event, too, and the run goes on.
"""

import atexit
import collections
import contextlib
import functools
import importlib
import json
import os
import pkgutil
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
import zlib
from importlib.machinery import PathFinder
from multiprocessing import util

FIRST_STEPS = 20  # tensors are read in each of these steps, and then rarely:
EVERY_STEPS = 50
EPOCHS = 50  # and in the first steps of so many epochs
COLUMNS = 1024  # so many numbers of a sample are enough to know it again
SAMPLES = 1_000_000  # so many samples are written down
TESTED = 100  # and so many of each evaluation
PROBES = 100  # so many of a data set are compared between ranks
# Before or after which function of whom which method of the watch is called
PATCHES = """
before torch.utils.data.dataloader._BaseDataLoaderIter _reset      batches.restart
after  torch.utils.data.dataloader._BaseDataLoaderIter _next_index batches.index
after  torch.utils.data.DataLoader               __init__          batches.make
after  torch.utils.data.DataLoader               __iter__          batches.iterate
after  torch.nn.parallel.DistributedDataParallel __init__          passes.wrap
before torch.nn.Module                           _apply            passes.convert
before torch.Tensor                              backward          passes.backward
before torch.autograd                            backward          passes.backward
after  torch.optim.Optimizer                     add_param_group   steps.hold
before torch.optim.Optimizer                     zero_grad         steps.zero
before torch.nn.Module                           zero_grad         steps.zero
after  torch.amp.GradScaler                      scale             steps.scale
after  torch.amp.GradScaler                      get_scale         steps.unscale
after  torch.amp.GradScaler                      unscale_          steps.unscale
before torch.amp.GradScaler                      step              steps.unscale
after  torch.amp.GradScaler                      step              steps.skip
before torch.nn.utils                            clip_grad_norm_   steps.clip
before torch.nn.utils                            clip_grad_value_  steps.clip
before torch                                     save              files.save
after  torch.nn.Module                           load_state_dict   files.load
after  torch.distributed                         init_process_group   group.join
before torch.distributed.algorithms.Join         __enter__            group.join_uneven
before torch.distributed all_gather                 evaluations.meet
before torch.distributed all_gather_into_tensor     evaluations.meet
before torch.distributed all_gather_object          evaluations.meet
before torch.distributed all_reduce                 evaluations.meet
before torch.distributed all_to_all                 evaluations.meet
before torch.distributed all_to_all_single          evaluations.meet
before torch.distributed broadcast                  evaluations.meet
before torch.distributed broadcast_object_list      evaluations.meet
before torch.distributed gather                     evaluations.meet
before torch.distributed gather_object              evaluations.meet
before torch.distributed reduce                     evaluations.meet
before torch.distributed reduce_scatter             evaluations.meet
before torch.distributed reduce_scatter_tensor      evaluations.meet
before torch.distributed scatter                    evaluations.meet
before torch.distributed batch_isend_irecv          group.send
before torch.distributed irecv                      group.send
before torch.distributed isend                      group.send
before torch.distributed recv                       group.send
before torch.distributed send                       group.send
"""
# All other names that PyTorch does not promise to keep
PRIVATE = """
torch._C._TorchDispatchModeKey.FAKE
torch._C._TorchDispatchModeKey.PROXY
torch._C._current_graph_task_id
torch._C._get_dispatch_mode
torch.nn.modules.batchnorm._NormBase
torch.nn.modules.module._has_any_global_hook
torch.utils._pytree.tree_leaves
torch.utils._pytree.tree_leaves_with_path
torch.utils._pytree.tree_map_only
"""
settings = json.loads(os.environ.get("AUDIT", "{}"))  # of audit.py's command line
host = socket.gethostname()


def begin(site):
    """Wait for `import torch`, and let the next sitecustomize on the path run."""
    if "torch" in sys.modules:  # a process that was forked
        attach()
    else:
        sys.meta_path.insert(0, Finder)
    sys.path[:] = [entry for entry in sys.path if entry != site]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError:
        if ours:
            sys.modules["sitecustomize"] = ours


class Finder:
    """Finds torch as Python would, and attaches the watch when it is imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name) if name == "torch" else None
        if spec:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                attach()

            spec.loader.exec_module = exec_module
        return spec


def attach():
    """Called when torch has been imported, which must not fail because of us."""
    try:
        if settings:
            hook()
    except Exception as error:
        print(f"audit: this process is not watched: {error!r}", file=sys.stderr)


def is_readers(path):
    """Whether this file of code is the reader's own."""
    library = path.startswith(not_the_readers)
    return not (library or "site-packages" in path or "dist-packages" in path)


def where():
    """The reader's lines that are running, the innermost first: file:line, ..."""
    frame = sys._getframe(1)
    lines = []
    while frame and len(lines) < 3:
        path = frame.f_code.co_filename
        if is_readers(path):
            lines.append(f"{os.path.abspath(path)}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(lines)


def unwatched():
    """Whether PyTorch records this code to repeat it: then it must stay as it is.

    Or it makes a step that changes nothing, to have an optimizer state to load into.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    modes = torch._C._TorchDispatchModeKey
    recorded = any(map(torch._C._get_dispatch_mode, (modes.FAKE, modes.PROXY)))
    running = [frame.f_code.co_name for frame, _ in traceback.walk_stack(None)]
    if recorded or "_init_optim_state" in running:
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def safe(name):
    """A hook that calls this method; what it raises goes no further, but is noted."""
    part, method = name.split(".")

    def called(*args, **kwargs):
        try:
            if not unwatched():
                getattr(getattr(watch, part), method)(*args, **kwargs)
        except Exception as error:
            watch.fail(error)

    return called


def nothing(*args, **kwargs):
    pass


def patch(owner, name, before=nothing, after=nothing):
    """Call `before(*arguments)` and `after(result, *arguments)` around a function."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def watched(*args, **kwargs):
        before(*args, **kwargs)
        result = original(*args, **kwargs)
        after(result, *args, **kwargs)
        return result

    # pickle looks a function up where it was defined.
    for place in (owner, sys.modules[original.__module__]):
        if getattr(place, name, None) is original:
            setattr(place, name, watched)


# Tensors


def local(tensor):
    """The part of a tensor that this process has."""
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()


def part_of(tensor):
    """Which part of a split tensor it is, a number for each dimension of the mesh."""
    if not hasattr(tensor, "placements"):
        return []
    place = tensor.device_mesh.get_coordinate()
    cuts = zip(place, tensor.placements, strict=True)
    return [number for number, cut in cuts if cut.is_shard()]


def sizes(named):
    """{name: mean absolute value} of {name: tensor}.

    The names tell the parts of a split tensor apart, so that only like parts meet.
    """
    found = {}
    for name, tensor in named.items():
        part = local(tensor)
        if part.layout == torch.sparse_coo:
            part = part.coalesce().values()
        if part.is_floating_point() and part.layout == torch.strided:
            norm = torch.linalg.vector_norm(part, 1, dtype=torch.float64).item()
            title = f"mean absolute value of {name}{part_of(tensor) or ''}"
            found[title] = norm / (part.numel() or 1)
    return found


def slope(gradient):
    """(its size, its direction): the latter stays if all of it is multiplied."""
    part = local(gradient).to_dense().reshape(-1)[:COLUMNS].cpu().double()
    places = torch.arange(len(part), device="cpu", dtype=torch.float64)
    size = part.abs().sum().item()
    return size, (part * places.cos()).sum().item() / (size or 1)


def plain(name):
    """A parameter's name without those of wrappers."""
    parts = name.split(".")
    return ".".join(part for part in parts if part not in ("module", "_orig_mod"))


def tensors_in(value):
    return [
        leaf
        for leaf in torch.utils._pytree.tree_leaves(value)
        if isinstance(leaf, torch.Tensor)
    ]


def hashes(value, count=None):
    """A text for each sample in a batch, the same for the same numbers."""
    found = []
    for tensor in map(local, tensors_in(value)):
        if tensor.dim() and tensor.numel() and tensor.layout == torch.strided:
            count = count or len(tensor)
            if len(tensor) == count:
                rows = tensor.reshape(count, -1)
                rows = rows[:, :: 1 + rows.shape[1] // COLUMNS].cpu().double()
                places = torch.arange(1.0, rows.shape[1] + 1, device="cpu")
                found.append((rows * places.cos()).sum(1))
    return [f"{number:.9g}" for number in sum(found).tolist()] if found else []


def random_state(tensor):
    """A number that changes when a model on its device draws a random number."""
    states = [torch.get_rng_state()]
    if tensor.device.type != "cpu":
        states.append(torch.get_device_module(tensor.device).get_rng_state())
    return zlib.crc32(bytes(torch.cat(states).tolist()))


def by_identity():
    """A dictionary of tensors, which it does not keep alive."""
    return torch.utils.weak.WeakIdKeyDictionary()


def parameters_of(optimizer):
    return [each for group in optimizer.param_groups for each in group["params"]]


def gradients_of(optimizer):
    """{place: gradient}"""
    places = enumerate(parameters_of(optimizer))
    return {place: each.grad for place, each in places if each.grad is not None}


def address_of_gradient(optimizer):
    """0 if all gradients are zero."""
    found = gradients_of(optimizer)
    return any(sizes(found).values()) and local(next(iter(found.values()))).data_ptr()


def has_modes(module):
    """Whether some part of it computes another thing in evaluation mode."""
    names = "p", "dropout", "track_running_stats"
    values = [getattr(part, name, 0) for part in module.modules() for name in names]
    return any(value for value in values if isinstance(value, (float, bool)))


class Watch:
    """What one process has done so far; only hashes and sums, never tensors."""

    def __init__(self):
        self.file = None
        self.noted = collections.Counter()
        self.batches = Batches()
        self.passes = Passes()
        self.evaluations = Evaluations()
        self.steps = Steps()
        self.group = Group()
        self.files = Files()

    @property
    def now(self):
        """A number that is the same on all ranks, also if one leaves out steps."""
        return self.passes.clock or self.steps.done

    def emit(self, kind, **facts):
        if self.file is None:
            path = f"{settings['folder']}/{time.time_ns()}-{host}-{os.getpid()}.jsonl"
            self.file = open(path, "x", buffering=1)  # noqa: SIM115  to the end
            self.emit("start", rank=int(os.environ.get("RANK", 0)))
        line = {"kind": kind, "step": self.steps.done, "lines": where(), **facts}
        self.file.write(json.dumps(line) + "\n")

    def note(self, kind, wrong="", bad=True, times=1, **facts):
        """What one process can judge, written once; "" if it is right."""
        wrong = wrong if bad else ""
        self.noted[kind, wrong] += 1
        if self.noted[kind, wrong] == times:
            self.emit(kind, key=wrong, wrong=wrong, **facts)

    def fail(self, error):
        with contextlib.suppress(Exception):  # the disk may be full
            self.note("failed", f"{error!r:.300}")

    def end(self):
        if self.file is not None:
            for part in ("evaluations", "steps", "group"):
                safe(f"{part}.end")()
            self.file.close()
        self.file = None


class Batches:
    """What loaders deliver, and what it is used for."""

    iterations = 0
    epoch_began = 0  # after so many steps
    samples = 0

    def __init__(self):
        self.names = weakref.WeakKeyDictionary()  # {loader: the same on all ranks}
        self.made = collections.Counter()  # {lines: how many loaders were made there}
        self.pending = []  # batches: nobody knows yet what they are used for
        self.passes = {}  # {(use, loader): {iteration: its number among these}}

    def make(self, result, loader, *args, **kwargs):
        lines = str(where())
        self.made[lines] += 1
        self.names[loader] = f"{lines} {self.made[lines]}"

    def restart(self, iterator, loader, *args, **kwargs):
        """A loader starts its workers, or keeps them for another epoch."""
        iterator._audit_waiting = collections.deque()
        # No property: that may be of a number which the workers share.
        epoch = getattr(loader.dataset, "__dict__", {}).get("epoch")
        theirs = iterator.__dict__.setdefault("_audit_epoch", epoch)
        if isinstance(epoch, int):
            wrong = f"the data set's epoch is {epoch}, and {theirs} in the workers"
            watch.note("workers", wrong, epoch != theirs)

    def index(self, indices, iterator):
        """The sampler has given the numbers of a batch, which comes later."""
        waiting = iterator.__dict__.setdefault("_audit_waiting", collections.deque())
        waiting.append(indices)

    def iterate(self, iterator, loader):
        if loader not in self.names:
            self.make(None, loader)
        self.iterations += 1
        self.epoch_began = watch.steps.done
        shares = getattr(loader.sampler, "num_replicas", 2) > 1
        iterator._audit_facts = {
            "loader": self.names[loader],
            "began": watch.passes.clock,
            "iteration": self.iterations,
            "shared": shares and "DistributedSampler" in type(loader.sampler).__name__,
        }
        iterator._audit_given = 0

    def deliver(self, data, iterator):
        facts = iterator._audit_facts
        iterator._audit_given += 1
        indices = iterator._audit_waiting.popleft()
        if not isinstance(indices, list):
            indices = [indices]
        indexed = all(hasattr(index, "__index__") for index in indices)
        rows = []
        if self.samples < SAMPLES:
            rows = hashes(data, len(indices) if indexed else None)
        value = rows
        if indexed:
            value = [f"{int(index):09}" for index in indices]
            if not facts["shared"]:  # one number may be several samples
                value = [" ".join(pair) for pair in zip(value, rows, strict=False)]
        self.samples += len(value)
        lengths = {len(each) for each in tensors_in(data) if each.dim() > 1}
        watch.note(
            "rows",
            f"tensors of one batch have {sorted(lengths)} rows",
            len(lengths) > 1 and lengths == {1, len(indices)},
        )
        if watch.evaluations.running:
            self.flush("evaluated")
        # Somebody may have only looked at a batch of this loader, or at all of another.
        self.pending = [
            each
            for each in self.pending
            if each["iteration"] == facts["iteration"]
            or (each["loader"] != facts["loader"] and "over" not in each)
        ]
        facts = facts | {"indexed": indexed, "value": value, "lines": where()}
        self.pending.append(facts)
        if facts["shared"]:
            for index, row in zip(map(int, indices), rows, strict=False):
                if index < PROBES:
                    watch.emit("data", key=[facts["loader"], index], value=[row])

    def exhaust(self, iterator):
        """The epoch of a loader ends, of which a batch or two may wait to be used."""
        if watch.evaluations.running:
            self.flush("evaluated")
        number = iterator._audit_facts["iteration"]
        used = any(number in passes for passes in self.passes.values())
        for facts in [*self.pending]:
            if facts["iteration"] == number:
                facts["over"] = True
                if iterator._audit_given > 2 and not used:  # somebody has looked at all
                    self.pending.remove(facts)

    def flush(self, use):
        """Write down what the batches were used for: "trained" or "evaluated"."""
        for facts in self.pending:
            passes = self.passes.setdefault((use, facts["loader"]), {})
            number = passes.setdefault(facts["iteration"], len(passes))
            if self.samples < SAMPLES:
                key = [facts["loader"], facts["began"] or number]
                watch.emit(use, key=key, **facts)
        self.pending = []
        watch.evaluations.running = False


class Passes:
    """Forward and backward passes."""

    clock = 0  # backward passes that all ranks make together
    outer = None  # the outermost module that runs now, by a weak reference
    parameters = []  # its own
    inside_wrapper = False
    sharded = False  # by FSDP
    hidden = ()  # the lines where FSDP finds no tensors in an output
    random = None
    fresh = False  # whether a forward pass came after the last backward pass
    unsent = ()  # the lines of a forward pass whose gradients are not sent

    def __init__(self):
        self.names = by_identity()  # {parameter: name, lines}
        self.averaged = by_identity()  # by DDP
        self.ran = by_identity()  # {parameter: name, lines of the layer's call}
        self.modes = by_identity()  # {parameter: training}
        self.thread = threading.get_ident()
        self.awaiting = weakref.WeakKeyDictionary()  # {wrapper: (lines, sends)}
        self.sends = weakref.WeakKeyDictionary()  # {wrapper: [lines, times sent]}
        self.hints = {}  # {what may be a cause, if weights differ next: lines}

    def wrap(self, result, wrapper, module, *args, **kwargs):
        self.name(module)
        for parameter in module.parameters():
            if parameter.requires_grad:  # DDP does not see what is thawed later
                self.averaged[parameter] = True

    def name(self, module):
        if type(module).__name__ == "FullyShardedDataParallel":
            watch.note("parallel")  # its parts are plain tensors
        for name, parameter in module.named_parameters():
            self.names.setdefault(parameter, (plain(name), where()))

    def convert(self, module, *args, **kwargs):
        """It goes to another device or type, where DDP's hooks do not follow."""
        if any(parameter in self.averaged for parameter in module.parameters()):
            self.hints.setdefault("converted", where())

    def enter(self, module, args):
        replica = threading.get_ident() != self.thread  # DataParallel's
        # A backward pass computes a checkpointed part again.
        if replica or torch._C._current_graph_task_id() != -1:
            return
        parts = [module]
        if self.outer is None or self.outer() in (None, module):
            self.outer = weakref.ref(module)
            self.inside_wrapper = False
            self.parameters = list(module.parameters())  # FSDP has others inside
            if self.parameters:
                if self.parameters[-1] not in self.names:
                    self.name(module)
                self.random = watch.steps.reads() and random_state(self.parameters[0])
            # A compiled module calls no hook of those inside it.
            if hasattr(module, "_orig_mod"):
                parts = module.modules()
        if not torch.is_grad_enabled():
            return
        for parameter in module.parameters(recurse=False):
            if parameter not in self.ran:
                name = self.names.get(parameter, ["a parameter"])[0]
                self.ran[parameter] = (name, where())
        if type(module).__name__.startswith("FSDP"):
            self.sharded = True
        for wrapper in parts:
            if isinstance(wrapper, torch.nn.parallel.DistributedDataParallel):
                self.inside_wrapper = True
                # DDP decides now whether the backward pass sends gradients.
                sends = wrapper.require_backward_grad_sync
                self.awaiting[wrapper] = (where(), sends)

    def leave(self, module, args, kwargs, output):
        if self.outer is None or self.outer() is not module:
            return
        parameters = self.parameters
        self.outer = None
        self.parameters = []
        if not parameters:
            return  # a loss
        with_gradients = torch.is_grad_enabled()
        training = getattr(module, "module", module).training  # without the wrapper
        # Between a forward and a backward pass, it is a teacher's.
        evaluates = not (with_gradients or (training and has_modes(module)))
        watch.evaluations.running = evaluates and not self.fresh
        if with_gradients:
            self.fresh = True
            averaged = any(parameter in self.averaged for parameter in parameters)
            if averaged and not self.inside_wrapper:
                self.hints.setdefault("bypass", where())
            if self.sharded and not tensors_in(output):
                self.hidden = where()
            if watch.steps.reads():
                self.look_at_pass(module, parameters, [args, kwargs])
        elif evaluates:
            if self.random and not any(part.training for part in module.modules()):
                drawn = random_state(parameters[0]) != self.random
                watch.note("chance", "random numbers were drawn in eval()", drawn)
            watch.evaluations.add(module, parameters, [args, kwargs], training)

    def look_at_pass(self, module, parameters, given):
        alike = not has_modes(module)
        for part in module.modules():
            for each in part.parameters(recurse=False):
                self.modes[each] = part.training or alike
        key = [where()[:1], watch.now]
        # What another module has computed may be the same, rightly.
        if not any(each.requires_grad for each in tensors_in(given)):
            inputs = hashes(given)
            if inputs:
                watch.emit("inputs", key=key, value=inputs)
        if random_state(parameters[0]) != self.random:
            watch.emit("random", key=key, value=self.random)

    def backward(self, *args, **kwargs):
        watch.evaluations.end()
        together = self.sharded
        for wrapper, (lines, sends) in self.awaiting.items():
            together |= sends
            counted = self.sends.setdefault(wrapper, [lines, 0])
            counted[1] += sends
            self.unsent = () if sends else lines
            if not (sends and wrapper.require_backward_grad_sync):
                watch.note("no_sync", "no_sync() around backward() alone", sends)
        if together and not watch.group.era[0]:  # no uneven inputs
            self.clock += 1
        self.awaiting.clear()
        watch.steps.backward(self.fresh)
        self.fresh = False


class Evaluations:
    """Forward passes without gradients in evaluation mode."""

    running = False  # whether the last forward pass was of one

    def __init__(self):
        self.results = {}  # {lines: its samples, and where ranks met afterwards}
        self.tested = set()  # samples of earlier ones
        self.last_read = {}  # {lines: when}

    def add(self, module, parameters, inputs, training):
        """One more pass of an evaluation, or of a teacher, which has one per step.

        A network that stays in training mode may differ between ranks.
        """
        lines = where()
        again = self.last_read.get(lines) == watch.now
        self.last_read[lines] = watch.now
        if not again and watch.steps.reads() and not training:
            state = dict(module.named_parameters())
            for prefix, part in module.named_modules():
                for name, buffer in part.named_buffers(recurse=False):
                    if name not in part._non_persistent_buffers_set:
                        state[f"{prefix}.{name}".strip(".")] = buffer
            watch.emit(
                "state",
                key=[lines, watch.now],
                value=sizes(state),
                inputs=hashes(inputs),
            )
        if any(parameter in watch.steps.held for parameter in parameters):
            result = self.results.setdefault(lines, {"value": []})
            result["met"] = None
            if len(result["value"]) < TESTED:
                result["value"] += hashes(inputs)

    def meet(self, *args, **kwargs):
        for result in self.results.values():
            result["met"] = result["met"] or where()[:1]

    def end(self):
        """Write them down, if the same samples have been tested before."""
        if self.running:
            watch.batches.flush("evaluated")
        for lines, result in self.results.items():
            samples = str(result["value"])
            if result["value"] and samples in self.tested:
                watch.emit("met", key=[lines, watch.now], lines=lines, **result)
            self.tested.add(samples)
        self.results = {}


class Steps:
    """Steps of optimizers, and the weights before and after them."""

    drawn = None  # (iterations, random state) in the step before
    scaled = None  # whether gradients are; None without a scaler
    stepping = False
    lines = ()  # of the last step
    by_scaler = False  # whether a GradScaler makes steps
    losses = 0  # in a row, of gradients that were set to zero before a step
    dead = None  # (parameter, its name, lines): it runs, and has had no gradient

    def __init__(self):
        self.counts = {}  # {an optimizer's title: its steps so far}
        self.titles = weakref.WeakKeyDictionary()  # {optimizer: its title}
        self.made = weakref.WeakKeyDictionary()  # {optimizer: the lines that made it}
        self.old = weakref.WeakKeyDictionary()  # {optimizer: where an old gradient is}
        self.held = by_identity()  # by an optimizer
        self.moved = by_identity()  # {parameter: whether it has had a gradient}
        self.fresh = set()  # lines of backward passes whose gradients are kept
        self.dropped = {}  # and of others: the lines that set their gradients to zero

    @property
    def done(self):
        return max(self.counts.values(), default=0)

    def reads(self):
        """Whether tensors are read in this step, which waits for the device."""
        batches = watch.batches
        early = self.done < FIRST_STEPS or self.done % EVERY_STEPS == 0
        begins = self.done < batches.epoch_began + 3 and batches.iterations < EPOCHS
        return early or begins or settings.get("every_step")

    def hold(self, result, optimizer, *args, **kwargs):
        self.made[optimizer] = where()

    def backward(self, fresh):
        if fresh and not self.stepping:
            self.lines = self.lines or where()
            self.fresh.add(where())
        if self.reads():
            for optimizer, title in self.titles.items():
                if self.counts[title] and self.old.get(optimizer, True):
                    self.old[optimizer] = address_of_gradient(optimizer)
        else:
            self.old.clear()

    def zero(self, *args, **kwargs):
        if not self.stepping:
            self.dropped |= dict.fromkeys(self.fresh, where())
            self.fresh = set()
            watch.passes.sends.clear()

    def before(self, optimizer, *args):
        passes = watch.passes
        passes.thread = threading.get_ident()
        watch.evaluations.end()
        watch.batches.flush("trained")
        title = self.titles.setdefault(
            optimizer, f"the number of steps of optimizer {len(self.counts)}"
        )
        self.counts.setdefault(title, 0)
        for lines, times in passes.sends.values():
            watch.note("twice", f"sent {times} times", times > 1, 3, lines=lines)
        if passes.unsent:
            passes.hints.setdefault("unsent", passes.unsent)
        self.look_at_gradients(optimizer)
        if settings.get("every_step"):
            drawn = watch.batches.iterations, random_state(parameters_of(optimizer)[0])
            if self.drawn not in (None, drawn) and self.drawn[0] == drawn[0]:
                watch.note("noise")  # beginning an epoch draws a number, too
            self.drawn = drawn
        if self.reads():
            self.look_at(optimizer)
        self.stepping = True
        self.lines = where()

    def look_at_gradients(self, optimizer):
        """Whether they are lost, old or scaled."""
        lost = [self.dropped[each] for each in self.fresh if each in self.dropped]
        wrong = "zero_grad() came after a backward pass, and before the step"
        self.losses = self.losses + 1 if lost else 0
        if self.losses in (0, 3):
            watch.note("lost", wrong, lost, lines=(*lost, where())[0])
        # Another tensor may have been put in the place of the old gradient.
        old = self.old.pop(optimizer, 0)
        kept = old and old == address_of_gradient(optimizer)
        watch.note("zeroed", "each was added to those of earlier steps", kept, 3)
        self.look_at_scale("scaled", 3)

    def look_at(self, optimizer):
        parameters = parameters_of(optimizer)
        trains = [watch.passes.modes.get(each) for each in parameters]
        evaluates = False in trains and True not in trains
        watch.note("mode", "the model was in eval() mode", evaluates, 3)
        for each in parameters:
            self.held[each] = True
            if each.grad is not None:
                self.moved[each] = True
                if each.grad.is_sparse:
                    watch.note("sparse", "a gradient was sparse")
        self.look_for_dead()
        self.look_for_unheld(optimizer)
        self.read(optimizer, "before")

    def look_for_dead(self):
        """Of what runs, the first has no gradient, and something behind it has."""
        self.dead = first = None
        for each, found in watch.passes.ran.items():
            if self.moved.get(each):
                self.dead = first
                return
            if first is None and each.requires_grad and each in self.held:
                first = (each, *found)
                if each not in self.moved:  # a gradient may be taken away again
                    each.register_post_accumulate_grad_hook(self.arrive)
                    self.moved[each] = False

    def arrive(self, parameter):
        self.moved[parameter] = True

    def read(self, optimizer, when):
        passes = watch.passes
        title = self.titles[optimizer]
        era, first = watch.group.era
        count = self.counts[title]
        named = {}
        unwrapped = {}
        for place, each in enumerate(parameters_of(optimizer)):
            name, lines = passes.names.get(each, ("a parameter", where()))
            if name in named:
                name = f"{name} ({place})"
            named[name] = each
            if each not in passes.averaged:
                unwrapped[f"mean absolute value of {name}"] = lines
            if len(part_of(each)) > passes.sharded:
                watch.note("parallel")
        shapes = str([(name, each.shape) for name, each in named.items()])
        rates = [float(each.get("lr") or 1) for each in optimizer.param_groups]
        facts = {
            "optimizer": title,
            "step": count + (when == "after"),
            "key": [title, era, count - first.setdefault(title, count), when],
            "unwrapped": unwrapped if passes.averaged else None,
            "model": zlib.crc32(shapes.encode()),
            "hints": passes.hints,
            "clock": passes.clock,
            "rate": max(rates),
            "value": sizes(named),
            "drawn": self.drawn,
            "noise": watch.noted["noise", ""],
        }
        if passes.sharded:
            early = "early", self.made.get(optimizer, ())
            facts["sharded"] = ("hidden", passes.hidden) if passes.hidden else early
        if when == "before":
            gradients = gradients_of(optimizer)
            if gradients or not any(each.requires_grad for each in named.values()):
                facts["gradients"] = sum(sizes(gradients).values())
            facts["slopes"] = {
                name: slope(each.grad)
                for name, each in named.items()
                if each.grad is not None and each.numel() > 3
            }
        watch.emit("weights", **facts)

    def look_for_unheld(self, optimizer):
        averaged = watch.passes.averaged
        left = [
            name
            for each, (name, _) in watch.passes.names.items()
            if each in averaged and each.grad is not None and each not in self.held
        ]
        if averaged:
            wrong = f"no optimizer holds {left}, which get gradients"
            lines = self.made.get(optimizer, where())
            watch.note("unheld", wrong, left, 8, lines=lines)  # it may begin later

    def after(self, optimizer, *args):
        title = self.titles[optimizer]
        passes = watch.passes
        if self.reads():
            self.read(optimizer, "after")
            passes.hints = {}
        self.stepping = False
        self.fresh = set()
        self.dropped = {}
        self.counts[title] += 1
        passes.sends.clear()
        passes.unsent = ()
        passes.outer = None  # a forward pass that has raised an error left it
        if self.counts[title] == settings.get("kill"):
            self.kill()

    def kill(self):
        with contextlib.suppress(FileExistsError):  # one rank dies
            open(os.path.join(settings["folder"], "killed"), "x").close()
            os.kill(os.getpid(), signal.SIGKILL)

    def skip(self, *args, **kwargs):
        """A GradScaler that finds an overflow makes no step, but ends one."""
        self.by_scaler = True
        self.fresh = set()
        watch.passes.sends.clear()

    def scale(self, result, scaler, *args, **kwargs):
        self.scaled = scaler.is_enabled()

    def unscale(self, *args, **kwargs):
        self.scaled = False

    def clip(self, *args, **kwargs):
        self.look_at_scale("clip")

    def look_at_scale(self, kind, times=1):
        if self.scaled is not None:
            bad = self.scaled and not (kind == "scaled" and self.by_scaler)
            watch.note(kind, "the gradients were still scaled", bad, times)

    def end(self):
        if self.done > 2:
            each, name, lines = self.dead or (None, "", where())
            dead = self.dead and not self.moved.get(each)
            watch.note("dead", f"{name} has had no gradient", dead, lines=lines)
        if not watch.group.era[0]:
            counts = self.counts or {"the number of steps of optimizer 0": 0}
            facts = {"value": counts, "lines": self.lines}
            watch.emit("steps", key="all", **facts)
            if watch.passes.clock:
                watch.emit("skips", key=watch.passes.clock, **facts)


class Group:
    """The process group."""

    lines = None  # that have made it

    def __init__(self):
        # How often ranks with uneven inputs have joined, and what was done before
        self.era = 0, {}

    def join(self, *args, **kwargs):
        if is_readers(sys._getframe(3).f_code.co_filename):  # else a framework's
            self.lines = where()
        watch.emit("group", rank=dist.get_rank(), world=dist.get_world_size())

    def join_uneven(self, *args, **kwargs):
        self.era = self.era[0] + 1, {}

    def send(self, *args, **kwargs):
        """From one rank to another, as the stages of a pipeline do in each step."""
        watch.evaluations.meet()
        if torch.is_grad_enabled():
            watch.note("parallel", times=3)

    def end(self):
        if self.lines:
            wrong = "the process has ended with its group"
            watch.note("destroyed", wrong, dist.is_initialized(), lines=self.lines)


class Files:
    """What is saved."""

    last_saved = None  # the path of a snapshot

    def __init__(self):
        self.saved = set()  # paths

    def load(self, result, module, state_dict, *args, **kwargs):
        """A script may try again with other names."""
        none = 0 < len(state_dict) == len(result.unexpected_keys)
        watch.emit("load", key=id(module), wrong="nothing was loaded" if none else "")

    def save(self, obj, f, *args, **kwargs):
        path = getattr(f, "name", None) if hasattr(f, "write") else f
        again = False
        if isinstance(path, (str, os.PathLike)):  # else it is a temporary file
            path = os.path.realpath(path)
            again = path in self.saved
            self.saved.add(path)
            watch.emit("file", key=f"{host}:{path}")
        if isinstance(obj, torch.nn.Module):
            obj = obj.state_dict(keep_vars=True)
        tensors = named_tensors(obj) if isinstance(obj, dict) else []
        optimizers = watch.steps.titles
        trained = {each.shape for each in sum(map(parameters_of, optimizers), [])}
        if tensors and trained <= {each.shape for _, each in tensors}:  # else a log
            if again and path == self.last_saved:
                watch.note("in_place", "the file was opened to be overwritten")
            self.last_saved = path
            for name, tensor in tensors:
                if tensor.shape in trained and not tensor.is_meta:
                    watch.note("parts", f"{name} is one part of it", part_of(tensor))
                    bad = bool(local(tensor).isnan().any())
                    watch.note("nan", f"{name} holds NaN", bad)

    def rename(self, source, target):
        source = os.path.realpath(source)
        self.saved.discard(source)
        if source == self.last_saved:  # a snapshot, and not a cache of each rank
            watch.note("in_place")
            watch.emit("file", key=f"{host}:{os.path.realpath(target)}")


def named_tensors(snapshot):
    """[(key, tensor), ...]"""
    return [
        (str(getattr(path[-1], "key", "")), leaf)
        for path, leaf in torch.utils._pytree.tree_leaves_with_path(snapshot)
        if isinstance(leaf, torch.Tensor)
    ]


def watch_batches():
    """Wrap what delivers batches: at most `batches` of an epoch, if that is set."""
    loader = torch.utils.data.DataLoader
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    advance = iterator.__next__
    length = loader.__len__
    most = settings.get("batches") or sys.maxsize

    @functools.wraps(advance)
    def watched(self):
        try:
            if self.__dict__.get("_audit_given", 0) >= most:
                raise StopIteration
            data = advance(self)
        except StopIteration:
            safe("batches.exhaust")(self)
            raise
        safe("batches.deliver")(data, self)
        return exact(data) if settings.get("like") else data

    iterator.__next__ = watched
    loader.__len__ = lambda self: min(most, length(self))


# What makes two commands comparable


def exact(value):
    """The tensors of a value in float64."""
    return torch.utils._pytree.tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.double() if tensor.is_floating_point() else tensor,
        value,
    )


def make_exact(module, args):
    """In front of each module: no dropout, statistics that stay, and float64."""
    if isinstance(module, torch.nn.modules.batchnorm._NormBase):
        module.training = False
    if isinstance(getattr(module, "dropout", None), float):
        module.dropout = 0.0  # of attention, or of a recurrent layer
    return exact(args)


def make_comparable():
    """Compute in float64, without dropout, on one order of samples.

    Two scripts then differ by rounding alone, unless they train another model.
    """
    functional = torch.nn.functional
    attention = functional.scaled_dot_product_attention
    data = torch.utils.data
    random_order = data.RandomSampler.__iter__
    shares = data.DistributedSampler.__iter__

    def attend(query, key, value, attn_mask=None, dropout_p=0.0, **others):
        return attention(query, key, value, attn_mask, 0.0, **others)

    def shuffled(sampler):
        whole = sampler.num_samples == len(sampler.data_source)
        if sampler.replacement or not whole:
            return random_order(sampler)
        return iter(order(sampler, sampler.num_samples))

    def shared(sampler):
        if not sampler.shuffle:
            return shares(sampler)
        found = order(sampler, len(sampler.dataset))
        end = len(found) // sampler.num_replicas * sampler.num_replicas
        return iter(found[sampler.rank : end : sampler.num_replicas])

    def whole_batches(result, batches, sampler, *args, **kwargs):
        if isinstance(sampler, (data.RandomSampler, data.DistributedSampler)):
            batches.drop_last = True

    for name in vars(functional):
        if "dropout" in name and not name.startswith("_"):
            setattr(functional, name, lambda x, *args, **kwargs: x)
    functional.scaled_dot_product_attention = attend
    data.RandomSampler.__iter__ = shuffled
    data.DistributedSampler.__iter__ = shared
    patch(data.BatchSampler, "__init__", after=whole_batches)
    torch.nn.modules.module.register_module_forward_pre_hook(make_exact)
    torch.compiler.set_stance("force_eager")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)  # for scripts that set no seed


def order(sampler, size):
    """A permutation that follows from how often this sampler was asked."""
    sampler._asked = getattr(sampler, "_asked", 0) + 1
    generator = torch.Generator().manual_seed(sampler._asked)
    return torch.randperm(size, generator=generator).tolist()


def at_end(watch):
    util.Finalize(None, watch.end, exitpriority=0)


def hook():
    """Let PyTorch tell the watch what happens."""
    global torch, dist, watch, not_the_readers
    import torch
    import torch.distributed as dist
    from torch.nn.modules import module
    from torch.optim import optimizer

    if hasattr(torch, "_audited"):
        return  # by the process that this one was forked from
    torch._audited = True
    for name in PRIVATE.split():
        pkgutil.resolve_name(name)  # a new version of PyTorch may lack one of them
    not_the_readers = (
        os.path.dirname(os.__file__),
        os.path.dirname(torch.__file__),
        __file__,
        "<",
    )
    watch = Watch()
    watch.emit("torch")

    os.register_at_fork(after_in_child=watch.__init__)
    util.register_after_fork(watch, at_end)
    # What multiprocessing forks calls no atexit; what it spawns calls atexit later.
    if "--multiprocessing-fork" in sys.orig_argv:
        atexit.register(watch.end)
    else:
        at_end(watch)
    # It warns that hooks see a compiled module once more, which does no harm here.
    module._has_any_global_hook = lambda: False
    module.register_module_forward_pre_hook(safe("passes.enter"))
    module.register_module_forward_hook(safe("passes.leave"), with_kwargs=True)
    optimizer.register_optimizer_step_pre_hook(safe("steps.before"))
    optimizer.register_optimizer_step_post_hook(safe("steps.after"))
    for row in PATCHES.strip().splitlines():
        when, owner, name, method = row.split()
        patch(pkgutil.resolve_name(owner), name, **{when: safe(method)})
    watch_batches()

    def hear(event, args):
        if event == "os.rename" and watch:  # os.replace, too; and not at the very end
            safe("files.rename")(*args[:2])

    sys.addaudithook(hear)
    if settings.get("like"):
        make_comparable()
