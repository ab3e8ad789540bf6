"""data_parallel.py: what can be seen of DataParallel where there is no GPU."""

import inspect
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.parallel import parallel_apply

import utils
from tests.helpers.checks import fence, import_script, noted
from tests.hooks import replace, write
from tests.hooks.accelerators import one_gpu
from tools.run.launch import train
from tools.run.results import same_bits

NAME = "variants/data_parallel.py"
PASSES = "DataParallel passes each batch through: it uses 0 CUDA GPUs"


# The script


def note_batches(script):
    """noted.0.json: the class of the wrapper, and the samples of what passes through.

    "wrapped": of each batch that `dp_model` gets. "calls": of each that the model gets,
    or a copy of it on another GPU.
    """

    def note(sizes):
        return lambda _, inputs: sizes.append(len(inputs[0]))

    def train(inner, self, *arguments):
        facts = {"wrapper": type(self.dp_model).__name__, "wrapped": [], "calls": []}
        self.dp_model.register_forward_pre_hook(note(facts["wrapped"]))
        # DataParallel copies the model with its hooks.
        self.model.register_forward_pre_hook(note(facts["calls"]))
        inner(self, *arguments)
        write("noted", facts)

    replace(script["Trainer"], "train", train)


def test_every_batch_goes_through_the_wrapper(tmp_path):
    """Also those of the evaluation. Without a GPU, the model gets them as they are."""
    hooks = [note_batches]
    done = train(NAME, 1, 1, batch=60, cwd=tmp_path, hooks=hooks)
    assert done.stdout.splitlines()[2] == PASSES
    (seen,) = noted(tmp_path, ranks=1)
    assert seen["wrapper"] == "DataParallel"
    assert seen["wrapped"] == seen["calls"] == [60] * 34 + [60] * 8 + [32]


def test_on_the_cpu_it_leaves_the_gpus_alone(tmp_path):
    """DataParallel would take them, and refuse a model that is on the CPU."""
    hooks = [one_gpu, note_batches]
    done = train(NAME, 1, 1, "--device", "cpu", cwd=tmp_path, hooks=hooks)
    assert done.stdout.splitlines()[2] == PASSES
    (seen,) = noted(tmp_path, ranks=1)
    assert seen["wrapper"] == "Linear"


@pytest.mark.parametrize(
    ("count", "batch", "line"),
    [
        (1, 32, "passes each batch through: it uses 1 CUDA GPUs"),
        (4, 5, "splits each batch over 3 of 4 CUDA GPUs: 2 + 2 + 1 samples"),
    ],
)
def test_the_line_for_gpus(count, batch, line):
    """It only needs to know how many there are."""
    data_parallel = import_script(NAME)
    wrapper = types.SimpleNamespace(device_ids=list(range(count)))
    assert data_parallel.describe_split(wrapper, batch) == f"DataParallel {line}"


# Snapshots


def test_the_wrappers_own_keys_are_refused_until_they_lose_their_prefix(
    tmp_path, monkeypatch
):
    """The lines that strip and load them are the page's."""
    model = torch.nn.Linear(20, 1)
    wrapped = torch.nn.DataParallel(torch.nn.Linear(20, 1))
    state = wrapped.state_dict()
    with pytest.raises(SystemExit):
        utils.check_snapshot({"MODEL_STATE": state}, model, None, "old.pt")
    monkeypatch.chdir(tmp_path)
    torch.save(state, "old.pt")
    exec(fence("docs/data_parallel.md", "old.pt"), {"torch": torch, "model": model})
    assert same_bits(model.state_dict(), wrapped.module.state_dict())


# What was not run


def test_a_thread_does_not_know_the_precision():
    """torch's own `_worker` switches autocast on without a dtype; here with the CPU's.

    Its default is bfloat16. That of CUDA is float16.
    """
    with torch.autocast("cpu", torch.float16), ThreadPoolExecutor() as threads:
        taken = threads.submit(torch.get_autocast_dtype, "cpu")
    assert taken.result() == torch.bfloat16
    assert torch.get_autocast_dtype("cuda") == torch.float16
    assert ", enabled=autocast_enabled)" in inspect.getsource(parallel_apply)
