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
    train,
)
from proofs.results import load
from proofs.warm import Fork

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
    "5 1 --snapshot-path no/s.pt": "cannot write no/s.pt: No such file or directory",
    "5 1 --snapshot-path /proc/s.pt": "cannot write /proc/s.pt: ",
    "5 1 --snapshot-path .": "cannot write '.': that is no file",
    "5 1 --snapshot-path /dev/null": "cannot write '/dev/null': that is no file",
    "5 1 --snapshot-path=": "cannot write '': that is no file",
    "5 1 --snapshot-path new/": "cannot write 'new/': that is no file",
    f"5 1 --snapshot-path {'x' * 300}": f"cannot write {'x' * 300}: File name too long",
    "5 1 --device tpu": "--device tpu: here PyTorch can only use cpu",
    "5 1 --device cuda": "--device cuda: here PyTorch can only use cpu",
}


ANOTHER = "choose another --snapshot-path"
NOT_SAVED_HERE = "snapshot.pt is not what these scripts save"
NOT_A_SNAPSHOT = {
    "cut": f"snapshot.pt is cut short: delete it or {ANOTHER}",
    "empty": f"snapshot.pt is cut short: delete it or {ANOTHER}",
    "text": f"snapshot.pt is no snapshot: {ANOTHER}",
    "pickle": f"snapshot.pt is no snapshot: {ANOTHER}",
    "class": "cannot read snapshot.pt: Unsupported global: GLOBAL pathlib.PosixPath",
    "tensor": f"{NOT_SAVED_HERE} (TypeError: a Tensor): {ANOTHER}",
    "keys": f"{NOT_SAVED_HERE} (KeyError: 'OPTIMIZER_STATE'): {ANOTHER}",
    "epochs": f"{NOT_SAVED_HERE} (ValueError: EPOCHS_RUN is below 0): {ANOTHER}",
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
@pytest.mark.parametrize("kind", NOT_A_SNAPSHOT)
def test_not_a_snapshot(name, kind, runs, copy_of):
    """Only a file that is cut short is to be deleted: nobody can need it."""
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
        case "class":  # torch would need to be told that it may be loaded
            torch.save(load(path) | {"PATH": path}, path)
        case "tensor":
            torch.save(torch.zeros(3), path)
        case "keys":
            torch.save({"MODEL_STATE": {}, "EPOCHS_RUN": 3}, path)
        case "epochs":
            torch.save(load(path) | {"EPOCHS_RUN": -3}, path)
    line = refused(name, path.parent, 9, 1)
    assert line.startswith(NOT_A_SNAPSHOT[kind])
    assert ("delete it" in line) == (kind in ("cut", "empty"))


@pytest.mark.parametrize("error", ["116", "13"])
def test_a_snapshot_that_cannot_be_read_is_left_alone(runs, copy_of, error):
    """ESTALE of a network disk, EACCES: the file may be as good as ever."""
    path = copy_of(runs("single_gpu.py")[0])
    script = plant("single_gpu.py", path.parent / "copy", hooks=["unreadable"])
    line = refused("single_gpu.py", path.parent, 9, 1, script=script, ERRNO=error)
    assert line == f"cannot read snapshot.pt: {os.strerror(int(error))}"


@pytest.mark.parametrize("name", RUNGS)
def test_snapshot_of_another_model(name, runs, copy_of):
    path = copy_of(runs("single_gpu.py")[0])
    snapshot = load(path)
    snapshot["MODEL_STATE"]["weight"] = torch.zeros(1, 30)
    torch.save(snapshot, path)
    line = refused(name, path.parent, 9, 1)
    assert (
        line == "snapshot.pt belongs to another model: choose another --snapshot-path"
    )


@pytest.mark.parametrize("name", RUNGS)
def test_snapshot_of_another_optimizer(name, runs, copy_of):
    """torch would load it, and raise KeyError in the first step."""
    path = copy_of(runs(name)[0])
    snapshot = load(path)
    (group,) = snapshot["OPTIMIZER_STATE"]["param_groups"]
    del group["lr"]
    torch.save(snapshot, path)
    line = refused(name, path.parent, 9, 1)
    assert line.startswith(
        "snapshot.pt belongs to another optimizer, without lr: choose"
    )
    group["params"].append(2)
    torch.save(snapshot, path)
    line = refused(name, path.parent, 9, 1)
    assert line.startswith("snapshot.pt belongs to an optimizer of other parameter gr")


def test_sgd_does_not_go_on_from_adagrad(runs, copy_of):
    """Plain SGD has settings that are whole numbers: momentum=0."""
    path = copy_of(runs("single_gpu.py")[0])
    snapshot = load(path)
    adagrad = torch.optim.Adagrad([torch.zeros(1, requires_grad=True)])
    (mine,) = snapshot["OPTIMIZER_STATE"]["param_groups"]
    (other,) = adagrad.state_dict()["param_groups"]
    snapshot["OPTIMIZER_STATE"]["param_groups"] = [other | {"params": mine["params"]}]
    torch.save(snapshot, path)
    plain = ("SGD, lr=0.001, momentum=0.9", "SGD, lr=0.001")
    script = plant("single_gpu.py", path.parent / "copy", plain)
    line = refused("single_gpu.py", path.parent, 9, 1, script=script)
    assert line.startswith("snapshot.pt belongs to another optimizer, without momentum")


def test_a_schedulers_own_settings_are_not_announced(runs, copy_of):
    """OneCycleLR puts its start and its momentum where the script's were."""
    path = copy_of(runs("single_gpu.py")[0])
    snapshot = load(path)
    (group,) = snapshot["OPTIMIZER_STATE"]["param_groups"]
    group |= {"max_lr": 0.001, "initial_lr": 0.00004, "momentum": 0.85}
    torch.save(snapshot, path)
    done = train(ROOT / "single_gpu.py", 6, 1, cwd=path.parent)
    assert "as in the script" not in done.stdout


def test_a_model_with_extra_state_resumes(tmp_path):
    """Its state_dict holds something that is no tensor and has no shape."""
    script = plant("single_gpu.py", tmp_path / "copy", hooks=["extra_state"])
    train(script, 1, 1, cwd=tmp_path)
    done = train(script, 2, 1, cwd=tmp_path)
    assert "resuming from snapshot.pt: 1 of 2 epochs" in done.stdout


def test_an_unfinished_epoch_is_announced(runs, copy_of):
    """Its rung goes on inside the epoch; others train the epoch from its start."""
    path = copy_of(runs("single_gpu.py")[0])
    torch.save(load(path) | {"SAMPLES_RUN": 1280}, path)
    done = train(ROOT / "single_gpu.py", 6, 1, cwd=path.parent)
    first = "snapshot.pt was saved inside an epoch, after 1280 of its samples: "
    assert done.stdout.startswith(first)


def test_adam_does_not_go_on_from_sgd(runs, copy_of):
    path = copy_of(runs("single_gpu.py")[0])
    sgd, adam = "SGD, lr=0.001, momentum=0.9", "Adam, lr=0.001"
    script = plant("single_gpu.py", path.parent / "copy", (sgd, adam))
    line = refused("single_gpu.py", path.parent, 9, 1, script=script)
    assert line.startswith("snapshot.pt belongs to another optimizer, without betas: ")


@pytest.mark.parametrize("name", ["single_gpu.py", "multigpu.py", "multinode.py"])
def test_the_learning_rate_of_the_snapshot_is_announced(name, runs, copy_of):
    path = copy_of(runs(name)[0])
    script = plant(name, path.parent / "copy", ("lr=0.001", "lr=0.01"))
    done = train(script, 6, 1, cwd=path.parent)
    line = "lr is 0.001, as in snapshot.pt, not 0.01, as in the script\n"
    assert done.stdout.count(line) == 1
    (group,) = load(path)["OPTIMIZER_STATE"]["param_groups"]
    assert group["lr"] == 0.001


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
    assert line == (
        "2 processes here need 2 accelerators: there is 1. To try several processes on"
        " the CPU, add --device cpu"
    )
    if name in UNDER_TORCHRUN:  # started without torchrun, on two machines of one each
        env = {"LOCAL_WORLD_SIZE": None, "RANK": 1, "LOCAL_RANK": 1}
        assert line == refused(name, tmp_path, 5, 1, script=script, **env)
        # With --virtual-local-rank, each process sees one device, as number 0.
        env = {"CUDA_VISIBLE_DEVICES": "GPU-3", "LOCAL_WORLD_SIZE": 8}
        args = ("--batch-size", 4096)
        assert "one step" in refused(name, tmp_path, 5, 1, *args, script=script, **env)


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_device_cpu_tries_several_processes_on_one_gpu(name, tmp_path):
    script = plant(name, tmp_path / "copy", hooks=["one_accelerator"])
    done = train(script, 1, 1, "--device", "cpu", cwd=tmp_path)
    assert done.stdout.startswith("2 x cpu (cuda is not used), batch 32 each")


def test_device_cpu_starts_two_processes(tmp_path):
    """However many GPUs there are."""
    script = plant("multigpu.py", tmp_path / "copy", hooks=["silent_accelerators"])
    done = run_script(script, 1, 1, "--device", "cpu", cwd=tmp_path)
    assert done.stdout.startswith("2 x cpu, batch 32 each"), done.stderr


@pytest.mark.parametrize("name", RUNGS)
def test_accelerators_that_do_not_answer(name, tmp_path):
    """A driver that is too old: it counts 8 devices, and none can be used."""
    script = plant(name, tmp_path / "copy", hooks=["silent_accelerators"])
    line = refused(name, tmp_path, 5, 1, script=script)
    assert line.startswith("there are 8 accelerators, and PyTorch cannot use them: ")
    train(script, 1, 1, "--device", "cpu", cwd=tmp_path)


def test_a_mac(tmp_path):
    """gloo has no collectives for MPS: several processes take the CPU, and say so."""
    for name in DISTRIBUTED:
        script = plant(name, tmp_path / "copy", hooks=["mps"])
        done = train(script, 1, 1, cwd=tmp_path)
        assert done.stdout.startswith("2 x cpu (mps is not used), batch 32 each")
        (tmp_path / "snapshot.pt").unlink()
        line = refused(name, tmp_path, 5, 1, "--device", "mps", script=script)
        assert line.endswith("cannot exchange its tensors. Type --device cpu")
    script = plant("single_gpu.py", tmp_path / "copy", hooks=["mps"])
    done = run_script(script, 1, 1, cwd=tmp_path)
    assert "it trains on mps" in done.stderr


def test_a_device_that_cannot_be_taken(tmp_path):
    """MIG: NVML counts more devices than there are for CUDA."""
    hooks = ["one_accelerator", "no_patience"]
    script = plant("multinode.py", tmp_path / "copy", hooks=hooks)
    env = {"LOCAL_WORLD_SIZE": 1, "MESSAGE": "invalid device ordinal\nand more"}
    line = refused("multinode.py", tmp_path, 5, 1, script=script, **env)
    assert line == (
        "cannot use cuda 0: invalid device ordinal. --device cpu trains without it"
    )


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
    start = "torchrun starts this script, python does not. Type: "
    command = "torchrun --standalone --nproc-per-node=2"
    assert line == f"{start}{command} {ROOT / 'multinode.py'} 5 1"
    # Typed as a module, with an option: what it says is what works.
    words = ["python", "-m", "variants.preemptible", "5", "1", "--batch-size", "7"]
    done = Fork(words, tmp_path, PYTHONPATH=ROOT).finish()
    assert done.returncode == 2
    words = [*command.split(), *words[1:]]
    assert done.stderr.endswith(f"Type: {' '.join(words)}\n")
    assert Fork(words, tmp_path, PYTHONPATH=ROOT).finish().returncode == 0


def test_a_copy_without_a_docstring(tmp_path):
    """Nobody can tell then who starts it; and a text about Python is no command."""
    for i, doc in enumerate(["", '"""Fine-tune on python source code."""\n']):
        script = plant("single_gpu.py", tmp_path / f"copy{i}")
        text = script.read_text()
        script.write_text(doc + text[text.index("import functools") :])
        env = {"TORCHELASTIC_RUN_ID": "run", "PYTHONPATH": tmp_path}
        done = run_script(script, 1, 1, cwd=tmp_path, **env)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [x for x in RUNGS if x not in UNDER_TORCHRUN])
def test_torchrun_does_not_start_what_python_starts(name, tmp_path):
    """Two processes would train, each for itself, and save to one path."""
    env = TORCHRUN | {"TORCHELASTIC_RUN_ID": "run"}
    line = refused(name, tmp_path, 5, 1, "--batch-size", 7, **env)
    start = "python starts this script, torchrun does not. Type: python"
    assert line == f"{start} {ROOT / name} 5 1 --batch-size 7"


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
        nprocs = "processes to start (default: one per accelerator, or 2 on the CPU)"
        assert f"--nprocs NPROCS {nprocs}" in words
    assert "that one process takes in a step (default: 32)" in words
    assert "--device DEVICE auto (the accelerator if there is one" in words
