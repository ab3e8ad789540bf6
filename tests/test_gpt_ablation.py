"""benchmarks.ablation: its variants are the diff, and its runs are fair."""

import ast
import math
import re

import pytest
import torch
import torch.nn.functional as F

from benchmarks import ablation
from ladder.diffs import mix
from ladder.pages import explanations
from ladder.rungs import ROOT
from mingpt import data
from mingpt.train import lr_scale


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("to be, or not to be: that is the question. " * 60)
    return data.prepare(str(folder / "text.txt"), cache=str(folder / "tokens"))


def code(text):
    """What of a module's text is computed: no comments and no docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body[0] = ast.Pass()
    return ast.unparse(tree)


def test_the_ablation_has_each_change_alone_and_all_but_each():
    """Together, its changes are the whole diff, but for what is no code."""
    texts = ablation.variants()
    assert len(texts) == 2 + 2 * len(ablation.CHANGES)
    assert len(set(map(code, texts.values()))) == len(texts)
    explained = explanations()[ablation.OLD, ablation.NEW]
    its = {n for n, (_, heading, _) in explained.items() if heading in ablation.CHANGES}
    assert code(mix(ablation.OLD, ablation.NEW, its)) == code(texts["modern.py"])
    assert texts["model.py"] == (ROOT / ablation.OLD).read_text()
    assert texts["modern.py"] == (ROOT / ablation.NEW).read_text()


def test_a_run_of_the_ablation_trains_and_evaluates_as_mingpt_does(corpus):
    texts = ablation.variants()
    run = ablation.Run("model.py", 3, 0.01, 20)
    training = ablation.Training(texts["model.py"], run, corpus)
    weights = [x.detach().clone() for x in training.model.parameters()]
    before = training.evaluate()
    assert before == pytest.approx(math.log(corpus.vocab_size), abs=0.3)
    assert all(map(torch.equal, training.model.parameters(), weights))
    tokens = torch.from_numpy(corpus.val.astype("int64"))
    losses = []
    for start in range(0, len(tokens) - 1, ablation.SIZE["block_size"]):
        window = tokens[start : start + ablation.SIZE["block_size"] + 1]
        with torch.no_grad():
            logits, _ = training.model(window[None, :-1])
        losses.append(F.cross_entropy(logits[0], window[1:], reduction="none"))
    assert before == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    assert all(training.step() > 0 for _ in range(20))
    lr = training.optimizer.param_groups[0]["lr"]
    assert lr == pytest.approx(0.01 * lr_scale(19, 20, ablation.WARMUP))
    assert training.evaluate() < before - 0.3
    again = ablation.Training(texts["model.py"], run, corpus)
    for _ in range(20):
        again.step()
    assert all(map(torch.equal, again.model.parameters(), training.model.parameters()))


def test_runs_of_one_seed_see_the_same_batches(corpus):
    texts, seen = ablation.variants(), []
    for variant in ("model.py", "modern.py"):
        run = ablation.Run(variant, 3, 0.01, 20)
        training = ablation.Training(texts[variant], run, corpus)
        seen.append([training.sampler.starts(step).tolist() for step in range(3)])
    assert seen[0] == seen[1]


def results_of(path, losses, seconds):
    """All results, with these losses for each (variant, seed, lr)."""
    results = ablation.Results(path)
    results.start()
    for variant, taken in seconds.items():
        results.add(variant=variant, steps=1, seconds=taken)
    for kind in ("rate", "tokens", "time"):
        for run in results.missing(kind, seconds):
            loss = losses(run.variant, run.seed, run.lr)
            results.add(**run._asdict(), loss=loss, seconds=1)
    return results


def made_up(variant, seed, lr):
    """Better the nearer lr is to 0.005; RMSNorm helps, and biases do not matter."""
    gain = {"one in: RMSNorm": 0.1, "modern.py": 0.2, "one out: RMSNorm": 0.1}
    noise = 0.01 * ((7 * seed + len(variant)) % 5)
    return 2 - gain.get(variant, 0) + abs(lr - 0.005) + noise / 10


def test_the_ablation_goes_on_where_it_was_and_prints_its_table(tmp_path, capsys):
    seconds = {"model.py": 0.01, "modern.py": 0.02}
    for change in ablation.CHANGES.values():
        seconds |= {f"one in: {change}": 0.01, f"one out: {change}": 0.02}
    path = tmp_path / "results.csv"
    results_of(path, made_up, seconds)
    found = ablation.Results(path)
    assert not any(found.missing(x, seconds) for x in ("rate", "tokens", "time"))
    assert {ablation.tuned(x) for x in seconds} == {
        "model.py",
        "one in: Muon",
        "one out: Muon",
        "modern.py",
    }
    assert found.rate("one in: RMSNorm") == 0.005
    assert found.steps_in_time("modern.py") == ablation.STEPS / 2
    ablation.print_table(found)
    tokens, time = capsys.readouterr().out.split("at equal time")
    rows = dict(re.findall(r"^(one \w+: \S+).* (better|worse|unclear)$", tokens, re.M))
    assert rows["one in: RMSNorm"] == "better"
    assert rows["one out: RMSNorm"] == "worse"
    assert rows["one in: QK-norm"] == "unclear"
    assert re.search(r"^modern.py +150 ", time, re.M)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))  # a run that was killed in its last seed
    (run,) = ablation.Results(path).missing("time", seconds)
    assert run.seed == 4
    ablation.print_table(ablation.Results(path))
    assert "its runs are not all made" in capsys.readouterr().out


def test_the_ablation_makes_a_run_in_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(ablation, "STEPS", 1)
    monkeypatch.setattr(ablation, "RATES", (0.01,))
    monkeypatch.chdir(tmp_path)  # for the tokens
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    results = ablation.Results(tmp_path / "results.csv")
    results.start()
    texts = {"model.py": ablation.variants()["model.py"]}
    ablation.fill(results, "rate", texts, 1)
    (loss,) = ablation.Results(results.path).loss.values()
    assert 3 < loss < 5


def test_the_ablation_does_not_mix_machines(tmp_path, capsys):
    path = tmp_path / "results.csv"
    results_of(path, made_up, {"model.py": 0.01})
    path.write_text(path.read_text().replace("# machine   ", "# machine   another "))
    with pytest.raises(SystemExit) as end:
        ablation.Results(path).start()
    assert end.value.code == 2
    assert "name another file with --results" in capsys.readouterr().err


@pytest.mark.text
def test_the_readme_has_the_table_of_the_file(capsys):
    ablation.print_table(ablation.Results(ablation.RESULTS))
    readme = (ROOT / "benchmarks/README.md").read_text()
    assert f"```\n{capsys.readouterr().out}```\n" in readme


def test_a_table_of_nothing_ends_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        ablation.print_table(ablation.Results(tmp_path / "nothing.csv"))
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
