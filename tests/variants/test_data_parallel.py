"""data_parallel.py: what can be seen of DataParallel where there is no GPU."""

import inspect
import json
import re
import threading
import types

import pytest
import torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import parallel_apply

from tests.helpers.checks import import_script
from tools.run.launch import launch, plant, run_script, train
from tools.run.results import load, losses, same_bits
from tools.scripts import ROOT

NAME = "variants/data_parallel.py"
PASSES = "DataParallel passes each batch through: it uses 0 CUDA GPUs"


def noted(folder):
    """What tests/hooks/data_parallel.py has noted."""
    return json.loads((folder / "noted.json").read_text())


# The script


def test_every_batch_goes_through_the_wrapper(tmp_path):
    """Also those of the evaluation. Without a GPU, the model gets them as they are."""
    script = plant(NAME, tmp_path / "copy", hooks=["data_parallel"])
    done = train(script, 1, 1, "--batch-size", 60, cwd=tmp_path)
    assert done.stdout.splitlines()[2] == PASSES
    seen = noted(tmp_path)
    assert seen["wrapper"] == "DataParallel"
    assert seen["train"] == [60] * 34
    assert seen["eval"] == [60] * 8 + [32]
    assert seen["calls"] == [["cpu", size] for size in seen["train"] + seen["eval"]]


def test_on_the_cpu_it_leaves_the_gpus_alone(tmp_path):
    """DataParallel would take them, and refuse a model that is on the CPU."""
    hooks = ["accelerators:one_gpu", "data_parallel"]
    script = plant(NAME, tmp_path / "copy", hooks=hooks)
    done = train(script, 1, 1, "--device", "cpu", cwd=tmp_path)
    assert done.stdout.splitlines()[2] == PASSES
    assert noted(tmp_path)["wrapper"] == "Linear"


@pytest.mark.parametrize(
    ("count", "batch", "line"),
    [
        (1, 32, "passes each batch through: it uses 1 CUDA GPUs"),
        (3, 32, "splits each batch over 3 of 3 CUDA GPUs: 11 + 11 + 10 samples"),
        (4, 5, "splits each batch over 3 of 4 CUDA GPUs: 2 + 2 + 1 samples"),
    ],
)
def test_the_line_for_gpus(count, batch, line):
    """It only needs to know how many there are."""
    data_parallel = import_script(NAME)
    wrapper = types.SimpleNamespace(device_ids=list(range(count)))
    assert data_parallel.describe_split(wrapper, batch) == f"DataParallel {line}"


# Snapshots


@pytest.mark.waits
def test_the_wrappers_own_keys_are_refused_until_they_lose_their_prefix(runs, tmp_path):
    """Then the run resumes bit for bit. The line that strips them is the page's."""
    wrap = "self.dp_model = torch.nn.DataParallel(self.model)"
    older = plant(NAME, tmp_path / "copy", (wrap, f"self.model = {wrap}"))
    train(older, 2, 2, "--batch-size", 64, cwd=tmp_path)
    done = launch(ROOT / NAME, 5, 2, cwd=tmp_path, real="")
    assert done.returncode == 2
    assert "snapshot.pt belongs to another model: choose" in done.stderr
    snapshot = load(tmp_path / "snapshot.pt")
    consume_prefix_in_state_dict_if_present(snapshot["MODEL_STATE"], "module.")
    torch.save(snapshot, tmp_path / "snapshot.pt")
    done = train(ROOT / NAME, 5, 2, "--batch-size", 64, cwd=tmp_path)
    assert len(losses(done)) == 3
    undisturbed, _ = runs(NAME)
    mine = load(tmp_path / "snapshot.pt")
    assert same_bits(mine, load(undisturbed / "snapshot.pt"))


# The loss, outside of the model and inside


def numbers(line):
    """Those in a line that the script of the page prints."""
    return [float(text) for text in re.findall(r"[\d.]+", line)]


@pytest.mark.parametrize(("batch", "gpus"), [(10, 4), (32, 4)])
def test_a_loss_inside_is_another_one_if_the_pieces_differ(tmp_path, batch, gpus):
    """With equal pieces it is the same: this is why nobody notices."""
    script = ROOT / "docs/data_parallel/loss_inside.py"
    done = run_script(script, batch, gpus, cwd=tmp_path)
    rows = [numbers(line) for line in done.stdout.splitlines()]
    sizes, losses_of_pieces, (outside,), (inside,), (apart_percent,) = rows
    loss_sum = 0
    for size, loss in zip(sizes, losses_of_pieces, strict=True):
        loss_sum += size * loss
    assert outside == pytest.approx(loss_sum / batch, abs=2e-6)
    mean = sum(losses_of_pieces) / len(losses_of_pieces)
    assert inside == pytest.approx(mean, abs=2e-6)
    pieces_are_equal = sizes[0] == sizes[-1]
    assert (abs(inside - outside) < 2e-6) == pieces_are_equal
    assert (apart_percent == 0) == pieces_are_equal


# What was not run


def test_a_thread_does_not_know_the_precision():
    """torch's own `_worker` switches autocast on without a dtype; here with the CPU's.

    Its default is bfloat16. That of CUDA is float16.
    """
    dtypes = []

    def worker():
        with torch.autocast("cpu", enabled=True):
            output = torch.nn.Linear(2, 2)(torch.ones(1, 2))
            dtypes.append(output.dtype)

    with torch.autocast("cpu", torch.float16):
        thread = threading.Thread(target=worker)
        thread.start()
        thread.join()
    assert dtypes == [torch.bfloat16]
    assert torch.get_autocast_dtype("cuda") == torch.float16
    assert ", enabled=autocast_enabled)" in inspect.getsource(parallel_apply)
