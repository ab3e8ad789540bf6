"""Each rank writes what it did to probe.RANK.json in the folder that it runs in.

    local_rank, threads          of this process; local_rank as it asked for a device
    timeout_s                    of the process group's collectives
    replica, replicas            which, of how many: ranks that share a batch are one
    orders, random               of each epoch: the samples it took, and a random number
    evaluated, weights           of the last epoch: samples, and weights at its end
    writes                       how often it wrote a snapshot

Of the script's samples 197 are taken, and of those held out 17: no number of ranks but
1 divides them. This process loads them, because a worker's notes would not reach it.
"""

import torch
import torch.distributed as dist
from hooks import Noted, replace, write
from torch.distributed.checkpoint import FileSystemWriter
from torch.utils.data import Subset

import utils

facts = {"writes": 0, "orders": [], "random": []}


class Trainer:
    def train(self, *arguments):
        facts["threads"] = torch.get_num_threads()
        sampler = self.train_data.sampler
        facts["replica"] = getattr(sampler, "rank", 0)
        facts["replicas"] = getattr(sampler, "num_replicas", 1)
        facts["timeout_s"] = None
        if dist.is_initialized():
            backend = dist.group.WORLD._get_backend(self.device)
            facts["timeout_s"] = backend.options._timeout.total_seconds()
        super().train(*arguments)
        write("probe", facts)

    def _run_epoch(self, epoch):
        train_set.seen.clear()
        result = super()._run_epoch(epoch)
        facts["orders"].append(list(train_set.seen))
        facts["random"].append(torch.rand(1).item())
        weights = []
        for weight in self.model.parameters():
            if hasattr(weight, "full_tensor"):  # this rank has a part of it
                weight = weight.full_tensor()
            weights += weight.flatten().tolist()
        facts["weights"] = weights
        return result

    def _evaluate(self):
        eval_set.seen.clear()
        result = super()._evaluate()
        facts["evaluated"] = list(eval_set.seen)
        return result


def around_load_train_objs(load_train_objs):
    global train_set, eval_set
    train_set, eval_set, *rest = load_train_objs()
    train_set = Noted(Subset(train_set, range(197)))
    eval_set = Noted(Subset(eval_set, range(17)))
    return train_set, eval_set, *rest


def around_prepare_dataloader(prepare_dataloader, *arguments, **options):
    loader = prepare_dataloader(*arguments, **options)
    loader.num_workers = 0
    return loader


def note_device(set_device, name, local_rank=None, *rest):
    facts["local_rank"] = local_rank
    return set_device(name, local_rank, *rest)


def note_write(write, *arguments, **options):
    facts["writes"] += 1
    return write(*arguments, **options)


replace(utils, "set_device", note_device)
replace(utils, "save_atomically", note_write)
replace(FileSystemWriter, "finish", note_write)  # that all ranks have written
