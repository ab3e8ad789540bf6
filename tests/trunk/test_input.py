"""Bad input: one line, exit status 2, before anything starts, every file as it was."""

import os
import pickle
import types

import pytest
import torch
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrap
from torch.optim import SGD

import utils
from tests.helpers.checks import help_of
from tools.run.launch import run_script, torchrun, train
from tools.scripts import ROOT, trunk

ARGUMENTS = {
    "": "the following arguments are required: total_epochs, save_every",
    "0 1": "argument total_epochs: '0' is not a whole number above 0",
    "5 1 --batch-size 0": "argument --batch-size/--batch_size: '0' is not a whole",
    "5 1 --snapshot-path no/s.pt": "cannot write 'no/s.pt': [Errno 2] No such file",
    "5 1 --snapshot-path new/": "cannot write 'new/': that names no file",
    "5 1 --snapshot-path /dev/null": "cannot write '/dev/null': that names no file",
    f"5 1 --snapshot-path {250 * 'x'}": "File name too long",
}


@pytest.fixture
def line_of(capsys):
    """`line_of(function, ...)`: the line with which it ends the program."""

    def get(function, *arguments, **options):
        with pytest.raises(SystemExit) as end:
            function(*arguments, **options)
        assert end.value.code == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        return err.strip().partition(": error: ")[2]

    return get


# The command line


@pytest.mark.parametrize("args", ARGUMENTS)
def test_bad_argument(args, line_of, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # the repository may not be writable
    parser = utils.make_parser("")
    assert ARGUMENTS[args] in line_of(parser.parse_args, args.split())


def test_underscored_options_are_understood(tmp_path):
    path = str(tmp_path / "other.pt")
    words = ["1", "2", "--batch_size", "64", "--snapshot_path", path]
    args = utils.make_parser("").parse_args(words)
    assert (args.batch_size, args.snapshot_path) == (64, path)
    assert not os.listdir(tmp_path), "a path is tried out, and nothing is left"


@pytest.mark.parametrize("name", trunk())
def test_help(name, tmp_path):
    shown = help_of(name, tmp_path)
    assert "total_epochs save_every" in shown
    assert "that one process takes in a step (default: 32)" in shown
    has_nprocs = "--nprocs NPROCS processes to start" in shown
    assert has_nprocs == (name == "multigpu.py")


def test_multinode_without_torchrun_says_what_to_type(tmp_path):
    done = run_script(ROOT / "multinode.py", 5, 1, cwd=tmp_path)
    line = "no 'RANK': start this script with torchrun, as --help shows"
    assert done == (2, "", f"multinode.py: error: {line}\n")
    assert not os.listdir(tmp_path)


def test_torchrun_does_not_start_what_python_starts(tmp_path):
    """Two processes would train, each for itself, and save to one path."""
    for name in ("single_gpu.py", "multigpu.py"):
        done = run_script(ROOT / name, 5, 1, cwd=tmp_path, TORCHELASTIC_RUN_ID="run")
        line = "start this script with python, not with torchrun"
        assert done == (2, "", f"{name}: error: {line}\n")
    assert not os.listdir(tmp_path)


def test_the_first_process_of_a_machine_speaks_for_all(line_of, monkeypatch):
    waited = []
    monkeypatch.setattr(utils.time, "sleep", waited.append)
    for rank in "01":
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert line_of(utils.error, "wrong") == "wrong"
    assert waited == [0.2, 5, 0.2]  # 0.2 s for gloo's threads


# Devices


@pytest.fixture
def machine(monkeypatch):
    """`machine(kind, count, ...)`: PyTorch says that it has these accelerators."""

    def pretend(kind, count, usable=True, nccl=True):
        device = torch.device(kind) if usable else None
        accelerator = types.SimpleNamespace(
            device_count=lambda: count, current_accelerator=lambda **_: device
        )
        monkeypatch.setattr(torch, "accelerator", accelerator)
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)

    return pretend


def test_accelerators_that_do_not_answer(machine, line_of):
    """A driver that is too old: it counts 8 devices, and none can be used."""
    machine("cuda", 8, usable=False)
    line = line_of(utils.choose_nprocs, "auto")
    assert line.startswith("PyTorch cannot use the accelerators here: ")
    assert utils.device_type("cpu", distributed=True) == "cpu"


def test_more_processes_than_accelerators(machine, line_of):
    assert utils.choose_nprocs("auto") == 2
    machine("cuda", 4)
    assert utils.choose_nprocs("auto") == 4
    assert utils.choose_nprocs("auto", 3) == 3
    assert utils.choose_nprocs("cpu", 8) == 8
    line = line_of(utils.choose_nprocs, "auto", 5)
    assert line == "5 processes, 4 accelerators: try more with --device cpu"


def test_a_mac_and_a_gpu_without_nccl(machine, line_of):
    """gloo has no collectives for MPS: several processes take the CPU."""
    line = "--device mps: this script can only use auto, cpu here"
    assert line_of(utils.device_type, "mps", distributed=False) == line
    machine("mps", 1)
    assert utils.device_type("auto", distributed=False) == "mps"
    assert utils.device_type("auto", distributed=True) == "cpu"
    assert line_of(utils.device_type, "mps", distributed=True) == line
    machine("cuda", 1, nccl=False)  # as on Windows
    assert utils.device_type("auto", distributed=False) == "cuda"
    assert utils.device_type("auto", distributed=True) == "cpu"


def test_the_device_of_a_process(machine):
    machine("cuda", 2)
    current = []
    torch.accelerator.set_device_index = current.append
    assert utils.set_device("auto", 1) == torch.device("cuda", 1)
    assert utils.set_device("auto") == torch.device("cuda", 0)
    assert current == [1, 0]


# The objects of load_train_objs


def test_what_ranks_must_have_in_common(tmp_path):
    """The numbers of training and of held-out samples, and each weight to 1e-5."""
    script = ROOT / "tests/helpers/ranks_that_differ.py"
    done = torchrun(script, cwd=tmp_path, PYTHONPATH=ROOT)
    sizes = "[(80, 9), (80, 10)]"
    both_say = [
        f"ranks have different numbers of (training, held-out) samples: {sizes}",
        "weight differs by rank, sums 1, 1.00001, not saved to s.pt",
        "weight differs by rank, norms 1, 1.0001, not saved to s.pt",
        "head.bias differs by rank, sums 1, 1.0001, not saved to s.pt",
        "weight has weights that are not finite, not saved to s.pt",
    ]
    for line in both_say:
        assert done.stderr.count(f"{script.name}: error: {line}\n") >= 2


def test_a_snapshot_that_was_saved_inside_an_epoch(line_of):
    """By preemptible.py. Others would train the samples before it twice."""
    line = line_of(utils.check_snapshot, {"SAMPLES_RUN": 64}, None, None, "s.pt")
    assert line.startswith("s.pt was saved inside an epoch: ")


def test_an_optimizer_in_an_optimizer(line_of):
    """As Lookahead holds one."""
    model = torch.nn.Linear(1, 1)
    optimizer = SGD(model.parameters())
    optimizer.inner = torch.optim.Adam(model.parameters())
    line = line_of(utils.check_optimizer, optimizer, model)
    assert line.startswith("the optimizer holds another one")


def test_the_parent_loads_no_data(tmp_path):
    """Each rank loads it once: with real data, more costs minutes and gigabytes."""
    line = "    train_set = utils.MyTrainDataset(2048)\n"
    note = "    open(f'{__name__}.{utils.os.getpid()}', 'x')\n"
    train("multigpu.py", 1, 1, cwd=tmp_path, changes=[(line, line + note)])
    loaded = [path.stem for path in tmp_path.glob("__*")]
    assert loaded == ["__mp_main__"] * 2


# The snapshot


def snapshot_of(model, optimizer=SGD):
    return {
        "MODEL_STATE": model.state_dict(),
        "OPTIMIZER_STATE": optimizer(model.parameters(), lr=0.1).state_dict(),
        "EPOCHS_RUN": 1,
    }


@pytest.mark.parametrize("kind", ["cut", "pickle", "MODEL_STATE", "OPTIMIZER_STATE"])
def test_not_a_snapshot(kind, tmp_path, line_of):
    path = tmp_path / "snapshot.pt"
    torch.save({kind: 3}, path)  # one key does not make a snapshot
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:100])
    elif kind == "pickle":  # code in it must not run
        path.write_bytes(pickle.dumps(os.getcwd, protocol=2))
    line = line_of(utils.read_snapshot, str(path))
    assert line.startswith(f"{path} is cut short or no snapshot: ")


@pytest.mark.parametrize("name", trunk())
def test_snapshot_of_another_model(name, tmp_path):
    path = tmp_path / "snapshot.pt"
    torch.save(snapshot_of(torch.nn.Linear(30, 1)), path)
    before = path.read_bytes()
    status = 1 if name == "multinode.py" else 2  # 1 is torchrun's own
    done = train(name, 9, 1, status=status, cwd=tmp_path)
    line = "snapshot.pt belongs to another model: choose another --snapshot-path"
    assert done.stderr.count(f"{name}: error: {line}\n") == 1
    if status == 1:  # torchrun adds a report
        assert "exitcode  : 2 " in done.stderr
    else:  # PyTorch tells of a rank that ends later
        others = done.stderr.count("Terminating process")
        assert done.stderr.count("\n") == 1 + others
    assert not done.stdout
    assert path.read_bytes() == before


def check(saved, model, optimizer=SGD):
    """Check the snapshot `saved` for a model and an optimizer."""
    optimizer = optimizer(model.parameters(), lr=0.1)
    utils.check_snapshot(saved, model, optimizer, "s.pt")


def test_a_model_whose_modules_stand_in_another_order(line_of):
    """The optimizer's state goes by number, and would land on other parameters."""
    layer = torch.nn.Linear(2, 2)
    saved = torch.nn.ModuleDict({"first": layer, "second": layer})
    mine = torch.nn.ModuleDict({"second": layer, "first": layer})
    line = line_of(check, snapshot_of(saved), mine)
    assert line.startswith("s.pt belongs to another model: ")


def test_a_buffer_may_have_another_shape():
    """Such as a table that grows, or what an observer of quantization has seen."""
    model = torch.nn.Linear(2, 1)
    model.register_buffer("table", torch.ones(2))
    saved = snapshot_of(model)
    model.table = torch.ones(3)
    check(saved, model)


def test_a_snapshot_of_wrapped_layers_fits():
    """As in chapter 7: `named_parameters` has other names than the state_dict."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    wrap.apply_activation_checkpointing(
        model, check_fn=lambda module: isinstance(module, torch.nn.Linear)
    )
    check(snapshot_of(model), model)


def test_a_snapshot_that_fits(capsys):
    model = torch.nn.Linear(2, 1)

    def scheduled(parameters, lr):
        optimizer = SGD(parameters, lr)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        optimizer.param_groups[0]["lr"] = lr / 10
        return optimizer

    check(snapshot_of(model, scheduled), model, scheduled)
    assert not capsys.readouterr().out, "a scheduler sets the rate itself"
    check(snapshot_of(model, scheduled), model)
    line = "lr is 0.01 as in s.pt, not 0.1 as here\n"
    assert capsys.readouterr().out == line
    check(snapshot_of(model), model, lambda parameters, lr: SGD(parameters, 1))
    assert capsys.readouterr().out == "lr is 0.1 as in s.pt, not 1 as here\n"
