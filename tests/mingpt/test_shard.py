"""mingpt.train --shard: the training without it, with a part of the model on a rank."""

import os

import pytest

from tests.conftest import OBSERVER
from tests.mingpt.test_train import TINY, check_runs, gpt, text  # noqa: F401  fixtures, too
from tools.run.processes import Program
from tools.scripts import ROOT

pytestmark = pytest.mark.waits

# Ranks draw different weights, in float64. Each notes the bytes that its tensors take.
OWN = """
import gc, os, torch
from mingpt import model
from mingpt.model import GPTConfig, make_optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook as after_each_step
rank = os.environ.get("RANK", "0")
class GPT(model.GPT):
    def __init__(self, config):
        torch.manual_seed(int(rank))
        super().__init__(config)
        self.double()
def tensors():
    kinds = torch.Tensor, torch.nn.Parameter
    held = [x.untyped_storage() for x in gc.get_objects() if type(x) in kinds]
    return {x.data_ptr(): x.nbytes() for x in held}
inherited = tensors()  # by a fork, from other tests
def hold(*_):
    if not os.path.exists(f"held.{rank}"):
        own = [size for at, size in tensors().items() if at not in inherited]
        open(f"held.{rank}", "w").write(str(sum(own)))
after_each_step(hold)
"""
OPTIONS = ["--model", "own", "--steps", 8, "--eval-every", 4, "--clip", 0.5]
# Of the validation text, rank 0 has 55 blocks, and rank 1 has 54: a batch less.
OPTIONS += ["--block-size", 18]
TWO = ["--batch-size", 2, "--accumulate", 2]


@pytest.fixture(scope="module")
def runs(gpt, tmp_path_factory):  # noqa: F811
    """`run(folder, *options, ...)`, and two folders: without --shard, and with it."""
    (own := tmp_path_factory.mktemp("own")).joinpath("own.py").write_text(OWN)

    def run(folder, *options, good=True, **how):
        how |= {"cwd": folder, "PYTHONPATH": f"{ROOT}:{own}"}
        done = gpt(*OPTIONS, *options, **how)
        assert (done.returncode == 0) == good, done.stdout + done.stderr
        return done

    run(own / "whole", *TWO, nprocs=2)
    run(own / "parts", *TWO, "--shard", nprocs=2)
    return run, own / "whole", own / "parts"


def test_trains_the_same_with_half_of_the_bytes(runs):
    check_runs(*runs[1:], "train loss", "val loss")
    held = [int(x.read_text()) for y in runs[1:] for x in sorted(y.glob("held.*"))]
    assert max(held[2:]) < 0.52 * held[0] < sum(held[2:])


@pytest.mark.waits
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="only Linux has it")
@pytest.mark.parametrize("lr", [0.001, 1e38])  # the second: weights are not finite
@pytest.mark.parametrize("how", [["--shard"], ["--split", 2]])
def test_no_gloo_thread_outlives_main(text, tmp_path, how, lr):  # noqa: F811
    """One that does may abort the exit. Only a new interpreter shows it."""
    (log := tmp_path / "log").mkdir()
    words = ["torchrun", "--standalone", "--nproc-per-node=2", "-m", "mingpt.train"]
    options = [*text, *TINY, "--steps", 2, *how, "--lr", lr]
    env = {"PYTHONPATH": f"{OBSERVER}:{ROOT}", "THREADS_LOG": log, "OMP_NUM_THREADS": 1}
    done = Program([*words, *options], tmp_path, real=True, **env).finish()
    assert done.returncode == (lr > 1)
    assert ("error: step 1: the loss or a weight" in done.stderr) == (lr > 1)
    # os._exit ends a rank whose weights are not finite: it notes nothing.
    assert [x.read_text() for x in log.iterdir()] == ["[]"] * (2 if lr < 1 else 0)
