"""train_loop.py: every mode trains the model of the scripts, and hands it back."""

import math
import os
import socket
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, SubsetRandomSampler

import utils
from tests.conftest import once
from tests.helpers.checks import assert_same_losses, assert_same_weights, noted, stack
from tests.helpers.forked import in_a_fork
from tools.run import slurm_cluster
from tools.run.processes import Program
from tools.run.results import load, losses, same_bits
from tools.scripts import ROOT
from variants.train_loop import Callback, TrainLoop, find_launcher

PYTHON = ["python", "-m", "variants.train_loop"]
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node=2", *PYTHON[1:]]
SCRIPT = ROOT / "tests/helpers/train_loops.py"


def run(words, cwd, **env):
    """Run it in a fork to its end, and insist that it ends well: Done."""
    done = Program(words, cwd, PYTHONPATH=ROOT, **env).finish()
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def case(folder, *words, **env):
    """Run a case of tests/helpers/train_loops.py: Done.

    With one thread, because it forks, and a pool of threads does not survive that.
    """
    return run(["python", SCRIPT, *words], folder, OMP_NUM_THREADS=1, **env)


# The modes


@pytest.fixture(scope="module")
def modes(tmp_path_factory):
    """`modes(mode, words)`: (folder, Done) of 5 epochs at an effective batch of 64."""

    @once
    def train(mode, under_torchrun=False):
        folder = tmp_path_factory.mktemp("mode")
        size = 32 if "ddp" in mode else 64
        start = TORCHRUN if under_torchrun else PYTHON
        words = [*start, 5, 2, "--gpu-mode", mode, "--batch-size", size]
        return folder, run(words, folder)

    return train


MODES = [
    ("single", False),
    ("ddp", False),
    ("ddp", True),
    pytest.param("dp", False, marks=pytest.mark.waits),
    pytest.param("ddp2", False, marks=pytest.mark.waits),
    pytest.param("ddp2", True, marks=pytest.mark.waits),
]


@pytest.mark.parametrize(("mode", "under_torchrun"), MODES)
def test_each_mode_trains_the_model_of_the_scripts(modes, runs, mode, under_torchrun):
    folder, done = modes(mode, under_torchrun)
    scripts_folder, scripts = runs("multigpu.py")
    assert_same_losses(losses(done), losses(scripts))
    assert_same_weights(folder / "snapshot.pt", scripts_folder / "snapshot.pt")
    _, _, test_loss = done.stdout.rpartition("test loss ")
    assert 0.01 < float(test_loss) < 0.1


def test_the_trained_model_comes_back(tmp_path):
    """Its own object, tied to its optimizer, and the rest of what `fit` has found."""
    case(tmp_path, "comes_back", "ddp")


AS_VARIANT = {
    "variants/gradient_accumulation.py": ("as_variant", "accumulate", "4"),
    "variants/mixed_precision.py": ("as_variant", "precision", '"bf16"'),
    "variants/ddp2.py": ("node", 1, 0, 2, 32, 5),
}


@pytest.mark.waits
@pytest.mark.parametrize("name", AS_VARIANT)
def test_the_weights_are_those_of_the_variant(runs, tmp_path, name):
    """5 epochs of its own task, with the same options."""
    folder, _ = runs(name)
    case(tmp_path, *AS_VARIANT[name])
    assert_same_weights(tmp_path / "node0.pt", folder / "snapshot.pt")


# Launchers


def test_what_srun_says_and_what_a_batch_script_says(monkeypatch):
    """In a batch script, SLURM_NTASKS is set as well, but nobody has started tasks."""
    env = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
    monkeypatch.setattr(os, "environ", env)
    assert not find_launcher()
    env["SLURM_STEP_NUM_TASKS"] = "1"  # srun --pty bash
    assert not find_launcher()
    env |= {
        "SLURM_JOB_ID": "12345",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "MASTER_ADDR": "node1",
    }
    assert find_launcher()
    assert utils.torchrun_env() == [3, 1, 4]
    assert os.environ["LOCAL_WORLD_SIZE"] == "2"
    assert os.environ["MASTER_PORT"] == "22345"


NO_SLURM = slurm_cluster.why_not()


@pytest.mark.waits
@pytest.mark.skipif(NO_SLURM is not None, reason=f"no Slurm: {NO_SLURM}")
def test_a_real_srun_starts_the_ranks(tmp_path):
    """Two on each of two nodes, which are hosts of their own."""
    slurm = "python -m tools.run.slurm_cluster 2 --"
    srun = "srun --nodes=2 --ntasks-per-node=2"
    script = "python -m variants.train_loop 2 2 --gpu-mode ddp2 --batch-size 16"
    words = f"{slurm} {srun} {script}".split()
    done = Program(words, tmp_path, real=True, PYTHONPATH=ROOT).finish()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("4 x cpu, batch 16 each: effective batch 64, ")
    run([*PYTHON, 2, 2, "--batch-size", 64, "--snapshot-path", "one.pt"], tmp_path)
    assert_same_weights(tmp_path / "snapshot.pt", tmp_path / "one.pt")


def two_machines(folder, num_gpus, epochs):
    """(the weights that both get back, what the first prints), all on this machine."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    folder.mkdir(exist_ok=True)
    env = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
        "PYTHONPATH": ROOT,
    }
    size = 64 // num_gpus
    machines = []
    for node_rank in (0, 1):
        words = ["python", SCRIPT, "node", 2, node_rank, num_gpus, size, epochs]
        machines.append(Program(words, folder, **env))
    first, second = [machine.finish() for machine in machines]
    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, first.stderr
    model = load(folder / "model0.pt")
    assert same_bits(load(folder / "model1.pt"), model)
    return model, first.stdout


@pytest.mark.waits
def test_two_machines_without_a_launcher(tmp_path):
    """The loss of ddp2 is over a machine: 2 with 2 processes are 2 with 1.

    Each machine has a file of its own. The newest reaches both.
    """
    one, _ = two_machines(tmp_path / "one", 1, epochs=3)
    two_machines(tmp_path / "two", 2, epochs=1)
    assert not (tmp_path / "two" / "node1.pt").exists(), "rank 0 writes"
    two, shown = two_machines(tmp_path / "two", 2, epochs=3)
    assert "epochs saved, by rank: [1, 1, -1, -1]. All take 0's" in shown
    torch.testing.assert_close(two, one, rtol=0, atol=1e-6)


# Resume


@pytest.mark.parametrize("mode", ["single", "ddp"])
def test_it_resumes_bit_for_bit(modes, tmp_path, mode):
    """Also what multigpu.py has begun."""
    size = 64
    start = PYTHON
    if mode == "ddp":
        size = 32
        start = ["python", ROOT / "multigpu.py"]
    run([*start, 2, 2, "--batch-size", size], tmp_path)
    done = run([*PYTHON, 5, 2, "--gpu-mode", mode, "--batch-size", size], tmp_path)
    assert "2 of 5 epochs are finished in snapshot.pt" in done.stdout
    folder, _ = modes(mode)
    undisturbed = load(folder / "snapshot.pt")
    resumed = load(tmp_path / "snapshot.pt")
    for key in ("MODEL_STATE", "OPTIMIZER_STATE"):
        assert same_bits(resumed[key], undisturbed[key])


SCHEDULES = {
    "epoch": partial(StepLR, step_size=1, gamma=0.5),
    "step": partial(OneCycleLR, max_lr=0.2, total_steps=64),
    "loss": partial(ReduceLROnPlateau, patience=0, threshold=1.0),
}


@pytest.mark.parametrize("name", SCHEDULES)
@in_a_fork
def test_a_schedule_resumes(tmp_path, name):
    """In a new loop, it goes on from the rate and the step of the snapshot."""

    def trained(file, epochs):
        """(the model's state, the learning rate)"""
        torch.manual_seed(0)
        per_step = name == "step"
        loop = loop_of(snapshot_path=tmp_path / file, scheduler_per_step=per_step)
        loop.scheduler = SCHEDULES[name](loop.optimizer)
        loop.fit(epochs)
        (group,) = loop.optimizer.param_groups
        return loop.model.state_dict(), group["lr"]

    whole, rate = trained("whole.pt", 4)
    trained("parts.pt", 2)
    resumed, resumed_rate = trained("parts.pt", 4)
    assert 0 < rate < 0.1
    assert resumed_rate == rate
    assert same_bits(resumed, whole)


# Loaders


def loop_of(train_loader=None, val_loader=None, rank=0, world_size=1, **options):
    data = list(zip(torch.randn(64, 3), torch.randn(64, 1), strict=True))
    model = torch.nn.Linear(3, 1)
    loop = TrainLoop(
        model,
        train_loader or DataLoader(data, 4),
        val_loader or DataLoader(data, 4),
        None,
        torch.optim.SGD(model.parameters(), lr=0.1),
        F.mse_loss,
        **options,
    )
    loop.rank = rank
    loop.world_size = world_size
    loop.nprocs = world_size
    return loop


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_each_held_out_sample_counts_once_in_its_own_batch(world_size):
    loader = DataLoader(range(9), 4, shuffle=True)
    found = []
    for rank in range(world_size):
        loop = loop_of(rank=rank, world_size=world_size)
        found += [batch.tolist() for batch in loop._share_out(loader)]
    assert sorted(found) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


class Begins(Callback):
    def on_train_begin(self, loop): ...


class Ends(Callback):  # as in Lightning
    def on_epoch_end(self, trainer, module): ...


def nan(output, targets):
    loss = F.mse_loss(output, targets)
    if output.requires_grad:  # in training alone, as of an auxiliary head
        return loss + torch.nan
    return loss


DATA = [(torch.zeros(3), torch.zeros(1))] * 8
HALF = SubsetRandomSampler(range(4))
OTHERS = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
REFUSED = {
    "gpu_mode 'dpp': choose single, dp, ddp, ddp2": {"gpu_mode": "dpp"},
    "precision '16': choose fp32, bf16, fp16": {"precision": "16"},
    "gpu_mode ddp2: accumulate is 1": {"gpu_mode": "ddp2", "accumulate": 2},
    "gpu_mode ddp cannot send this: ": {"gpu_mode": "ddp", "criterion": lambda *_: 0},
    "parameters that the model does not have": {"optimizer": OTHERS},
    "train_loader: a DataLoader with": {"train_loader": DATA},
    "val_loader: a DataLoader with": {"val_loader": DataLoader(DATA, sampler=HALF)},
    "yours to write for <class 'dict'>": {
        "train_loader": DataLoader([{"x": torch.ones(3)}])
    },
    "Begins.on_train_begin is never called": {"callbacks": [Begins()]},
    "Ends.on_epoch_end is never called": {"callbacks": [Ends()]},
    "num_gpus '2,3' is no whole number": {"num_gpus": "2,3"},
    "num_gpus 0 is no whole number": {"num_gpus": 0, "device_name": "cuda"},
    "error: the loss is nan": {"criterion": nan, "snapshot_path": "x.pt"},
}


@pytest.mark.parametrize("line", REFUSED)
@in_a_fork
def test_what_it_cannot_train_is_refused(line, tmp_path, monkeypatch, capsys):
    """One line, exit status 2, no file written."""
    monkeypatch.chdir(tmp_path)
    loop = loop_of()
    arguments = {"num_epochs": 1, "num_gpus": "3"}
    for name, value in REFUSED[line].items():
        if name in arguments:
            arguments[name] = value
        else:
            setattr(loop, name, value)
    with pytest.raises(SystemExit) as end:
        loop.fit(**arguments)
    assert end.value.code == 2
    shown = capsys.readouterr().err
    assert line in shown
    assert shown.count("\n") == 1
    assert not list(tmp_path.iterdir())


@in_a_fork
def test_what_may_be_left_out(tmp_path, monkeypatch, capsys):
    """No file is read or written, so that the next run trains, too."""
    monkeypatch.chdir(tmp_path)
    loop = loop_of(callbacks=None)
    loop.val_loader = None
    loop.fit(2, num_gpus=-1)
    first, second = loop.history
    assert list(first) == list(second) == ["train loss"]
    assert not list(tmp_path.iterdir())
    assert "0 of 2 epochs are finished\n" in capsys.readouterr().out
    loop = loop_of(val_loader=DataLoader(DATA, 5, drop_last=True))
    loop.fit(1, num_gpus=0)
    assert loop.device_name == "cpu", "also where there are GPUs"
    assert "drop_last=True: 3 of 8 samples do not count" in capsys.readouterr().out


@pytest.mark.waits
def test_a_script_without_a_main_guard_is_told(tmp_path):
    lines = [
        "from tests.helpers.train_loops import make_loop",
        "make_loop(gpu_mode='ddp').fit(1)",
    ]
    (tmp_path / "script.py").write_text("\n".join(lines))
    words = ["python", "script.py"]
    done = Program(words, tmp_path, real=True, PYTHONPATH=ROOT).finish()
    assert done.returncode == 2
    line = 'script.py: error: call `fit` below `if __name__ == "__main__":`'
    assert done.stderr.count(line) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("mode", ["ddp", pytest.param("ddp2", marks=pytest.mark.waits)])
def test_nested_batches_metrics_and_predictions(modes, tmp_path, mode):
    """The same model as without nesting. All ranks get all predictions, in order."""
    case(tmp_path, "nested", mode)
    folder, _ = modes("ddp")
    assert_same_weights(tmp_path / "snapshot.pt", folder / "snapshot.pt")
    snapshot = load(tmp_path / "snapshot.pt")
    model = torch.nn.Linear(20, 1)
    model.load_state_dict(snapshot["MODEL_STATE"])
    source, targets = stack(utils.MyTrainDataset(45, seed=1))
    expected = model(source).detach()
    in_training = noted(tmp_path, "predicted")
    afterwards = noted(tmp_path, "afterwards", ranks=1)
    for output in in_training + afterwards:
        torch.testing.assert_close(torch.tensor(output), expected.flatten())
    worst = (expected - targets).abs().max().item()
    last = snapshot["HISTORY"][-1]
    assert last["worst"] == pytest.approx(worst, abs=1e-5)


# Callbacks


@pytest.mark.waits
def test_early_stopping_ends_all_ranks_after_the_same_epoch(tmp_path):
    """It runs on rank 0: if the others went on, they would wait for it forever."""
    done = case(tmp_path, "stops_early")
    assert len(losses(done)) == 4
    assert "Warning" not in done.stderr
    assert noted(tmp_path, "hook") == [4 * 32] * 2
    assert noted(tmp_path, "rates") == [[0.001, 0.001, 0.0, 0.0]] * 2
    assert "epoch 4 saved to snapshot.pt" in done.stdout
    before = (tmp_path / "snapshot.pt").read_bytes()
    done = case(tmp_path, "stops_early")
    assert not losses(done)
    assert "a callback has ended the training" in done.stdout
    assert (tmp_path / "snapshot.pt").read_bytes() == before


@pytest.mark.waits
def test_lost_weights_end_the_training_and_are_not_saved(tmp_path):
    """Rank 1 alone has a held-out loss that is no number; rank 0 saves nothing."""
    done = Program(["python", SCRIPT, "is_lost"], tmp_path, PYTHONPATH=ROOT).finish()
    *good_epochs, (train_loss, held_out_loss) = losses(done)
    good = len(good_epochs)
    assert done.returncode == 2
    assert "error: the loss is nan, not saved to" in done.stderr
    assert done.stderr.count("\n") == 1
    assert 1 <= good < 19
    assert not math.isnan(train_loss)
    assert math.isnan(held_out_loss)
    assert load(tmp_path / "snapshot.pt")["EPOCHS_RUN"] == good
    assert (tmp_path / f"best.{good}.pt").exists()
    assert not (tmp_path / f"best.{good + 1}.pt").exists()
