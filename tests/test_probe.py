"""What each rank did, seen from inside: samples, order, threads, the way it ends."""

import ast
import json
import os

import pytest
import torch

from ladder.rungs import RUNGS
from proofs.launch import DISTRIBUTED, hooks_to_compare, plant, task_of, train

two_ranks = pytest.mark.parametrize(("name", "nprocs"), [(x, 2) for x in DISTRIBUTED])


def steps(facts, epoch):
    """The samples of each step of all ranks together, as sets."""
    orders, size = [x["orders"][epoch] for x in facts], 66 // len(facts)
    starts = range(0, len(orders[0]), size)
    return [{i for order in orders for i in order[at : at + size]} for at in starts]


@two_ranks
def test_every_step_has_the_samples_of_one_process(probes, name, nprocs):
    """Also where neither batches nor ranks divide the number of samples."""
    _, (alone,), _ = probes("single_gpu.py", 1)
    _, facts, _ = probes(name, nprocs)
    for epoch in (0, 1):
        seen = [i for x in facts for i in x["orders"][epoch]]
        assert len(seen) == len(set(seen)), "ranks share samples"
        # A sampler may draw an index more than the loader uses up.
        assert steps(facts, epoch)[:2] == steps([alone], epoch)[:2]
        assert len(steps(facts, epoch)) == len(steps([alone], epoch))


@two_ranks
def test_same_losses_and_weights_as_one_process(probes, name, nprocs):
    """On 197 samples and 17 held out."""
    hooks = hooks_to_compare(name)
    alone, (facts,), _ = probes(task_of(name), 1, hooks)
    several, ranks, _ = probes(name, nprocs, hooks)
    torch.testing.assert_close(several, alone, rtol=1e-6, atol=2e-6)
    for rank in ranks:
        torch.testing.assert_close(rank["weights"], facts["weights"], rtol=0, atol=1e-6)


@two_ranks
def test_every_held_out_sample_counts_once(probes, name, nprocs):
    _, facts, _ = probes(name, nprocs)
    assert sorted(i for x in facts for i in x["evaluated"]) == list(range(17))


@pytest.mark.parametrize("name", RUNGS)
def test_order_differs_by_epoch(probes, name):
    _, facts, _ = probes(name, 2)
    for rank in facts:
        first, second = rank["orders"]
        assert first != second


@two_ranks
def test_ranks_and_epochs_draw_different_random_numbers(probes, name, nprocs):
    """Dropout masks and the like, and those of rung 0 where there is one rank."""
    _, facts, _ = probes(name, nprocs)
    drawn = [x for rank in facts for x in rank["random"]]
    assert len(set(drawn)) == 2 * nprocs


@two_ranks
def test_each_rank_asks_for_a_device_of_its_own(probes, name, nprocs):
    _, facts, _ = probes(name, nprocs)
    assert [x["local_rank"] for x in facts] == list(range(nprocs))


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_processes_share_the_cores(probes, name):
    _, facts, _ = probes(name, 2)
    cores = max(2, os.cpu_count())
    assert sum(x["threads"] for x in facts) <= cores


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_no_wait_is_longer_than_five_minutes(probes, name):
    _, facts, _ = probes(name, 2)
    assert [x["timeout_s"] for x in facts] == [300, 300]


@two_ranks
def test_one_rank_writes(probes, name, nprocs):
    _, facts, _ = probes(name, nprocs)
    assert [x["writes"] for x in facts] == [2] + [0] * (nprocs - 1)


@two_ranks
def test_one_rank_prints(probes, name, nprocs):
    _, _, done = probes(name, nprocs)
    assert done.stdout.count("effective batch 66") == 1
    assert done.stdout.count("epoch 1/2 |") == 1
    assert done.stdout.count("epoch 2/2 |") == 1
    assert done.stdout.count("epoch 2 saved to snapshot.pt") == 1


def with_lines_added(text):
    """(`text` with a line added after each statement of `train`, their number)."""
    (trainer,) = (
        x for x in ast.parse(text).body if getattr(x, "name", "") == "Trainer"
    )
    (train,) = (x for x in trainer.body if getattr(x, "name", "") == "train")
    statements = [x for x in ast.walk(train) if isinstance(x, ast.stmt) and x != train]
    lines = text.splitlines()
    # From the last line to the first: those that are still to come keep their numbers.
    # Of blocks that end together, what goes after the inner one comes first.
    ends = sorted(statements, key=lambda x: (x.end_lineno, -x.col_offset))
    for number in reversed(range(len(ends))):
        end = ends[number]
        indent = " " * end.col_offset
        lines.insert(end.end_lineno, f"{indent}self.passed.append({number})")
    return "\n".join(lines) + "\n", len(ends)


@pytest.mark.parametrize("name", RUNGS)
def test_a_line_added_anywhere_in_train_runs_on_every_rank(name, tmp_path):
    """A reader adds a scheduler's step, a counter or a `break` wherever it seems right.

    On rank 0 alone, it would change what that rank does, with no error.
    """
    script = plant(name, tmp_path / "copy", hooks=["note_lines"])
    text, count = with_lines_added(script.read_text())
    assert count > 8
    script.write_text(text)
    train(script, 2, 1, cwd=tmp_path)
    files = sorted(tmp_path.glob("noted.*.json"))
    assert len(files) == (2 if name in DISTRIBUTED else 1)
    passed = [json.loads(file.read_text()) for file in files]
    assert set(passed[0]) == set(range(count))
    assert all(x == passed[0] for x in passed)


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_what_ranks_exchange_is_on_the_device(name, tmp_path):
    """On a GPU, NCCL takes nothing else. On a CPU a hook sees to it."""
    script = plant(name, tmp_path / "copy", hooks=["on_device"])
    train(script, 1, 1, cwd=tmp_path)


@pytest.mark.parametrize(
    "test",
    [
        test_every_step_has_the_samples_of_one_process,
        test_same_losses_and_weights_as_one_process,
        test_every_held_out_sample_counts_once,
        test_one_rank_writes,
        test_one_rank_prints,
    ],
)
def test_multigpu_with_three_ranks(probes, test):
    """197 samples by 3 ranks and 17 held out: nothing divides evenly."""
    test(probes, "multigpu.py", 3)
