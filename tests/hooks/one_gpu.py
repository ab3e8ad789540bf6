"""All ranks of this machine share its first GPU. NCCL refuses that; gloo does not."""

import os

import torch.distributed as dist
from hooks import replace

import utils


def on_the_first(set_device, name, local_rank, *nprocs):
    return set_device(name, 0, *nprocs)


def by_gloo(init_process_group, backend, **options):
    """The stand-in's collectives know it as ranks on several machines."""
    os.environ["STANDIN_HOST"] = os.environ["RANK"]
    options.pop("device_id", None)
    if backend == "nccl":
        backend = "gloo"
    init_process_group(backend, **options)


replace(utils, "set_device", on_the_first)
replace(dist, "init_process_group", by_gloo)
