"""sharded_snapshot.py: a folder with a part of each rank."""

import os
import shutil
import signal
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.helpers.checks import (
    assert_same_losses,
    assert_same_snapshot,
    assert_same_weights,
    fence,
    import_script,
    noted,
)
from tests.helpers.own_disks import launch_on_own_disks
from tests.hooks import replace, write
from tests.hooks.models import changes_objects, float64
from tools.run.launch import run_script, train
from tools.run.results import load, losses

NAME = "variants/sharded_snapshot.py"


@changes_objects
def add_buffer(train_set, eval_set, model, loss_fn):
    """Before other parameters in the state_dict. DCP puts it behind them."""
    model[0].register_buffer("ones", torch.ones(1))
    return train_set, eval_set, model, loss_fn


@pytest.mark.waits
def test_resumes_on_other_numbers_of_ranks_and_from_and_to_a_plain_file(runs, tmp_path):
    """fsdp.py, 2 ranks, 4, and the lines of the chapter for fsdp.py on one."""
    how = {"cwd": tmp_path, "hooks": [add_buffer]}
    first = train("variants/fsdp.py", 1, 1, **how)
    second = train(NAME, 2, 1, **how)
    (tmp_path / "snapshot.pt").unlink()
    changes = [("lr=0.01", "lr=0.5")]  # the saved rate counts
    fourth = train(NAME, 4, 1, nprocs=4, changes=changes, **how)
    (folder,) = tmp_path.glob("snapshot.pt.*")
    assert "saved to snapshot.pt.4." in fourth.stdout
    assert "lr is 0.01 as in snapshot.pt.2." in fourth.stdout
    code = fence("docs/sharded_snapshot.md", "dcp_to_torch_save(")
    (tmp_path / "one_file.py").write_text(code)
    done = run_script(tmp_path / "one_file.py", folder.name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    options = "--snapshot-path", "plain.pt"
    fifth = train("variants/fsdp.py", 5, 2, *options, nprocs=1, **how)
    pieces = losses(first) + losses(second) + losses(fourth) + losses(fifth)
    whole, done = runs(NAME, hooks=(add_buffer,))
    assert_same_losses(pieces, losses(done))
    assert_same_weights(tmp_path / "plain.pt", whole)


def test_the_newer_of_a_folder_and_a_plain_file_counts(runs, tmp_path):
    """And no two runs write into one folder. A second wait for the end does no harm."""
    trains = "    trainer.train(args.total_epochs)\n"
    twice = trains, f"{trains}    trainer._finish_saving()\n"
    train(NAME, 1, 1, cwd=tmp_path, changes=[twice])
    (mine,) = tmp_path.glob("snapshot.pt.*")
    (other,) = runs(NAME)[0].glob("snapshot.pt.*")
    assert mine.suffix != other.suffix
    train("variants/fsdp.py", 2, 1, cwd=tmp_path)
    resumed = train(NAME, 3, 1, cwd=tmp_path)
    assert "2 of 3 epochs are finished" in resumed.stdout


def test_a_folder_of_a_larger_model(runs, tmp_path):
    """DCP would load what the smaller one has."""
    folder, _ = runs(NAME)
    (saved,) = folder.glob("snapshot.pt.*")
    shutil.copytree(saved, tmp_path / saved.name)
    smaller = "Sequential(*layers)", "Sequential(*layers[:2], torch.nn.Identity())"
    done = train(NAME, 9, 1, status=1, cwd=tmp_path, changes=[smaller])
    assert f"error: {saved.name} belongs to another model\n" in done.stderr
    assert not done.stdout


def test_it_takes_no_folder_but_its_own(tmp_path):
    mine = "s.3.0123abcd"
    for name in (mine, "s.v2.9.0123abcd", "s.2.9.0123abcd", "s.9.0123abcd.bak"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").touch()
    (tmp_path / "s.9.0123abce").mkdir()  # not complete
    found = import_script(NAME).complete_folders(str(tmp_path / "s"))
    assert found == [(3, str(tmp_path / mine))]


@pytest.mark.parametrize(
    ("moment", "saved"), [("metadata", 5), ("old", 6), ("error", 5)]
)
def test_stopped_while_saving_it_keeps_a_whole_snapshot(runs, tmp_path, moment, saved):
    """In the save after the sixth epoch, rank 0 gets SIGKILL, or rank 1 cannot write.

    `metadata`: before rank 0 writes that all have written. `old`: after that, before
    the old folder is removed.
    """
    owner, function, rank = {
        "error": (dcp.FileSystemWriter, "write_data", 1),
        "metadata": (dcp.FileSystemWriter, "finish", 0),
        "old": (shutil, "rmtree", 0),
    }[moment]

    def stop(script):
        def around(inner, *arguments, **options):
            if dist.get_rank() == rank:
                if moment == "error":
                    raise OSError("planted")
                os.kill(os.getpid(), signal.SIGKILL)
            return inner(*arguments, **options)

        replace(owner, function, around)

    folder, _ = runs(NAME)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    train(NAME, 7, 1, status=1, cwd=tmp_path, hooks=[stop])
    assert load(tmp_path)["EPOCHS_RUN"] == saved
    resumed = train(NAME, saved + 1, 1, cwd=tmp_path)
    assert f"{saved} of {saved + 1} epochs are finished" in resumed.stdout
    (complete,) = tmp_path.glob("snapshot.pt.*/.metadata")
    assert complete.parent.suffixes[-2] == f".{saved + 1}"


def change_while_saving(script):
    """The weights change, in place, before the thread that saves them writes a byte.

    group.RANK.json: the backend and the time-out of the group that this thread uses.
    """
    changed = threading.Event()

    def async_save(inner, *arguments, process_group, **options):
        backend = process_group._get_backend(torch.device("cpu"))
        timeout = backend.options._timeout
        name = dist.get_backend(process_group)
        write("group", [name, timeout.total_seconds()])
        return inner(*arguments, process_group=process_group, **options)

    def save(inner, self):
        inner(self)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(100)
        changed.set()

    def write_data(inner, *arguments):
        changed.wait()
        return inner(*arguments)

    replace(dist, "get_default_backend_for_device", lambda inner, device: "cpu:gloo")
    replace(dcp, "async_save", async_save)
    replace(script["Trainer"], "_save_snapshot", save)
    replace(dcp.FileSystemWriter, "write_data", write_data)


def test_what_is_saved_is_not_changed_by_later_steps(tmp_path):
    """https://github.com/pytorch/pytorch/issues/144657"""

    changed = tmp_path / "changed"
    undisturbed = tmp_path / "undisturbed"
    train(NAME, 1, 1, cwd=changed, hooks=[change_while_saving, float64])
    train(NAME, 1, 1, cwd=undisturbed, hooks=[float64])
    assert_same_snapshot(changed, undisturbed)
    assert noted(changed, "group") == [["gloo", 300]] * 2


def test_a_rank_that_sees_another_disk_ends_before_it_says_saved(tmp_path):
    first, second = launch_on_own_disks(NAME, 2, 1, cwd=tmp_path)
    assert second.returncode == 2
    assert "error: not every rank can see snapshot.pt.1." in second.stderr
    assert "saved to" not in first.stdout
