"""sharded_snapshot.py: a folder with a part of each rank, and a file that names it."""

import json
import re
import shutil

import pytest
import torch

from tools.run.launch import launch, plant, run_script, train
from tools.run.results import load, losses, same_bits, weights
from tools.scripts import ROOT

NAME = "variants/sharded_snapshot.py"


def test_resumes_on_other_numbers_of_ranks_and_from_and_to_a_plain_file(runs, tmp_path):
    """multinode.py, 2 ranks, 4, and the lines of the chapter for single_gpu.py."""
    page = (ROOT / "docs/7_sharding.md").read_text()
    after = page.partition("## Make one file of the parts")[2]
    code = re.search(r"```python\n(.*?)```", after, re.S)[1]
    (tmp_path / "one_file.py").write_text(code)
    script = ROOT / NAME
    pieces = losses(train(ROOT / "multinode.py", 1, 1, cwd=tmp_path))
    pieces += losses(train(script, 2, 1, cwd=tmp_path))
    path, copy = tmp_path / "snapshot.pt", tmp_path / "copy.pt"
    shutil.copy(path, copy)  # what it saves leaves the folder of the other file alone
    remove = "            shutil.rmtree(old_folder"  # twice: it may be gone already
    twice = plant(NAME, tmp_path / "twice", (remove, f"{remove}); {remove.strip()}"))
    four = "--batch-size", 16, "--snapshot-path", copy
    pieces += losses(train(twice, 4, 1, *four, cwd=tmp_path, nprocs=4))
    copy.replace(path)
    done = run_script(tmp_path / "one_file.py", cwd=tmp_path, PYTHONPATH=ROOT)
    assert done.returncode == 0, done.stderr
    last = 5, 2, "--batch-size", 64, "--snapshot-path", "plain.pt"
    pieces += losses(train(ROOT / "single_gpu.py", *last, cwd=tmp_path))
    folder, done = runs(NAME)
    torch.testing.assert_close(pieces, losses(done), rtol=1e-6, atol=2e-6)
    mine, whole = weights(tmp_path / "plain.pt"), weights(folder / "snapshot.pt")
    torch.testing.assert_close(mine, whole, rtol=0, atol=1e-6)
    folders = sorted(x.name[:-8] for x in tmp_path.glob("*.pt.*"))
    assert folders == ["copy.pt.4.", "snapshot.pt.2."]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_option_that_is_changed_costs_no_state(runs, tmp_path):
    """As in every script, the saved momentum counts. Two runs have two folders."""
    _, done = runs(NAME)
    path, hooks = tmp_path / "snapshot.pt", ["fsdp:counting"]
    script = plant(NAME, tmp_path / "first", hooks=hooks)
    for _ in range(2):
        path.unlink(missing_ok=True)
        train(script, 1, 1, cwd=tmp_path)
    assert len([*tmp_path.glob("snapshot.pt.1.*")]) == 2
    shapes = torch.load(path)["SHAPES"]["MODEL_STATE"]
    assert all(x.is_meta for x in shapes.values()), "no weights"
    script = plant(NAME, tmp_path / "other", (", momentum=0.9", ""), hooks=hooks)
    assert losses(train(script, 2, 1, cwd=tmp_path)) == losses(done)[1:2]
    assert load(path)["OPTIMIZER_STATE"]["state"][0]["count"] == 2 * 32
    from variants.sharded_snapshot import load_parts, load_train_objs

    _, _, model, _, optimizer = load_train_objs()
    optimizer.param_groups[0]["lr"] = 1.0
    load_parts(model, optimizer, *tmp_path.glob("snapshot.pt.2.*"))
    assert optimizer.param_groups[0]["lr"] == 0.001


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
    group = json.loads((tmp_path / "other/group.0.json").read_text())
    assert group == [True, "gloo", 300]


def line_of(name, *changes, cwd):
    """The line with which a script ends that finds these parts."""
    script = plant(name, cwd / "copy", *changes)
    done = launch(script, 9, 1, cwd=cwd, real="", nprocs=1)
    return re.findall(r"(?m)^\w+\.py: error: (.+)$", done.stderr)


def test_what_does_not_fit_ends_with_a_line(runs, copy_of):
    """Another script, another model, a part that is missing."""
    path = copy_of(runs(NAME)[0])
    before = path.read_bytes()
    other = ["snapshot.pt belongs to another model: choose another --snapshot-path"]
    assert line_of("single_gpu.py", cwd=path.parent) == other
    wide = "torch.nn.Linear(20, 1)", "torch.nn.Sequential(torch.nn.Linear(20, 1))"
    assert line_of(NAME, wide, cwd=path.parent) == other
    (part,) = path.parent.glob("*/__1_0.distcp")
    part.unlink()
    (line,) = line_of(NAME, cwd=path.parent)
    assert re.fullmatch(rf"cannot load {part.parent}: .*No such file .*distcp'", line)
    assert path.read_bytes() == before
