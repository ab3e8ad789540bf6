"""What each rank did, seen from inside: samples, order, threads, what it writes."""

import os

import pytest
import torch

from tools.run.launch import DISTRIBUTED, hooks_to_compare, task_of
from tools.scripts import SCRIPTS

# 197 samples by 3 ranks and 17 held out: nothing divides evenly.
RUNS = [*((x, 2) for x in DISTRIBUTED), ("multigpu.py", 3)]
of_each_run = pytest.mark.parametrize(("name", "nprocs"), RUNS)


def replicas(facts):
    """One rank of each replica. Ranks that share a batch are one, and do the same."""
    found = {}
    for rank in facts:
        first = found.setdefault(rank["replica"], rank)
        for key in ("replicas", "orders", "evaluated", "random"):
            assert rank[key] == first[key], f"{key} of ranks of one replica"
    assert sorted(found) == list(range(facts[0]["replicas"]))
    return list(found.values())


def steps(facts, epoch):
    """The samples of each step of all replicas together, as sets."""
    orders, size = [x["orders"][epoch] for x in facts], 66 // len(facts)
    starts = range(0, len(orders[0]), size)
    return [{i for order in orders for i in order[at : at + size]} for at in starts]


@of_each_run
def test_every_step_has_the_samples_of_one_process(probes, name, nprocs):
    """Also where neither batches nor ranks divide the number of samples."""
    _, (alone,), _ = probes("single_gpu.py")
    facts = replicas(probes(name, nprocs)[1])
    for epoch in (0, 1):
        seen = [i for x in facts for i in x["orders"][epoch]]
        assert len(seen) == len(set(seen)), "replicas share samples"
        # A sampler may draw an index more than the loader uses up.
        assert steps(facts, epoch)[:2] == steps([alone], epoch)[:2]
        assert len(steps(facts, epoch)) == len(steps([alone], epoch))


@of_each_run
def test_same_losses_and_weights_as_one_process(probes, name, nprocs):
    """On 197 samples and 17 held out."""
    hooks = hooks_to_compare(name)
    alone, (facts,), _ = probes(task_of(name), 1, hooks)
    several, ranks, _ = probes(name, nprocs, hooks)
    torch.testing.assert_close(several, alone, rtol=1e-6, atol=2e-6)
    for rank in ranks:
        torch.testing.assert_close(rank["weights"], facts["weights"], rtol=0, atol=1e-6)


@of_each_run
def test_every_held_out_sample_counts_once(probes, name, nprocs):
    _, facts, _ = probes(name, nprocs)
    evaluated = [i for x in replicas(facts) for i in x["evaluated"]]
    assert sorted(evaluated) == list(range(17))


@pytest.mark.parametrize("name", SCRIPTS)
def test_order_differs_by_epoch(probes, name):
    _, facts, _ = probes(name)
    for rank in facts:
        first, second = rank["orders"]
        assert first != second


@of_each_run
def test_ranks_and_epochs_draw_different_random_numbers(probes, name, nprocs):
    """Dropout masks and the like, which ranks that share a batch share as well."""
    facts = replicas(probes(name, nprocs)[1])
    drawn = [x for rank in facts for x in rank["random"]]
    assert len(set(drawn)) == 2 * len(facts)


@of_each_run
def test_each_rank_asks_for_a_device_of_its_own(probes, name, nprocs):
    _, facts, _ = probes(name, nprocs)
    assert [x["local_rank"] for x in facts] == list(range(nprocs))


@of_each_run
def test_processes_share_the_cores(probes, name, nprocs):
    _, facts, _ = probes(name, nprocs)
    cores = max(nprocs, os.cpu_count())
    assert sum(x["threads"] for x in facts) <= cores


@of_each_run
def test_no_wait_is_longer_than_five_minutes(probes, name, nprocs):
    _, facts, _ = probes(name, nprocs)
    assert [x["timeout_s"] for x in facts] == [300] * nprocs


@of_each_run
def test_one_rank_writes(probes, name, nprocs):
    _, facts, _ = probes(name, nprocs)
    assert [x["writes"] for x in facts] == [2] + [0] * (nprocs - 1)


@of_each_run
def test_one_rank_prints(probes, name, nprocs):
    _, _, done = probes(name, nprocs)
    assert done.stdout.count("effective batch 66") == 1
    assert done.stdout.count("epoch 1/2 |") == 1
    assert done.stdout.count("epoch 2/2 |") == 1
    assert done.stdout.count("epoch 2 saved to snapshot.pt") == 1
