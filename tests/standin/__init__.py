"""A stand-in for GPUs: see standin.cpp for what it shows.

`build` compiles it, once per machine and version of PyTorch. `register` makes it this
process' accelerator, with as many devices as STANDIN_DEVICES says (2).
"""

import contextlib
import types
from pathlib import Path

import torch
import torch.distributed as dist

plain_data = torch.Tensor.data


def build():
    """The compiled module, which takes a minute the first time."""
    from torch.utils.cpp_extension import load  # it imports setuptools

    name = f"standin_{torch.__version__}".translate({ord(x): "_" for x in ".+"})
    source = str(Path(__file__).with_name("standin.cpp"))
    return load(name, source, extra_cflags=["-O0", "-Wno-everything"])


def register():
    """Before the script begins. A fork of a process that has it need not."""
    if torch._C._get_privateuse1_backend_name() == "standin":
        return
    compiled = build()
    torch.utils.rename_privateuse1_backend("standin")
    torch._register_device_module("standin", device_module(compiled))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    # Tensors move to it in place, as to CUDA: `.to()` keeps a model's parameters.
    torch._has_compatible_shallow_copy_type = lambda input, from_: True
    torch.Tensor.data = property(plain_data.__get__, set_data)

    def strict(store, rank, size, timeout):
        place = dist.PrefixStore("gloo", store)
        return compiled.strict(dist.ProcessGroupGloo(place, rank, size, timeout))

    dist.Backend.register_backend("strict", strict, devices=["standin"])
    dist.Backend.backend_capability["gloo"].append("standin")  # as CUDA


def set_data(tensor, new):
    """`tensor.data = new`, also from one type of device to another."""
    if tensor.device.type == new.device.type:
        plain_data.__set__(tensor, new)
        return
    new = new.detach()
    if isinstance(tensor, torch.nn.Parameter):
        new = torch.nn.Parameter(new, tensor.requires_grad)
    torch.utils.swap_tensors(tensor, new)


def device_module(compiled):
    """What `torch.cuda` is for CUDA."""

    def manual_seed_all(seed):
        for index in range(compiled.count()):
            compiled.generator(index).manual_seed(seed)

    module = types.ModuleType("torch.standin")
    vars(module).update(
        is_available=lambda: compiled.count() > 0,
        is_initialized=lambda: True,
        device_count=compiled.count,
        current_device=compiled.current,
        set_device=lambda x: compiled.set_current(getattr(x, "index", x)),
        device=torch.accelerator.device_index,
        manual_seed_all=manual_seed_all,
        get_rng_state=lambda _=None: compiled.generator(-1).get_state(),
        set_rng_state=lambda state, _=None: compiled.generator(-1).set_state(state),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        synchronize=torch.accelerator.synchronize,
        Stream=torch.Stream,
        Event=torch.Event,
        current_stream=torch.accelerator.current_stream,
        stream=contextlib.nullcontext,
        seen=compiled.seen,
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
    )
    return module
