"""This machine says that it has accelerators, or a CPU is as strict as they are."""

import inspect
import types

import torch
import torch.distributed as dist
from hooks import replace
from torch.utils._pytree import tree_leaves


def one(_):
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
        before = [hasattr(x, "is_placed") for x in tree_leaves((arguments, options))]
        result = function(*arguments, **options)
        if function == torch.Tensor.data.__set__ and before[1]:  # it has been moved
            arguments[0].is_placed = True
        moved = function is torch.Tensor.to and len(arguments) > 1
        in_place = arguments and result is arguments[0]
        back = function is torch.Tensor.cpu
        if moved or "device" in options or any(before) and not in_place and not back:
            for x in tree_leaves(result):
                if isinstance(x, torch.Tensor):
                    x.is_placed = True
        return result


def strict(script):
    """Collectives of the default group refuse what was not put on a device, as NCCL."""

    def checked(collective, *arguments, **options):
        marks = torch.overrides._len_torch_function_stack()  # not inside backward()
        named = inspect.signature(collective).bind(*arguments, **options).arguments
        for tensor in named.values():
            if isinstance(tensor, torch.Tensor) and not named.get("group") and marks:
                assert getattr(tensor, "is_placed", False), f"{tensor} is on no device"
        return collective(*arguments, **options)

    def marking(main, *arguments):
        with Marking():
            main(*arguments)

    replace(script, "main", marking)
    for name in ("all_reduce", "all_gather", "broadcast"):
        replace(dist, name, checked)
