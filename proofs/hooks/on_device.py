"""What ranks exchange must have been put on the trainer's device, also on a CPU.

On a CPU nothing fails without it. So each tensor that is made with a `device`
or moved by `to` is marked, and a collective of the default group refuses all others.
"""

import torch
import torch.distributed as dist
from hooks import replace


class Marking(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), options=None):
        options = options or {}
        result = function(*arguments, **options)
        moved = function is torch.Tensor.to and len(arguments) > 1
        if moved or "device" in options:
            result.is_placed = True
        elif function in (torch.empty_like, torch.Tensor.view):
            result.is_placed = hasattr(arguments[0], "is_placed")
        return result


def checked(collective, *arguments, group=None, **options):
    for tensor in arguments:
        if isinstance(tensor, torch.Tensor) and group is None:
            assert getattr(tensor, "is_placed", False), f"{tensor} is on no device"
    return collective(*arguments, group=group, **options)


def around_main(main, *arguments):
    with Marking():
        main(*arguments)


for name in ("all_reduce", "all_gather", "broadcast"):
    replace(dist, name, checked)
