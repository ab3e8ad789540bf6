"""data_parallel.py: what can be seen of DataParallel where there is no GPU.

tests/test_gpu.py has the tests that need two.
"""

import inspect
import json
import threading
import types

import pytest
import torch
import torch.nn.functional as F
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import gather, parallel_apply, replicate, scatter

import utils
from ladder.rungs import ROOT
from proofs.launch import launch, plant, run_script, train
from proofs.results import load, losses, same_bits

NAME = "variants/data_parallel.py"
LOSS_INSIDE = ROOT / "docs/data_parallel/loss_inside.py"
PASSES = (
    "DataParallel passes each batch through: it splits over two or more CUDA GPUs, and"
    " this run uses 0"
)


def noted(folder):
    """What proofs/hooks/data_parallel.py has noted."""
    return json.loads((folder / "noted.json").read_text())


# The script


def test_the_third_line_says_that_it_passes_through(runs):
    _, done = runs(NAME)
    assert done.stdout.splitlines()[2] == PASSES


def test_every_batch_goes_through_the_wrapper(tmp_path):
    """Also those of the evaluation. Without a GPU, the model gets them as they are."""
    script = plant(NAME, tmp_path / "copy", hooks=["data_parallel"])
    train(script, 1, 1, "--batch-size", 60, cwd=tmp_path)
    seen = noted(tmp_path)
    assert seen["wrapper"] == "DataParallel"
    assert seen["train"] == [60] * 34
    assert seen["eval"] == [60] * 8 + [32]
    assert seen["calls"] == [["cpu", x] for x in seen["train"] + seen["eval"]]


def test_on_the_cpu_it_leaves_the_gpus_alone(tmp_path):
    """DataParallel would take them, and refuse a model that is on the CPU."""
    hooks = ["one_accelerator", "data_parallel"]
    script = plant(NAME, tmp_path / "copy", hooks=hooks)
    done = train(script, 1, 1, "--device", "cpu", cwd=tmp_path)
    assert done.stdout.startswith("1 x cpu (cuda is not used), batch 32 each")
    assert done.stdout.splitlines()[2] == PASSES
    assert noted(tmp_path)["wrapper"] == "Linear"


@pytest.mark.parametrize(
    ("count", "batch", "line"),
    [
        (2, 32, "2 of 2 CUDA GPUs: 16 + 16 samples"),
        (3, 32, "3 of 3 CUDA GPUs: 11 + 11 + 10 samples"),
        (4, 10, "4 of 4 CUDA GPUs: 3 + 3 + 3 + 1 samples"),
        (4, 5, "3 of 4 CUDA GPUs: 2 + 2 + 1 samples"),
        (8, 1, "1 of 8 CUDA GPUs: 1 samples"),
    ],
)
def test_the_line_for_several_gpus(count, batch, line):
    """It only needs to know how many there are."""
    wrapper = types.SimpleNamespace(device_ids=list(range(count)))
    expected = f"DataParallel splits each batch over {line}"
    assert utils.describe_split(wrapper, batch) == expected


def test_the_line_for_one_gpu():
    line = utils.describe_split(types.SimpleNamespace(device_ids=[0]), 32)
    assert line == PASSES.replace("uses 0", "uses 1")


# Snapshots


@pytest.fixture(scope="module")
def prefixed(tmp_path_factory):
    """A folder with a snapshot of an older script, whose only model is the wrapper."""
    folder = tmp_path_factory.mktemp("prefixed")
    wrap = "self.dp_model = torch.nn.DataParallel(self.model)"
    change = (wrap, f"self.model = {wrap}")
    script = plant(NAME, folder / "copy", change)
    train(script, 2, 2, "--batch-size", 64, cwd=folder)
    return folder


def test_the_wrappers_own_keys_are_refused(prefixed, copy_of):
    path = copy_of(prefixed)
    assert list(load(path)["MODEL_STATE"]) == ["module.weight", "module.bias"]
    for name in (NAME, "single_gpu.py"):
        done = launch(ROOT / name, 5, 2, cwd=path.parent, real="")
        assert done.returncode == 2
        assert "snapshot.pt belongs to another model: choose" in done.stderr


def test_without_their_prefix_they_resume_bit_for_bit(prefixed, copy_of, runs):
    """With the line that the chapter shows."""
    path = copy_of(prefixed)
    snapshot = load(path)
    consume_prefix_in_state_dict_if_present(snapshot["MODEL_STATE"], "module.")
    torch.save(snapshot, path)
    done = train(ROOT / NAME, 5, 2, "--batch-size", 64, cwd=path.parent)
    assert len(losses(done)) == 3
    undisturbed = runs(NAME)[0] / "snapshot.pt"
    assert same_bits(load(path), load(undisturbed))


def test_ddp_goes_on_where_data_parallel_ended(runs, copy_of):
    """And back: the losses are those of one process, up to rounding."""
    path = copy_of(runs(NAME)[0])
    curve = losses(train(ROOT / "multigpu.py", 6, 6, cwd=path.parent))
    options = ("--batch-size", 64)
    curve += losses(train(ROOT / NAME, 7, 7, *options, cwd=path.parent))
    alone = path.parent / "alone"
    alone.mkdir()
    expected = losses(train(ROOT / "single_gpu.py", 7, 7, *options, cwd=alone))
    torch.testing.assert_close(curve, expected[5:], rtol=1e-6, atol=2e-6)


# The loss, outside of the model and inside


@pytest.fixture(scope="module")
def pieces_of():
    """`pieces_of(batch, gpus)`: (model, whole batch, its pieces), in float64."""

    def get(batch, gpus):
        generator = torch.Generator().manual_seed(batch)
        whole = [
            torch.randn(batch, x, generator=generator, dtype=torch.float64)
            for x in (20, 1)
        ]
        torch.manual_seed(0)
        model = torch.nn.Linear(20, 1, dtype=torch.float64)
        pieces = zip(*(x.chunk(gpus) for x in whole), strict=True)
        return model, whole, list(pieces)

    return get


UNEVEN = [(32, 3), (10, 4), (33, 4), (5, 4)]


@pytest.mark.parametrize(("batch", "gpus"), [(32, 2), (64, 4), *UNEVEN])
def test_the_loss_of_gathered_outputs_is_that_of_the_batch(pieces_of, batch, gpus):
    """In whatever pieces the batch was computed, and so is its gradient."""
    model, (source, targets), pieces = pieces_of(batch, gpus)
    alone = F.mse_loss(model(source), targets)
    gathered = F.mse_loss(torch.cat([model(x) for x, _ in pieces]), targets)
    torch.testing.assert_close(gathered, alone, rtol=1e-12, atol=0)
    mine, theirs = (
        torch.autograd.grad(x, list(model.parameters())) for x in (gathered, alone)
    )
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("batch", "gpus"), UNEVEN)
def test_a_loss_per_sample_may_be_inside(pieces_of, batch, gpus):
    """Its mean is that of the batch, because each sample counts once."""
    model, (source, targets), pieces = pieces_of(batch, gpus)
    each = [F.mse_loss(model(x), y, reduction="none") for x, y in pieces]
    alone = F.mse_loss(model(source), targets)
    torch.testing.assert_close(torch.cat(each).mean(), alone, rtol=1e-12, atol=0)


def numbers(line):
    """What stands behind the colon, as floats."""
    return [float(x.rstrip("%")) for x in line.rpartition(":")[2].split()]


def loss_inside(folder, batch, gpus):
    """What docs/data_parallel/loss_inside.py prints, as lists of floats."""
    done = run_script(LOSS_INSIDE, batch, gpus, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(("batch", "gpus"), UNEVEN)
def test_a_loss_inside_is_another_one_if_the_pieces_differ(tmp_path, batch, gpus):
    sizes, each, outside, inside, apart = loss_inside(tmp_path, batch, gpus)
    sizes, each = numbers(sizes), numbers(each)
    assert sum(sizes) == batch and sizes[-1] < sizes[0]
    pairs = zip(sizes, each, strict=True)
    weighted = sum(size * loss for size, loss in pairs) / batch
    assert numbers(outside) == pytest.approx([weighted], abs=2e-6)
    assert numbers(inside) == pytest.approx([sum(each) / len(each)], abs=2e-6)
    assert abs(numbers(inside)[0] - numbers(outside)[0]) > 1e-3
    assert float(apart.split()[-1].rstrip("%")) > 1


def test_a_loss_inside_is_the_same_if_the_pieces_are_equal(tmp_path):
    """This is why nobody notices it until the number of GPUs changes."""
    *_, outside, inside, apart = loss_inside(tmp_path, 32, 4)
    assert numbers(inside) == numbers(outside)
    assert apart.endswith(" 0.0%")


# What was not run


def test_the_parts_of_data_parallel_do_not_run_on_the_cpu():
    """If one does some day, more of the chapter can be shown where there is no GPU."""
    model, source = torch.nn.Linear(20, 1), torch.randn(32, 20)
    with pytest.raises(AssertionError, match="not implemented for CPU tensors"):
        replicate(model, [0, 1])
    with pytest.raises(AssertionError, match="not implemented for CPU tensors"):
        gather([model(source), model(source)], "cpu")
    with pytest.raises(ValueError, match="device, but got: cpu"):
        scatter(source, ["cpu", "cpu"])
    with pytest.raises(ValueError, match="device, but got: cpu"):
        parallel_apply([model, model], [source, source], devices=["cpu", "cpu"])


def test_a_thread_does_not_know_the_precision():
    """torch's own `_worker` switches autocast on without a dtype; here with the CPU's.

    Its default is bfloat16. That of CUDA is float16.
    """
    source, dtypes = torch.ones(1, 2), [torch.get_autocast_dtype("cuda")]

    def worker():
        with torch.autocast("cpu", enabled=True):
            dtypes.append(torch.nn.Linear(2, 2)(source).dtype)
            with torch.autocast("cpu", torch.float16):
                dtypes.append(torch.nn.Linear(2, 2)(source).dtype)

    with torch.autocast("cpu", torch.float16):
        thread = threading.Thread(target=worker)
        thread.start()
        thread.join()
    assert dtypes == [torch.float16, torch.bfloat16, torch.float16]
    assert ", enabled=autocast_enabled)" in inspect.getsource(parallel_apply)
