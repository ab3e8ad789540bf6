"""sharded_snapshot.py: a folder with a part of each rank, and a file that names it."""

import re
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.helpers.checks import (
    assert_same_losses,
    assert_same_weights,
    import_script,
    noted,
)
from tests.helpers.forked import in_a_fork
from tests.helpers.zoo import Float32Momentum
from tests.variants.test_preemptible import ranks
from tools.run.launch import launch, plant, run_script, train
from tools.run.results import load, losses, same_bits
from tools.scripts import ROOT

NAME = "variants/sharded_snapshot.py"


def test_resumes_on_other_numbers_of_ranks_and_from_and_to_a_plain_file(runs, tmp_path):
    """multinode.py, 2 ranks, 4, and the lines of the chapter for single_gpu.py."""
    page = (ROOT / "docs/sharded_snapshot.md").read_text()
    after = page.partition("## Make one file of the parts")[2]
    code = re.search(r"```python\n(.*?)```", after, re.S)[1]
    (tmp_path / "one_file.py").write_text(code)
    first = train(ROOT / "multinode.py", 1, 1, cwd=tmp_path)
    second = train(ROOT / NAME, 2, 1, cwd=tmp_path)
    # What is saved to a copy of the file leaves the folder of the file alone.
    path = tmp_path / "snapshot.pt"
    copy = tmp_path / "copy.pt"
    shutil.copy(path, copy)
    # The old folder is removed twice: it may be gone already.
    remove = "            shutil.rmtree(old_folder"
    twice = plant(NAME, tmp_path / "twice", (remove, f"{remove}); {remove.strip()}"))
    options = "--batch-size", 16, "--snapshot-path", copy
    fourth = train(twice, 4, 1, *options, cwd=tmp_path, nprocs=4)
    copy.replace(path)
    done = run_script(tmp_path / "one_file.py", cwd=tmp_path, PYTHONPATH=ROOT)
    assert done.returncode == 0, done.stderr
    options = "--batch-size", 64, "--snapshot-path", "plain.pt"
    fifth = train(ROOT / "single_gpu.py", 5, 2, *options, cwd=tmp_path)
    pieces = losses(first) + losses(second) + losses(fourth) + losses(fifth)
    folder, done = runs(NAME)
    assert_same_losses(pieces, losses(done))
    assert_same_weights(tmp_path / "plain.pt", folder / "snapshot.pt")
    left = sorted(folder.stem for folder in tmp_path.glob("*.pt.*"))
    assert left == ["copy.pt.4", "snapshot.pt.2"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_option_that_is_changed_costs_no_state(runs, tmp_path):
    """As in every script, the saved momentum counts. Two runs have two folders."""
    _, done = runs(NAME)
    path = tmp_path / "snapshot.pt"
    hooks = ["fsdp:counting"]
    script = plant(NAME, tmp_path / "first", hooks=hooks)
    for _ in range(2):
        path.unlink(missing_ok=True)
        train(script, 1, 1, cwd=tmp_path)
    assert len(list(tmp_path.glob("snapshot.pt.1.*"))) == 2
    shapes = torch.load(path)["SHAPES"]["MODEL_STATE"]
    assert all(shape.is_meta for shape in shapes.values()), "no weights"
    script = plant(NAME, tmp_path / "other", (", momentum=0.9", ""), hooks=hooks)
    resumed = train(script, 2, 1, cwd=tmp_path)
    assert losses(resumed) == losses(done)[1:2]
    assert load(path)["OPTIMIZER_STATE"]["state"][0]["count"] == 2 * 32
    sharded_snapshot = import_script(NAME)
    _, _, model, _ = sharded_snapshot.load_train_objs()
    optimizer = sharded_snapshot.make_optimizer(model)
    (group,) = optimizer.param_groups
    group["lr"] = 1.0
    (folder,) = tmp_path.glob("snapshot.pt.2.*")
    sharded_snapshot.load_parts(model, optimizer, folder)
    assert optimizer.param_groups[0]["lr"] == 0.001


def test_what_was_unfrozen_resumes_with_its_state(tmp_path):
    """In a new process it is frozen again, until its epoch comes."""
    model = "    model = torch.nn.Linear(20, 1)\n"
    epoch = "            train_loss = self._run_epoch(epoch)\n"
    script = plant(
        NAME,
        tmp_path / "copy",
        (model, f"{model}    model.bias.requires_grad_(False)\n"),
        (
            epoch,
            "            self.model.reshard()\n"
            f"            self.model.bias.requires_grad_(epoch > 0)\n{epoch}",
        ),
    )
    (tmp_path / "whole").mkdir()
    whole = train(script, 3, 3, cwd=tmp_path / "whole")
    first = train(script, 2, 2, cwd=tmp_path)
    second = train(script, 3, 3, cwd=tmp_path)
    assert losses(first) + losses(second) == losses(whole)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@in_a_fork
def test_the_optimizer_gets_what_was_saved(tmp_path):
    """Not what PyTorch makes of it: its momentum in the dtype of the weights.

    Also that of a bias that is frozen when it is loaded. One weight is never trained.
    """
    sharded_snapshot = import_script(NAME)

    def make():
        model = torch.nn.Linear(2, 1, dtype=torch.bfloat16)
        model.never = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        return model, Float32Momentum([model.weight, model.bias])

    model, optimizer = make()
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    saved = [torch.rand(1, 2), torch.rand(1)]
    for weight, momentum in zip(optimizer.state, saved, strict=True):
        optimizer.state[weight]["momentum"] = momentum
    folder = tmp_path / "folder"
    dcp.save(sharded_snapshot.parts_of(model, optimizer), checkpoint_id=folder)
    model, optimizer = make()
    model.bias.requires_grad_(False)
    sharded_snapshot.load_parts(model, optimizer, folder)
    loaded = [
        optimizer.state[weight]["momentum"] for weight in (model.weight, model.bias)
    ]
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    assert not model.bias.requires_grad


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

    def saved(folder, *hooks):
        script = plant(NAME, folder / "copy", hooks=[*hooks, "float64"])
        train(script, 1, 1, cwd=folder)
        return load(folder / "snapshot.pt")

    undisturbed = saved(tmp_path / "undisturbed")
    changed = saved(tmp_path / "changed", "fsdp:changed_while_saving")
    assert same_bits(changed, undisturbed)
    its_own_group = [True, "gloo", 300]
    assert noted(tmp_path / "changed", "group") == [its_own_group] * 2


@pytest.mark.parametrize("name", ["../other", "other", "snapshot.pt.1.0123456g"])
def test_it_names_no_folder_but_its_own(tmp_path, capsys, name):
    """The next save removes that folder."""
    folder_of = import_script(NAME).folder_of
    path = tmp_path / "snapshot.pt"
    mine = "snapshot.pt.1.0123456f"
    assert folder_of({"FOLDER": mine}, path) == str(tmp_path / mine)
    with pytest.raises(SystemExit):
        folder_of({"FOLDER": name}, path)
    line = "names a folder that no script of ours has written"
    assert line in capsys.readouterr().err


def test_a_rank_that_sees_another_disk_ends_before_a_save(tmp_path):
    script = plant(NAME, tmp_path / "copy")
    first, second = ranks(script, 2, 1, cwd=tmp_path)
    assert second.returncode == 2
    assert re.search("error: rank 0 writes to .*, which this rank", second.stderr)
    assert first.returncode != 0
    assert "saved to" not in first.stdout


def line_of(name, *changes, cwd):
    """The line with which a script ends that finds these parts."""
    script = plant(name, cwd / "copy", *changes)
    done = launch(script, 9, 1, cwd=cwd, real="", nprocs=1)
    return re.findall(r"(?m)^\w+\.py: error: (.+)$", done.stderr)


def test_what_does_not_fit_ends_with_a_line(runs, copy_of):
    """Another script, another model, a part that is missing."""
    folder, _ = runs(NAME)
    path = copy_of(folder)
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
