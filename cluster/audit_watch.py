"""What audit.py puts into each process of a training run: it watches, and writes.

A generated sitecustomize.py calls `begin` when Python starts. As soon as the process
has imported torch, PyTorch's own hooks and a few wrapped functions note what happens:
one line of JSON for each event, in a file of the process's own. Nothing here sends
anything to another rank, draws a random number, or changes a tensor. An error in here
is an event, too, and the run goes on.
"""

import atexit
import collections
import contextlib
import functools
import importlib.util
import json
import os
import pkgutil
import signal
import socket
import sys
import threading
import time
import weakref
import zlib
from multiprocessing import util

FIRST_STEPS = 20  # tensors are read in each of these steps, and then rarely:
EVERY_STEPS = 50
EPOCHS = 50  # and in the first steps of so many epochs
COLUMNS = 1024  # so many numbers of a sample are enough to know it again
SAMPLES = 1_000_000  # so many samples are written down
TESTED = 100  # and so many of each evaluation
PROBES = 100  # so many of a data set are compared between ranks
CHUNK = 1 << 24  # so many numbers of a tensor are copied at a time
# Before or after which function of whom which method of the watch is called
PATCHES = """
before torch.utils.data.dataloader._BaseDataLoaderIter _reset           restart
after  torch.utils.data.dataloader._BaseDataLoaderIter _next_index      index
after  torch.utils.data.DataLoader                     __iter__         iterate
after  torch.optim.Optimizer                           add_param_group  hold
after  torch.nn.parallel.DistributedDataParallel       __init__         wrap
before torch.Tensor                                    backward         backward
before torch.autograd                                  backward         backward
after  torch.amp.GradScaler                            scale            scale
after  torch.amp.GradScaler                            unscale_         unscale
after  torch.amp.GradScaler                            step             skip
after  torch.amp.GradScaler                            update           unscale
before torch.nn.utils                                  clip_grad_norm_  clip
before torch.nn.utils                                  clip_grad_value_ clip
before torch                                           save             save
after  torch.distributed                       init_process_group       join
before torch.distributed.algorithms.Join       __enter__                join_uneven
"""
# Functions of torch.distributed by which the results of an evaluation can meet
COLLECTIVES = """
all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all
all_to_all_single batch_isend_irecv broadcast broadcast_object_list gather gather_object
irecv isend recv reduce reduce_scatter reduce_scatter_tensor scatter send
"""
settings = json.loads(os.environ.get("AUDIT", "{}"))  # of audit.py's command line
host = socket.gethostname()


def begin(site):
    """Wait for `import torch`, and let the next sitecustomize on the path run."""
    if "torch" in sys.modules:  # a process that was forked
        attach()
    else:
        sys.meta_path.insert(0, Finder())
    sys.path[:] = [entry for entry in sys.path if entry != site]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError:
        if ours:
            sys.modules["sitecustomize"] = ours


class Finder:
    """Finds torch as Python would, and attaches the watch when it is imported."""

    searching = False

    def find_spec(self, name, path=None, target=None):
        if name != "torch" or self.searching:
            return None
        self.searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.searching = False
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
    library = "site-packages" in path or "dist-packages" in path
    return not library and not path.startswith(not_the_readers)


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
    """Whether PyTorch records this code to repeat it: then it must stay as it is."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    modes = torch._C._TorchDispatchModeKey
    if any(map(torch._C._get_dispatch_mode, (modes.FAKE, modes.PROXY))):
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def safe(function):
    """A hook that calls it; what it raises is written down and goes no further."""

    def called(*args, **kwargs):
        try:
            if not unwatched():
                function(*args, **kwargs)
        except Exception as error:
            watch.fail(error)

    return called


def nothing(*args, **kwargs):
    pass


def patch(owner, name, before=nothing, after=nothing):
    """Call `before(*arguments)` and `after(result, *arguments)` around a function."""
    original = getattr(owner, name)
    first = safe(before)
    then = safe(after)

    @functools.wraps(original)
    def watched(*args, **kwargs):
        first(*args, **kwargs)
        result = original(*args, **kwargs)
        then(result, *args, **kwargs)
        return result

    # pickle looks a function up where it was defined.
    for place in (owner, sys.modules[original.__module__]):
        if getattr(place, name, None) is original:
            setattr(place, name, watched)


# Tensors


def local(tensor):
    """The part of a tensor that this process has."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def part_of(tensor):
    """Which part of a split tensor it is, a number for each dimension of the mesh."""
    if not hasattr(tensor, "placements"):
        return []
    place = tensor.device_mesh.get_coordinate()
    cuts = zip(place, tensor.placements, strict=True)
    return [number for number, cut in cuts if cut.is_shard()]


def numbers(tensors):
    """The numbers that tensors of one element hold, after one wait for the device."""
    if not tensors:
        return []
    device = tensors[0].device
    return torch.stack([tensor.to(device) for tensor in tensors]).tolist()


def sizes(named):
    """{name: mean absolute value} of {name: tensor}.

    The names tell the parts of a split tensor apart, so that only like parts meet.
    """
    means = {}
    with torch.no_grad():
        for name, tensor in named.items():
            part = local(tensor)
            if part.is_floating_point() and part.layout == torch.strided:
                exact = torch.float32 if part.device.type == "mps" else torch.float64
                # A large tensor, copied as float64, might not fit into memory.
                chunks = part.reshape(-1).split(CHUNK)
                total = sum(chunk.abs().sum(dtype=exact) for chunk in chunks)
                title = f"mean absolute value of {name}{part_of(tensor) or ''}"
                means[title] = total / max(1, part.numel())
        return dict(zip(means, numbers(list(means.values())), strict=True))


def plain(name):
    """A parameter's name without those of wrappers."""
    parts = name.split(".")
    return ".".join(part for part in parts if part not in ("module", "_orig_mod"))


def tensors_in(value):
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def hashes(value, count=None):
    """A text for each sample in a batch, the same for the same numbers."""
    found = []
    with torch.no_grad():
        for tensor in map(local, tensors_in(value)):
            if not tensor.dim() or not tensor.numel() or tensor.is_complex():
                continue
            count = count or len(tensor)
            if len(tensor) == count:
                rows = tensor.reshape(count, -1)
                rows = rows[:, :: 1 + rows.shape[1] // COLUMNS].cpu().double()
                places = torch.arange(1.0, rows.shape[1] + 1, device="cpu")
                found.append((rows * places.cos()).sum(1))
    return [f"{number:.9g}" for number in sum(found).tolist()] if found else []


def random_state(device):
    """A number that changes when a model on this device draws a random number."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state())
    return zlib.crc32(b"".join(bytes(state.tolist()) for state in states))


def parameters_of(optimizer):
    return [each for group in optimizer.param_groups for each in group["params"]]


def gradients_of(optimizer):
    found = {}
    for place, each in enumerate(parameters_of(optimizer)):
        if each.grad is not None:
            found[place] = each.grad
    return found


def settings_of(optimizer):
    """{name: value} of what is a number, or a tuple of numbers."""
    found = {}
    for place, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            if isinstance(value, (int, float)):
                found[f"{key} of group {place}"] = value
            elif isinstance(value, tuple):
                found[f"{key} of group {place}"] = str(value)
    return found


class Watch:
    """What one process has done so far; only hashes and sums, never tensors."""

    def __init__(self):
        self.file = None
        self.failed = set()  # lines of this file that have raised something
        self.noted = collections.Counter()
        self.meetings = 0  # collectives since the last evaluation began
        self.group = None  # the lines that have made the process group
        self.uneven = False

        self.counts = {}  # {an optimizer's number: its steps so far}
        self.numbers = weakref.WeakKeyDictionary()  # {optimizer: its number}
        self.values = {}  # {an optimizer's number: its first weights}
        self.unchanged = {}  # {an optimizer's number: lines}, if they are still these
        self.made = weakref.WeakKeyDictionary()  # {optimizer: the lines that made it}
        self.zeroed = weakref.WeakKeyDictionary()  # {optimizer: had no old gradients}
        self.held = torch.utils.weak.WeakIdKeyDictionary()  # by an optimizer
        self.averaged = torch.utils.weak.WeakIdKeyDictionary()  # by DDP: {it: its name}
        self.names = torch.utils.weak.WeakIdKeyDictionary()  # {parameter: name, lines}

        self.loaders = weakref.WeakKeyDictionary()  # {loader: {lines: its name there}}
        self.loops = collections.Counter()  # {lines: how many loaders begin there}
        self.iterations = 0
        self.epoch_began = 0  # after so many steps
        self.pending = []  # batches: nobody knows yet what they are used for
        self.passes = {}  # {(use, loader): {iteration: its number among these}}
        self.begins = {}  # {loader: the first samples of each pass}
        self.samples = 0

        self.thread = threading.get_ident()
        self.outer = None  # the outermost module that runs now, by a weak reference
        self.parameters = []  # its own
        self.inside_wrapper = False
        self.fully_sharded = False
        self.random = None
        self.modes = torch.utils.weak.WeakIdKeyDictionary()  # {parameter: training}
        self.awaiting = weakref.WeakKeyDictionary()  # {wrapper: (lines, sends)}
        self.sends = collections.Counter()  # {lines of a forward pass: times sent}
        self.unsent = False
        self.drawn = None  # (iterations, random state) in the step before
        self.scaled = None  # whether gradients are; None without a scaler

        self.evaluated = False  # by the last forward pass
        self.evaluation = None  # what is known of the one that runs
        self.tested = set()  # samples of earlier ones
        self.last_read = weakref.WeakKeyDictionary()  # {module: step}

        self.saved = set()  # paths
        self.states = {}  # {path: of how many optimizers it has the state}
        self.last_saved = None  # the path of a snapshot
        self.snapshots = []  # (how many optimizers had a state, lines)
        self.in_parts = False

    def emit(self, kind, **facts):
        if self.file is None:
            path = f"{settings['folder']}/{time.time_ns()}-{host}-{os.getpid()}.jsonl"
            self.file = open(path, "x", buffering=1)  # noqa: SIM115  to the end
            self.emit("start", rank=int(os.environ.get("RANK", 0)))
        line = {"kind": kind, "step": self.step, "lines": where(), **facts}
        self.file.write(json.dumps(line) + "\n")

    def note(self, kind, wrong="", times=1, **facts):
        """What one process can judge, written once; "" if it is right."""
        self.noted[kind, wrong] += 1
        if self.noted[kind, wrong] == times:
            self.emit(kind, wrong=wrong, **facts)

    def fail(self, error):
        trace = error.__traceback__
        line = (trace.tb_next or trace).tb_lineno
        if line not in self.failed:
            self.failed.add(line)
            with contextlib.suppress(Exception):  # the disk may be full
                self.emit("failed", what=f"{error!r:.300}", own_line=line)

    @property
    def step(self):
        return max(self.counts.values(), default=0)

    def reads(self):
        """Whether tensors are read in this step, which waits for the device."""
        early = self.step < FIRST_STEPS or self.step % EVERY_STEPS == 0
        begins = self.step < self.epoch_began + 3 and self.iterations < EPOCHS
        return early or begins or settings.get("every_step", False)

    # Batches

    def restart(self, iterator, *args, **kwargs):
        """A loader keeps its workers, and its iterator begins another epoch."""
        iterator._audit_waiting = collections.deque()

    def index(self, indices, iterator):
        """The sampler has given the numbers of a batch, which comes later."""
        empty = collections.deque()
        iterator.__dict__.setdefault("_audit_waiting", empty).append(indices)

    def iterate(self, iterator, loader):
        lines = str(where())
        names = self.loaders.setdefault(loader, {})
        if lines not in names:
            self.loops[lines] += 1
            names[lines] = f"{lines} {self.loops[lines]}"
        self.iterations += 1
        self.epoch_began = self.step
        iterator._audit_facts = {
            "loader": names[lines],
            "iteration": self.iterations,
            "shared": "DistributedSampler" in type(loader.sampler).__name__,
        }

    def deliver(self, data, iterator):
        facts = iterator._audit_facts
        indices = iterator._audit_waiting.popleft()
        if not isinstance(indices, list):
            indices = [indices]
        indexed = all(hasattr(index, "__index__") for index in indices)
        on_cpu = all(each.device.type == "cpu" for each in tensors_in(data))
        rows = []
        if on_cpu and self.samples < SAMPLES:
            rows = hashes(data, len(indices) if indexed else None)
        # A sampler may give a number to several ranks whose data are not the same.
        value = rows
        if indexed:
            found = [f"{int(index):09}" for index in indices]
            value = [" ".join(pair) for pair in zip(found, rows, strict=False)]
            if facts["shared"]:
                value = found
        self.samples += len(value)
        if self.evaluated:
            self.flush("evaluated")
        # Somebody may have only looked at a batch of this loader.
        self.pending = [
            each
            for each in self.pending
            if each["loader"] != facts["loader"]
            or each["iteration"] == facts["iteration"]
        ]
        facts = {**facts, "indexed": indexed, "value": value, "lines": where()}
        self.pending.append(facts)
        if facts["shared"] and rows:
            length = len(iterator._dataset)
            for index, row in zip(map(int, indices), rows, strict=True):
                if index < PROBES:
                    sample = {f"sample {index}": row, "the data set's length": length}
                    self.emit("data", key=[facts["loader"], index], value=sample)

    def exhaust(self, iterator):
        """The epoch of a loader ends. What has not been used by now was looked at."""
        if self.evaluated:
            self.flush("evaluated")
        number = iterator._audit_facts["iteration"]
        self.pending = [each for each in self.pending if each["iteration"] != number]

    def flush(self, use):
        """Write down what the batches were used for: "trained" or "evaluated"."""
        for facts in self.pending:
            passes = self.passes.setdefault((use, facts["loader"]), {})
            number = passes.setdefault(facts["iteration"], len(passes))
            if self.samples < SAMPLES:
                self.emit(use, key=[facts["loader"], number], **facts)
            if use == "trained" and facts["indexed"]:
                self.look_at_order(facts, number)
        self.pending = []
        self.evaluated = False

    def look_at_order(self, facts, number):
        begins = self.begins.setdefault(facts["loader"], [])
        if number == len(begins):
            begins.append([])
        begin = begins[-1]
        if len(begin) < 8:
            begin += facts["value"]
            if number and len(begin) >= 8:
                same = begin[:8] == begins[-2][:8] != sorted(begin[:8])
                first = [int(each.split()[0]) for each in begin[:3]]
                wrong = f"two epochs began with the samples {first}" if same else ""
                self.note("order", wrong, lines=facts["lines"])

    # Forward and backward passes

    def wrap(self, result, wrapper, module, *args, **kwargs):
        self.name(module)
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:  # DDP does not see what is thawed later
                self.averaged[parameter] = name

    def name(self, module):
        if type(module).__name__.startswith("FSDP"):
            self.fully_sharded = True
        if type(module).__name__ == "FullyShardedDataParallel":
            self.note("parallel")  # its parts are plain tensors
        for name, parameter in module.named_parameters():
            if parameter not in self.names:
                self.names[parameter] = (plain(name), where())

    def enter(self, module, args):
        if threading.get_ident() != self.thread:
            return  # DataParallel's replicas
        if torch._C._current_graph_task_id() != -1:
            return  # a backward pass computes a checkpointed part again
        parts = [module]
        if self.outer is None or self.outer() in (None, module):
            self.outer = weakref.ref(module)
            self.inside_wrapper = False
            self.parameters = list(module.parameters())  # FSDP has others inside
            if self.parameters:
                if self.parameters[-1] not in self.names:
                    self.name(module)
                if self.reads():
                    self.random = random_state(self.parameters[0].device)
            # A compiled module calls no hook of those inside it.
            if hasattr(module, "_orig_mod"):
                parts = module.modules()
        for wrapper in parts:
            if isinstance(wrapper, DDP):
                self.inside_wrapper = True
                if torch.is_grad_enabled():
                    # DDP decides now whether the backward pass sends gradients.
                    sends = wrapper.require_backward_grad_sync
                    self.awaiting[wrapper] = (where(), sends)

    def leave(self, module, args, kwargs, output):
        if self.outer is None or self.outer() is not module:
            return
        if threading.get_ident() != self.thread:
            return
        parameters = self.parameters
        self.outer = None
        self.parameters = []
        if not parameters:
            return  # a loss
        held = any(parameter in self.held for parameter in parameters)
        averaged = any(parameter in self.averaged for parameter in parameters)
        with_gradients = torch.is_grad_enabled()
        training = getattr(module, "module", module).training  # without the wrapper
        self.evaluated = not training and not with_gradients
        if not self.evaluated and averaged and not self.inside_wrapper:
            self.note("bypass", str(where()))  # a hint, if weights differ later
        if with_gradients:
            if self.reads():
                for each in parameters:
                    self.modes[each] = training
                key = [where()[:1], self.step]
                inputs = []
                # What another module has computed may be the same, rightly.
                given = tensors_in([args, kwargs])
                if not any(each.requires_grad for each in given):
                    inputs = hashes(given)
                if inputs:
                    self.emit("inputs", key=key, value=inputs)
                if random_state(parameters[0].device) != self.random:
                    self.emit("random", key=key, value=self.random)
        elif not training:
            self.evaluate(module, held, [args, kwargs])

    def evaluate(self, module, held, inputs):
        """A forward pass of an evaluation, or of a teacher, which has one per step."""
        gap = self.step - self.last_read.get(module, -EVERY_STEPS)
        self.last_read[module] = self.step
        if gap > 4 or (gap and self.reads()):
            state = dict(module.named_parameters())
            for prefix, part in module.named_modules():
                for name, buffer in part.named_buffers(recurse=False):
                    if name not in part._non_persistent_buffers_set:
                        state[f"{prefix}.{name}".strip(".")] = buffer
            self.emit("state", key=[where(), self.step], value=sizes(state))
        if held:
            if self.evaluation is None:
                self.evaluation = {"lines": where(), "value": []}
                self.meetings = 0
            if len(self.evaluation["value"]) < TESTED:
                self.evaluation["value"] += hashes(inputs)

    def end_evaluation(self):
        """Write it down, if the same samples have been tested before."""
        facts = self.evaluation
        self.evaluation = None
        if facts and facts["value"]:
            samples = hash(str(facts["value"]))
            if samples in self.tested:
                key = [facts["lines"], self.step]
                self.emit("met", key=key, alone=not self.meetings, **facts)
            self.tested.add(samples)

    def backward(self, *args, **kwargs):
        self.end_evaluation()
        for wrapper, (lines, sends) in self.awaiting.items():
            self.sends[lines] += sends
            self.unsent = not sends
            now = wrapper.require_backward_grad_sync
            if not sends:
                self.note("no_sync")
            elif not now:
                self.note("no_sync", "no_sync() around backward() alone")
        self.awaiting.clear()
        if self.reads():
            for optimizer, number in self.numbers.items():
                if self.counts[number] and not self.zeroed.get(optimizer):
                    left = any(sizes(gradients_of(optimizer)).values())
                    self.zeroed[optimizer] = not left
        else:
            self.zeroed.clear()

    # Steps

    def hold(self, result, optimizer, *args, **kwargs):
        self.made[optimizer] = where()
        for each in parameters_of(optimizer):
            self.held[each] = True

    def before_step(self, optimizer, *args):
        self.thread = threading.get_ident()
        self.end_evaluation()
        self.flush("trained")
        number = self.numbers.setdefault(optimizer, len(self.counts))
        count = self.counts.setdefault(number, 0)
        for lines, times in self.sends.items():
            wrong = f"sent {times} times for one step" if times > 1 and lines else ""
            self.note("twice", wrong, 3, lines=lines)
        if self.unsent:
            self.note("unsent", "a step without averages", 2)
        kept = not self.zeroed.pop(optimizer, True)
        wrong = "each gradient was added to those of earlier steps" if kept else ""
        self.note("zeroed", wrong, 3)
        if settings.get("like"):
            device = parameters_of(optimizer)[0].device
            drawn = self.iterations, random_state(device)
            if self.drawn not in (None, drawn) and self.drawn[0] == drawn[0]:
                self.note("noise")  # beginning an epoch draws a number, too
            self.drawn = drawn
        if self.reads():
            trains = [self.modes.get(each) for each in parameters_of(optimizer)]
            wrong = "the model was in eval() mode" if False in trains else ""
            self.note("mode", "" if True in trains else wrong, 3)
            for each in parameters_of(optimizer):
                self.held[each] = True  # others may have been put there
            self.read(optimizer, number, count)
        if count == 2:
            self.look_for_unheld(optimizer)

    def read(self, optimizer, number, count):
        facts = {"optimizer": number, "step": count, "key": [number, count]}
        self.emit("settings", value=settings_of(optimizer), **facts)
        facts["rate"] = max(float(each.get("lr", 1)) for each in optimizer.param_groups)
        facts["unwrapped"] = []
        named = {}
        here = where()
        for place, each in enumerate(parameters_of(optimizer)):
            unknown = (f"parameter {place} of optimizer {number}", here)
            name, lines = self.names.get(each, unknown)
            if name in named:
                name = f"{name} ({place})"
            named[name] = each
            if self.averaged and each not in self.averaged:
                facts["unwrapped"].append(f"mean absolute value of {name}")
                facts["unwrapped_lines"] = lines
            if len(part_of(each)) > self.fully_sharded:
                self.note("parallel")
        if settings.get("every_step"):
            facts["gradients"] = sum(sizes(gradients_of(optimizer)).values())
        value = sizes(named)
        self.emit("weights", value=value, **facts)
        if value != self.values.setdefault(number, value):
            self.values[number] = None  # it has changed some
            self.unchanged.pop(number, None)
            self.note("learns")
        elif count > 3 and facts["rate"] and any(value.values()):  # a part may be empty
            self.unchanged[number] = here

    def look_for_unheld(self, optimizer):
        for each, (name, _) in self.names.items():
            trained = each in self.averaged and each.grad is not None
            if trained and each not in self.held:
                wrong = f"{name} has a gradient, and no optimizer holds it"
                self.note("unheld", wrong, lines=self.made.get(optimizer, where()))
                return
        if self.averaged:
            self.note("unheld")

    def after_step(self, optimizer, *args):
        number = self.numbers[optimizer]
        self.counts[number] += 1
        self.sends.clear()
        self.unsent = False
        self.outer = None  # a forward pass that has raised an error left them
        self.parameters = []
        if settings.get("every_step"):
            self.read(optimizer, number, self.counts[number])
        if self.counts[number] == settings.get("kill"):
            self.kill()

    def kill(self):
        last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        marker = os.path.join(settings["folder"], "killed")
        if last and not os.path.exists(marker):
            open(marker, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)

    def skip(self, *args, **kwargs):
        """A GradScaler that finds an overflow makes no step, but ends one."""
        self.sends.clear()

    def scale(self, result, scaler, *args, **kwargs):
        self.scaled = scaler.is_enabled()

    def unscale(self, *args, **kwargs):
        self.scaled = False

    def clip(self, *args, **kwargs):
        if self.scaled is not None:
            wrong = "the gradients were still scaled" if self.scaled else ""
            self.note("clip", wrong)

    def meet(self, *args, **kwargs):
        self.meetings += 1

    def join(self, *args, **kwargs):
        if is_readers(sys._getframe(3).f_code.co_filename):  # else a framework's
            self.group = where()
        self.emit("group", rank=dist.get_rank())

    def join_uneven(self, *args, **kwargs):
        self.uneven = True  # DDP's join lets ranks make other numbers of steps

    # Files

    def save(self, obj, f, *args, **kwargs):
        path = f if isinstance(f, (str, os.PathLike)) else getattr(f, "name", None)
        again = False
        if isinstance(path, (str, os.PathLike)):  # else it is a temporary file
            path = os.path.realpath(path)
            again = path in self.saved and os.path.exists(path)
            self.saved.add(path)
            self.emit("file", key=f"{host}:{path}")
        if isinstance(obj, torch.nn.Module):
            obj = obj.state_dict(keep_vars=True)
        if not isinstance(obj, dict):
            caller = sys._getframe(3).f_code.co_filename
            # torch.distributed.checkpoint's files are not whole snapshots.
            self.in_parts |= "checkpoint" in os.path.dirname(caller)
            return
        tensors = []  # of (name, tensor)
        states = []  # of optimizers
        collect("", obj, tensors, states)
        if not tensors and not states:
            return
        self.states[path or len(self.states)] = sum(map(bool, states))
        trained = sum(map(parameters_of, self.numbers), [])
        shapes = {tensor.shape for _, tensor in tensors}
        if not {each.shape for each in trained} <= shapes:
            return  # no weights: a log
        wrong = ""
        if again and path == self.last_saved:
            wrong = f"{os.path.basename(path)} was opened to be overwritten"
        self.note("in_place", wrong)
        self.last_saved = path
        self.look_for_nan(tensors)
        self.look_at_keys(tensors)
        needed = sum(bool(optimizer.state) for optimizer in self.numbers)
        if needed and not self.in_parts:
            self.snapshots.append((needed, where()))

    def look_for_nan(self, tensors):
        found = []
        for name, tensor in tensors:
            if tensor.is_floating_point() and not tensor.is_meta:
                found.append((name, tensor))
        are_nan = numbers([local(tensor).isnan().any() for _, tensor in found])
        names = [name for (name, _), bad in zip(found, are_nan, strict=True) if bad]
        self.note("nan", f"{names[0]} holds NaN" if names else "")

    def look_at_keys(self, tensors):
        """Only names of what is trained count: an average has others, rightly."""
        trained = {
            local(each).data_ptr(): self.averaged.get(each) for each in self.held
        }
        for name, tensor in tensors:
            if local(tensor).data_ptr() in trained:
                own = trained[local(tensor).data_ptr()]  # may have a `module`, too
                wrapped = name != own and name.startswith(("module.", "_orig_mod."))
                self.note("keys", f"the key {name} was saved" if wrapped else "")
                return

    def renamed(self, args):
        source = os.path.realpath(args[0])
        if source in self.saved:
            self.saved.remove(source)
            if source == self.last_saved:  # a snapshot, and not a cache of each rank
                self.emit("file", key=f"{host}:{os.path.realpath(args[1])}")

    def end(self):
        if self.file is None:
            return
        if self.evaluated:
            self.flush("evaluated")
        self.end_evaluation()
        for number, lines in self.unchanged.items():
            wrong = f"optimizer {number} has changed no weight"
            self.note("learns", wrong, lines=lines)
        if len(self.snapshots) > 1:  # a single one is the result
            needed, lines = self.snapshots[-1]
            lacks = sum(self.states.values()) < needed
            wrong = "the file lacks an optimizer's state" if lacks else ""
            self.note("optimizer", wrong, lines=lines)
        if not self.uneven:
            counts = {
                f"steps of optimizer {number}": count
                for number, count in self.counts.items()
            }
            self.emit("steps", key="all", value=counts)
        if self.group:
            left = dist.is_initialized()
            wrong = "the process has ended with its group" if left else ""
            self.note("destroyed", wrong, lines=self.group)
        self.file.close()
        self.file = None


def collect(name, value, tensors, states):
    """Find the tensors and the optimizers' states in a snapshot."""
    if isinstance(value, torch.Tensor):
        tensors.append((name, value))
    elif isinstance(value, torch.optim.Optimizer):
        states.append(value.state)
    elif isinstance(value, dict):
        if {"state", "param_groups"}.issubset(value):
            states.append(value["state"])
        else:
            for key, item in value.items():
                collect(str(key), item, tensors, states)
    elif isinstance(value, (list, tuple)) and len(value) < 1000:  # else it is data
        for number, item in enumerate(value):
            collect(f"{name} {number}", item, tensors, states)


def watch_batches():
    """Wrap what delivers batches: at most `batches` of an epoch, if that is set."""
    loader = torch.utils.data.DataLoader
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    advance = iterator.__next__
    length = loader.__len__
    most = settings.get("batches", sys.maxsize)
    deliver = safe(watch.deliver)
    exhaust = safe(watch.exhaust)

    @functools.wraps(advance)
    def watched(self):
        if self._num_yielded >= most:
            exhaust(self)
            raise StopIteration
        try:
            data = advance(self)
        except StopIteration:
            exhaust(self)
            raise
        deliver(data, self)
        return exact(data) if settings.get("like") else data

    iterator.__next__ = watched
    loader.__len__ = lambda self: min(most, length(self))


# What makes two commands comparable


def exact(value):
    """The tensors of a value in float64."""

    def cast(tensor):
        single = tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.double() if single else tensor

    return torch.utils._pytree.tree_map_only(torch.Tensor, cast, value)


def make_exact(module, args):
    """In front of each module: no dropout, statistics that stay, and float64."""
    if isinstance(module, torch.nn.modules.batchnorm._NormBase):
        module.training = False
    if isinstance(getattr(module, "dropout", None), float):
        module.dropout = 0.0  # of attention, or of a recurrent layer
    # Some were made from other tensors, such as the weights of a loss.
    for tensor in [*module.parameters(False), *module.buffers(False)]:
        if tensor.is_floating_point():
            tensor.data = tensor.data.double()
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
    util.Finalize(None, safe(watch.end), exitpriority=0)


def hook():
    """Let PyTorch tell the watch what happens."""
    global torch, dist, DDP, watch, not_the_readers
    import torch
    import torch.distributed as dist
    from torch.nn.modules import module
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.optim import optimizer

    if hasattr(torch, "_audited"):
        return  # by the process that this one was forked from
    torch._audited = True
    library = os.path.dirname(os.__file__)
    not_the_readers = (library, os.path.dirname(torch.__file__), __file__, "<")
    watch = Watch()
    watch.emit("torch")

    os.register_at_fork(after_in_child=watch.__init__)
    util.register_after_fork(watch, at_end)
    # What multiprocessing forks calls no atexit; what it spawns calls atexit later.
    if "--multiprocessing-fork" in sys.orig_argv:
        atexit.register(safe(watch.end))
    else:
        at_end(watch)
    # It warns that hooks see a compiled module once more, which does no harm here.
    module._has_any_global_hook = lambda: False
    module.register_module_forward_pre_hook(safe(watch.enter))
    module.register_module_forward_hook(safe(watch.leave), with_kwargs=True)
    optimizer.register_optimizer_step_pre_hook(safe(watch.before_step))
    optimizer.register_optimizer_step_post_hook(safe(watch.after_step))
    for row in PATCHES.split("\n")[1:-1]:
        when, owner, name, method = row.split()
        called = {when: getattr(watch, method)}
        patch(pkgutil.resolve_name(owner), name, **called)
    for name in COLLECTIVES.split():
        patch(dist, name, before=watch.meet)
    watch_batches()
    rename = safe(watch.renamed)

    def hear(event, args):
        if event == "os.rename" and watch:  # os.replace, too; and not at the very end
            rename(args)

    sys.addaudithook(hear)
    if settings.get("like"):
        make_comparable()
