"""What each rank did, seen from inside: samples, order, threads, what it writes."""

import os

import pytest
from torch.testing import assert_close

from tests.helpers.checks import assert_same_losses, hooks_to_compare, replicas
from tests.helpers.scripts import task_of
from tools.run.launch import DISTRIBUTED
from tools.run.results import losses
from tools.scripts import SCRIPTS

# 197 samples by 3 ranks and 17 held out: nothing divides evenly.
RUNS = [(name, 2) for name in DISTRIBUTED] + [("multigpu.py", 3)]
of_each_run = pytest.mark.parametrize(("name", "nprocs"), RUNS)


def steps(facts, epoch):
    """The samples of each step of all replicas together, as sets."""
    orders = [rank["orders"][epoch] for rank in facts]
    size = 66 // len(facts)
    found = []
    for start in range(0, len(orders[0]), size):
        samples = set()
        for order in orders:
            samples.update(order[start : start + size])
        found.append(samples)
    return found


@of_each_run
def test_every_step_has_the_samples_of_one_process(probes, name, nprocs):
    """Also where neither batches nor ranks divide the number of samples."""
    alone, _ = probes("single_gpu.py")
    facts, _ = probes(name, nprocs)
    facts = replicas(facts)
    for epoch in (0, 1):
        seen = [index for rank in facts for index in rank["orders"][epoch]]
        assert len(seen) == len(set(seen)), "replicas share samples"
        mine = steps(facts, epoch)
        expected = steps(alone, epoch)
        # A sampler may draw an index more than the loader uses up.
        assert mine[:2] == expected[:2]
        assert len(mine) == len(expected)


@of_each_run
def test_same_losses_and_weights_as_one_process(probes, name, nprocs):
    """On 197 samples and 17 held out."""
    hooks = hooks_to_compare(name)
    (alone,), done_alone = probes(task_of(name), 1, hooks)
    ranks, done = probes(name, nprocs, hooks)
    assert_same_losses(losses(done), losses(done_alone))
    for rank in ranks:
        assert_close(rank["weights"], alone["weights"], rtol=0, atol=1e-6)


@of_each_run
def test_every_held_out_sample_counts_once(probes, name, nprocs):
    facts, _ = probes(name, nprocs)
    evaluated = [index for rank in replicas(facts) for index in rank["evaluated"]]
    assert sorted(evaluated) == list(range(17))


@pytest.mark.parametrize("name", SCRIPTS)
def test_order_differs_by_epoch(probes, name):
    facts, _ = probes(name)
    for rank in facts:
        first, second = rank["orders"]
        assert first != second


@of_each_run
def test_ranks_and_epochs_draw_different_random_numbers(probes, name, nprocs):
    """Dropout masks and the like, which ranks that share a batch share as well."""
    facts, _ = probes(name, nprocs)
    drawn = {number for rank in facts for number in rank["random"]}
    assert len(drawn) == 2 * facts[0]["replicas"]


@of_each_run
def test_processes_share_the_cores(probes, name, nprocs):
    facts, _ = probes(name, nprocs)
    cores = max(nprocs, os.cpu_count())
    assert sum(rank["threads"] for rank in facts) <= cores


@of_each_run
def test_no_wait_is_longer_than_five_minutes(probes, name, nprocs):
    facts, _ = probes(name, nprocs)
    assert [rank["timeout_s"] for rank in facts] == [300] * nprocs


@of_each_run
def test_one_rank_writes(probes, name, nprocs):
    facts, _ = probes(name, nprocs)
    assert [rank["writes"] for rank in facts] == [2] + [0] * (nprocs - 1)


@of_each_run
def test_one_rank_prints(probes, name, nprocs):
    _, done = probes(name, nprocs)
    assert done.stdout.count("effective batch 66") == 1
    assert done.stdout.count("epoch 1/2 |") == 1
    assert done.stdout.count("epoch 2/2 |") == 1
    assert done.stdout.count("saved to snapshot.pt") == 2
