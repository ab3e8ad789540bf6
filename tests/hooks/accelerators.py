"""Act as if this machine had a GPU, or let several ranks share one."""

import collections
import os
import types

import torch
import torch.distributed as dist

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
        write("seen", seen)
        return result

    replace(script["Trainer"], "_run_batch", run_batch)
