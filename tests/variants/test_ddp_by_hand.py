"""Gradients averaged by hand: the weights of DDP, in the messages that are promised."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.helpers.checks import help_of, noted
from tests.hooks import replace, write
from tools.run.launch import run_script, train
from tools.run.results import load, losses
from tools.scripts import ROOT

NAME = "variants/ddp_by_hand.py"
PARENT = "multigpu.py"
SMALL = ("2**20", "2**11")  # --bucket-mb 1 means 2 kB: several buckets of a small model
BUCKETS = ("--bucket-mb", 1)
UNUSED = ("Parallel(self.model)", "Parallel(self.model, find_unused_parameters=True)")


class Odd(nn.Module):
    """Frozen weights, two dtypes, memory in other orders, unused parameters.

    One sample in 80 uses `rare`: in most steps some ranks do, or none. It fills the
    first bucket, so that a rank which does not wait for it sends in another order.
    """

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(20, 20).requires_grad_(False)
        self.first = nn.Linear(20, 20)
        self.conv = nn.Conv2d(5, 20, 2).to(memory_format=torch.channels_last)
        self.last = nn.Linear(20, 1).double()
        self.never = nn.Parameter(torch.randn(20))
        self.register_buffer("scale", torch.rand(20))
        self.rare = nn.Linear(20, 26)

    def forward(self, source):
        hidden = torch.tanh(self.first(self.frozen(source))) * self.scale
        images = source.view(-1, 5, 2, 2)
        hidden = hidden + self.conv(images).flatten(1)
        rare = source[:, :1] > 2.25
        if rare.any():
            hidden = hidden + rare * self.rare(source).mean(1, keepdim=True)
        return self.last(hidden.double()).float()


def train_odd(script):
    """It begins with other numbers on each rank, and with the same on rank 0."""

    def load_train_objs(inner):
        train_set, eval_set, _, loss_fn = inner()
        return train_set, eval_set, Odd(), loss_fn

    def make_optimizer(model):
        for tensor in model.state_dict().values():
            tensor += script["utils"].get_rank()
        weights = model.parameters()
        return torch.optim.AdamW(weights, lr=0.01, weight_decay=0.1, fused=True)

    replace(script, "load_train_objs", load_train_objs)
    script["make_optimizer"] = make_optimizer


@pytest.mark.waits
def test_an_odd_model_is_trained_as_by_ddp_and_by_one_process(tmp_path):
    """On three ranks, in both ways. `Odd` and `train_odd` say what is odd."""

    def trained(way, name, *options, changes=()):
        folder = tmp_path / way
        done = train(
            name,
            2,
            2,
            *options,
            cwd=folder,
            nprocs=3,
            batch=66,
            own_options=False,
            changes=changes,
            hooks=[train_odd],
        )
        return load(folder), losses(done)

    alone = trained("alone", "single_gpu.py")
    ddp = trained("ddp", PARENT, changes=[UNUSED])
    plain = trained("plain", NAME)
    in_buckets = trained("buckets", NAME, *BUCKETS, changes=[SMALL])
    for mine in (plain, in_buckets):
        torch.testing.assert_close(mine, ddp, rtol=0, atol=2e-6)
        torch.testing.assert_close(mine, alone, rtol=0, atol=5e-6)


# Messages and bytes

LINEAR = "torch.nn.Linear(20, 1)"
DEEP = f"torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(8)), {LINEAR})"
GRADIENTS = 8 * 420 + 21
PARAMETERS = 18


def note_messages(script):
    """messages.RANK.json: what the last step did, from its first to its last event.

    Of an all-reduce, the numbers in it. "launched": one of them is. "computed": the
    backward pass of a layer begins.
    """

    def run_batch(inner, *arguments):
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            dist.barrier()  # or a rank waits for another's profiler to start
            loss = inner(*arguments)
        messages = []
        for event in sorted(seen.events(), key=lambda event: event.time_range.start):
            if event.name == "gloo:all_reduce":
                messages.append(event.input_shapes[0][0])
            elif event.name == "c10d::allreduce_":
                messages.append("launched")
            elif event.name.endswith(": AddmmBackward0"):
                messages.append("computed")
        write("messages", messages)
        return loss

    replace(script["Trainer"], "_run_batch", run_batch)


def messages(name, folder, *options, changes=()):
    """(the numbers in each message of a step, how many leave inside backward)

    The model has eight layers of 420 weights, and a last one of 21.
    """
    train(
        name,
        1,
        1,
        *options,
        cwd=folder,
        own_options=False,
        changes=[(LINEAR, DEEP), *changes],
        hooks=[note_messages],
    )
    events, _ = noted(folder, "messages")
    sizes = [event for event in events if isinstance(event, int)]
    while events.pop() != "computed":  # the first layer, whose backward is the last
        pass
    return sorted(sizes), events.count("launched")


def test_plainly_each_gradient_is_a_message_after_backward(tmp_path):
    """With one number more, which says whether this rank has used the parameter."""
    sizes, hidden = messages(NAME, tmp_path)
    assert sizes == sorted([401, 21] * 8 + [21, 2])
    assert hidden == 0


def test_buckets_are_few_messages_and_leave_inside_backward(tmp_path):
    """The first has the last layer. A bucket is full when it has reached 512 numbers.

    The last bucket is complete when backward is at its end.
    """
    sizes, hidden = messages(NAME, tmp_path, *BUCKETS, changes=[SMALL])
    assert sizes == [844, 844, 844, 867]
    assert sum(sizes) == GRADIENTS + PARAMETERS
    assert 2 <= hidden <= 3


def test_the_bytes_are_those_of_ddp_that_finds_unused_parameters(tmp_path):
    """Which sends one number for each parameter in a message more."""
    sizes, _ = messages(PARENT, tmp_path, changes=[UNUSED])
    assert sizes == [PARAMETERS, GRADIENTS]


# What else it claims


def test_a_second_backward_in_a_step_is_refused(tmp_path):
    """Its gradients would come too late for a bucket that has left."""
    twice = ("loss.backward()", "loss.backward(retain_graph=True); loss.backward()")
    done = train(NAME, 1, 1, status=1, cwd=tmp_path, changes=[twice])
    assert "RuntimeError: a second backward() in one step" in done.stderr


def test_help_and_bad_input(tmp_path):
    """No option is the plainest way, so 0 is an error."""
    shown = help_of(NAME, tmp_path)
    assert "bucket size (default: none, each gradient is sent alone" in shown
    done = run_script(ROOT / NAME, 1, 1, "--bucket-mb", 0, cwd=tmp_path)
    line = "argument --bucket-mb: '0' is not a whole number above 0"
    assert done == (2, "", f"ddp_by_hand.py: error: {line}\n")
