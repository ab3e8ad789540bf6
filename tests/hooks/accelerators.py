"""This machine says that it has accelerators, or a CPU is as strict as they are."""

import collections
import inspect
import os
import types

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from . import replace, write


def one_gpu(_):
    """There is one GPU."""
    accelerator = torch.accelerator
    accelerator.device_count = lambda: 1
    accelerator.is_available = lambda: True
    accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    torch._C._get_accelerator = accelerator.current_accelerator  # for process groups
    dist.is_nccl_available = lambda: True
    # Adam asks for it, also on the CPU.
    stream = types.SimpleNamespace(is_capturing=lambda: False)
    accelerator.current_stream = lambda: stream


class Marking(torch.overrides.TorchFunctionMode):
    """Marks each tensor made with a `device`, moved by `to`, or computed from those."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = options or {}
        given = tree_leaves((arguments, options))
        before = [hasattr(value, "is_placed") for value in given]
        result = function(*arguments, **options)
        if function == torch.Tensor.data.__set__ and before[1]:  # it has been moved
            arguments[0].is_placed = True
        moved = function is torch.Tensor.to and len(arguments) > 1
        made = "device" in options
        in_place = arguments and result is arguments[0]
        moved_back = function is torch.Tensor.cpu
        computed = any(before) and not in_place and not moved_back
        if moved or made or computed:
            for value in tree_leaves(result):
                if isinstance(value, torch.Tensor):
                    value.is_placed = True
        return result


def strict_as_nccl(script):
    """Collectives of the default group refuse what was not put on a device, as NCCL."""

    def checked(collective, *arguments, **options):
        bound = inspect.signature(collective).bind(*arguments, **options)
        in_default_group = not bound.arguments.get("group")
        # Not inside backward(), where nothing is marked.
        is_marking = torch.overrides._len_torch_function_stack() > 0
        if in_default_group and is_marking:
            for value in bound.arguments.values():
                if isinstance(value, torch.Tensor):
                    assert hasattr(value, "is_placed"), f"{value} is on no device"
        return collective(*arguments, **options)

    def to_local(inner, tensor):
        local = inner(tensor)
        local.is_placed = True  # it is where the mesh is
        return local

    def marking(main, *arguments):
        with Marking():
            main(*arguments)

    replace(DTensor, "to_local", to_local)
    replace(script, "main", marking)
    for name in ("all_reduce", "all_gather", "broadcast"):
        replace(dist, name, checked)


def share_one_gpu(script):
    """All ranks of a machine share its first GPU. NCCL refuses that; gloo does not."""

    def on_the_first(set_device, name, local_rank, *nprocs):
        return set_device(name, 0, *nprocs)

    def by_gloo(init_process_group, backend, **options):
        # The stand-in's collectives know it as ranks on several machines.
        os.environ["STANDIN_HOST"] = os.environ["RANK"]
        options.pop("device_id", None)
        if backend == "nccl":
            backend = "gloo"
        init_process_group(backend, **options)

    replace(script["utils"], "set_device", on_the_first)
    replace(dist, "init_process_group", by_gloo)


def note_standin(script):
    """seen.RANK.json: what costs time on a GPU, or fails there (tests/standin).

    {what: how often it was seen in `_run_batch`}, of all steps together.
    """
    seen = collections.Counter()

    def run_batch(inner, *arguments):
        before = collections.Counter(torch.standin.seen())
        result = inner(*arguments)
        seen.update(collections.Counter(torch.standin.seen()) - before)
        return result

    def train(inner, *arguments):
        inner(*arguments)
        write("seen", seen)

    replace(script["Trainer"], "_run_batch", run_batch)
    replace(script["Trainer"], "train", train)
