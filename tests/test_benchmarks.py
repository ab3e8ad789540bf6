"""The benchmarks measure what they say, on the scripts as they are now.

The frameworks that benchmarks.loop compares with need benchmarks/requirements.txt, and
are not tried here.
"""

import ast
import itertools
import math
import re
from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F

import single_gpu
from benchmarks import ablation, loop, variants
from ladder.diffs import mix
from ladder.files import edit
from ladder.pages import explanations
from ladder.rungs import ROOT
from mingpt import data
from mingpt.train import lr_scale
from proofs.hosts import Hosts
from proofs.warm import Fork

WIDTH = 512


def weights(features, outputs):
    """How many the job's model has: a task's own, one linear layer, behind its body."""
    sizes = [features, *[WIDTH] * 4, features, outputs]
    return sum((n + 1) * m for n, m in itertools.pairwise(sizes))


WEIGHTS = weights(20, 1)  # for the trunk's task
GRADIENTS = 4 * WEIGHTS  # bytes

needs_networks = pytest.mark.skipif(
    variants.why_no_networks("cpu") is not None,
    reason=str(variants.why_no_networks("cpu")),
)


@pytest.mark.parametrize("kind", [loop.BareLoop, loop.SingleGpu])
def test_the_loop_of_single_gpu_is_measured(kind):
    torch.manual_seed(0)
    train_objs = single_gpu.load_train_objs()
    contestant = kind(train_objs, torch.device("cpu"))
    contestant.run(1)
    assert contestant.seconds > 0
    before = train_objs[2].weight
    assert not torch.equal(contestant.model.weight, before)


# benchmarks.variants


def run_variants(*arguments):
    """`python -m benchmarks.variants ARGUMENTS`, in a fork: Done."""
    words = ["python", "-m", "benchmarks.variants", *arguments, "--width", WIDTH]
    return Fork(words, ROOT).finish()


def rows_of(text):
    """{row: [the medians of its three cells]} of the first table that was printed."""
    cells = 3 * r" +([\d.,]+)%? \(\S+ \.\. \S+\)"
    return {
        row: [float(x.replace(",", "")) for x in found]
        for row, *found in re.findall(f"^(parent|variant|ratio){cells}$", text, re.M)
    }


def edge(name, folder, networks=(), nprocs=2):
    args = Namespace(rounds=1, nprocs=nprocs, width=WIDTH)
    return variants.Edge(name, folder, networks, "cpu", args)


def test_a_variant_is_measured_beside_its_parent():
    name = "variants/preemptible.py"
    done = run_variants(name, "--rounds", 1, "--steps", 2, "--batch-size", 32)
    assert done.returncode == 0, done.stderr
    for heading in ("command", "machine", "versions", "plan", "sent", "peak"):
        assert re.search(f"^{heading}  +\\S", done.stdout, re.M)
    title = f"{name} beside multinode.py\n{WEIGHTS:,} weights; loss "
    assert title in done.stdout
    losses = re.search(r"loss (\S+) of the parent, (\S+) of the variant", done.stdout)
    assert losses[1] == losses[2], "both train the same"
    assert re.search("^ +steps/s +MB sent in a step +peak MB$", done.stdout, re.M)
    rows = rows_of(done.stdout)
    for parent, variant, ratio in zip(*rows.values(), strict=True):
        assert ratio == pytest.approx(variant / parent, abs=0.05)
    assert rows["ratio"][1:] == pytest.approx([1, 1], abs=0.05), "bytes and memory"


def test_a_task_of_its_own_is_the_parents_as_well(tmp_path):
    own = edge("variants/real_job.py", tmp_path, nprocs=1)
    assert own.own_task
    turn = own.run(variants.Side("multinode.py", 8), TRAIN_SAMPLES=8)
    assert turn.weights == weights(64, 10)
    assert turn.loss < 5, "the trunk's, a squared error, is about 20 in the beginning"


def test_without_networks_the_all_reduces_are_counted(tmp_path):
    """What DDP gives to them, which does not depend on the number of ranks."""
    three = edge("multigpu.py", tmp_path, nprocs=3)
    turn = three.run(variants.Side("multigpu.py", 8), TRAIN_SAMPLES=2 * 3 * 8)
    assert turn.weights == WEIGHTS
    assert turn.sent_bytes == 2 * GRADIENTS


@pytest.mark.waits
@needs_networks
@pytest.mark.parametrize("hosts", [1, 3])
def test_the_bytes_of_a_ring_are_counted(tmp_path, hosts):
    """Each of W ranks sends 2 (W - 1) / W times the gradients, and TCP's headers."""
    with Hosts(hosts, tmp_path) as found:
        networks = [f"/proc/{host.pid}/ns/net" for host in found]
        three = edge("variants/preemptible.py", tmp_path / "edge", networks, nprocs=3)
        turn = three.run(variants.Side("multinode.py", 8), TRAIN_SAMPLES=2 * 3 * 8)
    ring = 2 * GRADIENTS * 4 / 3
    assert ring < turn.sent_bytes < 1.06 * ring


def test_the_peak_of_memory_is_that_of_the_tensors(tmp_path):
    """Weights, gradients and momentum; and what the body's layers leave behind.

    That is four outputs, with one before its ReLU, and up to two gradients of them. It
    is not what the script has taken and given back before.
    """
    alone = edge("multigpu.py", tmp_path)
    side = variants.Side("single_gpu.py", 1024)
    before = "    torch.manual_seed(0)\n"
    edit(alone.scripts[side.name], (before, f"{before}    torch.ones(10**8)\n"))
    turn = alone.run(side, TRAIN_SAMPLES=8 * 1024, GIVE_BACK=1)
    output = 1024 * WIDTH * 4
    least = 3 * GRADIENTS + 4 * output
    assert least < turn.peak_bytes < least + 3.5 * output


@pytest.mark.waits
@needs_networks
def test_accumulation_saves_bytes_and_time_on_a_slow_network():
    """Eight times fewer bytes for a sample. The rest of the time is computing."""
    name = "variants/gradient_accumulation.py"
    few = ("--rounds", 1, "--steps", 1, "--batch-size", 32, "--micro-batch", 8)
    done = run_variants(name, *few, "--mbit", 50)
    assert done.returncode == 0, done.stderr
    ordinary, slow = done.stdout.split(f"{name} --accumulate 8 beside multigpu.py\n")
    assert f"{name} --accumulate 4 beside multigpu.py\n" in ordinary
    assert rows_of(ordinary)["ratio"][1] == pytest.approx(1, abs=0.03), "a step's bytes"
    assert "2 hosts with a rank each, 50 Mbit/s each way" in slow
    rows = rows_of(slow)
    assert rows["ratio"][1] == pytest.approx(1 / 8, abs=0.005), "a sample's bytes"
    assert rows["ratio"][0] > 2, "samples/s"
    assert 50 < rows["parent"][2] < 103, "percent of the time"


@pytest.mark.parametrize(
    "words, message",
    [
        (["variants/nothing.py"], "variants/nothing.py is no rung with a parent"),
        (["single_gpu.py"], "single_gpu.py is no rung with a parent. Those are multi"),
        (["--rounds", "0"], "argument --rounds: '0' is not a whole number above 0"),
        (["--device", "gpu"], "--device gpu: here PyTorch can only use cpu"),
    ],
)
def test_bad_input_ends_in_one_line(words, message):
    done = run_variants(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"variants.py: error: {message}")
    assert done.stderr.count("\n") == 1


def test_what_a_script_refuses_is_said_in_its_line(tmp_path, capsys):
    side = variants.Side("multigpu.py", 8)
    with pytest.raises(SystemExit) as end:
        edge("multigpu.py", tmp_path).run(side, TRAIN_SAMPLES=4)
    assert end.value.code == 2
    line = "error: multigpu.py: one step takes 2 x 8 samples and there are 4: lower"
    assert line in capsys.readouterr().err


# benchmarks.ablation


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
    assert "not all of its runs are made" in capsys.readouterr().out


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
