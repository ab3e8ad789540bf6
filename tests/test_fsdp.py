"""fsdp.py: the training of multinode.py, with a part of the model on each rank."""

import json
import math
import os
import pickle
import re

import pytest
import torch

from tests.conftest import needs_hosts
from tools.proofs import hosts
from tools.proofs.launch import launch, objects_of, plant, train
from tools.proofs.results import load, losses, same_bits, weights
from tools.proofs.warm import Fork
from tools.scripts import ROOT
from variants import fsdp

NAME = "variants/fsdp.py"
MODEL = "    model = torch.nn.Linear(20, 1)\n"
RECORD = "faults:record_in_one_piece"
SHARDED = re.search(r"    sizes = .*\n.*\n", (ROOT / NAME).read_text())[0]


def test_learns(typed):
    _, done, _ = typed(NAME)
    curve = losses(done)
    assert curve[0][0] > 10 * 0.01
    assert 0.9 * 0.01 < curve[-1][1] < 1.15 * 0.01


@pytest.fixture(scope="module")
def multinode(tmp_path_factory):
    """multinode.py with the model of fsdp.py."""
    return plant("multinode.py", tmp_path_factory.mktemp("parent"), (MODEL, SHARDED))


def test_the_losses_of_multinode(runs, multinode, tmp_path):
    folder, done = runs(NAME)
    others = train(multinode, 5, 2, cwd=tmp_path)
    torch.testing.assert_close(losses(done), losses(others), rtol=1e-6, atol=2e-6)
    mine, theirs = weights(folder / "snapshot.pt"), weights(tmp_path / "snapshot.pt")
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("nprocs", [2, 3])
def test_a_rank_holds_its_share_of_the_rows(tmp_path, nprocs):
    """Of weights, gradients and momentum. The last layer has one row for all ranks."""
    unnamed = "init_process_group(backend, ", "init_process_group("  # as if NCCL's
    script = plant(NAME, tmp_path / "copy", unnamed, hooks=["fsdp:held"])
    train(script, 1, 1, cwd=tmp_path, nprocs=nprocs)
    shapes = [x.shape for x in objects_of(NAME)[2].parameters()]
    for rank in range(nprocs):
        numbers = 0
        for rows, *rest in shapes:
            each = -(-rows // nprocs)  # as torch.chunk does
            mine = max(0, min(each, rows - rank * each))
            numbers += mine * math.prod(rest)
        held = json.loads((tmp_path / f"held.{rank}.json").read_text())
        assert held == ["gloo", 300, True, *[4 * numbers] * 3]


# Snapshots


def test_resumes_on_other_numbers_of_ranks_and_in_other_scripts(
    runs, multinode, tmp_path
):
    """2 ranks, 4, put together for multinode.py, 1: the momentum comes along."""
    path = tmp_path / "snapshot.pt"
    pieces = losses(train(ROOT / NAME, 1, 1, cwd=tmp_path))
    pieces += losses(
        train(ROOT / NAME, 2, 1, "--batch-size", 16, cwd=tmp_path, nprocs=4)
    )
    fsdp.put_together(str(path), str(path))
    assert len(os.listdir(tmp_path)) == 2, "a file, and the parts that it was made of"
    pieces += losses(train(multinode, 3, 1, cwd=tmp_path))
    args = (5, 2, "--batch-size", 64)
    pieces += losses(train(ROOT / NAME, *args, cwd=tmp_path, nprocs=1))
    folder, done = runs(NAME)
    torch.testing.assert_close(pieces, losses(done), rtol=1e-6, atol=2e-6)
    mine, whole = weights(path), weights(folder / "snapshot.pt")
    torch.testing.assert_close(mine, whole, rtol=0, atol=1e-6)


def test_two_snapshots_and_it_resumes_from_a_plain_one_with_buffers(tmp_path):
    path, best = tmp_path / "snapshot.pt", tmp_path / "best.pt"
    one = "self.saver.save(snapshot, self.snapshot_path)"
    two = one, f"{one}; self.saver.save(snapshot, 'best.pt')"
    script = plant(NAME, tmp_path / "copy", two, hooks=["models:batch_norm"])
    train(script, 2, 1, cwd=tmp_path)
    assert same_bits(load(best), load(path))
    assert len(list(tmp_path.glob("*.pt.*"))) == 2, "a folder for each"
    best.unlink()
    fsdp.put_together(str(path), str(path))
    done = train(script, 3, 1, cwd=tmp_path)
    assert "2 of 3 epochs are finished in snapshot.pt" in done.stdout


@pytest.mark.parametrize(
    ("moment", "saved"), [("parts", 1), ("pointer", 1), ("old", 2), ("error", 1)]
)
def test_stopped_while_saving_it_keeps_a_whole_snapshot(tmp_path, moment, saved):
    script = plant(NAME, tmp_path / "copy", hooks=["fsdp:in_second_save"])
    done = launch(script, 3, 1, cwd=tmp_path, real="", KILLED=moment)
    assert done.returncode == 1
    assert "epoch 1 saved to snapshot.pt" in done.stdout
    assert load(tmp_path / "snapshot.pt")["EPOCHS_RUN"] == saved


def test_what_is_saved_is_not_changed_by_later_steps(tmp_path):
    """https://github.com/pytorch/pytorch/issues/144657"""
    for name, hooks in (("one", []), ("other", ["fsdp:changed_while_saving"])):
        hooks = [*hooks, "float64"]
        (tmp_path / name).mkdir()
        script = plant(NAME, tmp_path / f"copy of {name}", hooks=hooks)
        train(script, 1, 1, cwd=tmp_path / name)
    one, other = (load(tmp_path / x / "snapshot.pt") for x in ("one", "other"))
    assert same_bits(one, other)
    assert one["MODEL_STATE"]["0.weight"].dtype == torch.float64


def test_one_folder_is_left_and_other_files_stay(runs):
    """Of three saves. A second run in this folder finds no name of its own taken."""
    names = sorted(os.listdir(runs(NAME)[0]))
    assert names == ["snapshot.pt", f"snapshot.pt.{load_raw(runs)['PARTS']}"]


def load_raw(runs):
    return torch.load(runs(NAME)[0] / "snapshot.pt", weights_only=True)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_no_pickle_is_read(runs, copy_of, monkeypatch):
    path = copy_of(runs(NAME)[0])
    monkeypatch.chdir(path.parent)
    (listing,) = path.parent.glob("*/.metadata")
    listing.write_bytes(pickle.dumps(Bomb()))
    assert same_bits(load(path), load(runs(NAME)[0] / "snapshot.pt"))
    assert not os.path.exists("exploded")


# Bad input


def test_ranks_that_use_different_blocks(tmp_path):
    """Else FSDP2 gathers and trains one block for the other, without an error."""
    script = plant(NAME, tmp_path / "copy", hooks=["fsdp:experts", RECORD])
    done = launch(script, 1, 1, cwd=tmp_path, real="")
    assert done.returncode == 1
    assert "RuntimeError: a parameter has no gradient" in done.stderr
    assert "epoch 1/1" not in done.stdout


def line_of(script, *arguments, cwd):
    """The line with which a rank ends."""
    done = launch(script, *arguments, cwd=cwd, real="")
    assert "exitcode  : 2 " in done.stderr.split("Root Cause")[1]
    (line,) = re.findall(r"(?m)^\w+\.py: error: (.+)$", done.stderr)
    return line


def test_a_model_without_blocks(tmp_path):
    script = plant(NAME, tmp_path / "copy", (SHARDED, MODEL))
    line = line_of(script, 1, 1, cwd=tmp_path)
    assert line == "the model has no list of blocks that could be sharded"


def test_blocks_that_share_a_weight(tmp_path):
    tied = SHARDED.replace("32", "20") + "    model[0].weight = model[1].weight\n"
    script = plant(NAME, tmp_path / "copy", (SHARDED, tied))
    line = line_of(script, 1, 1, cwd=tmp_path)
    assert line == "two blocks share a weight: they must be one block"


def test_a_snapshot_of_another_model(runs, copy_of):
    path = copy_of(runs(NAME)[0])
    script = plant(NAME, path.parent / "copy", ("(32, 32), ", ""))
    line = line_of(script, 9, 1, cwd=path.parent)
    assert (
        line == "snapshot.pt belongs to another model: choose another --snapshot-path"
    )


def test_a_folder_that_is_not_whole(runs, copy_of):
    path = copy_of(runs(NAME)[0])
    before = path.read_bytes()
    (part,) = path.parent.glob("*/__1_0.distcp")
    part.unlink()
    line = line_of(ROOT / NAME, 9, 1, cwd=path.parent)
    assert re.fullmatch(rf"{part.parent} is not whole: .*No such file .*distcp'", line)
    assert path.read_bytes() == before


def test_other_scripts_refuse_parts(runs, copy_of):
    path = copy_of(runs(NAME)[0])
    why = "a fork of the tests knows the classes of fsdp.py"
    done = launch(ROOT / "single_gpu.py", 9, 1, cwd=path.parent, real=why)
    start = "single_gpu.py: error: snapshot.pt is cut short or no snapshot: Unpickling"
    assert done.returncode == 2
    assert done.stderr.startswith(start)


# Evaluation, memory, hosts


def test_ranks_with_unequally_many_batches(tmp_path):
    """65 held-out samples in batches of 32: rank 0 has two of them, and rank 1 one."""
    few = "MyTrainDataset(512, seed=1)", "MyTrainDataset(65, seed=1)"
    line = "self.model(source)  # all ranks"
    noted = line, f"print('one more') or {line}"
    script = plant(NAME, tmp_path / "copy", few, noted)
    text = script.read_text()  # a rank that waits alone raises soon
    script.write_text(text.replace("timedelta(minutes=5)", "timedelta(seconds=10)"))
    curves = []
    for nprocs in (1, 2):
        folder = tmp_path / str(nprocs)
        folder.mkdir()
        args = (1, 1, "--batch-size", 64 // nprocs)
        done = train(script, *args, cwd=folder, nprocs=nprocs)
        curves += losses(done)
        assert done.stdout.count("one more") == nprocs - 1
    torch.testing.assert_close(curves[0], curves[1], rtol=1e-6, atol=2e-6)


LARGE = "(32, 32), ", "(32, 1000), *[(1000, 1000)] * 12, (1000, 32), "
FEW = [("MyTrainDataset(2048)", "MyTrainDataset(64)"), ("(512, seed", "(32, seed")]


@pytest.mark.waits
@pytest.mark.parametrize("name", [NAME, "multinode.py"])
def test_a_model_too_large_for_one_rank(tmp_path, name):
    """Its weights take 48 MB; with gradients, buckets and momentum, four times that."""
    change = (MODEL, SHARDED.replace(*LARGE)) if name != NAME else LARGE
    script = plant(name, tmp_path / "copy", change, *FEW, hooks=["fsdp:limited"])
    how = {"nprocs": 4, "real": "", "LIMIT_MB": 170}
    done = launch(script, 1, 1, "--batch-size", 8, cwd=tmp_path, **how)
    failed = "DefaultCPUAllocator: can't allocate memory" in done.stderr
    assert (done.returncode, failed) == ((0, False) if name == NAME else (1, True))


def sent_by(host):
    (link,) = json.loads(host.run("ip", "-s", "-j", "link", "show", "eth0"))
    return link["stats64"]["tx"]["bytes"]


@needs_hosts
@pytest.mark.waits
def test_hsdp_sends_less_between_machines(tmp_path):
    """With the lines of the chapter; 2 machines, 2 ranks each, 8 steps."""
    page = (ROOT / "docs/7_sharding.md").read_text()
    (code,) = re.findall(r"## Shard inside a machine.*?```python\n(.*?)```", page, re.S)
    one_mesh = re.search(r" +mesh = .*\n", (ROOT / NAME).read_text())[0]
    two_dimensions = "".join(f"        {line}\n" for line in code.splitlines())
    wide = ("(32, 32), ", "(32, 500), (500, 500), (500, 500), (500, 32), ")
    few = [("MyTrainDataset(2048)", "MyTrainDataset(512)"), ("(512, seed", "(32, seed")]
    words = "torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d"
    words += " --rdzv-endpoint=node0:29500 -m variants.fsdp 1 1 --batch-size 16"
    sent, saved = [], []
    for name, mesh in (("fsdp", one_mesh), ("hsdp", two_dimensions)):
        folder = tmp_path / name
        plant(NAME, folder, wide, *few, (one_mesh, mesh))
        with hosts.Hosts(2, folder) as two:
            before = sent_by(two[0])
            jobs = [host.start(words.split(), PYTHONPATH=folder) for host in two]
            assert [job.wait() for job in jobs] == [0, 0], jobs[0].output
            sent.append(sent_by(two[0]) - before)
        saved.append(load(folder / "snapshot.pt")["MODEL_STATE"])
    torch.testing.assert_close(saved[0], saved[1], rtol=0, atol=1e-6)
    model = 8 * 4 * sum(x.numel() for x in saved[0].values())
    fsdp_sent, hsdp_sent = (x / model for x in sent)
    print(f"times the model, each step: FSDP {fsdp_sent:.2f}, HSDP {hsdp_sent:.2f}")
    assert 0.95 < hsdp_sent < 1.1
    assert fsdp_sent > 2.2


def test_the_recipes_of_the_chapter(tmp_path):
    """What works, what raises an error, what is wrong in silence."""
    words = ["torchrun", "--standalone", "--nproc-per-node=2"]
    done = Fork([*words, ROOT / "docs/sharding/recipes.py"], tmp_path).finish()
    said = re.findall(r"(?m)^(\w+) +\| (.*)$", done.stdout)
    assert dict(said[:1]) == {"clip": "norm 7.746, of rank 0's part 5.477"}
    assert [x for x in said if x[0] == "accumulate"] == [
        ("accumulate", "averaged after the first: True, sync off: False"),
        ("accumulate", "after both, the same gradient: True"),
    ]
    rest = [text for topic, text in said if topic not in ("clip", "accumulate")]
    starts = [
        "embedding alone: Parameter 'embedding.weight' is shared",
        "block, then all: True",
        "aten.embedding.default got mixed torch.Tensor and DTensor",
        "after register_fsdp_forward_method: no error",
        "seeds (0, 0): ranks have the same rows: True",
        "seeds (0, 1): ranks have the same rows: False",
        "reduced in torch.bfloat16: 0.500000, in torch.float32",
        "reduced in torch.float32: 0.500500, in torch.float32",
        "shape (4, 4), rank 0 holds (2, 4)",
    ]
    if torch.__version__ < "2.12":  # it unties the weights, and raises no error
        starts[0] = "embedding alone: no error"
    assert [text[: len(x)] for text, x in zip(rest, starts, strict=True)] == starts


@pytest.mark.waits
def test_the_table_of_the_chapter(tmp_path):
    """Bytes of each parameter: the formula, and what 4 ranks hold."""
    words = ["torchrun", "--standalone", "--nproc-per-node=4"]
    done = Fork([*words, ROOT / "docs/sharding/memory.py"], tmp_path).finish()
    rows = re.findall(r"formula +([\d.]+) \| +([\d.]+)", done.stdout)
    assert rows == [(x, x) for x in ("16.0", "10.0", "8.0", "4.0")]
    kept = [float(x) for x in re.findall(r"activations.*\| ([\d.]+)", done.stdout)]
    assert kept == pytest.approx([8, 4], abs=0.7)
