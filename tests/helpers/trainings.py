"""Small trainings for the audit: torchrun ... trainings.py NAME

Those in WRONG make a mistake, in the line that says so. Those in RIGHT are right,
though each does something that could be taken for a mistake. If a mistake takes only
a few changed lines in a script of the docs, it stands in mistakes.diff instead, and
what is harmless in harmless.diff.
"""

import itertools
import sys
import types

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)

WRONG = {}  # {name: the check that names it}
RIGHT = []


def wrong(check):
    def register(function):
        WRONG[function.__name__] = check
        return function

    return register


def right(function):
    RIGHT.append(function.__name__)
    return function


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 32)
        self.norm = nn.LayerNorm(32)
        self.last = nn.Linear(32, 4)

    def forward(self, x):
        return self.last(self.norm(F.relu(self.first(x))))


def samples(count=160):
    x = torch.randn(count, 10, generator=torch.Generator().manual_seed(7))
    return TensorDataset(x, x[:, :4].argmax(1))


def shares(dataset=None, **options):
    dataset = dataset or samples()
    sampler = DistributedSampler(dataset, drop_last=True)
    return DataLoader(dataset, 8, sampler=sampler, **options)


def batches(loader):
    for epoch in range(2):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        yield from loader


def model_of(make=Net):
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(1 + dist.get_rank())
    return model


def train(model, optimizer=None, loader=None, call=None, after=None):
    optimizer = optimizer or adam(model)
    for x, y in batches(shares() if loader is None else loader):
        optimizer.zero_grad()
        F.cross_entropy((call or model)(x), y).backward()
        optimizer.step()
        if after:
            after()


def adam(model, kind=torch.optim.AdamW):
    return kind(model.parameters(), lr=0.001)


# Wrong, and found in public scripts or libraries


@wrong("drift")
def copies_of_a_split_model_drift():
    """Each rank scales the gradient of its LayerNorm, a copy, by another number."""
    model = model_of()
    model.last.weight.data += dist.get_rank()  # a part of each rank's own
    optimizer = adam(model)
    for x, y in batches(DataLoader(samples(), 8)):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for each in model.first, model.norm:
            for parameter in each.parameters():
                dist.all_reduce(parameter.grad)
        model.norm.weight.grad *= 1 + dist.get_rank()
        optimizer.step()  # MISTAKE


@wrong("early")
def an_optimizer_before_fully_shard():
    model = model_of()
    optimizer = adam(model)  # MISTAKE
    fully_shard(model)
    train(model, optimizer)


class Hiding(Net):
    def forward(self, x):
        return types.SimpleNamespace(logits=super().forward(x))


@wrong("hidden")
def an_output_in_an_object():
    model = fully_shard(model_of(Hiding))
    train(model, call=lambda x: model(x).logits)  # MISTAKE


class Stream(IterableDataset):
    def __iter__(self):
        torch.manual_seed(100 * dist.get_rank() + get_worker_info().id)
        whole = samples()
        for number in torch.randperm(160).tolist():
            yield whole[number]


@wrong("samples")
def a_stream_that_all_workers_read():
    ddp_model = DDP(model_of())
    train(ddp_model, loader=DataLoader(Stream(), 8, num_workers=2))  # MISTAKE


class Noisy(Dataset):
    epoch = 0

    def __getitem__(self, index):
        x, y = samples()[index]
        generator = torch.Generator().manual_seed(index + 1000 * self.epoch)
        return x + torch.randn(10, generator=generator), y

    def __len__(self):
        return 80


@wrong("workers")
def workers_that_keep_the_first_epoch(keep=True):
    dataset = Noisy()
    loader = shares(dataset, num_workers=1, persistent_workers=keep)
    steps = itertools.count(1)

    def after():
        dataset.epoch = next(steps) // len(loader)

    train(DDP(model_of()), loader=loader, after=after)  # MISTAKE


# Right


class Branched(Net):
    def __init__(self):
        super().__init__()
        self.branch = nn.Linear(32, 4)

    def forward(self, x):
        hidden = F.relu(self.first(x))
        self.branch(hidden)
        return self.last(self.norm(hidden))


@right
def a_teacher_and_a_branch_that_is_not_used():
    ddp_model = DDP(model_of(Branched), find_unused_parameters=True)
    teacher = model_of().eval()

    def call(x):
        y = ddp_model(x)
        with torch.no_grad():
            wanted = teacher(x)
        return y - wanted

    whole = samples(161)  # the sampler gives one to both ranks
    loader = DataLoader(whole, 8, sampler=DistributedSampler(whole))
    train(ddp_model, loader=loader, call=call)


@right
def an_optimizer_that_waits():
    ddp_model = DDP(model_of())
    later = DDP(nn.Linear(10, 4))
    of_later = adam(later, torch.optim.SGD)
    train(ddp_model, call=lambda x: ddp_model(x) + 0 * later(x), after=of_later.step)


@right
def workers_that_start_anew():
    workers_that_keep_the_first_epoch(keep=False)


@right
def two_networks_in_one_line():
    generator = DDP(model_of(lambda: nn.Linear(10, 10)))
    critic = DDP(model_of())
    train(critic, call=lambda x: critic(generator(x).detach()))
    train(generator, call=lambda x: critic(generator(x)))


@right
def a_pipeline():
    stage = nn.Linear(10, 10)
    optimizer = adam(stage)
    for x, y in batches(DataLoader(samples(), 8)):
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            hidden = stage(x)
            dist.send(hidden.detach(), 1)
            dist.recv(x, 1)
            hidden.backward(x)
        else:
            dist.recv(x, 0)
            x.requires_grad_()
            F.cross_entropy(stage(x), y).backward()
            dist.send(x.grad, 0)
        optimizer.step()


@right
def one_rank_steps_for_all():
    """As a parameter server does."""
    model = model_of()
    optimizer = adam(model)
    for x, y in batches(shares()):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for each in model.parameters():
            dist.all_reduce(each.grad)
        if dist.get_rank() == 0:
            optimizer.step()
        for each in model.parameters():
            dist.broadcast(each.data, src=0)


@right
def uneven_inputs():
    ddp_model = DDP(model_of())
    own = range(100) if dist.get_rank() else range(100, 160)
    loader = DataLoader(Subset(samples(), own), 8)
    for _ in range(2):
        with Join([ddp_model]):
            train(ddp_model, adam(ddp_model, torch.optim.SGD), loader)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    globals()[sys.argv[1]]()
    dist.destroy_process_group()
