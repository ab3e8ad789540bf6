"""Each rank of docs/convert/after.py writes what it did to probe.RANK.json.

rank, timeout_s              of this process; of its group's collectives
trained, evaluated           the samples that it took: of each epoch; of the last one
seeds                        torch's seed at the start of each epoch
sum                          of the weights after the last epoch
saved                        how often it wrote the snapshot
threads_left                 gloo's threads when the process group has been destroyed
"""

import json

import torch
import torch.distributed as dist
from hooks import replace

facts = {"trained": [], "seeds": [], "saved": 0}
seen = []


class Indexed(torch.utils.data.Dataset):
    """A data set that notes which samples are taken."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        seen.append(index)
        return self.data[index]


def around_make_data(make_data, n):
    return Indexed(make_data(n))


def around_train(train, *arguments):
    seen.clear()
    facts["seeds"].append(torch.initial_seed())
    train(*arguments)
    facts["trained"].append(list(seen))


def around_test(test, model, *rest):
    seen.clear()
    test(model, *rest)
    facts["evaluated"] = list(seen)
    facts["sum"] = sum(x.sum().item() for x in model.parameters())


def around_save_atomically(save_atomically, *arguments):
    facts["saved"] += 1
    save_atomically(*arguments)


def note_group(init_process_group, *arguments, **options):
    init_process_group(*arguments, **options)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    facts["timeout_s"] = backend.options._timeout.total_seconds()
    facts["rank"] = dist.get_rank()


def note_end(destroy_process_group):
    destroy_process_group()
    with open(f"probe.{facts['rank']}.json", "w") as file:
        json.dump(facts, file)


replace(dist, "init_process_group", note_group)
replace(dist, "destroy_process_group", note_end)
