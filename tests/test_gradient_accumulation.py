"""Micro-batches: the gradient of the whole batch, and one all-reduce for each step."""

import json
import re
import shutil

import pytest
import torch
import torch.nn.functional as F

import utils
from ladder.rungs import ROOT
from proofs.launch import objects_of, plant, run_script, train
from proofs.results import load, same_bits
from proofs.warm import Fork
from tests.conftest import once
from tests.test_input import refused

NAME = "variants/gradient_accumulation.py"
PAGE = "docs/gradient_accumulation.md"
TOKENS, GROUPS = "docs/accumulation/tokens.py", "docs/accumulation/groups.py"
STEPS = 32  # of an epoch with an effective batch of 64
BYTES = 21 * 8  # of all gradients, in float64

# What the mistakes of the chapter put into the script
WITH = "with contextlib.nullcontext() if last else self.ddp_model.no_sync():"
EVERY_TIME = (WITH, "if True:")
BACKWARD_ONLY = (EVERY_TIME, ("loss.backward()", f"{WITH} loss.backward()"))
FLAG = "self.ddp_model.require_backward_grad_sync = last; loss.backward()"
BETWEEN = (EVERY_TIME, ("loss.backward()", FLAG))
BY_N = (
    ("(output, targets[micro]) * share", "(output, targets[micro]) / self.accumulate"),
)


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    """`sent(accumulate, changes=(), nprocs=2)`: what each rank noted, in float64.

    One epoch with an effective batch of 64. The notes: proofs/hooks/accumulation.py.
    """

    @once
    def run(accumulate, changes, nprocs):
        folder = tmp_path_factory.mktemp("sent")
        script = plant(NAME, folder / "copy", *changes, hooks=["accumulation"])
        options = ("--batch-size", 64 // nprocs, "--accumulate", accumulate)
        train(script, 1, 1, *options, cwd=folder, nprocs=nprocs, DOUBLE=1)
        return [
            json.loads((folder / f"sent.{rank}.json").read_text())
            for rank in range(nprocs)
        ]

    return lambda accumulate, changes=(), nprocs=2: run(accumulate, changes, nprocs)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process noted that takes the effective batch at once."""
    folder = tmp_path_factory.mktemp("alone")
    script = plant("single_gpu.py", folder / "copy", hooks=["accumulation"])
    train(script, 1, 1, "--batch-size", 64, cwd=folder, DOUBLE=1)
    return json.loads((folder / "sent.0.json").read_text())


def apart(one, other):
    """The largest difference of two lists of numbers."""
    return (torch.tensor(one).double() - torch.tensor(other).double()).abs().max()


# Exact, and sent once


@pytest.mark.parametrize(
    ("accumulate", "nprocs"), [(1, 2), (4, 2), (5, 2), (10, 2), (40, 2), (3, 4)]
)
def test_same_weights_as_one_process(sent, alone, accumulate, nprocs):
    """Batches of 32 in 5 pieces (the last has 4), in 8, or in 32; of 16 in 3."""
    for rank in sent(accumulate, nprocs=nprocs):
        assert apart(rank["used"], alone["used"]) < 1e-13
        assert apart(rank["weights"], alone["weights"]) < 1e-13


@pytest.mark.parametrize("accumulate", [1, 4, 5, 40])
def test_one_all_reduce_for_each_step(sent, accumulate):
    """Of all gradients, however many micro-batches there are."""
    for rank in sent(accumulate):
        assert rank["steps"] == [[BYTES]] * STEPS


def test_one_micro_batch_is_the_parent(runs, tmp_path):
    """Without the option, to the last bit."""
    done = train(ROOT / NAME, 5, 2, cwd=tmp_path, own_options=False)
    folder, parent = runs("multigpu.py")
    assert same_bits(load(tmp_path / "snapshot.pt"), load(folder / "snapshot.pt"))
    speed = r"[\d,]+ samples/s"
    assert re.sub(speed, "", done.stdout) == re.sub(speed, "", parent.stdout)


@pytest.mark.parametrize("value", ["0", "-1", "two"])
def test_bad_accumulate(value, tmp_path):
    line = refused(NAME, tmp_path, 5, 1, "--accumulate", value)
    assert line == f"argument --accumulate: '{value}' is not a whole number above 0"


def test_help_says_what_is_cut(tmp_path):
    done = run_script(ROOT / NAME, "--help", cwd=tmp_path)
    help_text = " ".join(done.stdout.split())
    assert "micro-batches that a process cuts its batch into (default: 1)" in help_text


# The mistakes that no error shows


def test_without_no_sync_every_micro_batch_is_sent(sent, alone):
    for rank in sent(5, (EVERY_TIME,)):
        assert rank["steps"] == [[BYTES] * 5] * STEPS
        assert apart(rank["weights"], alone["weights"]) < 1e-13


def gradients_of_first_step():
    """[rank][micro-batch]: the share of each in the first step, 5 pieces of 32."""
    train_set, _, model, loss_fn, _ = objects_of(NAME)
    order = torch.randperm(2048, generator=torch.Generator().manual_seed(0))
    shares = []
    for rank in (0, 1):
        batch = [train_set[i] for i in order[rank::2][:32]]
        source, targets = map(torch.stack, zip(*batch, strict=True))
        pieces = zip(source.split(7), targets.split(7), strict=True)
        grads = [
            torch.autograd.grad(
                loss_fn(model(x), y) * len(x) / 32, list(model.parameters())
            )
            for x, y in pieces
        ]
        shares.append([torch.cat([x.flatten() for x in some]) for some in grads])
    return shares


def test_no_sync_around_backward_alone_changes_nothing(sent, alone):
    """DDP reduces all that has accumulated: the mean so far, and this rank's new."""
    for rank, notes in enumerate(sent(5, BACKWARD_ONLY)):
        assert notes["steps"] == [[BYTES] * 5] * STEPS
        assert apart(notes["weights"], alone["weights"]) < 1e-13
        shares = gradients_of_first_step()
        for i, buffer in enumerate(notes["first"]):
            before = sum(shares[0][:i] + shares[1][:i]) / 2
            mine = torch.tensor(buffer, dtype=torch.float64)
            expected = (before + shares[rank][i]).sort()[0]  # DDP has its own order
            assert apart(mine.sort()[0].tolist(), expected.tolist()) < 1e-4


def test_a_flag_set_between_forward_and_backward_lets_ranks_drift(sent, alone):
    """DDP sends the first micro-batch's gradients alone; the others stay local."""
    notes = sent(5, BETWEEN)
    assert [x["steps"] for x in notes] == [[[BYTES]] * STEPS] * 2
    for rank, shares in zip(notes, gradients_of_first_step(), strict=True):
        first = torch.tensor(rank["first"][0]).sort()[0].tolist()
        assert apart(first, shares[0].sort()[0].tolist()) < 1e-4
    assert apart(notes[0]["weights"], notes[1]["weights"]) > 0.01
    assert apart(notes[0]["weights"], alone["weights"]) > 0.01


@pytest.mark.parametrize(("accumulate", "factor"), [(4, 1), (5, None), (10, 0.8)])
def test_divided_by_n_uneven_micro_batches_are_wrong(sent, alone, accumulate, factor):
    """Right for 4 equal pieces. 10 make 8 pieces of 4: all gradients are too small."""
    used = sent(accumulate, BY_N)[0]["used"]
    right = torch.tensor(alone["used"], dtype=torch.float64)
    if factor:
        assert apart(used, (factor * right).tolist()) < 1e-13
    else:
        assert apart(used, right.tolist()) > 0.01 * right.abs().max()


# What a reader adds


def test_clipped_after_the_last_micro_batch(tmp_path):
    """Between the loop and the optimizer: as in one process, in float64."""
    step = "self.optimizer.step()"
    clip = f"torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5); {step}"
    ended = []
    for name, options in {
        "single_gpu.py": (64,),
        NAME: (32, "--accumulate", 5),
    }.items():
        script = plant(name, tmp_path / "copy", (step, clip), hooks=["accumulation"])
        train(script, 1, 1, "--batch-size", *options, cwd=tmp_path, DOUBLE=1)
        ended.append(json.loads((tmp_path / "sent.0.json").read_text()))
        (tmp_path / "snapshot.pt").unlink()
    assert torch.tensor(ended[0]["used"]).norm() == pytest.approx(0.5, rel=1e-4)
    assert apart(ended[0]["weights"], ended[1]["weights"]) < 1e-13


def test_batch_normalization_sees_micro_batches(tmp_path):
    """Each of 4 updates the statistics, and none sees the whole batch."""
    script = plant(NAME, tmp_path / "copy", hooks=["batch_norm"])
    train(script, 1, 1, cwd=tmp_path)
    state = load(tmp_path / "snapshot.pt")["MODEL_STATE"]
    assert state["0.num_batches_tracked"] == 4 * STEPS


def test_a_loss_that_compares_samples():
    """The mean of the micro-batches' losses has another gradient than the batch."""
    model = utils.Encoder(20, 8).double()
    source, targets = (torch.stack(x) for x in zip(*utils.load_views()[0], strict=True))
    source = source[:32].double()
    whole, pieces = (
        torch.autograd.grad(
            sum(
                utils.info_nce(model(source[x : x + size]), targets[x : x + size])
                for x in range(0, 32, size)
            )
            / (32 / size),
            model.linear.weight,
        )[0]
        for size in (32, 8)
    )
    assert (pieces - whole).norm() > 0.1 * whole.norm()


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """(folder, line) of a run with docs/accumulation/watch.py."""
    folder = tmp_path_factory.mktemp("watched")
    attach = "from docs.accumulation import watch; watch.attach(self)"
    change = ("self.epochs_run = 0", f"self.epochs_run = 0; {attach}")
    script = plant(NAME, folder / "copy", change)
    shutil.copytree(ROOT / "docs" / "accumulation", folder / "copy/docs/accumulation")
    done = train(script, 5, 2, cwd=folder)
    lines = {x for x in done.stdout.splitlines() if x.startswith("per step")}
    return folder, lines


def test_less_is_kept_for_backward(watched):
    """A quarter: of 8 samples, not 32, 20 features, an output and a target."""
    assert watched[1] == {
        "per step: all-reduces 1, bytes 84 | gradient error 0.000 %"
        f" | ranks apart 0.000000 | bytes kept for backward {8 * 22 * 4}"
    }


def test_watching_changes_no_bit(watched, runs):
    snapshots = [load(x / "snapshot.pt") for x in (watched[0], runs(NAME)[0])]
    assert same_bits(*snapshots)


# The scripts of the chapter


def printed(script, nprocs, cwd):
    """{what a line is about: its number} of a script under torchrun."""
    start = ["torchrun", "--standalone", f"--nproc-per-node={nprocs}"]
    done = Fork([*start, str(ROOT / script)], cwd, OMP_NUM_THREADS=1).finish()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^(.+): \D*(\d+\.\d+)", done.stdout, re.M)
    return {what: float(number) for what, number in lines}


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_a_mean_over_tokens(nprocs, tmp_path):
    """Exact if divided by the tokens of all ranks. By this rank's: if it is alone."""
    errors = printed(TOKENS, nprocs, tmp_path)
    assert errors["divided by all ranks' tokens"] == 0
    assert errors["the mean of all means"] > 1
    assert (errors["divided by this rank's tokens"] > 1) == (nprocs > 1)


def test_a_micro_batch_of_padding():
    """Its mean is nan, which no later step mends; its sum is 0."""
    logits, labels = torch.zeros(3, 5), torch.full((3,), -100)
    assert F.cross_entropy(logits, labels).isnan()
    assert F.cross_entropy(logits, labels, reduction="sum") == 0


def test_groups_of_a_loader(tmp_path):
    """Eleven batches, four to a step, and the last is shorter."""
    weights = printed(GROUPS, 3, tmp_path)
    assert weights["by_group"] == 0
    assert weights["by_count"] > 0.1


@pytest.mark.text
def test_the_page_shows_lines_of_the_scripts():
    text = "".join((ROOT / name).read_text() for name in (TOKENS, GROUPS))
    there = {line.strip() for line in text.splitlines()}
    fences = re.findall(r"```python\n(.*?)```", (ROOT / PAGE).read_text(), re.S)
    assert len(fences) == 3
    shown = [line.strip() for fence in fences for line in fence.splitlines()]
    assert not [line for line in shown if line not in there]
