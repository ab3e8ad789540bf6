"""Gradients averaged by hand: the weights of DDP, in the messages that are promised."""

import pytest
import torch

from tests.conftest import once
from tests.helpers.checks import help_of, noted
from tools.run.launch import launch, plant, run_script, train
from tools.run.results import load, losses
from tools.scripts import ROOT

NAME = "variants/ddp_by_hand.py"
PARENT = "multigpu.py"
SMALL = ("2**20", "2**11")  # --bucket-mb 1 means 2 kB: several buckets of a small model
UNUSED = ("Parallel(self.model)", "Parallel(self.model, find_unused_parameters=True)")
WAYS = [pytest.param((), id="plain"), pytest.param(("--bucket-mb", 1), id="buckets")]


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """`odd(name, nprocs, options, *changes)`: the snapshot of an odd model."""

    @once
    def run(name, nprocs, options, *changes):
        folder = tmp_path_factory.mktemp("odd")
        script = plant(name, folder / "copy", *changes, hooks=["ddp_by_hand:odd"])
        options = ("--batch-size", 66 // nprocs, *options)
        done = train(
            script, 2, 2, *options, cwd=folder, nprocs=nprocs, own_options=False
        )
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
    alone = odd("single_gpu.py", 1, ())
    torch.testing.assert_close(mine, ddp, rtol=0, atol=2e-6)
    torch.testing.assert_close(mine, alone, rtol=0, atol=5e-6)


# Messages and bytes

DEEP = "torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(8)), {})"
LINEAR = "torch.nn.Linear(20, 1)"


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    """`events(name, options, *changes)`: the events of each rank's second step.

    An event is (name, start, end, shapes of its inputs), and they are in order. The
    model has eight layers of 420 weights, and a last one of 21.
    """

    @once
    def run(name, options=(), *changes):
        folder = tmp_path_factory.mktemp("events")
        deep = (LINEAR, DEEP.format(LINEAR))
        script = plant(name, folder / "copy", deep, *changes, hooks=["ddp_by_hand"])
        options = ("--batch-size", 1024, *options)
        train(script, 2, 2, *options, cwd=folder, own_options=False)
        ranks = noted(folder, "events")
        for its_events in ranks:
            its_events.sort(key=lambda event: event[1])
        return ranks

    return run


def message_sizes(events):
    """The numbers in each all-reduce."""
    sizes = []
    for name, _, _, shapes in events:
        if name == "gloo:all_reduce":
            sizes.append(shapes[0][0])
    return sizes


def messages(ranks):
    """The numbers in each all-reduce of a step, which is the same on all ranks."""
    first, second = map(message_sizes, ranks)
    assert sorted(first) == sorted(second)
    return first


def hidden(ranks):
    """How many all-reduces were launched before the last layer's backward ended."""
    launched = []
    computed = []
    for name, start, end, _ in ranks[0]:
        if name == "c10d::allreduce_":
            launched.append(start)
        elif name.endswith(": AddmmBackward0"):
            computed.append(end)
    backward_ended = max(computed)
    return sum(start < backward_ended for start in launched)


BUCKETS = NAME, ("--bucket-mb", 1), SMALL
GRADIENTS = 8 * 420 + 21
PARAMETERS = 18


def test_plainly_each_gradient_is_a_message_after_backward(events):
    """With one number more, which says whether this rank has used the parameter."""
    plain = events(NAME)
    assert messages(plain) == [401, 21] * 8 + [21, 2]
    assert hidden(plain) == 0


def test_buckets_are_few_messages_and_leave_inside_backward(events):
    """The first has the last layer. A bucket is full when it has reached 512 numbers.

    The last bucket is complete when backward is at its end.
    """
    in_buckets = events(*BUCKETS)
    assert sorted(messages(in_buckets)) == [844, 844, 844, 867]
    assert 2 <= hidden(in_buckets) <= 3


def test_the_bytes_are_those_of_ddp_that_finds_unused_parameters(events):
    """Which sends one number for each parameter in a message more."""
    ddp = messages(events(PARENT))
    that_finds = messages(events(PARENT, (), UNUSED))
    assert ddp == [GRADIENTS]
    assert sorted(that_finds) == [PARAMETERS, GRADIENTS]
    assert sum(messages(events(NAME))) == GRADIENTS + PARAMETERS
    assert sum(messages(events(*BUCKETS))) == GRADIENTS + PARAMETERS


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
    shown = help_of(NAME, tmp_path)
    assert "bucket size (default: none, each gradient is sent alone" in shown
    done = run_script(ROOT / NAME, 1, 1, "--bucket-mb", 0, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "argument --bucket-mb: '0' is not a whole number above 0" in done.stderr
