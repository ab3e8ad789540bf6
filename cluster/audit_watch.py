"""What audit.py puts into each process of a training run: it watches, and writes.

A generated sitecustomize.py calls `begin` when Python starts. As soon as the process
has imported torch, PyTorch's own hooks and a few wrapped functions note what happens:
one line of JSON for each event, in a file of the process's own. Nothing here sends
anything to another rank, draws a random number, or changes a tensor. An error in here
is an event, too, and the run goes on.
"""

import atexit
import collections
import functools
import importlib.util
import json
import os
import signal
import socket
import sys
import threading
import time
import warnings
import weakref
import zlib
from multiprocessing import util

FIRST_STEPS = 20  # weights are read after each of these steps, and then rarely:
EVERY_STEPS = 50
COLUMNS = 1024  # so many numbers of a sample are enough to know it again
INDICES = 1_000_000  # so many samples' numbers are written down
MEETINGS = "all_reduce all_gather all_gather_object all_gather_into_tensor gather"
MEETINGS += (
    " gather_object reduce reduce_scatter_tensor broadcast broadcast_object_list"
)
settings = json.loads(os.environ.get("AUDIT", "{}"))  # of audit.py's command line


def begin():
    """Wait for `import torch`, and let the next sitecustomize on the path run."""
    if "torch" in sys.modules:  # a process that was forked
        attach()
    else:
        sys.meta_path.insert(0, Finder())
    here = os.path.join(settings["folder"], "site")
    sys.path[:] = [entry for entry in sys.path if entry != here]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError:
        if ours:
            sys.modules["sitecustomize"] = ours


class Finder:
    """Finds torch as Python would, and attaches the watch when it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                attach()

            spec.loader.exec_module = exec_module
        return spec


def where():
    """The reader's lines that are running, the innermost first: file:line, ..."""
    frame = sys._getframe(1)
    lines = []
    while frame and len(lines) < 3:
        path = frame.f_code.co_filename
        if not path.startswith(not_the_readers) and "-packages" not in path:
            lines.append(f"{os.path.abspath(path)}:{frame.f_lineno}")
        frame = frame.f_back
    return lines


def safely(function, *args, **kwargs):
    """Call it; what it raises is written down and goes no further."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        if type(error).__name__ not in watch.broken:
            watch.broken.add(type(error).__name__)
            try:
                line = error.__traceback__.tb_next.tb_lineno
                watch.emit("broken", what=f"{error!r:.300}", own_line=line)
            except Exception:
                pass  # the disk may be full: the run goes on all the same
        return None


def patch(owner, name, before=None, after=None):
    """Call `before(*arguments)` and `after(result, *arguments)` around a function."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def watched(*args, **kwargs):
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        if before:
            safely(before, *args, **kwargs)
        result = original(*args, **kwargs)
        if after:
            safely(after, result, *args, **kwargs)
        return result

    setattr(owner, name, watched)


def local(tensor):
    """The part of a tensor that this process has."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def part_of(tensor):
    """Which part of a split tensor it is: ranks with the same may be compared."""
    if not hasattr(tensor, "placements"):
        return ""
    place = tensor.device_mesh.get_coordinate()
    cuts = zip(place, tensor.placements, strict=True)
    return str([number for number, cut in cuts if cut.is_shard()])


def sums(tensors):
    """[sum, sum of absolute values] of each tensor, after one wait for the device."""
    found = []
    with torch.no_grad():
        for tensor in map(local, tensors):
            exact = torch.float32 if tensor.device.type == "mps" else torch.float64
            total = tensor.sum(dtype=exact)
            size = torch.linalg.vector_norm(tensor, 1, dtype=exact)
            found.append(torch.stack([total, size]))
        found = [pair.to(found[0].device) for pair in found]
        return torch.stack(found).tolist() if found else []


def tensors_in(value):
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def hashes(value, count=None):
    """A text for each sample in a batch, the same for the same numbers."""
    with torch.no_grad():
        tensors = [tensor for tensor in tensors_in(value) if tensor.dim()]
        if count is None and tensors:
            count = len(tensors[0])
        found = []
        for tensor in tensors:
            if len(tensor) != count or not tensor.numel() or tensor.is_complex():
                continue
            rows = local(tensor).reshape(count, -1)
            rows = rows[:, :: 1 + rows.shape[1] // COLUMNS].double()
            weights = torch.arange(1, rows.shape[1] + 1, device=rows.device)
            found.append((rows * weights.double().cos()).sum(1))
        numbers = sum(found).tolist() if found else []
    return [f"{number:.9g}" for number in numbers]


def random_state():
    """A number that changes when this process draws a random number."""
    states = [torch.get_rng_state()]
    if torch.accelerator.is_available():
        states.append(torch.get_device_module().get_rng_state())
    return zlib.crc32(b"".join(bytes(state.tolist()) for state in states))


class Watch:
    """What one process has done so far; only hashes and sums, never tensors."""

    def __init__(self):
        self.file = None
        self.meetings = 0  # collectives that give a rank what others have
        self.broken = set()
        self.steps = weakref.WeakKeyDictionary()  # {optimizer: steps so far}
        self.numbers = weakref.WeakKeyDictionary()  # {optimizer: its number}
        self.optimized = torch.utils.weak.WeakIdKeyDictionary()
        self.averaged = torch.utils.weak.WeakIdKeyDictionary()  # by a DDP wrapper
        self.names = torch.utils.weak.WeakIdKeyDictionary()  # {parameter: name, lines}
        self.loaders = weakref.WeakKeyDictionary()  # {loader: [number, iterations]}
        self.awaiting = weakref.WeakKeyDictionary()  # {wrapper: how it was called}
        self.outer = None  # the outermost module that runs now, by a weak reference
        self.parameters = []  # its own
        self.thread = threading.get_ident()
        self.inside_wrapper = False
        self.sends = collections.Counter()  # {line of a forward pass: times sent}
        self.unsent = False
        self.last_pass = None
        self.batches = 0
        self.indices = 0
        self.random = None
        self.scaled = False
        self.saved = set()
        self.said = set()

    def emit(self, kind, **facts):
        if self.file is None:
            name = f"{os.getpid()}-{time.time_ns()}.jsonl"
            path = os.path.join(settings["folder"], name)
            self.file = open(path, "x", buffering=1)  # noqa: SIM115  to the end
            environ = {key: os.environ.get(key) for key in ("RANK", "WORLD_SIZE")}
            self.emit("start", host=socket.gethostname(), time=time.time(), **environ)
        line = {"kind": kind, "meetings": self.meetings, **facts}
        self.file.write(json.dumps(line) + "\n")

    def once(self, kind, **facts):
        """Emit it for the first time that these lines do it."""
        lines = where()
        if (kind, str(lines)) not in self.said:
            self.said.add((kind, str(lines)))
            self.emit(kind, lines=lines, step=self.step, **facts)

    @property
    def step(self):
        return max(self.steps.values(), default=0)

    def reads(self, step):
        rarely = step < FIRST_STEPS or step % EVERY_STEPS == 0
        return rarely or settings.get("every_step", False)

    # Batches

    def restart(self, iterator, *args, **kwargs):
        """A loader keeps its workers, and its iterator begins another epoch."""
        iterator._audit = collections.deque()

    def index(self, indices, iterator):
        """The sampler has given the numbers of a batch, which comes later."""
        waiting = iterator.__dict__.setdefault("_audit", collections.deque())
        waiting.append(indices)

    def deliver(self, data, iterator, loader_number, iteration):
        indices = iterator._audit.popleft() if hasattr(iterator, "_audit") else None
        if not isinstance(indices, list):
            indices = [indices]
        facts = {"loader": loader_number, "iteration": iteration, "indices": None}
        known = all(isinstance(index, int) for index in indices)
        if known and self.indices < INDICES:
            self.indices += len(indices)
            facts["indices"] = indices
            on_cpu = all(each.device.type == "cpu" for each in tensors_in(data))
            facts["rows"] = hashes(data, len(indices)) if on_cpu else []
        self.batches += 1
        self.emit("batch", **facts)
        if self.reads(self.step):
            self.random = random_state()

    def iterate(self, iterator, loader):
        entry = self.loaders.setdefault(loader, [len(self.loaders), 0])
        entry[1] += 1
        iterator.__dict__["_audit_of"] = (entry[0], entry[1])
        data = loader.dataset
        chosen = getattr(data, "indices", None)
        facts = {
            "loader": entry[0],
            "iteration": entry[1],
            "length": len(data) if hasattr(data, "__len__") else None,
            "subset": zlib.crc32(str(list(chosen)).encode())
            if chosen is not None
            else None,
            "sampler": type(getattr(loader, "sampler", None)).__name__,
        }
        self.emit("iterate", lines=where(), **facts)

    # Forward and backward passes

    def wrap(self, result, wrapper, module, *args, **kwargs):
        for parameter in module.parameters():
            self.averaged[parameter] = True

    def name(self, module):
        for name, parameter in module.named_parameters():
            if parameter not in self.names:
                for prefix in ("module.", "_orig_mod."):
                    name = name.replace(prefix, "")
                self.names[parameter] = (name, type(module).__name__, where())

    def enter(self, module, args):
        if threading.get_ident() != self.thread:
            return  # DataParallel's replicas
        if torch._C._current_graph_task_id() != -1:
            return  # a backward pass computes a checkpointed part again
        if self.outer is None or self.outer() in (None, module):
            self.outer = weakref.ref(module)
            self.inside_wrapper = False
            self.parameters = list(module.parameters())  # FSDP has others inside
            if self.parameters and self.parameters[0] not in self.names:
                self.name(module)
            # A compiled module calls no hook of those inside it.
            parts = module.modules() if hasattr(module, "_orig_mod") else [module]
        else:
            parts = [module]
        for wrapper in parts:
            if isinstance(wrapper, DDP):
                self.inside_wrapper = True
                if torch.is_grad_enabled():
                    sync = wrapper.require_backward_grad_sync
                    self.awaiting[wrapper] = (str(where()), sync)

    def leave(self, module, args):
        if self.outer is None or self.outer() is not module:
            return
        if threading.get_ident() != self.thread:
            return
        self.outer = None
        parameters = self.parameters
        self.parameters = []
        if not parameters:
            return  # a loss
        trains = module.training and torch.is_grad_enabled()
        averaged = any(parameter in self.averaged for parameter in parameters)
        if trains and averaged and not self.inside_wrapper:
            self.once("bypass")
        this_pass = (trains, self.batches, self.step)
        if this_pass == self.last_pass:
            return
        facts = {}
        optimized = any(parameter in self.optimized for parameter in parameters)
        if not trains and optimized and (self.last_pass or [True])[0]:
            facts["buffers"] = self.buffers(module)
        if optimized or trains:
            self.last_pass = this_pass
            if trains and self.reads(self.step):
                facts["inputs"] = " ".join(hashes(args))
            self.emit("train" if trains else "eval", lines=where(), **facts)

    def buffers(self, module):
        found = {}
        for name, part in module.named_modules():
            for key, buffer in part._buffers.items():
                kept = key not in part._non_persistent_buffers_set
                if kept and buffer is not None and buffer.is_floating_point():
                    found[f"{name}.{key}".replace("module.", "")] = buffer
        return dict(zip(found, sums(found.values()), strict=True))

    def backward(self, *args, **kwargs):
        for wrapper, (lines, sync) in list(self.awaiting.items()):
            if sync:
                self.sends[lines] += 1
                if not wrapper.require_backward_grad_sync:
                    self.once("no_sync")
            self.unsent = not sync
        self.awaiting.clear()

    # Steps

    def before_step(self, optimizer):
        count = self.steps.setdefault(optimizer, 0)
        number = self.numbers.setdefault(optimizer, len(self.numbers))
        lines = max(self.sends, key=self.sends.get, default="")
        facts = {"optimizer": number, "step": count + 1, "unsent": self.unsent}
        facts["sends"] = self.sends[lines] if lines else 0
        facts["sent_from"] = lines
        parameters = parameters_of(optimizer)
        if parameters and len(parameters) != self.optimized.get(parameters[0]):
            for each in parameters:
                self.optimized[each] = len(parameters)
            self.emit("parameters", optimizer=number, rows=self.rows(parameters))
        if self.reads(count):
            facts["lines"] = where()
            facts["groups"] = [numbers_in(group) for group in optimizer.param_groups]
            now = random_state()
            facts["random"] = [self.random, now]
            self.random = now
            self.read(number, count, parameters)
            if settings.get("every_step"):
                grads = [each.grad for each in parameters if each.grad is not None]
                facts["grads"] = sums(grads)
        self.emit("step", **facts)

    def read(self, number, count, parameters):
        self.emit("weights", optimizer=number, step=count, sums=sums(parameters))

    def rows(self, parameters):
        """Of each parameter, what the starting process has to know."""
        rows = []
        for number, each in enumerate(parameters):
            default = (f"parameter {number}", "", [])
            name, kind, lines = self.names.get(each, default)
            averaged = each in self.averaged
            sharded = kind.startswith("FSDP")
            rows.append([name, lines, each.numel(), part_of(each), averaged, sharded])
        return rows

    def after_step(self, optimizer):
        self.steps[optimizer] += 1
        self.sends.clear()
        self.unsent = False
        self.outer = None
        count = self.steps[optimizer]
        if settings.get("every_step"):
            self.read(self.numbers[optimizer], count, parameters_of(optimizer))
        if count == settings.get("kill"):
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
        if self.scaled:
            self.once("clip")

    def meet(self, *args, **kwargs):
        self.meetings += 1

    # Files

    def save(self, obj, f, *args, **kwargs):
        path = f if isinstance(f, (str, os.PathLike)) else getattr(f, "name", None)
        if isinstance(obj, torch.nn.Module):
            obj = {"": obj.state_dict(keep_vars=True)}
        if not isinstance(obj, dict):
            caller = sys._getframe(3).f_code.co_filename
            if "checkpoint" in os.path.dirname(caller):  # torch.distributed's
                self.emit("parts")
            return
        facts = {"prefix": None, "optimizer": False, "broken": None, "numbers": 0}
        self.inspect(obj, facts)
        if isinstance(path, (str, os.PathLike)):
            path = os.path.realpath(path)
            facts["again"] = path in self.saved
            self.saved.add(path)
        self.emit("save", path=path, step=self.step, lines=where(), **facts)

    def inspect(self, value, facts):
        """Note what a snapshot holds: an optimizer's state, NaN, keys of a wrapper."""
        if isinstance(value, (list, tuple)):
            value = dict(enumerate(value))
        if {"state", "param_groups"}.issubset(value):
            facts["optimizer"] = True
            return
        for key, item in value.items():
            if isinstance(item, torch.optim.Optimizer):
                facts["optimizer"] = True
            elif isinstance(item, (dict, list, tuple)):
                self.inspect(item, facts)
            elif isinstance(item, torch.Tensor) and item.is_floating_point():
                facts["numbers"] += item.numel()
                total = local(item).sum(dtype=torch.float64)
                if not item.is_meta and not total.isfinite():
                    facts["broken"] = str(key)
                wrapped = str(key).startswith(("module.", "_orig_mod."))
                if wrapped and "n_averaged" not in value:  # an average has such keys
                    facts["prefix"] = key

    def move(self, result, source, target, *args, **kwargs):
        source = os.path.realpath(source)
        if source in self.saved:
            self.saved.remove(source)
            path = os.path.realpath(target)
            self.emit("move", source=source, path=path, lines=where())

    def load(self, result, f, map_location=None, *args, **kwargs):
        devices = {tensor.device for tensor in tensors_in(result)}
        others = [each for each in devices if each.type not in ("cpu", "meta")]
        if map_location is None and others:
            own = torch.accelerator.current_device_index()
            if any(each.index != own for each in others):
                self.once("load")

    def join(self, *args, **kwargs):
        self.emit("group", rank=dist.get_rank(), lines=where())

    def end(self):
        if self.file:
            self.emit("end", initialized=dist.is_initialized())
            self.file = None


def parameters_of(optimizer):
    return [each for group in optimizer.param_groups for each in group["params"]]


def numbers_in(group):
    """What an optimizer's group is set to; a rate that is a tensor is read."""
    found = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, (bool, int, float)) or key == "betas":
            found[key] = value
    return found


def pre_forward(module, args):
    if not torch.compiler.is_compiling():
        safely(watch.enter, module, args)
        if settings.get("like"):
            return exact(args)
    return None


def post_forward(module, args, output):
    if not torch.compiler.is_compiling():
        safely(watch.leave, module, args)


def watch_batches(loader, iterator):
    """Wrap what delivers batches: at most `batches` of an epoch, if that is set."""
    advance = iterator.__next__
    length = loader.__len__
    most = settings.get("batches", sys.maxsize)

    @functools.wraps(advance)
    def watched(self):
        if self._num_yielded >= most:
            raise StopIteration
        data = advance(self)
        safely(watch.deliver, data, self, *self.__dict__.get("_audit_of", (-1, 0)))
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


def make_comparable():
    """Compute in float64, without dropout, on one order of samples.

    Two scripts then differ by rounding alone, unless they train another model.
    """
    functional = torch.nn.functional
    attention = functional.scaled_dot_product_attention
    normalize = functional.batch_norm

    def attend(query, key, value, attn_mask=None, dropout_p=0.0, **others):
        return attention(query, key, value, attn_mask, 0.0, **others)

    def norm(
        x, mean, variance, weight=None, bias=None, training=False, *others, **more
    ):
        return normalize(x, mean, variance, weight, bias, mean is None, *others, **more)

    for name in vars(functional):
        if "dropout" in name and not name.startswith("_"):
            setattr(functional, name, lambda x, *args, **kwargs: x)
    functional.scaled_dot_product_attention = attend
    functional.batch_norm = norm
    torch.nn.SyncBatchNorm.forward = torch.nn.BatchNorm1d.forward
    patch(torch.nn.RNNBase, "__init__", after=lambda _, self, *a, **k: dry(self))
    data = torch.utils.data
    random_order = data.RandomSampler.__iter__
    shares = data.DistributedSampler.__iter__

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

    data.RandomSampler.__iter__ = shuffled
    data.DistributedSampler.__iter__ = shared
    patch(data.BatchSampler, "__init__", after=whole_batches)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)  # for scripts that set no seed


def dry(module):
    module.dropout = 0.0


def order(sampler, size):
    """A permutation that follows from how often this sampler was asked."""
    sampler._asked = getattr(sampler, "_asked", 0) + 1
    generator = torch.Generator().manual_seed(sampler._asked)
    return torch.randperm(size, generator=generator).tolist()


def attach():
    """Called when torch has been imported."""
    global torch, dist, DDP, watch, not_the_readers
    import torch

    if hasattr(torch, "_audited"):
        return  # by the process that this one was forked from
    torch._audited = True
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    library = os.path.dirname(os.__file__)
    not_the_readers = (library, os.path.dirname(torch.__file__), __file__, "<")
    watch = Watch()
    safely(watch.emit, "torch", version=torch.__version__)
    # The hooks see a compiled module once more, which does no harm here.
    warnings.filterwarnings("ignore", ".*global hooks on modules")
    safely(hook)
    if settings.get("like"):
        safely(make_comparable)


def hook():
    from torch.distributed.algorithms.join import Join
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )
    from torch.utils.data import DataLoader
    from torch.utils.data.dataloader import _BaseDataLoaderIter as iterator

    os.register_at_fork(after_in_child=watch.__init__)
    atexit.register(safely, watch.end)
    # A process that multiprocessing has forked ends without atexit's functions.
    util.register_after_fork(
        watch, lambda _: util.Finalize(None, watch.end, exitpriority=0)
    )
    modules = torch.nn.modules.module
    modules.register_module_forward_pre_hook(pre_forward)
    modules.register_module_forward_hook(post_forward)
    register_optimizer_step_pre_hook(
        lambda optimizer, *_: safely(watch.before_step, optimizer)
    )
    register_optimizer_step_post_hook(
        lambda optimizer, *_: safely(watch.after_step, optimizer)
    )
    patch(iterator, "_reset", before=watch.restart)
    patch(DataLoader, "__iter__", after=watch.iterate)
    patch(iterator, "_next_index", after=watch.index)
    watch_batches(DataLoader, iterator)
    patch(DDP, "__init__", after=watch.wrap)
    patch(torch.Tensor, "backward", before=watch.backward)
    patch(torch.amp.GradScaler, "step", after=watch.skip)
    patch(torch.amp.GradScaler, "scale", after=watch.scale)
    patch(torch.amp.GradScaler, "unscale_", after=watch.unscale)
    patch(torch.amp.GradScaler, "update", after=watch.unscale)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        patch(torch.nn.utils, name, before=watch.clip)
    for name in MEETINGS.split():
        patch(dist, name, before=watch.meet)
    patch(dist, "init_process_group", after=watch.join)
    patch(Join, "__enter__", before=lambda _: watch.emit("uneven"))
    patch(torch, "save", before=watch.save)
    patch(torch, "load", after=watch.load)
    patch(os, "replace", after=watch.move)
    patch(os, "rename", after=watch.move)
