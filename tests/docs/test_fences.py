"""Code that readers copy from the pages, and that no command of a page runs."""

import pytest

from tests.helpers.checks import fence
from tools.run.launch import torchrun
from tools.scripts import ROOT


def test_the_example_of_a_test(tmp_path):
    names = {}
    exec(fence("CONTRIBUTING.md", "note_mean"), names)
    names["test_the_statistics_of_rank_0_are_saved"](tmp_path)


BLOCKS = """
import copy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import parallel
from torch.nn.functional import gelu, scaled_dot_product_attention
import utils
from variants import tensor_parallel

BLOCKS = 48
PLAN_OF_THE_PAGE


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        for name in "q", "k", "v", "out":
            setattr(self, name, nn.Linear(8, 8))

    def forward(self, x):
        batch, tokens, _ = x.shape
        parts = self.q(x), self.k(x), self.v(x)
        heads = [y.view(batch, tokens, -1, 4).transpose(1, 2) for y in parts]
        return self.out(scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return self.down(gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()
        self.mlp = MLP()

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


dist.init_process_group("gloo")
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
source = torch.randn(2, 3, 8)
whole = Model()
model = copy.deepcopy(whole)
tensor_parallel.PLAN = PLAN
tensor_parallel.split_layers(model, torch.device("cpu"), split=2)
outputs = [x(source) for x in (whole, model)]
torch.testing.assert_close(*outputs)
for output in outputs:
    output.square().mean().backward()
pairs = zip(whole.named_parameters(), model.parameters(), strict=True)
for (name, x), y in pairs:
    grad = utils.join_parts(y.grad)
    if dist.get_rank() == 0:
        torch.testing.assert_close(x.grad, grad, msg=name)
parts = [getattr(x, "to_local", lambda: x)() for x in model.parameters()]
print(sum(x.numel() for x in parts))
utils.forget_meshes(model)
dist.destroy_process_group()
"""


@pytest.mark.waits
def test_the_plan_of_a_transformer(tmp_path):
    """Two ranks compute its outputs and gradients, each with half of the weights."""
    page = "docs/split_your_model.md"
    plan = fence(page, "PLAN = {}") + fence(page, "both = {")
    script = BLOCKS.replace("PLAN_OF_THE_PAGE", plan)
    (tmp_path / "blocks.py").write_text(script)
    done = torchrun("blocks.py", cwd=tmp_path, PYTHONPATH=ROOT, OMP_NUM_THREADS=1)
    assert done.stdout == 2 * f"{48 * (128 + 128 + 12 + 8 + 16)}\n"
