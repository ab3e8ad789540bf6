"""train_loop.py: every mode trains the model of the scripts, and hands it back."""

import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, SubsetRandomSampler, default_collate

import utils
from tests.helpers.checks import (
    assert_same_losses,
    assert_same_weights,
    import_script,
    stack,
)
from tests.helpers.forked import in_a_fork
from tests.helpers.made_once import made_once
from tests.helpers.needs import needs_slurm
from tests.helpers.own_disks import free_port
from tests.hooks import replace
from tools.run.launch import torchrun_words, train
from tools.run.processes import Program
from tools.run.results import load, losses, same_bits
from tools.scripts import ROOT
from variants import train_loop

PYTHON = ["python", "-m", "variants.train_loop"]
SNAPSHOT = "snapshot.pt"
HERE = vars(train_loop)


def make_loop(script=HERE, model=None, batch_size=32, **options):
    """The loop that `main` of train_loop.py makes, with other options.

    script: the globals of train_loop.py, which a process has of its own.
    """
    data = script["utils"].MyTrainDataset
    torch.manual_seed(0)
    model = model or torch.nn.Linear(20, 1)
    arguments = {
        "train_loader": DataLoader(data(2048), batch_size, shuffle=True),
        "val_loader": DataLoader(data(512, seed=1), 32),
        "test_loader": None,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9),
        "criterion": F.mse_loss,
        **options,
    }
    return script["TrainLoop"](model, **arguments)


def start_loop(main, cwd, words=PYTHON, **env):
    """Start train_loop.py with `main(script)` in place of its own: Program."""

    def call_main(script):
        script["main"] = lambda _: main(script)

    cwd.mkdir(exist_ok=True)
    return Program([*words, 1, 1], cwd, hooks=[call_main], PYTHONPATH=ROOT, **env)


# The modes


def train_in(mode, folder):
    """Done of 5 epochs at an effective batch of 64, in two processes if in several."""
    size = 32 if "ddp" in mode else 64
    words = [*PYTHON, 5, 2, "--gpu-mode", mode, "--batch-size", size]
    return Program(words, folder, PYTHONPATH=ROOT).succeed()


@made_once
def modes(folder, mode):
    """`modes(mode)`: (folder, Done) of `train_in`."""
    return folder, train_in(mode, folder)


DP = pytest.param("dp", marks=pytest.mark.waits)
DDP2 = pytest.param("ddp2", marks=pytest.mark.waits)


@pytest.mark.parametrize("mode", ["single", "ddp", DP, DDP2])
def test_each_mode_trains_the_model_of_the_scripts(modes, runs, mode):
    folder, done = modes(mode)
    scripts_folder, scripts = runs("multigpu.py")
    assert_same_losses(losses(done), losses(scripts))
    assert_same_weights(folder / SNAPSHOT, scripts_folder / SNAPSHOT)


class CountsSteps(train_loop.Callback):
    def on_train_start(self, loop):
        self.state["steps"] = 0
        loop.optimizer.register_step_post_hook(self.count)

    def count(self, *_):
        self.state["steps"] += 1


def test_the_trained_model_comes_back(tmp_path):
    """Its own object, tied to its optimizer, and the rest of what `fit` has found.

    From a second call of `fit`, in which the training goes on.
    """

    def main(script):
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 1))
        best = script["BestCheckpoints"]()
        # From this file as the new processes import it.
        counts = import_script("tests/variants/test_train_loop.py").CountsSteps()
        loop = make_loop(
            script,
            model,
            gpu_mode="ddp",
            snapshot_path=SNAPSHOT,
            callbacks=[best, counts],
        )
        loop.test_loader = loop.val_loader
        loop.fit(2)
        assert loop.fit(4) is model
        assert not model.training, "ready for use, in every mode"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        (group,) = loop.optimizer.param_groups
        for mine, its in zip(model.parameters(), group["params"], strict=True):
            assert mine is its
        assert len(loop.optimizer.state) == 4, "momentum, of each parameter"
        snapshot = load(SNAPSHOT)
        assert snapshot["EPOCHS_RUN"] == len(loop.history) == 4
        # The statistics of BatchNorm, too.
        assert same_bits(model.state_dict(), snapshot["MODEL_STATE"])
        assert list(loop.test_results) == ["test loss"]
        ((loss, path),) = best.state["best"]
        assert loss == min(epoch["held-out loss"] for epoch in loop.history)
        assert Path(path).exists()
        assert counts.state["steps"] == 2 * 32, "of the second call"

    start_loop(main, tmp_path).succeed()


@pytest.mark.waits
@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("variants/gradient_accumulation.py", {"accumulate": 4}),
        ("variants/mixed_precision.py", {"precision": "bf16"}),
    ],
)
def test_the_weights_are_those_of_the_variant(runs, tmp_path, name, option):
    """5 epochs with the same option."""

    def main(script):
        make_loop(script, gpu_mode="ddp", snapshot_path=SNAPSHOT, **option).fit(5)

    start_loop(main, tmp_path).succeed()
    folder, _ = runs(name)
    assert_same_weights(tmp_path / SNAPSHOT, folder / SNAPSHOT)


# Launchers


def test_a_batch_script_has_started_no_ranks(monkeypatch):
    """SLURM_NTASKS is set there as well."""
    env = {"SLURM_NTASKS": "4"}
    monkeypatch.setattr(os, "environ", env)
    assert not train_loop.find_launcher()
    env["SLURM_STEP_NUM_TASKS"] = "1"  # srun --pty bash
    assert not train_loop.find_launcher()


@pytest.mark.waits
@needs_slurm
def test_a_real_srun_starts_the_ranks(modes, tmp_path):
    """Two on each of two nodes, which are hosts of their own."""
    slurm = "python -m tools.run.slurm_cluster 2 --"
    srun = "srun --nodes=2 --ntasks-per-node=2"
    script = "python -m variants.train_loop 5 2 --gpu-mode ddp2 --batch-size 16"
    words = f"{slurm} {srun} {script}".split()
    done = Program(words, tmp_path, real=True, PYTHONPATH=ROOT).succeed()
    assert done.stdout.startswith("4 x cpu, batch 16 each: effective batch 64, ")
    folder, _ = modes("single")
    assert_same_weights(tmp_path / SNAPSHOT, folder / SNAPSHOT)


def train_on_two_machines(folder, num_gpus, epochs):
    """The weights that both get back. Both are this machine.

    A step takes 32 samples of each, and its loss is no mean over them.
    """

    def train_on(node_rank, script):
        loop = make_loop(
            script,
            batch_size=32 // num_gpus,
            criterion=torch.dist,
            gpu_mode="ddp2",
            snapshot_path=f"node{node_rank}.pt",
        )
        model = loop.fit(epochs, 2, node_rank, num_gpus)
        torch.save(model.state_dict(), f"model{node_rank}.pt")

    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    machines = [start_loop(partial(train_on, rank), folder, **where) for rank in (0, 1)]
    for machine in machines:
        machine.succeed()
    model = load(folder / "model0.pt")
    assert same_bits(load(folder / "model1.pt"), model)
    return model


@pytest.mark.waits
def test_two_machines_without_a_launcher(tmp_path):
    """The loss of ddp2 is over a machine: 2 with 2 processes are 2 with 1.

    Each machine has a file of its own. Only the first is written, and reaches both.
    """
    one = train_on_two_machines(tmp_path / "one", num_gpus=1, epochs=3)
    two = tmp_path / "two"
    train_on_two_machines(two, num_gpus=2, epochs=1)
    assert not (two / "node1.pt").exists(), "rank 0 writes"
    model = train_on_two_machines(two, num_gpus=2, epochs=3)
    torch.testing.assert_close(model, one, rtol=0, atol=1e-6)


# Resume


def test_it_resumes_bit_for_bit(modes, tmp_path):
    """Also what multigpu.py has begun."""
    train("multigpu.py", 2, 2, cwd=tmp_path)
    done = train_in("ddp", tmp_path)
    assert "2 of 5 epochs are finished in snapshot.pt" in done.stdout
    folder, _ = modes("ddp")
    undisturbed = load(folder / SNAPSHOT)
    resumed = load(tmp_path / SNAPSHOT)
    for key in ("MODEL_STATE", "OPTIMIZER_STATE"):
        assert same_bits(resumed[key], undisturbed[key])


SCHEDULES = {
    "epoch": partial(StepLR, step_size=1, gamma=0.5),
    "step": partial(OneCycleLR, max_lr=0.01, total_steps=4 * 64),
    "loss": partial(ReduceLROnPlateau, patience=0, threshold=1.0),
}


@pytest.mark.parametrize("name", SCHEDULES)
@in_a_fork
def test_a_schedule_resumes(tmp_path, name):
    """In a new loop, it goes on from the rate and the step of the snapshot."""

    def trained(file, epochs):
        """(the model's state, the learning rate)"""
        loop = make_loop(snapshot_path=tmp_path / file)
        loop.scheduler = SCHEDULES[name](loop.optimizer)
        loop.scheduler_per_step = name == "step"
        loop.fit(epochs)
        (group,) = loop.optimizer.param_groups
        return loop.model.state_dict(), group["lr"]

    whole, rate = trained("whole.pt", 4)
    trained("parts.pt", 2)
    resumed, resumed_rate = trained("parts.pt", 4)
    assert 0 < rate < 0.001
    assert resumed_rate == rate
    assert same_bits(resumed, whole)


# Loaders


REFUSED = {
    "gpu_mode 'dpp': choose single, dp, ddp, ddp2": {"gpu_mode": "dpp"},
    "gpu_mode ddp2: accumulate is 1": {"gpu_mode": "ddp2", "accumulate": 2},
    "gpu_mode ddp cannot send this: RuntimeError('Serialization of parametrized": {
        "gpu_mode": "ddp",
        "model": spectral_norm(torch.nn.Linear(20, 1)),
    },
    "val_loader: a DataLoader with": {
        "val_loader": DataLoader(range(8), sampler=SubsetRandomSampler(range(4)))
    },
}


@pytest.mark.parametrize("line", REFUSED)
@in_a_fork
def test_what_it_cannot_train_is_refused(line, tmp_path, monkeypatch, capsys):
    """One line, exit status 2, no file written."""
    monkeypatch.chdir(tmp_path)
    loop = make_loop(**REFUSED[line])
    with pytest.raises(SystemExit) as end:
        loop.fit(1)
    assert end.value.code == 2
    shown = capsys.readouterr().err
    assert line in shown
    assert shown.count("\n") == 1
    assert not list(tmp_path.iterdir())


@in_a_fork
def test_what_may_be_left_out(tmp_path, monkeypatch, capsys):
    """No file is read or written, so that the next run trains, too."""
    monkeypatch.chdir(tmp_path)
    loop = make_loop(callbacks=None, val_loader=None)
    loop.fit(2, num_gpus=-1)
    first, second = loop.history
    assert list(first) == list(second) == ["train loss"]
    assert not list(tmp_path.iterdir())
    assert "0 of 2 epochs are finished\n" in capsys.readouterr().out
    loop.fit(2, num_gpus=0)
    assert loop.device_name == "cpu", "also where there are GPUs"


class Nested(torch.nn.Linear):
    """Its input is a dict, and its output a tuple."""

    def forward(self, batch):
        return super().forward(batch["x"]), batch["more"][0], None


def nest(samples):
    source, targets = default_collate(samples)
    return {"x": source, "more": (source, "text")}, targets


@pytest.mark.parametrize("mode", ["ddp", DDP2])
def test_nested_batches_metrics_and_predictions(modes, tmp_path, mode):
    """The same model as without nesting. All ranks get all predictions, in order.

    Each sample counts once, in its own batch. Under torchrun.
    """

    def main(script):
        predicted = []

        class Predicts(script["Callback"]):
            every_rank = True

            def on_batch_end(self, loop):
                if loop.step in (1, 32):  # an epoch's first, which goes on, and last
                    predicted[:] = loop.predict(loop.val_loader)

        torch.manual_seed(0)  # the weights that make_loop's own model begins with
        model = Nested(20, 1)
        held_out = utils.MyTrainDataset(45, seed=1)
        loop = make_loop(
            script,
            model,
            val_loader=DataLoader(held_out, 4, shuffle=True, collate_fn=nest),
            criterion=lambda output, targets: F.mse_loss(output[0], targets),
            metrics={"sum": lambda output, targets: (output[0] - targets).sum()},
            callbacks=[Predicts()],
            gpu_mode=mode,
            snapshot_path=SNAPSHOT,
        )
        loop.train_loader.collate_fn = nest
        loop.fit(5)
        source, targets = stack(held_out)
        expected = F.linear(source, model.weight, model.bias).detach()
        alone = loop.predict([nest(held_out)])  # after `fit`
        for (output, *_), its_targets in (predicted, alone):
            torch.testing.assert_close(output, expected)
            assert torch.equal(its_targets, targets)
        total = (expected - targets).sum().item()
        assert loop.history[-1]["sum"] == pytest.approx(total, abs=1e-4)

    start_loop(main, tmp_path, [*torchrun_words(2), *PYTHON[1:]]).succeed()
    folder, _ = modes("ddp")
    assert_same_weights(tmp_path / SNAPSHOT, folder / SNAPSHOT)


# Callbacks


def stops_early(script):
    """The learning rate is 0 from the third epoch on, so that nothing gets better."""
    loop = make_loop(script, gpu_mode="ddp", save_every=100, snapshot_path=SNAPSHOT)
    loop.scheduler = StepLR(loop.optimizer, step_size=2, gamma=0.0)
    loop.fit(20, callbacks=[script["EarlyStopping"](2)])


@pytest.mark.waits
def test_early_stopping_ends_all_ranks_after_the_same_epoch(tmp_path):
    """It runs on rank 0: if the others went on, they would wait for it forever."""
    done = start_loop(stops_early, tmp_path).succeed()
    assert len(losses(done)) == 4
    assert "Warning" not in done.stderr
    assert "epoch 4 saved to snapshot.pt" in done.stdout
    before = (tmp_path / SNAPSHOT).read_bytes()
    done = start_loop(stops_early, tmp_path).succeed()
    assert not losses(done)
    assert "a callback has ended the training" in done.stdout
    assert (tmp_path / SNAPSHOT).read_bytes() == before


@pytest.mark.waits
def test_lost_weights_end_the_training_and_are_not_saved(tmp_path):
    """Rank 1 alone has a held-out loss that is no number; rank 0 saves nothing."""

    def get_loss(inner, loop, batch):
        lost = (loop.rank, loop.epochs_run, loop.model.training) == (1, 2, False)
        return inner(loop, batch) * (torch.nan if lost else 1)

    def main(script):
        replace(script["TrainLoop"], "get_loss", get_loss)
        loop = make_loop(script, gpu_mode="ddp", snapshot_path=SNAPSHOT)
        loop.fit(20, callbacks=[script["BestCheckpoints"](2)])

    done = start_loop(main, tmp_path).finish()
    assert done.returncode == 2
    assert "error: the loss is nan, not saved to" in done.stderr
    assert done.stderr.count("\n") == 1
    assert load(tmp_path)["EPOCHS_RUN"] == 2
    best = {path.name for path in tmp_path.glob("best.*")}
    assert best == {"best.1.pt", "best.2.pt"}
