"""The benchmark of the loop still fits the scripts that it measures.

The frameworks beside them need benchmarks/requirements.txt, and are not tried here.
"""

import pytest
import torch

import single_gpu
from benchmarks import loop


@pytest.mark.parametrize("kind", [loop.BareLoop, loop.SingleGpu])
def test_the_loop_of_single_gpu_is_measured(kind):
    torch.manual_seed(0)
    train_objs = single_gpu.load_train_objs()
    contestant = kind(train_objs, torch.device("cpu"))
    contestant.run(1)
    assert contestant.seconds > 0
    before = train_objs[2].weight
    assert not torch.equal(contestant.model.weight, before)
