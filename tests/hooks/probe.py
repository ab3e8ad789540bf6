"""What each rank did, in probe.RANK.json in the folder that it runs in.

    threads                      of this process
    timeout_s                    of the process group's collectives, as asked for
    replica, replicas            which, of how many: ranks that share a batch are one
    orders, random               of each epoch: the samples it took, and a random number
    evaluated, weights           of the last epoch: samples, and weights at its end
    writes                       how often it wrote a snapshot

Of the script's samples 197 are taken, and of those held out 17: no number of ranks but
1 divides them. This process loads them, because a worker's notes would not reach it.
"""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.utils.data import Subset

from . import Noted, replace, write


def probe(script):
    """Note all that stands above."""
    facts = {"writes": 0, "orders": [], "random": []}
    data = []

    def train(inner, self, *arguments):
        facts["threads"] = torch.get_num_threads()
        sampler = self.train_data.sampler
        facts["replica"] = getattr(sampler, "rank", 0)
        facts["replicas"] = getattr(sampler, "num_replicas", 1)
        inner(self, *arguments)
        write("probe", facts)

    def run_epoch(inner, self, epoch):
        train_set, _ = data
        train_set.seen.clear()
        result = inner(self, epoch)
        facts["orders"].append(list(train_set.seen))
        facts["random"].append(torch.rand(1).item())
        weights = []
        for weight in self.model.parameters():
            if hasattr(weight, "full_tensor"):  # this rank has a part of it
                weight = weight.full_tensor()
            weights += weight.flatten().tolist()
        facts["weights"] = weights
        return result

    def evaluate(inner, self):
        _, eval_set = data
        eval_set.seen.clear()
        result = inner(self)
        facts["evaluated"] = list(eval_set.seen)
        return result

    def init_process_group(inner, *arguments, timeout, **options):
        facts["timeout_s"] = timeout.total_seconds()
        inner(*arguments, timeout=timeout, **options)

    def load_train_objs(inner):
        train_set, eval_set, *rest = inner()
        train_set = Noted(Subset(train_set, range(197)))
        eval_set = Noted(Subset(eval_set, range(17)))
        data[:] = train_set, eval_set
        return *data, *rest

    def prepare_dataloader(inner, *arguments, **options):
        loader = inner(*arguments, **options)
        loader.num_workers = 0
        return loader

    def note_write(inner, *arguments, **options):
        facts["writes"] += 1
        return inner(*arguments, **options)

    replace(script["Trainer"], "train", train)
    replace(script["Trainer"], "_run_epoch", run_epoch)
    replace(script["Trainer"], "_evaluate", evaluate)
    replace(dist, "init_process_group", init_process_group)
    replace(script, "load_train_objs", load_train_objs)
    replace(script, "prepare_dataloader", prepare_dataloader)
    replace(script["utils"], "save_atomically", note_write)
    replace(FileSystemWriter, "finish", note_write)  # that all ranks have written
