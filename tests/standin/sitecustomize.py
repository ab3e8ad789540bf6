"""A stand-in for GPUs: standin.cpp says what it shows.

In PYTHONPATH, it is the accelerator of every new interpreter, with as many devices as
STANDIN_DEVICES says (2). It is compiled once per version of PyTorch: a minute.
"""

import contextlib
import logging
import types
from pathlib import Path

import torch
import torch.distributed as dist

# A build for CUDA would warn in each process that it finds no GPU.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
from torch.utils.cpp_extension import load  # noqa: E402

plain_data = torch.Tensor.data


def register():
    """Compile it, and make it PyTorch's accelerator, with a backend of its own."""
    version = torch.__version__.replace(".", "_").replace("+", "_")
    source = Path(__file__).with_name("standin.cpp").resolve()
    compiled = load(
        f"standin_{version}", str(source), extra_cflags=["-O0", "-Wno-everything"]
    )
    torch.utils.rename_privateuse1_backend("standin")
    torch._register_device_module("standin", device_module(compiled))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    # Tensors move to it in place, as to CUDA: `.to()` keeps a model's parameters.
    torch._has_compatible_shallow_copy_type = lambda input, from_: True
    torch.Tensor.data = property(plain_data.__get__, set_data)

    def strict(store, rank, size, timeout):
        store = dist.PrefixStore("gloo", store)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        return compiled.strict(gloo)

    dist.Backend.register_backend("strict", strict, devices=["standin"])
    dist.Backend.backend_capability["gloo"].append("standin")  # as CUDA
    dist.device_mesh.split_group = split_group


def split_group(split_ranks, timeout, **options):
    """NCCL makes these of one group; here they are made one by one."""
    mine = None
    for ranks in split_ranks:
        group = dist.new_group(ranks, timeout)  # all ranks take part
        if dist.get_rank() in ranks:
            mine = group
    return mine


def set_data(tensor, new):
    """`tensor.data = new`, also from one type of device to another."""
    if tensor.device.type == new.device.type:
        plain_data.__set__(tensor, new)
        return
    new = new.detach()
    if isinstance(tensor, torch.nn.Parameter):
        new = torch.nn.Parameter(new, tensor.requires_grad)
    vars(new).update(vars(tensor))  # as on CUDA, its attributes stay
    torch.utils.swap_tensors(tensor, new)


def add_random_numbers(module, generator):
    """Each device draws its own, which `torch.manual_seed` and `fork_rng` know."""

    def of(device):
        index = torch.device(device).index
        if index is None:
            index = module.current_device()
        return generator(index)

    def manual_seed_all(seed):
        for index in range(module.device_count()):
            generator(index).manual_seed(seed)

    module.manual_seed = lambda seed: of("standin").manual_seed(seed)
    module.manual_seed_all = manual_seed_all
    module.get_rng_state = lambda device="standin": of(device).get_state()
    module.set_rng_state = lambda state, device="standin": of(device).set_state(state)


def device_module(compiled):
    """What `torch.cuda` is for CUDA."""

    def is_available():
        return compiled.count() > 0

    def set_device(device):
        index = getattr(device, "index", device)  # of a torch.device, or a number
        compiled.set_current(index)

    module = types.ModuleType("torch.standin")
    module.is_available = is_available
    module.is_initialized = is_available
    module.device_count = compiled.count
    module.current_device = compiled.current
    module.set_device = set_device
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    add_random_numbers(module, compiled.generator)
    module.Stream = torch.Stream
    module.Event = torch.Event
    module.synchronize = torch.accelerator.synchronize
    module.current_stream = torch.accelerator.current_stream
    module.stream = contextlib.nullcontext
    module.seen = compiled.seen
    module._is_in_bad_fork = lambda: False
    return module


if torch._C._get_privateuse1_backend_name() != "standin":  # else a fork's parent did it
    register()
