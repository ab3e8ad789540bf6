"""The lines of docs/make_it_real.md that no command of the page runs."""

import inspect
import re
import textwrap

import pytest
import torch

import multigpu
from tests.helpers.checks import fence
from tools.run.launch import train
from tools.run.results import load, losses
from tools.scripts import ROOT

TASK = '''def load_train_objs():
    """One sample of eleven is of class 1 and counts 20 times; some have no class."""
    torch.manual_seed(0)
    sets = []
    for size in (2048, 513):
        source = torch.randn(size, 20)
        score = source @ torch.linspace(-1, 1, 20) + torch.randn(size)
        targets = (score > 3.7).long()
        targets[torch.rand(size) < IGNORED] = -100
        sets.append(torch.utils.data.TensorDataset(source, targets))
    loss_fn = torch.nn.CrossEntropyLoss(WEIGHT, reduction="REDUCTION")
    return *sets, torch.nn.Linear(20, 2), loss_fn
'''
CASES = {
    "class weights": ("torch.tensor([1.0, 20.0])", "0"),
    "ignored targets": ("torch.ones(2)", "0.3"),
}


def lines_of_the_page():
    """Changes of multigpu.py, whose loss divides by the weights of all ranks."""
    steps = textwrap.indent(fence("docs/make_it_real.md", "def _run_batch"), "    ")
    # Three dots on the page stand for the loop's head.
    tests = fence("docs/make_it_real.md", "self.weigh(targets)])")
    evaluate = inspect.getsource(multigpu.Trainer._evaluate)
    old = evaluate[evaluate.index("        loss_sum = ") :]
    (loop,) = re.findall(r"(?s)        for source.*?output = .*?\n", old)
    run_batch = inspect.getsource(multigpu.Trainer._run_batch)
    return [(run_batch, steps), (old, tests.replace("        ...\n", loop))]


def farthest(values):
    """How far the others are from the first."""
    first, *others = values
    return max((first - value).abs().max().item() for value in others)


@pytest.mark.waits
@pytest.mark.parametrize("case", CASES)
def test_a_weighted_mean_on_several_processes(case, tmp_path):
    """With the page's lines as on one process. Without them, another training."""
    class_weights, ignored = CASES[case]
    task = TASK.replace("WEIGHT", class_weights).replace("IGNORED", ignored)
    load_train_objs = inspect.getsource(multigpu.load_train_objs)

    def train_on_1_2_and_4(reduction, *changes):
        """(the losses, the weights)"""
        found = []
        own_task = load_train_objs, task.replace("REDUCTION", reduction)
        for nprocs in (1, 2, 4):
            cwd = tmp_path / f"{reduction}_{nprocs}"
            done = train(
                "multigpu.py",
                3,
                3,
                cwd=cwd,
                nprocs=nprocs,
                changes=[own_task, ("lr=0.001", "lr=0.1"), *changes],
            )
            _, loss = losses(done)[-1]
            model = load(cwd)["MODEL_STATE"]
            found.append((torch.tensor(loss), model["weight"]))
        return zip(*found, strict=True)

    with_lines, weights = train_on_1_2_and_4("sum", *lines_of_the_page())
    without, other_weights = train_on_1_2_and_4("mean")
    assert farthest(weights) < 1e-6
    assert farthest(with_lines) < 2e-6
    assert farthest(other_weights) > 1e-3
    # On one process, the weights are the same; the page shows that the loss is wrong.
    assert torch.equal(weights[0], other_weights[0])
    if case == "class weights":
        for row in with_lines, without:
            cells = " | ".join(f"{loss:.4f}" for loss in row)
            assert f"| {cells} |" in (ROOT / "docs/make_it_real.md").read_text()
