"""The benchmarks measure what they say, on the scripts as they are now.

The frameworks that benchmarks.loop compares with need benchmarks/requirements.txt, and
are not tried here.
"""

import itertools
import re
from argparse import Namespace

import pytest
import torch

import single_gpu
from benchmarks import loop, variants
from ladder.files import edit
from ladder.rungs import ROOT
from proofs.hosts import Hosts
from proofs.warm import Fork

WIDTH = 512


def weights(features, outputs):
    """How many the job's model has: a task's own, one linear layer, behind its body."""
    sizes = [features, *[WIDTH] * 4, features, outputs]
    return sum((n + 1) * m for n, m in itertools.pairwise(sizes))


WEIGHTS = weights(20, 1)  # for the trunk's task
GRADIENTS = 4 * WEIGHTS  # bytes

needs_networks = pytest.mark.skipif(
    variants.why_no_networks("cpu") is not None,
    reason=str(variants.why_no_networks("cpu")),
)


@pytest.mark.parametrize("kind", [loop.BareLoop, loop.SingleGpu])
def test_the_loop_of_single_gpu_is_measured(kind):
    torch.manual_seed(0)
    train_objs = single_gpu.load_train_objs()
    contestant = kind(train_objs, torch.device("cpu"))
    contestant.run(1)
    assert contestant.seconds > 0
    before = train_objs[2].weight
    assert not torch.equal(contestant.model.weight, before)


# benchmarks.variants


def run_variants(*arguments):
    """`python -m benchmarks.variants ARGUMENTS`, in a fork: Done."""
    words = ["python", "-m", "benchmarks.variants", *arguments, "--width", WIDTH]
    return Fork(words, ROOT).finish()


def rows_of(text):
    """{row: [the medians of its three cells]} of the first table that was printed."""
    cells = 3 * r" +([\d.,]+)%? \(\S+ \.\. \S+\)"
    return {
        row: [float(x.replace(",", "")) for x in found]
        for row, *found in re.findall(f"^(parent|variant|ratio){cells}$", text, re.M)
    }


def edge(name, folder, networks=(), nprocs=2):
    args = Namespace(rounds=1, nprocs=nprocs, width=WIDTH)
    return variants.Edge(name, folder, networks, "cpu", args)


def test_a_variant_is_measured_beside_its_parent():
    name = "variants/preemptible.py"
    done = run_variants(name, "--rounds", 1, "--steps", 2, "--batch-size", 32)
    assert done.returncode == 0, done.stderr
    for heading in ("command", "machine", "versions", "plan", "sent", "peak"):
        assert re.search(f"^{heading}  +\\S", done.stdout, re.M)
    title = f"{name} beside multinode.py\n{WEIGHTS:,} weights; loss "
    assert title in done.stdout
    losses = re.search(r"loss (\S+) of the parent, (\S+) of the variant", done.stdout)
    assert losses[1] == losses[2], "both train the same"
    assert re.search("^ +steps/s +MB sent in a step +peak MB$", done.stdout, re.M)
    rows = rows_of(done.stdout)
    for parent, variant, ratio in zip(*rows.values(), strict=True):
        assert ratio == pytest.approx(variant / parent, abs=0.05)
    assert rows["ratio"][1:] == pytest.approx([1, 1], abs=0.05), "bytes and memory"


def test_a_task_of_its_own_is_the_parents_as_well(tmp_path):
    own = edge("variants/real_job.py", tmp_path, nprocs=1)
    assert own.own_task
    turn = own.run(variants.Side("multinode.py", 8), TRAIN_SAMPLES=8)
    assert turn.weights == weights(64, 10)
    assert turn.loss < 5, "the trunk's, a squared error, is about 20 in the beginning"


def test_without_networks_the_all_reduces_are_counted(tmp_path):
    """What DDP gives to them, which does not depend on the number of ranks."""
    three = edge("multigpu.py", tmp_path, nprocs=3)
    turn = three.run(variants.Side("multigpu.py", 8), TRAIN_SAMPLES=2 * 3 * 8)
    assert turn.weights == WEIGHTS
    assert turn.sent_bytes == 2 * GRADIENTS


@pytest.mark.waits
@needs_networks
@pytest.mark.parametrize("hosts", [1, 3])
def test_the_bytes_of_a_ring_are_counted(tmp_path, hosts):
    """Each of W ranks sends 2 (W - 1) / W times the gradients, and TCP's headers."""
    with Hosts(hosts, tmp_path) as found:
        networks = [f"/proc/{host.pid}/ns/net" for host in found]
        three = edge("variants/preemptible.py", tmp_path / "edge", networks, nprocs=3)
        turn = three.run(variants.Side("multinode.py", 8), TRAIN_SAMPLES=2 * 3 * 8)
    ring = 2 * GRADIENTS * 4 / 3
    assert ring < turn.sent_bytes < 1.06 * ring


def test_the_peak_of_memory_is_that_of_the_tensors(tmp_path):
    """Weights, gradients and momentum; and what the body's layers leave behind.

    That is four outputs, with one before its ReLU, and up to two gradients of them. It
    is not what the script has taken and given back before.
    """
    alone = edge("multigpu.py", tmp_path)
    side = variants.Side("single_gpu.py", 1024)
    before = "    torch.manual_seed(0)\n"
    edit(alone.scripts[side.name], (before, f"{before}    torch.ones(10**8)\n"))
    turn = alone.run(side, TRAIN_SAMPLES=8 * 1024, GIVE_BACK=1)
    output = 1024 * WIDTH * 4
    least = 3 * GRADIENTS + 4 * output
    assert least < turn.peak_bytes < least + 3.5 * output


@pytest.mark.waits
@needs_networks
def test_accumulation_saves_bytes_and_time_on_a_slow_network():
    """Eight times fewer bytes for a sample. The rest of the time is computing."""
    name = "variants/gradient_accumulation.py"
    few = ("--rounds", 1, "--steps", 1, "--batch-size", 32, "--micro-batch", 8)
    done = run_variants(name, *few, "--mbit", 50)
    assert done.returncode == 0, done.stderr
    ordinary, slow = done.stdout.split(f"{name} --accumulate 8 beside multigpu.py\n")
    assert f"{name} --accumulate 4 beside multigpu.py\n" in ordinary
    assert rows_of(ordinary)["ratio"][1] == pytest.approx(1, abs=0.03), "a step's bytes"
    assert "2 hosts with a rank each, 50 Mbit/s each way" in slow
    rows = rows_of(slow)
    assert rows["ratio"][1] == pytest.approx(1 / 8, abs=0.005), "a sample's bytes"
    assert rows["ratio"][0] > 2, "samples/s"
    assert 50 < rows["parent"][2] < 103, "percent of the time"


@pytest.mark.parametrize(
    "words, message",
    [
        (["variants/nothing.py"], "variants/nothing.py is no rung with a parent"),
        (["single_gpu.py"], "single_gpu.py is no rung with a parent. Those are multi"),
        (["--rounds", "0"], "argument --rounds: '0' is not a whole number above 0"),
        (["--device", "gpu"], "--device gpu: here PyTorch can only use cpu"),
    ],
)
def test_bad_input_ends_in_one_line(words, message):
    done = run_variants(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"variants.py: error: {message}")
    assert done.stderr.count("\n") == 1


def test_what_a_script_refuses_is_said_in_its_line(tmp_path, capsys):
    side = variants.Side("multigpu.py", 8)
    with pytest.raises(SystemExit) as end:
        edge("multigpu.py", tmp_path).run(side, TRAIN_SAMPLES=4)
    assert end.value.code == 2
    line = "error: multigpu.py: one step takes 2 x 8 samples and there are 4: lower"
    assert line in capsys.readouterr().err
