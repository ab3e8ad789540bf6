"""The lines of docs/make_it_real.md that no command of the page runs."""

import inspect
import re
import textwrap

import pytest
import torch

import multigpu
from tools.run.launch import plant, train
from tools.run.results import load
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
    model = torch.nn.Linear(20, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_fn = torch.nn.CrossEntropyLoss(WEIGHT, reduction="REDUCTION")
    return *sets, model, loss_fn, optimizer


'''
CASES = {
    "class weights": ("torch.tensor([1.0, 20.0])", 0),
    "ignored targets": ("torch.ones(2)", 0.3),
}


def with_the_lines_of_the_page(text):
    """multigpu.py whose loss divides by the weights of all ranks."""
    page = (ROOT / "docs/make_it_real.md").read_text()
    fences = re.findall(r"```python\n(.*?)```", page, re.S)
    (steps,) = [x for x in fences if "def _run_batch" in x]
    (tests,) = [x for x in fences if "self.weigh(targets)])" in x]
    steps = textwrap.indent(steps, "    ")
    text = text.replace(inspect.getsource(multigpu.Trainer._run_batch), steps)
    old = inspect.getsource(multigpu.Trainer._evaluate)
    head, _, rest = old.partition("        loss_sum = ")
    loop = re.search(r"        for source.*?output = .*?\n", rest, re.S)[0]
    first, _, last = tests.partition("        ...\n")
    return text.replace(old, head + first + loop + last)


@pytest.mark.waits
@pytest.mark.parametrize("case", CASES)
def test_a_weighted_mean_on_several_processes(case, tmp_path):
    """With the page's lines as on one process. Without them, another training."""
    weight, ignored = CASES[case]
    losses, weights = {}, {}
    for cured in (True, False):
        script = plant("multigpu.py", tmp_path / f"cured_{cured}")
        text = script.read_text()
        if cured:
            text = with_the_lines_of_the_page(text)
        task = TASK.replace("WEIGHT", weight).replace("IGNORED", str(ignored))
        task = task.replace("REDUCTION", "sum" if cured else "mean")
        text = text.replace(inspect.getsource(multigpu.load_train_objs) + "\n\n", task)
        script.write_text(text)
        for nprocs in (1, 2, 4):
            cwd = tmp_path / f"{cured}_{nprocs}"
            cwd.mkdir()
            size = ("--batch-size", 64 // nprocs)
            done = train(script, 3, 3, *size, cwd=cwd, nprocs=nprocs)
            *_, loss = re.findall(r"held-out loss (\S+)", done.stdout)
            losses[cured, nprocs] = float(loss)
            weights[cured, nprocs] = load(cwd / "snapshot.pt")["MODEL_STATE"]["weight"]
    for cured, nprocs in losses:
        if nprocs > 1:
            apart = (weights[cured, nprocs] - weights[cured, 1]).abs().max()
            assert (apart < 1e-6) == cured
            assert (abs(losses[cured, nprocs] - losses[cured, 1]) < 2e-6) == cured
    assert torch.equal(weights[True, 1], weights[False, 1])
    assert abs(losses[True, 1] - losses[False, 1]) > 1e-4, "of the same weights"
    if case == "class weights":
        row = "| {:.4f} | {:.4f} | {:.4f} |".format
        page = (ROOT / "docs/make_it_real.md").read_text()
        for cured in (True, False):
            assert row(*[losses[cured, n] for n in (1, 2, 4)]) in page
