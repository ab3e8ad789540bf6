"""Gradients averaged by hand: the weights of DDP, in the messages that are promised."""

import json

import pytest
import torch

from tests.conftest import once
from tools.run.launch import launch, plant, run_script, train
from tools.run.results import load, losses
from tools.scripts import ROOT

NAME, PARENT = "variants/ddp_by_hand.py", "multigpu.py"
SMALL = ("2**20", "2**11")  # --bucket-mb 1 means 2 kB: several buckets of a small model
UNUSED = ("Parallel(self.model)", "Parallel(self.model, find_unused_parameters=True)")
WAYS = [pytest.param((), id="plain"), pytest.param(("--bucket-mb", 1), id="buckets")]
ODD = "ddp_by_hand:odd"


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """`odd(name, nprocs, options, *changes)`: the snapshot of an odd model."""

    @once
    def run(name, nprocs, options, *changes):
        folder = tmp_path_factory.mktemp("odd")
        script = plant(name, folder / "copy", *changes, hooks=[ODD])
        size = ("--batch-size", 66 // nprocs)
        how = {"nprocs": nprocs, "own_options": False}
        done = train(script, 2, 2, *size, *options, cwd=folder, **how)
        return load(folder / "snapshot.pt"), losses(done)

    return run


@pytest.mark.waits
@pytest.mark.parametrize("nprocs", [1, 2, 3])
@pytest.mark.parametrize("options", WAYS)
def test_an_odd_model_is_trained_as_by_ddp_and_by_one_process(odd, options, nprocs):
    """Frozen, tied, in two dtypes, used by some ranks or by none: hooks/ddp_by_hand.py.

    The ranks begin with other weights and buffers.
    """
    mine = odd(NAME, nprocs, options, SMALL)
    ddp = odd(PARENT, nprocs, (), UNUSED)
    torch.testing.assert_close(mine, ddp, rtol=0, atol=2e-6)
    torch.testing.assert_close(mine, odd("single_gpu.py", 1, ()), rtol=0, atol=5e-6)


# Messages and bytes

DEEP = "torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(8)), {})"
LINEAR = "torch.nn.Linear(20, 1)"


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    """`events(name, *options)`: [(name, start, end, shapes)] of the second step.

    The model has eight layers of 420 weights, and a last one of 21.
    """

    @once
    def run(name, options=(), *changes):
        folder = tmp_path_factory.mktemp("events")
        deep = (LINEAR, DEEP.format(LINEAR))
        script = plant(name, folder / "copy", deep, *changes, hooks=["ddp_by_hand"])
        size = ("--batch-size", 1024, *options)
        train(script, 2, 2, *size, cwd=folder, own_options=False)
        found = [json.loads(x.read_text()) for x in folder.glob("events.*.json")]
        assert len(found) == 2
        return [sorted(x, key=lambda event: event[1]) for x in found]

    return run


def messages(ranks):
    """The numbers in each all-reduce of a step, which is the same on all ranks."""
    one, other = ([x[3][0][0] for x in y if x[0] == "gloo:all_reduce"] for y in ranks)
    assert sorted(one) == sorted(other)
    return one


def hidden(ranks):
    """How many all-reduces were launched before the last layer's backward ended."""
    launched = [x[1] for x in ranks[0] if x[0] == "c10d::allreduce_"]
    computed = max(x[2] for x in ranks[0] if x[0].endswith(": AddmmBackward0"))
    return sum(x < computed for x in launched)


BUCKETS = NAME, ("--bucket-mb", 1), SMALL
GRADIENTS, PARAMETERS = 8 * 420 + 21, 18


def test_plainly_each_gradient_is_a_message_after_backward(events):
    """With one number more, which says whether this rank has used the parameter."""
    assert messages(events(NAME)) == [401, 21] * 8 + [21, 2]
    assert hidden(events(NAME)) == 0


def test_buckets_are_few_messages_and_leave_inside_backward(events):
    """The first has the last layer. A bucket is full when it has reached 512 numbers.

    The last bucket is complete when backward is at its end.
    """
    sent = messages(events(*BUCKETS))
    assert sorted(sent) == [844, 844, 844, 867]
    assert 2 <= hidden(events(*BUCKETS)) <= 3


def test_the_bytes_are_those_of_ddp_that_finds_unused_parameters(events):
    """Which sends one number for each parameter in a message more."""
    ddp, finds = (messages(events(PARENT, (), *x)) for x in ((), (UNUSED,)))
    assert ddp == [GRADIENTS]
    assert sorted(finds) == [PARAMETERS, GRADIENTS]
    total = GRADIENTS + PARAMETERS
    assert sum(messages(events(NAME))) == sum(messages(events(*BUCKETS))) == total


# What else it claims


def test_a_second_backward_in_a_step_is_refused(tmp_path):
    """Its gradients would come too late for a bucket that has left."""
    twice = ("loss.backward()", "loss.backward(retain_graph=True); loss.backward()")
    script = plant(NAME, tmp_path / "copy", twice)
    done = launch(script, 1, 1, cwd=tmp_path, real="")
    assert done.returncode == 1
    assert "RuntimeError: a second backward() in one step" in done.stderr


def test_help_and_bad_input(tmp_path):
    """No option is the plainest way, so 0 is an error."""
    words = " ".join(run_script(ROOT / NAME, "--help", cwd=tmp_path).stdout.split())
    assert "bucket size (default: none, each gradient is sent alone" in words
    done = run_script(ROOT / NAME, 1, 1, "--bucket-mb", 0, cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "argument --bucket-mb: '0' is not a whole number above 0" in done.stderr
