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
    loss_fn = torch.nn.CrossEntropyLoss(WEIGHT, reduction="REDUCTION")
    return *sets, torch.nn.Linear(20, 2), loss_fn
'''
PAGE = ROOT / "docs/make_it_real.md"
CASES = {
    "class weights": ("torch.tensor([1.0, 20.0])", 0),
    "ignored targets": ("torch.ones(2)", 0.3),
}


def with_the_lines_of_the_page(text):
    """multigpu.py whose loss divides by the weights of all ranks."""
    fences = re.findall(r"(?s)```python\n(.*?)```", PAGE.read_text())
    (steps,) = [fence for fence in fences if "def _run_batch" in fence]
    (tests,) = [fence for fence in fences if "self.weigh(targets)])" in fence]
    run_batch = inspect.getsource(multigpu.Trainer._run_batch)
    text = text.replace(run_batch, textwrap.indent(steps, "    "))
    # Three dots on the page stand for the loop's head.
    evaluate = inspect.getsource(multigpu.Trainer._evaluate)
    head, _, rest = evaluate.partition("        loss_sum = ")
    loop = re.search(r"(?s)        for source.*?output = .*?\n", rest)[0]
    tests = tests.replace("        ...\n", loop)
    return text.replace(evaluate, head + tests)


@pytest.mark.waits
@pytest.mark.parametrize("case", CASES)
def test_a_weighted_mean_on_several_processes(case, tmp_path):
    """With the page's lines as on one process. Without them, another training."""
    class_weights, ignored = CASES[case]
    task = TASK.replace("WEIGHT", class_weights).replace("IGNORED", str(ignored))
    runs = {}  # {whether the lines are there: [(loss, weight) on 1, 2, 4 processes]}
    for cured in (True, False):
        script = plant("multigpu.py", tmp_path / f"cured_{cured}")
        text = script.read_text()
        if cured:
            text = with_the_lines_of_the_page(text)
        reduction = "sum" if cured else "mean"
        text = text.replace("lr=0.001", "lr=0.1")
        load_train_objs = inspect.getsource(multigpu.load_train_objs)
        text = text.replace(load_train_objs, task.replace("REDUCTION", reduction))
        script.write_text(text)
        runs[cured] = []
        for nprocs in (1, 2, 4):
            cwd = tmp_path / f"{cured}_{nprocs}"
            cwd.mkdir()
            size = ("--batch-size", 64 // nprocs)
            done = train(script, 3, 3, *size, cwd=cwd, nprocs=nprocs)
            *_, loss = re.findall(r"held-out loss (\S+)", done.stdout)
            state = load(cwd / "snapshot.pt")["MODEL_STATE"]
            runs[cured].append((float(loss), state["weight"]))
        (loss_on_one, weight_on_one), *on_more = runs[cured]
        for loss, weight in on_more:
            assert ((weight - weight_on_one).abs().max() < 1e-6) == cured
            assert (abs(loss - loss_on_one) < 2e-6) == cured
    (loss_cured, weight_cured), *_ = runs[True]
    (loss, weight), *_ = runs[False]
    assert torch.equal(weight_cured, weight)
    assert abs(loss_cured - loss) > 1e-4, "of the same weights"
    if case == "class weights":
        for row in runs.values():
            cells = " | ".join(f"{loss:.4f}" for loss, _ in row)
            assert f"| {cells} |" in PAGE.read_text()
