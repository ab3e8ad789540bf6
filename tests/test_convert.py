"""The scripts of docs/convert_your_script.md: what one trains, the next one trains."""

import ast
import json
import os
import re
import uuid

import pytest
import torch

from ladder.diffs import hunks
from ladder.pages import parse
from ladder.rungs import ROOT
from proofs import launch
from proofs.launch import plant, run_script
from proofs.processes import left_over, run
from proofs.results import load, same_bits, shape_of, weights
from proofs.warm import Fork
from tests.conftest import OBSERVER

PAGE = "docs/convert_your_script.md"
BEFORE, STEP1, STEP2, AFTER, COMPARE = (
    f"docs/convert/{name}.py"
    for name in ("before", "step1", "step2", "after", "compare")
)
SNAPSHOT, MODEL = "stripes_snapshot.pt", "stripes_model.pt"
KEYS = [f"{x}.{y}" for x in ("conv1", "conv2", "linear") for y in ("weight", "bias")]

linux = pytest.mark.skipif(
    not os.path.isdir("/proc/self"), reason="processes are looked up in /proc"
)


def alone(script, *options, cwd):
    """Done of a script that is one process.

    It has one thread, as torchrun gives to each of several processes: these small
    convolutions gain nothing from more, and wait long where others compute.
    """
    return run_script(script, *options, cwd=cwd, OMP_NUM_THREADS=1)


def torchrun(script, *options, cwd, nprocs=2, real="", **env):
    """Done of a script under torchrun; `real` as `proofs.launch.launch` has it."""
    start = ["torchrun", "--standalone", f"--nproc-per-node={nprocs}"]
    words = [*start, str(script), *map(str, options)]
    if real:
        return run(launch.as_typed(words), cwd, **env)
    return Fork(words, cwd, OMP_NUM_THREADS=1, **env).finish()


def curve(done):
    """[(loss, accuracy in percent)] on the held-out samples, of each epoch."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^Test loss (\S+), accuracy (\S+)%$", done.stdout, re.M)
    return [(float(loss), float(accuracy)) for loss, accuracy in lines]


def progress(done):
    """[("1", "0", "1000", "0")]: epoch, samples done, all samples, percent."""
    pattern = r"^Train epoch (\d+) \[(\d+)/(\d+) \((\d+)%\)\]"
    return re.findall(pattern, done.stdout, re.M)


def code_of(heading):
    """The first fence of Python below a heading of the guide."""
    page = parse(PAGE)
    (start,) = [line for line, text, _ in page.headings if text == heading]
    lines = page.lines[start:]
    lines = lines[lines.index("```python") + 1 :]
    return "\n".join(lines[: lines.index("```")])


@pytest.mark.text
@pytest.mark.parametrize(("old", "new"), [(STEP1, STEP2), (STEP2, AFTER)])
def test_the_tables_name_every_change(old, new):
    """The guide shows a whole diff; the table below it has a row for each hunk.

    It says nothing of the two changes in the docstring.
    """
    lines = parse(PAGE).lines
    table = lines[lines.index(f"<!-- diff -U0 {old} {new} -->") :]
    table = table[table.index("|---|---|") + 1 :]
    rows = [row.split("|")[1] for row in table[: table.index("")]]
    texts = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    code = ast.parse((ROOT / new).read_text()).body[1].lineno
    changes = [hunk for hunk in hunks(old, new) if hunk.new_start >= code]
    assert len(changes) == len(hunks(old, new)) - 2
    there = ["\n".join(hunk.lines) for hunk in changes]
    assert not [x for x in there if not any(text in x for text in texts)]
    assert not [text for text in texts if not any(text in x for x in there)]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """(folder, Done) of step2.py: one process, batch 60."""
    folder = tmp_path_factory.mktemp("one")
    return folder, alone(ROOT / STEP2, cwd=folder)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """(folder, Done, threads) of after.py: two processes, batch 30 each.

    threads: for each rank, the names of gloo's threads that were left at its exit.
    """
    folder, log = tmp_path_factory.mktemp("two"), tmp_path_factory.mktemp("threads")
    real = "threads that outlive a script do so in a new interpreter alone"
    env = {"PYTHONPATH": OBSERVER, "THREADS_LOG": log}
    done = torchrun(ROOT / AFTER, "--save-model", cwd=folder, real=real, **env)
    return folder, done, [json.loads(x.read_text()) for x in log.iterdir()]


@pytest.mark.parametrize("name", [BEFORE, STEP1])
def test_before_learns(name, tmp_path):
    """As it stands, shuffled by chance. step1.py differs only in its indentation."""
    done = alone(ROOT / name, "--save-model", cwd=tmp_path)
    assert len(curve(done)) == 5
    assert curve(done)[-1][1] > 80
    assert list(load(tmp_path / MODEL)) == KEYS
    assert os.listdir(tmp_path) == [MODEL]


def test_only_the_order_is_new_in_step2(one, tmp_path):
    """before.py, in step2.py's order, prints its numbers to the digit."""
    order = "sampler = torch.utils.data.RandomSampler(train_set, generator=G)\n"
    seeds = "G.manual_seed(args.seed + epoch), torch.manual_seed(args.seed + epoch)"
    script = plant(
        BEFORE,
        tmp_path,
        ("args = get_args()", "G = torch.Generator()\nargs = get_args()"),
        ("train_loader = DataLoader(", order + "train_loader = DataLoader("),
        ("shuffle=True", "sampler=sampler, drop_last=True"),
        ("args.epochs + 1):\n", f"args.epochs + 1):\n    {seeds}\n"),
    )
    done = alone(script, cwd=tmp_path)
    assert curve(done) == curve(one[1])
    assert progress(done)[1] == ("1", "600", "1000", "62")


def test_two_processes_save_what_one_saves(one, two):
    """The same kind of snapshot, and a model with plain keys, written after the loop.

    With dropout the processes draw other numbers than one does: what they have learnt
    is compared without, in `test_one_two_and_three_processes_train_as_one`.
    """
    assert curve(two[1])[-1][1] > 80
    assert progress(two[1]) == progress(one[1])
    theirs, mine = (load(run[0] / SNAPSHOT) for run in (one, two))
    assert shape_of(mine) == shape_of(theirs), "either continues the other"
    assert mine["EPOCHS_RUN"] == 5
    assert same_bits(load(two[0] / MODEL), mine["MODEL_STATE"])
    assert list(mine["MODEL_STATE"]) == KEYS
    assert sorted(os.listdir(two[0])) == [MODEL, SNAPSHOT], "nothing else is left"


# The comparison


def flat(path):
    """All the weights of a file that `--compare` has written, as one tensor."""
    return torch.cat([x.flatten() for x in load(path)["MODEL_STATE"].values()])


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The folder with the files of step2.py and of after.py on 1, 2 and 3 processes."""
    folder = tmp_path_factory.mktemp("compared")
    options = ("--compare", "--epochs", 2)
    runs = [alone(ROOT / STEP2, *options, cwd=folder)]
    for nprocs in (1, 2, 3):
        (folder / SNAPSHOT).unlink()
        runs.append(torchrun(ROOT / AFTER, *options, cwd=folder, nprocs=nprocs))
    assert len({str(curve(done)) for done in runs}) == 1, "they print the same"
    return folder


def test_one_two_and_three_processes_train_as_one(compared):
    """60, 30 and 20 samples each: the same weights and learning rate on every rank."""
    expected = flat(compared / "alone.pt")
    assert expected.dtype == torch.float64
    names = sorted(path.name for path in compared.glob("world_*.pt"))
    assert names == [f"world_{n}_rank_{r}.pt" for n in (1, 2, 3) for r in range(n)]
    for name in names:
        difference = (flat(compared / name) - expected).abs().max()
        assert difference < 1e-13
        assert load(compared / name)["LR"] == load(compared / "alone.pt")["LR"]
    done = alone(ROOT / COMPARE, "alone.pt", *names, cwd=compared)
    ends = {line.partition(": ")[2] for line in done.stdout.splitlines()}
    assert ends == {"weights differ by 0.000000000000, rate 0.004900"}


UNWRAPPED = "train(args, ddp_model,", "train(args, model,"


def test_a_comparison_of_runs_that_resumed_is_refused(tmp_path):
    """The snapshot was not removed, so that the wrong script trained nothing at all."""
    alone(ROOT / STEP2, "--compare", "--epochs", 2, cwd=tmp_path)
    script = plant(AFTER, tmp_path / "copy", UNWRAPPED)
    torchrun(script, "--compare", "--epochs", 2, cwd=tmp_path)
    files = ["alone.pt", "world_2_rank_0.pt", "world_2_rank_1.pt"]
    assert same_bits(*(load(tmp_path / x)["MODEL_STATE"] for x in files[:2]))
    assert refused(files, tmp_path) == (
        "world_2_rank_0.pt: trained 0 epochs: remove the snapshot before each run"
    )


def refused(files, folder):
    """The line with which compare.py refuses."""
    done = alone(ROOT / COMPARE, *files, cwd=folder)
    assert done.returncode == 2, done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("compare.py: error: ")
    return line.removeprefix("compare.py: error: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"EPOCHS_TRAINED": 1}, "epochs trained: 1, but in a.pt: 2"),
        ({"EPOCHS_TRAINED": None}, "has no EPOCHS_TRAINED"),
        ({"LR": None, "FIRST_LR": None}, "has no LR, FIRST_LR"),
        (
            {"MODEL_STATE": {"module.w": torch.ones(2)}},
            "has other weights than a.pt, such as module.w",
        ),
        (
            {"MODEL_STATE": {"w": torch.ones(3)}},
            "has other weights than a.pt, such as w",
        ),
    ],
)
def test_compare_refuses_what_cannot_be_compared(change, message, tmp_path):
    result = {"MODEL_STATE": {"w": torch.ones(2)}, "LR": 0.1, "FIRST_LR": 0.2}
    result["EPOCHS_TRAINED"] = 2
    torch.save(result, tmp_path / "a.pt")
    result = {k: v for k, v in (result | change).items() if v is not None}
    torch.save(result, tmp_path / "b.pt")
    assert refused(["a.pt", "b.pt"], tmp_path) == f"b.pt: {message}"


@pytest.mark.parametrize("first_lr", [0.1, 0.2])
def test_compare_says_that_the_rate_never_changed(first_lr, tmp_path):
    """A mistake with the scheduler would not show yet."""
    state = {"n": torch.tensor(5), "w": torch.tensor([1.0, float("nan")])}
    result = {"MODEL_STATE": state, "LR": 0.1, "FIRST_LR": first_lr}
    torch.save(result | {"EPOCHS_TRAINED": 2}, tmp_path / "a.pt")
    done = alone(ROOT / COMPARE, "a.pt", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "differ by nan" in done.stdout, "no maximum hides it"
    said = "the rate has not changed yet: a mistake with a scheduler would not show"
    assert (said in done.stdout) == (first_lr == 0.1)


def test_dropout_of_any_kind_is_turned_off(tmp_path):
    """The loop of step2.py finds it in layers that the script does not have, too."""
    layers = [
        torch.nn.Dropout1d(),
        torch.nn.AlphaDropout(),
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout()),
        torch.nn.LSTM(8, 8, num_layers=2, dropout=0.5),
        torch.nn.TransformerEncoderLayer(8, 2, dropout=0.5),
    ]
    code = compile((ROOT / STEP2).read_text(), STEP2, "exec")
    step2 = {"__name__": "step2"}
    exec(code, step2)
    inputs = torch.ones(3, 4, 8)
    for layer in layers:

        def draws(layer=layer):
            outputs = [layer(inputs) for _ in range(2)]
            return [x[0] if isinstance(x, tuple) else x for x in outputs]

        assert not torch.equal(*draws()), layer
        step2["turn_dropout_off"](layer)
        assert torch.equal(*draws()), layer


STEP = "scheduler.step()"
MISTAKES = {
    "a continue above the scheduler": (STEP, f"if rank: continue\n        {STEP}"),
    "the scheduler on rank 0 alone": (STEP, f"if rank == 0: {STEP}"),
    "the model is not wrapped": UNWRAPPED,
    "the sampler is not told the epoch": ("sampler.set_epoch(epoch)", "pass"),
    "every process takes all samples": (
        "DistributedSampler(train_set,",
        "DistributedSampler(train_set, num_replicas=1, rank=0,",
    ),
    "the batch is not divided": ("args.batch_size // world_size", "args.batch_size"),
    "dropout is on": ("        turn_dropout_off(model)", "        pass"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_compare_shows_a_mistake(mistake, compared, tmp_path):
    """None of them raises. Each is far above what rounding does in float64."""
    script = plant(AFTER, tmp_path / "copy", MISTAKES[mistake])
    done = torchrun(script, "--compare", "--epochs", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    files = [compared / "alone.pt", *sorted(tmp_path.glob("world_*.pt"))]
    done = alone(ROOT / COMPARE, *files, cwd=tmp_path)
    found = re.findall(r"by (\S+), rate (\S+)", done.stdout)
    assert len(found) == 3
    assert all(float(difference) > 1e-5 for difference, _ in found[1:])
    last = "0.010000" if "scheduler" in mistake else "0.004900"
    assert [rate for _, rate in found] == ["0.004900", "0.004900", last]


def test_float32_hides_small_mistakes(tmp_path):
    """The right conversion, compared in float32: rounding is no longer nothing."""
    float32 = "torch.set_default_dtype(torch.float64)", "pass"
    script = plant(AFTER, tmp_path / "copy", float32)
    for nprocs in (1, 3):
        (tmp_path / SNAPSHOT).unlink(missing_ok=True)
        torchrun(script, "--compare", "--epochs", 2, cwd=tmp_path, nprocs=nprocs)
    difference = flat(tmp_path / "world_3_rank_0.pt") - flat(
        tmp_path / "world_1_rank_0.pt"
    )
    assert 1e-8 < difference.abs().max() < 1e-2


# All ranks do the same


def with_lines_added(text):
    """(`text` with a line added after each statement of a function, their number)."""
    functions = [
        x
        for x in ast.parse(text).body
        if getattr(x, "name", "") in ("train", "test", "main")
    ]
    statements = [x for y in functions for x in ast.walk(y) if isinstance(x, ast.stmt)]
    statements = [x for x in statements if x not in functions]
    lines = text.splitlines()
    ends = sorted(statements, key=lambda x: (x.end_lineno, -x.col_offset))
    for number in reversed(range(len(ends))):
        indent = " " * ends[number].col_offset
        lines.insert(ends[number].end_lineno, f"{indent}passed.append({number})")
    return "\n".join(lines) + "\n", len(ends)


def test_a_line_added_anywhere_runs_on_every_rank(tmp_path):
    """In `train`, `test` and `main`; a scheduler, a counter or a `break` goes there."""
    script = plant(AFTER, tmp_path / "copy", hooks=["convert_lines"])
    text, count = with_lines_added(script.read_text())
    assert count > 50
    script.write_text(text)
    options = ("--epochs", 2, "--compare", "--save-model")
    done = torchrun(script, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    passed = [json.loads((tmp_path / f"noted.{x}.json").read_text()) for x in (0, 1)]
    assert len(set(passed[0])) > count - 10, "all but the resume and CUDA"
    assert passed[0] == passed[1]


def test_a_break_on_one_rank_hangs(tmp_path):
    """Rank 0 has left the loop and does something else: rank 1 waits for it."""
    script = plant(
        AFTER,
        tmp_path / "copy",
        ("save_once(snapshot, SNAPSHOT)", "if epoch == 2 and rank == 0: break"),
        ("minutes=5", "seconds=4"),
        ("import gc", "import gc, time"),
        ("    gc.collect()", "    time.sleep(8); gc.collect()"),
    )
    done = torchrun(script, cwd=tmp_path)
    assert done.returncode == 1
    assert "Timed out waiting 4000ms" in done.stderr
    assert "Train epoch 3" not in done.stdout


def test_a_break_that_all_ranks_decide(tmp_path):
    """The lines of the guide: one rank wants to stop, and all do."""
    lines = code_of("Let all processes decide to stop")
    wish = "time.monotonic() > deadline"
    assert lines.count(wish) == 1
    lines = lines.replace(wish, "rank == 1 and epoch == 2")
    step = "        scheduler.step()\n"
    script = plant(AFTER, tmp_path / "copy", (step, f"{step}{lines}\n"))
    done = torchrun(script, cwd=tmp_path)
    assert len(curve(done)) == 2


def test_the_best_checkpoint(tmp_path):
    """The lines of the guide keep the best epoch, and a resumed run keeps it, too."""
    test = "        test(model, device, test_loader)\n"
    last = 'accuracy {correct / total:.1%}")\n'
    changes = [
        (test, code_of("Keep the best checkpoint") + "\n"),
        (last, f"{last}    return correct / total\n"),
        ("    epochs_run, epochs", "    best = 0.0\n    epochs_run, epochs"),
        ('"EPOCHS_RUN": epoch,', '"EPOCHS_RUN": epoch, "BEST": best,'),
        (
            'snapshot["EPOCHS_RUN"]\n',
            'snapshot["EPOCHS_RUN"]; best = snapshot["BEST"]\n',
        ),
    ]
    script = plant(AFTER, tmp_path / "copy", *changes)
    first = curve(torchrun(script, "--epochs", 2, cwd=tmp_path))
    best = load(tmp_path / "best.pt")
    accuracies = [accuracy for _, accuracy in first]
    assert accuracies[-1] == max(accuracies), "the second epoch is the best so far"
    assert same_bits(best, load(tmp_path / SNAPSHOT)["MODEL_STATE"])
    assert f"{load(tmp_path / SNAPSHOT)['BEST']:.1%}" == f"{max(accuracies)}%"
    worse = ("correct / total\n", "correct / total / 2\n")
    script = plant(AFTER, tmp_path / "copy", *changes, worse)
    assert len(curve(torchrun(script, "--epochs", 3, cwd=tmp_path))) == 1
    assert same_bits(load(tmp_path / "best.pt"), best)


@pytest.mark.parametrize(
    ("shuffle", "status"), [("use_cuda", 0), ("not use_cuda", 1), ("True", 1)]
)
def test_shuffle_beside_a_sampler_raises(shuffle, status, tmp_path):
    """Where it stands under `if use_cuda`, on the CPU all seems well."""
    old = "sampler=sampler, drop_last=True"
    script = plant(AFTER, tmp_path / "copy", (old, f"{old}, shuffle={shuffle}"))
    done = torchrun(script, "--epochs", 1, cwd=tmp_path, nprocs=1)
    assert done.returncode == status
    message = "sampler option is mutually exclusive with shuffle"
    assert (message in done.stderr) == bool(status)


def test_without_torchrun(compared, tmp_path):
    """The guide's lines for torch.multiprocessing.spawn: the same weights."""
    text = (ROOT / AFTER).read_text()
    entry = text[text.index('if __name__ == "__main__":') :]
    lines = code_of("Start it without torchrun") + "\n"
    script = plant(AFTER, tmp_path / "copy", (entry, lines))
    done = alone(script, "--compare", "--epochs", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("world_2_rank_0.pt", "world_2_rank_1.pt"):
        assert same_bits(load(tmp_path / name), load(compared / name))


MASKED = """
import torch
import torch.distributed as dist
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
model = torch.nn.Linear(5, 7)
ddp_model = torch.nn.parallel.DistributedDataParallel(model)
everything, all_labels = torch.randn(4, 6, 5), torch.randint(7, (4, 6))
all_labels[0, 1:] = all_labels[1, 3:] = -100  # 4 tokens in the first half count
share = slice(rank * 4 // world_size, (rank + 1) * 4 // world_size)
inputs, labels = everything[share], all_labels[share]
LINES
whole = torch.nn.Linear(5, 7)
whole.load_state_dict(model.state_dict())
F.cross_entropy(whole(everything).flatten(0, 1), all_labels.flatten()).backward()
error = (model.weight.grad - whole.weight.grad).abs().max().item()
print(f"rank {rank} of {world_size}: {error:.1e}")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("nprocs", [1, 2])
def test_a_masked_loss(nprocs, tmp_path):
    """4 and 12 tokens on two ranks: with the guide's lines, the mean over all 16."""
    assert (
        masked(code_of("Divide a masked loss by all tokens"), nprocs, tmp_path) < 1e-15
    )


def test_a_masked_loss_is_no_mean_over_the_batch(tmp_path):
    """The mean of each rank's mean is wrong, and nothing says so."""
    lines = (
        "F.cross_entropy(ddp_model(inputs).flatten(0, 1), labels.flatten()).backward()"
    )
    assert masked(lines, 1, tmp_path) < 1e-15
    assert masked(lines, 2, tmp_path) > 1e-2


def masked(lines, nprocs, folder):
    """How far the gradients are from those of one process with the whole batch."""
    script = folder / "masked.py"
    script.write_text(MASKED.replace("LINES", lines))
    done = torchrun(script, cwd=folder, nprocs=nprocs)
    assert done.returncode == 0, done.stderr
    errors = re.findall(r"^rank \d of \d: (\S+)$", done.stdout, re.M)
    assert len(errors) == nprocs
    return max(map(float, errors))


# Kills, and what each rank has done


def test_a_kill_in_a_write_leaves_the_last_snapshot(one, tmp_path):
    """step2.py dies while it writes its third snapshot, and goes on from the second.

    The learning rate and dropout's random numbers must go on, too.
    """
    save = "        torch.save(snapshot, file)\n"
    half = 'file.write(b"half"), file.flush(), os.kill(os.getpid(), 9)'
    die = f'        if snapshot["EPOCHS_RUN"] == 3:\n            {half}\n'
    script = plant(STEP2, tmp_path / "copy", (save, die + save))
    assert alone(script, cwd=tmp_path).returncode == -9
    assert load(tmp_path / SNAPSHOT)["EPOCHS_RUN"] == 2
    done = alone(ROOT / STEP2, cwd=tmp_path)
    assert "resuming: 2 of 5 epochs are finished" in done.stdout
    assert same_bits(load(tmp_path / SNAPSHOT), load(one[0] / SNAPSHOT))
    assert not (tmp_path / f"{SNAPSHOT}.tmp").exists()


@linux
def test_killed_after_resumes_bit_for_bit(two, tmp_path):
    script = plant(AFTER, tmp_path / "copy", hooks=["convert_kill"])
    mark = uuid.uuid4().hex
    real = "a rank is killed, and nothing may be left"
    done = torchrun(script, cwd=tmp_path, real=real, MARK=mark)
    assert done.returncode == 1
    assert "SIGKILL" in done.stderr
    assert not left_over(mark)
    assert load(tmp_path / SNAPSHOT)["EPOCHS_RUN"] == 2
    done = torchrun(ROOT / AFTER, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("resuming: 2 of 5 epochs are finished") == 1
    assert "epoch 2 [" not in done.stdout
    assert same_bits(load(tmp_path / SNAPSHOT), load(two[0] / SNAPSHOT))


ODD = "make_data(1250), [1000, 250]", "make_data(1257), [1007, 250]"


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """(folder, Done, [facts of each rank]) of after.py, 20 samples each.

    There are 1007 samples, which padding would make a step more.
    """
    folder = tmp_path_factory.mktemp("three")
    script = plant(AFTER, folder / "copy", ODD, hooks=["convert_probe"])
    done = torchrun(script, "--compare", cwd=folder, nprocs=3)
    assert done.returncode == 0, done.stderr
    files = [folder / f"probe.{rank}.json" for rank in range(3)]
    return folder, done, [json.loads(file.read_text()) for file in files]


@linux
def test_three_processes_train_as_one(three, tmp_path):
    """3 x 20 and 1 x 60 of 1007: tight enough to see any other sample."""
    script = plant(STEP2, tmp_path / "copy", ODD)
    done = alone(script, "--compare", cwd=tmp_path)
    assert curve(done) == curve(three[1])
    assert len({facts["sum"] for facts in three[2]}) == 1, "equal on all, to the bit"
    mine, theirs = (weights(x / SNAPSHOT) for x in (three[0], tmp_path))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@linux
def test_three_processes_evaluate_each_sample_once(three):
    """250 held-out samples are 84 + 83 + 83; none of them is trained on."""
    _, _, facts = three
    assert [len(x["evaluated"]) for x in facts] == [84, 83, 83]
    held_out = set().union(*(x["evaluated"] for x in facts))
    assert len(held_out) == 250
    trained = {index for x in facts for epoch in x["trained"] for index in epoch}
    assert not held_out & trained


@linux
def test_three_processes_share_out_each_epoch(three):
    """16 steps of 3 x 20 different samples; another order in each epoch."""
    _, _, facts = three
    orders = [[x["trained"][epoch] for x in facts] for epoch in range(5)]
    for order in orders:
        assert [len(part) for part in order] == [320, 320, 320]
        assert len(set().union(*order)) == 960
    assert len({str(order) for order in orders}) == 5


@linux
def test_each_process_has_random_numbers_of_its_own(three):
    """They follow from epoch and rank alone, so that a resumed run repeats them."""
    for rank, facts in enumerate(three[2]):
        assert facts["seeds"] == [1 + epoch * 3 + rank for epoch in range(1, 6)]


@linux
def test_one_process_prints_and_saves_and_all_end_well(two, three):
    _, done, facts = three
    assert len(curve(done)) == 5
    assert [x["saved"] for x in facts] == [5, 0, 0]
    assert [x["timeout_s"] for x in facts] == [300] * 3
    assert two[2] == [[], []], "a thread is left, and the exit can abort"


def test_after_says_how_to_start_it(tmp_path):
    done = alone(ROOT / AFTER, cwd=tmp_path)
    assert done.returncode == 2
    command = "torchrun --standalone --nproc-per-node=2"
    assert done.stderr == f"start this with: {command} {ROOT / AFTER}\n"
    assert not os.listdir(tmp_path)
