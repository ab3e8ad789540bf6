"""Bad input: one line, exit status 2, before anything starts, every file as it was."""

import os
import pickle

import pytest
import torch

from ladder.rungs import ROOT, RUNGS
from proofs.launch import (
    DISTRIBUTED,
    SPAWNED,
    UNDER_TORCHRUN,
    launch,
    objects_of,
    plant,
    run_script,
)
from proofs.results import load

TORCHRUN = {
    "RANK": 0,
    "LOCAL_RANK": 0,
    "WORLD_SIZE": 2,
    "LOCAL_WORLD_SIZE": 2,
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": 1,
}
ARGUMENTS = {
    "": "the following arguments are required: total_epochs, save_every",
    "5": "the following arguments are required: save_every",
    "five 1": "argument total_epochs: 'five' is not a whole number above 0",
    "0 1": "argument total_epochs: '0' is not a whole number above 0",
    "-5 1": "argument total_epochs: '-5' is not a whole number above 0",
    "5 0": "argument save_every: '0' is not a whole number above 0",
    "5 1.5": "argument save_every: '1.5' is not a whole number above 0",
    "5 1 --batch-size 0": "argument --batch-size/--batch_size: '0' is not a whole",
    "5 1 --batch-size ten": "argument --batch-size/--batch_size: 'ten' is not a whole",
    "5 1 --batch-size 4096": "samples and there are {samples}: lower --batch-size",
    "5 1 --speed 2": "unrecognized arguments: --speed 2",
    "5 1 --snapshot-path no/s.pt": "cannot write no/s.pt.tmp: No such file or dir",
    "5 1 --snapshot-path /proc/s.pt": "cannot write /proc/s.pt.tmp: ",
    "5 1 --snapshot-path .": "cannot write '.': that is no file",
    "5 1 --snapshot-path /dev/null": "cannot write '/dev/null': that is no file",
    "5 1 --snapshot-path=": "cannot write '': that is no file",
    f"5 1 --snapshot-path {'x' * 300}": ".tmp: File name too long",
}


def files(folder):
    return {x.name: x.read_bytes() for x in folder.iterdir() if x.is_file()}


def refused(name, folder, *args, script=None, **env):
    """The one line on stderr with which a rung refuses to run."""
    script = script or ROOT / name
    if name in UNDER_TORCHRUN:
        env = TORCHRUN | env
    before = files(folder)
    env = {key: value for key, value in env.items() if value is not None}
    done = run_script(script, *args, cwd=folder, **env)
    assert done.returncode == 2, done.stdout + done.stderr
    assert not done.stdout
    assert done.stderr.count("\n") == 1, done.stderr
    assert files(folder) == before
    start = f"{os.path.basename(name)}: error: "
    assert done.stderr.startswith(start)
    return done.stderr.removeprefix(start).strip()


@pytest.mark.parametrize("name", RUNGS)
def test_the_first_process_of_a_machine_speaks_at_once(name, tmp_path):
    """It is the first test here: if all processes waited, each of the others would."""
    script = plant(name, tmp_path / "copy", hooks=["no_patience"])
    assert refused(name, tmp_path, 5, 0, script=script, PATIENCE="raise")


@pytest.mark.parametrize("name", RUNGS)
@pytest.mark.parametrize("args", ARGUMENTS)
def test_bad_argument(name, args, tmp_path):
    samples = len(objects_of(name)[0])
    expected = ARGUMENTS[args].format(samples=samples)
    assert expected in refused(name, tmp_path, *args.split())


@pytest.mark.parametrize("name", RUNGS)
@pytest.mark.parametrize(
    "kind", ["cut", "empty", "text", "pickle", "tensor", "keys", "epochs"]
)
def test_not_a_snapshot(name, kind, runs, copy_of):
    path = copy_of(runs("single_gpu.py")[0])
    whole = path.read_bytes()
    match kind:
        case "cut":
            path.write_bytes(whole[: len(whole) // 2])
        case "empty":
            path.write_bytes(b"")
        case "text":
            path.write_text("epoch 5\n")
        case "pickle":  # code in it must not run
            path.write_bytes(pickle.dumps(os.getcwd))
        case "tensor":
            torch.save(torch.zeros(3), path)
        case "keys":
            torch.save({"MODEL_STATE": {}, "EPOCHS_RUN": 3}, path)
        case "epochs":
            torch.save(load(path) | {"EPOCHS_RUN": -3}, path)
    line = refused(name, path.parent, 9, 1)
    assert line.startswith("snapshot.pt is cut short or is no snapshot: delete it")


@pytest.mark.parametrize("name", RUNGS)
def test_snapshot_of_another_model(name, runs, copy_of):
    path = copy_of(runs("single_gpu.py")[0])
    snapshot = load(path)
    snapshot["MODEL_STATE"]["weight"] = torch.zeros(1, 30)
    torch.save(snapshot, path)
    line = refused(name, path.parent, 9, 1)
    assert line.startswith("snapshot.pt belongs to another model: delete it")


@pytest.mark.parametrize("name", RUNGS)
def test_no_held_out_sample(name, tmp_path):
    hooks = ["end_at_setup"] if name in DISTRIBUTED else []
    script = plant(name, tmp_path / "copy", hooks=["none_held_out", *hooks])
    assert refused(name, tmp_path, 5, 1, script=script)


def test_more_processes_than_samples(tmp_path):
    args = (5, 1, "--batch-size", 1, "--nprocs", 2049)
    script = plant("multigpu.py", tmp_path / "copy", hooks=["end_at_setup"])
    line = refused("multigpu.py", tmp_path, *args, script=script)
    assert line.startswith("one step takes 2049 x 1 samples and there are 2048")
    script = plant("multinode.py", tmp_path / "copy", hooks=["end_at_setup"])
    args = (5, 1, "--batch-size", 1)
    line = refused("multinode.py", tmp_path, *args, script=script, WORLD_SIZE=2049)
    assert line.startswith("one step takes 2049 x 1 samples and there are 2048")


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_more_processes_than_accelerators(name, tmp_path):
    """The count is planted: this is tested where there is no accelerator, too."""
    script = plant(name, tmp_path / "copy", hooks=["one_accelerator", "no_patience"])
    args = () if name in UNDER_TORCHRUN else ("--nprocs", 2)
    line = refused(name, tmp_path, 5, 1, *args, script=script)
    assert line == "2 processes here need 2 accelerators: there is 1"
    if name in UNDER_TORCHRUN:  # started without torchrun, on two machines of one each
        env = {"LOCAL_WORLD_SIZE": None, "RANK": 1, "LOCAL_RANK": 1}
        assert line == refused(name, tmp_path, 5, 1, script=script, **env)


@pytest.mark.parametrize("args", ["0", "-1", "two"])
def test_bad_nprocs(args, tmp_path):
    line = refused("multigpu.py", tmp_path, 5, 1, "--nprocs", args)
    assert line == f"argument --nprocs: '{args}' is not a whole number above 0"


def test_multinode_has_no_nprocs(tmp_path):
    """torchrun has it: as a flag of the script it would do nothing."""
    script = plant("multinode.py", tmp_path / "copy", hooks=["end_at_setup"])
    line = refused("multinode.py", tmp_path, 5, 1, "--nprocs", 2, script=script)
    assert line == "unrecognized arguments: --nprocs 2"


def test_multinode_without_torchrun_says_what_to_type(tmp_path):
    line = refused("multinode.py", tmp_path, 5, 1, **dict.fromkeys(TORCHRUN))
    assert line.endswith("torchrun --standalone --nproc-per-node=2 multinode.py 50 10")


@pytest.mark.parametrize("name", list(TORCHRUN)[:3] + list(TORCHRUN)[4:])
def test_half_set_torchrun_variables(name, tmp_path):
    script = plant("multinode.py", tmp_path / "copy", hooks=["no_patience"])
    env = {name: None}
    line = refused("multinode.py", tmp_path, 5, 1, script=script, **env)
    assert line.startswith(f"not set: {name}. torchrun sets them all: ")
    if not name.startswith("MASTER"):
        env = {name: "one"}
        line = refused("multinode.py", tmp_path, 5, 1, script=script, **env)
        assert "is not a number" in line


def test_under_torchrun_one_process_speaks_for_all(tmp_path):
    why = "torchrun's report and status are the claim"
    done = launch(ROOT / "multinode.py", 5, 0, cwd=tmp_path, real=why)
    assert done.returncode != 0
    assert done.stderr.count("error: argument save_every: '0' is not a whole") == 1
    assert "exitcode  : 2 " in done.stderr.split("Root Cause")[1]


@pytest.mark.parametrize("name", RUNGS)
def test_help(name, tmp_path):
    done = run_script(ROOT / name, "--help", cwd=tmp_path)
    assert done.returncode == 0
    words = " ".join(done.stdout.split())
    assert "total_epochs save_every" in words
    if name in SPAWNED:
        assert "--nprocs NPROCS processes to start" in words
