"""This machine says that it has accelerators, or a CPU is as strict as they are."""

import types

import torch
import torch.distributed as dist
from hooks import replace


def one(_):
    """There is one GPU."""
    accelerator = torch.accelerator
    accelerator.device_count = lambda: 1
    accelerator.is_available = lambda: True
    accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    torch._C._get_accelerator = accelerator.current_accelerator  # for process groups
    # Adam asks for it, also on the CPU.
    stream = types.SimpleNamespace(is_capturing=lambda: False)
    accelerator.current_stream = lambda: stream


INHERIT = (torch.empty_like, torch.Tensor.view, torch.Tensor.contiguous)


class Marking(torch.overrides.TorchFunctionMode):
    """Marks each tensor that is made with a `device` or moved by `to`."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = options or {}
        result = function(*arguments, **options)
        moved = function is torch.Tensor.to and len(arguments) > 1
        if moved or "device" in options:
            result.is_placed = True
        elif function in INHERIT:
            result.is_placed = hasattr(arguments[0], "is_placed")
        elif function is torch.Tensor.unbind:
            for part in result:
                part.is_placed = hasattr(arguments[0], "is_placed")
        return result


def strict(script):
    """Collectives of the default group refuse what was not put on a device, as NCCL."""

    def checked(collective, *arguments, group=None, **options):
        marks = torch.overrides._len_torch_function_stack()  # not inside backward()
        for tensor in arguments:
            if isinstance(tensor, torch.Tensor) and group is None and marks:
                assert getattr(tensor, "is_placed", False), f"{tensor} is on no device"
        return collective(*arguments, group=group, **options)

    def marking(main, *arguments):
        with Marking():
            main(*arguments)

    replace(script, "main", marking)
    for name in ("all_reduce", "all_gather", "broadcast"):
        replace(dist, name, checked)
