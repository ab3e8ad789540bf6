"""train_loop.py: every mode trains the model of the rungs, and hands it back."""

import inspect
import json
import pickle
import re
import socket
import sys
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler

import utils
from ladder.rungs import FRAMEWORKS, ROOT, RUNGS, commands
from proofs import processes, slurm_cluster
from proofs.results import load, losses, same_bits, weights
from proofs.warm import Fork
from tests.test_input import ARGUMENTS
from variants.train_loop import Callback, EarlyStopping, TrainLoop

NAME = "variants/train_loop.py"
PYTHON = ["python", "-m", "variants.train_loop"]
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node=2", *PYTHON[1:]]
SCRIPT = ROOT / "tests" / "train_loops.py"


def run(words, cwd, **env):
    """Run it in a fork to its end, and insist that it ends well: Done."""
    done = Fork(words, cwd, PYTHONPATH=ROOT, **env).finish()
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def case(folder, *words, **env):
    """Run a case of tests/train_loops.py: Done.

    With one thread, because it forks, and a pool of threads does not survive that.
    """
    return run(["python", SCRIPT, *words], folder, OMP_NUM_THREADS=1, **env)


def noted(folder, name, ranks=2):
    files = [folder / f"{name}.{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) for file in files]


# The modes

MODES = {
    "single": (PYTHON, "64"),
    "dp": (PYTHON, "64"),
    "ddp": (PYTHON, "32"),
    "ddp2": (PYTHON, "32"),
    "ddp under torchrun": (TORCHRUN, "32"),
    "ddp2 under torchrun": (TORCHRUN, "32"),
}


@pytest.fixture(scope="module")
def modes(tmp_path_factory):
    """`modes[name]`: (folder, Done) of 5 epochs at an effective batch of 64."""
    found = {}
    for name, (words, size) in MODES.items():
        folder = tmp_path_factory.mktemp("mode")
        mode = name.partition(" ")[0]
        options = ["--gpu-mode", mode, "--batch-size", size]
        found[name] = folder, run([*words, 5, 2, *options], folder)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_trains_the_model_of_the_rungs(modes, runs, mode):
    folder, done = modes[mode]
    for rung in ("single_gpu.py", "multigpu.py"):
        other, other_done = runs(rung)
        both = losses(done), losses(other_done)
        torch.testing.assert_close(*both, rtol=1e-6, atol=2e-6)
        both = [weights(x / "snapshot.pt") for x in (folder, other)]
        torch.testing.assert_close(*both, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_it_prints_what_the_rungs_print(modes, runs, mode):
    _, done = modes[mode]
    rung = "multigpu.py" if "ddp" in mode else "single_gpu.py"
    *lines, test = done.stdout.splitlines()
    numbers = r"(?<=loss )\d+\.\d+|[\d,]+(?= samples/s)"
    expected = re.sub(numbers, "", runs(rung)[1].stdout).splitlines()
    assert [re.sub(numbers, "", x) for x in lines] == expected
    assert re.fullmatch(r"test loss 0\.0\d{5}", test)
    if mode != "ddp under torchrun" and mode != "ddp2 under torchrun":
        assert not done.stderr, "torchrun says that it sets OMP_NUM_THREADS"


def test_learns(tmp_path):
    """The docstring's first command, as one types it, in new interpreters."""
    words, _ = commands(NAME)
    done = processes.run(words, tmp_path, PYTHONPATH=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    curve = losses(done)
    assert len(curve) == 50
    assert 0.009 < curve[-1][1] < 0.011
    assert 0.009 < float(done.stdout.rpartition("test loss ")[2]) < 0.011


@pytest.mark.parametrize("mode", ["single", "ddp"])
def test_the_trained_model_comes_back(tmp_path, mode):
    """Its own object, tied to its optimizer, and the rest of what `fit` has found."""
    case(tmp_path, "comes_back", mode)
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["the same model"] and facts["the same parameters"]
    assert facts["momentum"] == 4
    assert not facts["group"]
    assert not facts["training"], "ready for use, in every mode"
    model = load(tmp_path / "model.pt")
    snapshot = load(tmp_path / "snapshot.pt")
    assert snapshot["EPOCHS_RUN"] == 4
    assert same_bits(model, snapshot["MODEL_STATE"]), "BatchNorm's statistics, too"
    trained = torch.nn.Sequential(torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 1))
    trained.load_state_dict(model)
    trained.eval()
    data = zip(*utils.MyTrainDataset(512, seed=1), strict=True)
    source, targets = (torch.stack(x) for x in data)
    loss = F.mse_loss(trained(source), targets).item()
    assert facts["metrics"]["held-out loss"] == pytest.approx(loss, rel=1e-5)
    names = ["train loss", "held-out loss", "test loss"]
    assert list(facts["metrics"]) == names
    ((loss, path),) = facts["best"]
    assert loss <= facts["metrics"]["held-out loss"] and (tmp_path / path).exists()


def test_fit_can_be_called_again_under_torchrun(tmp_path):
    """torchrun's store still has the addresses of the process group before."""
    folders = [tmp_path / "again", tmp_path / "once"]
    for folder in folders:
        folder.mkdir()
    words = ["torchrun", "--standalone", "--nproc-per-node=3", SCRIPT]
    done = run([*words, "again"], folders[0], OMP_NUM_THREADS=1)
    once = [*words, "schedule", "ddp", 2]
    once = losses(run(once, folders[1], OMP_NUM_THREADS=1))
    assert losses(done) == [*once, once[0]]
    assert "lr is" not in done.stdout, "it is as in the script, and the schedule's"
    both = [load(folder / "snapshot.pt")["MODEL_STATE"] for folder in folders]
    assert same_bits(*both)


def test_what_travels_is_tied_and_not_shared(tmp_path):
    """A loop in one file; beside it, the two mistakes that its chapter names."""
    loop, source, targets = loop_of(), torch.ones(4, 3), torch.ones(4, 1)

    def learns(model, optimizer):
        before = model.weight.clone()
        F.mse_loss(model(source), targets).backward()
        optimizer.step()
        return not torch.equal(model.weight, before)

    original = loop.model.weight.clone()
    utils.save_loop(loop, tmp_path / "loop.pt")
    there = torch.load(tmp_path / "loop.pt", weights_only=False)
    assert learns(there.model, there.optimizer)
    assert torch.equal(loop.model.weight, original)
    # Pickled one by one, they no longer belong together.
    pair = [pickle.loads(pickle.dumps(x)) for x in (loop.model, loop.optimizer)]
    assert not learns(*pair)
    # As an argument of torch.multiprocessing.spawn, they share their memory with us.
    data = ForkingPickler.dumps((loop.model, loop.optimizer))
    assert learns(*pickle.loads(data))
    assert not torch.equal(loop.model.weight, original)


@pytest.mark.parametrize("name", ["gradient_accumulation", "mixed_precision", "ddp2"])
def test_the_weights_are_those_of_the_variant(runs, tmp_path, name):
    """5 epochs of its own task, with the same options."""
    folder, _ = runs(f"variants/{name}.py")
    case(tmp_path, f"as_{name}")
    both = [weights(x / "snapshot.pt") for x in (tmp_path, folder)]
    torch.testing.assert_close(*both, rtol=0, atol=1e-6)


def test_both_methods_can_be_overridden(tmp_path):
    case(tmp_path, "override", 1)
    assert noted(tmp_path, "connection") == [[0, 2], [1, 2]]
    assert noted(tmp_path, "device_ids") == [None, None]


# Launchers


def test_two_slurm_tasks_start_no_other_process(tmp_path, modes):
    """What srun sets; a task is a rank, and torchrun's names are made from srun's."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    env = {
        "SLURM_STEP_NUM_TASKS": 2,
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "node[1-2]",
        "SLURM_JOB_ID": 7,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
        "PYTHONPATH": ROOT,
    }
    words = [*PYTHON, 5, 2, "--gpu-mode", "ddp"]
    tasks = [
        Fork(words, tmp_path, **env, SLURM_PROCID=rank, SLURM_LOCALID=rank)
        for rank in range(2)
    ]
    done = [task.finish() for task in tasks]
    assert [x.returncode for x in done] == [0, 0], done[0].stderr + done[1].stderr
    assert losses(done[0]) == losses(modes["ddp under torchrun"][1])
    assert not done[1].stdout


def test_what_srun_says_and_what_a_batch_script_says(monkeypatch):
    """In a batch script, SLURM_NTASKS is set as well, but nobody has started tasks."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "to be removed")
        monkeypatch.delenv(name)
    batch = {"SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NTASKS": 4}
    step = {
        "SLURM_PROCID": 3,
        "SLURM_LOCALID": 1,
        "SLURM_STEP_NUM_TASKS": 4,
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_JOB_ID": 12345,
        "SLURM_STEP_ID": 0,
        "MASTER_ADDR": "node1",
    }
    for name, value in batch.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_PORT", "to be removed")
    monkeypatch.delenv("MASTER_PORT")
    assert not utils.find_launcher()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")  # srun --pty bash
    assert not utils.find_launcher()
    for name, value in step.items():
        monkeypatch.setenv(name, str(value))
    assert utils.find_launcher()
    assert utils.torchrun_env() == [3, 1, 4]
    assert utils.os.environ["LOCAL_WORLD_SIZE"] == "2"
    assert utils.os.environ["MASTER_PORT"] == "22345"
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("MASTER_PORT")
    monkeypatch.setenv("SLURM_STEP_ID", "1")  # another srun, at the same time
    assert utils.find_launcher()
    assert utils.os.environ["MASTER_PORT"] == "23342"


NO_SLURM = slurm_cluster.why_not()


@pytest.mark.waits
@pytest.mark.skipif(NO_SLURM is not None, reason=f"no Slurm: {NO_SLURM}")
def test_a_real_srun_starts_the_ranks(tmp_path):
    """Two on each of two nodes, which are hosts of their own."""
    words = [sys.executable, *PYTHON[1:], 2, 2, "--gpu-mode", "ddp2"]
    srun = ["srun", "--nodes=2", "--ntasks-per-node=2", *words, "--batch-size", 16]
    slurm = [sys.executable, "-m", "proofs.slurm_cluster", 2, "--"]
    done = processes.run([*slurm, *srun], tmp_path, PYTHONPATH=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("4 x cpu, batch 16 each: effective batch 64, ")
    run([*PYTHON, 2, 2, "--batch-size", 64, "--snapshot-path", "one.pt"], tmp_path)
    both = [weights(tmp_path / x) for x in ("snapshot.pt", "one.pt")]
    torch.testing.assert_close(*both, rtol=0, atol=1e-6)


def nodes(folder, gpu_mode, num_nodes, num_gpus, batch_size, epochs=3):
    """The weights after a training on `num_nodes` machines, all of them this one."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    folder.mkdir(exist_ok=True)
    env = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    env |= {"OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT}
    words = ["python", SCRIPT, "node", gpu_mode, num_nodes]
    machines = [
        Fork([*words, rank, num_gpus, batch_size, epochs], folder, **env)
        for rank in range(num_nodes)
    ]
    done = [machine.finish() for machine in machines]
    assert [x.returncode for x in done] == [0] * num_nodes, done[0].stderr
    models = [load(folder / f"model{rank}.pt") for rank in range(num_nodes)]
    assert all(same_bits(models[0], model) for model in models), "each gets it back"
    return models[0], losses(done[0]), done[0].stdout


def test_ddp2_takes_the_loss_over_a_machine(tmp_path):
    """In float64: 2 machines with 2 processes are 2 with 1, and ddp is not."""
    one = nodes(tmp_path / "one", "ddp2", 2, 1, 64)
    two = nodes(tmp_path / "two", "ddp2", 2, 2, 32)
    torch.testing.assert_close(two[1], one[1], rtol=0, atol=2e-6)  # as printed
    torch.testing.assert_close(two[0], one[0], rtol=0, atol=1e-12)
    ddp, *_ = nodes(tmp_path / "ddp", "ddp", 2, 2, 32)
    assert not torch.isclose(ddp["log_temperature"], one[0]["log_temperature"])


def test_machines_with_disks_of_their_own_take_the_newest_snapshot(tmp_path):
    whole, *_ = nodes(tmp_path / "whole", "ddp", 2, 1, 64, epochs=2)
    nodes(tmp_path / "resumed", "ddp", 2, 1, 64, epochs=1)
    assert not (tmp_path / "resumed" / "node1.pt").exists(), "rank 0 writes"
    resumed, _, said = nodes(tmp_path / "resumed", "ddp", 2, 1, 64, epochs=2)
    assert "ranks found different snapshots: all take rank 0's" in said
    assert same_bits(resumed, whole)


# Resume


@pytest.mark.parametrize("mode", ["single", "ddp"])
def test_it_resumes_bit_for_bit(modes, tmp_path, mode):
    size = MODES[mode][1]
    for epochs in (2, 5):
        words = [*PYTHON, epochs, 2, "--gpu-mode", mode, "--batch-size", size]
        done = run(words, tmp_path)
    assert "resuming from snapshot.pt: 2 of 5 epochs are finished" in done.stdout
    both = [load(x / "snapshot.pt") for x in (tmp_path, modes[mode][0])]
    assert same_bits(*both)


@pytest.mark.parametrize(("mode", "kind"), [("single", "fp16"), ("ddp", "fp32")])
def test_dropout_resumes_and_differs_from_rank_to_rank(tmp_path, mode, kind):
    """And the scale of float16 resumes, which the first steps have lowered."""
    case(tmp_path, "dropout", mode, kind)
    assert same_bits(*(load(tmp_path / x) for x in ("whole.pt", "resumed.pt")))
    if mode == "ddp":
        first, second = noted(tmp_path, "random")
        assert first != second


def test_workers_resume_and_draw_other_numbers_on_each_rank(tmp_path):
    """Those of a loader with a generator of its own, of which each rank has a copy."""
    case(tmp_path, "workers")
    first, second = noted(tmp_path, "seen")
    assert first != second
    assert same_bits(*(load(tmp_path / x) for x in ("whole.pt", "resumed.pt")))


def test_the_rungs_read_its_snapshots_and_it_reads_theirs(modes, tmp_path):
    multigpu = ["python", ROOT / "multigpu.py"]
    run([*multigpu, 1, 1], tmp_path)
    run([*PYTHON, 3, 1, "--gpu-mode", "ddp"], tmp_path)
    done = run([*multigpu, 5, 1], tmp_path)
    assert "resuming from snapshot.pt: 3 of 5 epochs are finished" in done.stdout
    both = [weights(x / "snapshot.pt") for x in (tmp_path, modes["ddp"][0])]
    assert torch.equal(*both)


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
    loop.rank, loop.world_size, loop.nprocs = rank, world_size, world_size
    return loop


def collate(batch):
    return batch


def init_worker(number):
    pass


OPTIONS = {  # every option of a loader but the three that are replaced
    "dataset": list(range(17)),
    "batch_size": 3,
    "num_workers": 2,
    "collate_fn": collate,
    "pin_memory": True,
    "drop_last": True,
    "timeout": 7,
    "worker_init_fn": init_worker,
    "multiprocessing_context": torch.multiprocessing.get_context("spawn"),
    "generator": torch.Generator(),
    "prefetch_factor": 5,
    "persistent_workers": True,
    "pin_memory_device": "cuda",
    "in_order": False,
}
REPLACED = {"sampler", "batch_sampler", "shuffle"}


def test_a_loader_keeps_every_option():
    """All that the installed torch knows: a new option makes this test fail."""
    known = inspect.signature(DataLoader).parameters
    assert set(OPTIONS) | REPLACED == set(known)
    assert not [x for x, y in OPTIONS.items() if y == known[x].default]
    shared = loop_of()._share_out(DataLoader(**OPTIONS))
    for name, value in OPTIONS.items():
        assert getattr(shared, name) is value or getattr(shared, name) == value, name


def shares(loader, train, world_size, epoch=0, gpu_mode="ddp"):
    found = []
    for rank in range(world_size):
        loop = loop_of(rank=rank, world_size=world_size, gpu_mode=gpu_mode)
        shared = loop._share_out(loader, train)
        if train:
            shared.sampler.set_epoch(epoch)
        found.append([batch.tolist() for batch in shared])
    return found


def flat(batches):
    return [x for batch in batches for x in batch]


def test_a_shuffling_loader_still_shuffles_in_each_epoch():
    loader = DataLoader(range(12), 2, shuffle=True)
    first, second = (shares(loader, True, 3, epoch) for epoch in (0, 1))
    assert first != second
    for epoch in (first, second):
        taken = flat(flat(epoch))
        assert sorted(taken) == list(range(12)) != taken
    assert shares(loader, True, 3) == first


def test_a_loader_that_does_not_shuffle_keeps_the_order():
    loader = DataLoader(range(12), 2)
    found = shares(loader, True, 3, epoch=4)
    assert found == [[[0, 3], [6, 9]], [[1, 4], [7, 10]], [[2, 5], [8, 11]]]


def test_whole_batches_only_if_the_loader_says_so():
    """Else some samples are taken twice, so that all ranks take equally many."""
    for drop_last, count in ((True, 6), (False, 12)):
        loader = DataLoader(range(11), 2, drop_last=drop_last)
        found = shares(loader, True, 3)
        assert len(flat(flat(found))) == count
        assert len({len(batches) for batches in found}) == 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_each_held_out_sample_counts_once_in_its_own_batch(world_size):
    loader = DataLoader(range(17), 4, shuffle=True)
    found = shares(loader, False, world_size)
    batches = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16]]
    assert sorted(flat(found)) == batches


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(3), torch.zeros(1)


class MyLoader(DataLoader):
    def __iter__(self):
        return iter(())


DATA = [(torch.zeros(3), torch.zeros(1))] * 8
HALF = SubsetRandomSampler(range(4))
REFUSED = {
    "no such mode": ({"gpu_mode": "dpp"}, "gpu_mode 'dpp': choose single, dp, ddp, d"),
    "no such precision": (
        {"precision": "16"},
        "precision '16': choose fp32, bf16, fp1",
    ),
    "ddp2 in pieces": ({"gpu_mode": "ddp2", "accumulate": 2}, "accumulate must be 1"),
    "no pieces": ({"accumulate": -1}, "accumulate -1: a number above 0 is needed"),
    "never saved": ({"save_every": 0}, "save_every 0: a number above 0 is needed"),
    "gradients turned round": ({"clip": -1.0}, "clip -1.0: a number above 0 is needed"),
    "parameters of the loss": (
        {"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])},
        "the optimizer has parameters that the model does not have, of the criterion",
    ),
    "one class twice": (
        {"callbacks": [EarlyStopping(), EarlyStopping()]},
        "their state",
    ),
    "no loader": ({"train_loader": DATA}, "train_loader is no DataLoader, but a list"),
    "no validation": ({"val_loader": None}, "val_loader is no DataLoader"),
    "a stream": (
        {"train_loader": DataLoader(Stream(), 4)},
        "an IterableDataset has no",
    ),
    "its own loop": ({"val_loader": MyLoader(DATA, 4)}, "would lose its __iter__"),
    "batches": (
        {"train_loader": DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]])},
        "train_loader: no batch_sampler can be shared out. Give it batch_size=...",
    ),
    "no batches": ({"val_loader": DataLoader(DATA, None)}, "Give it batch_size=..."),
    "some of the samples": (
        {"val_loader": DataLoader(DATA, 4, sampler=HALF)},
        "val_loader: its SubsetRandomSampler would be lost. Say shuffle=...",
    ),
    "drawn twice": (
        {
            "train_loader": DataLoader(
                DATA,
                4,
                sampler=torch.utils.data.RandomSampler(DATA, replacement=True),
            )
        },
        "its RandomSampler would be lost",
    ),
    "samples left out": (
        {"val_loader": DataLoader(DATA, 4, drop_last=True)},
        "val_loader: drop_last=True leaves samples out. Say drop_last=False",
    ),
    "too large a batch": (
        {"train_loader": DataLoader(DATA, 4), "gpu_mode": "ddp"},
        "one step takes 3 x 4 samples and there are 8",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_it_cannot_train_is_refused(fault, tmp_path, monkeypatch, capsys):
    """One line, exit status 2, no process started, no file written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.multiprocessing, "spawn", None)
    options, line = REFUSED[fault]
    loop = loop_of()
    for name, value in options.items():
        setattr(loop, name, value)
    with pytest.raises(SystemExit) as end:
        loop.fit(1, num_gpus=3)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert line in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def refused(words, folder, **env):
    done = Fork(words, folder, PYTHONPATH=ROOT, **env).finish()
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("args", ARGUMENTS)
def test_bad_argument(args, tmp_path):
    """The same command line as all rungs have."""
    expected = ARGUMENTS[args].format(samples=2048)
    assert expected in refused([*PYTHON, *args.split()], tmp_path)
    assert not list(tmp_path.iterdir())


def test_bad_input_of_its_own(tmp_path, modes):
    line = refused([*PYTHON, 1, 1, "--gpu-mode", "gpu"], tmp_path)
    assert "gpu_mode 'gpu': choose single, dp, ddp, ddp2" in line
    line = refused([*PYTHON, 1, 1], tmp_path, RANK=0, WORLD_SIZE=2)
    assert "gpu_mode single is one process: start one, or choose ddp" in line
    line = refused(["python", SCRIPT, "unsendable"], tmp_path)
    assert "gpu_mode ddp cannot send this to other processes: Can't " in line
    line = refused(["python", SCRIPT, "node", "ddp", 2, 0, 1, 8, 1], tmp_path)
    assert "several machines need MASTER_ADDR and MASTER_PORT on each" in line
    env = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost"}
    words = [*PYTHON, 1, 1, "--gpu-mode", "ddp", "--nprocs", 4]
    line = refused(words, tmp_path, **env, MASTER_PORT=29500)
    assert "num_gpus is 4, and 2 processes were started here" in line
    (tmp_path / "snapshot.pt").write_text("no snapshot")
    line = refused([*PYTHON, 1, 1, "--gpu-mode", "ddp"], tmp_path)
    assert "snapshot.pt is no snapshot: choose another --snapshot-path" in line


# Accumulation and precision


def test_pieces_are_one_step_and_are_sent_once(tmp_path, modes):
    """A batch of 32 in 5 pieces, of which the last is shorter."""
    case(tmp_path, "override", 5)
    steps = 2048 // 64
    # DDP sends its parameters in one bucket, once for each step.
    assert noted(tmp_path, "sent") == [[steps, steps]] * 2
    run([*PYTHON, 1, 1, "--gpu-mode", "ddp", "--snapshot-path", "whole.pt"], tmp_path)
    both = [weights(tmp_path / x) for x in ("snapshot.pt", "whole.pt")]
    torch.testing.assert_close(*both, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_precision(tmp_path, kind):
    """The model computes in it, and the weights are of float32."""
    case(tmp_path, "precision", kind)
    name = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[kind]
    assert noted(tmp_path, "dtype") == [[name, "torch.float32", False]] * 2
    snapshot = load(tmp_path / "snapshot.pt")
    assert bool(snapshot["SCALER_STATE"]) == (kind == "fp16")
    whole = tmp_path / "whole"
    whole.mkdir()
    run([*PYTHON, 2, 1, "--gpu-mode", "ddp"], whole)
    mine, theirs = (weights(x / "snapshot.pt") for x in (tmp_path, whole))
    # In float16, the first steps overflow and are skipped until the scale fits.
    assert 0 < (mine - theirs).abs().max() < 0.1


def test_gradients_are_clipped_after_they_are_unscaled(tmp_path):
    """In float16 they are 65536 times as large while they are scaled."""
    found = []
    for kind in ("fp32", "fp16"):
        folder = tmp_path / kind
        folder.mkdir()
        case(folder, "precision", kind, "single", 0.5)
        found.append(weights(folder / "snapshot.pt"))
    before = torch.cat([x.flatten() for x in loop_parameters()])
    assert (found[0] - before).norm() > 0.3
    assert (found[0] - found[1]).abs().max() < 0.01


def loop_parameters():
    torch.manual_seed(0)
    return [x.detach().double() for x in torch.nn.Linear(20, 1).parameters()]


# Callbacks


def test_a_schedule_acts_on_every_rank_and_callbacks_on_rank_0(tmp_path):
    folders = {mode: tmp_path / mode for mode in ("single", "ddp")}
    for mode, folder in folders.items():
        folder.mkdir()
        done = case(folder, "schedule", mode, 3)
    rates = [0.001, 0.0005, 0.00025]
    assert noted(folders["ddp"], "rates") == [rates, rates]
    both = [weights(folder / "snapshot.pt") for folder in folders.values()]
    torch.testing.assert_close(*both, rtol=0, atol=1e-6)
    steps = 2048 // 64
    calls = {"start": 3, "batch": 3 * steps, "end": 3}
    assert noted(folders["ddp"], "calls", 1) == [calls]
    assert not (folders["ddp"] / "calls.1.json").exists()
    shown = [f"{step}/{steps}" for step in range(1, steps + 1)] * 3
    assert done.stderr.split() == shown
    folder = tmp_path / "resumed"
    folder.mkdir()
    case(folder, "schedule", "ddp", 1, 3)
    both = [load(x / "snapshot.pt") for x in (folder, folders["ddp"])]
    assert same_bits(*both)


def test_early_stopping_ends_all_ranks_after_the_same_epoch(tmp_path):
    """It runs on rank 0: if the others went on, they would wait for it forever."""
    done = case(tmp_path, "stops_early")
    assert len(losses(done)) == 4
    assert noted(tmp_path, "rates") == [[0.001, 0.001, 0.0, 0.0]] * 2
    assert "epoch 4 saved to snapshot.pt" in done.stdout
    before = (tmp_path / "snapshot.pt").read_bytes()
    done = case(tmp_path, "stops_early")
    assert not losses(done)
    assert "a callback has ended the training" in done.stdout
    assert (tmp_path / "snapshot.pt").read_bytes() == before


def test_lost_weights_end_the_training_and_are_not_saved(tmp_path):
    """Rank 1 alone has lost them, and rank 0's callback is told."""
    done = case(tmp_path, "is_lost")
    *good, last = losses(done)
    assert 1 <= len(good) < 19
    assert last[0] != last[0]
    assert load(tmp_path / "snapshot.pt")["EPOCHS_RUN"] == len(good)
    assert f"best.{len(good)}.pt" in {x.name for x in tmp_path.iterdir()}
    assert not (tmp_path / f"best.{len(good) + 1}.pt").exists()


def test_the_best_checkpoints_are_kept(tmp_path):
    """Two of five, and any rung resumes from them."""
    done = case(tmp_path, "bests")
    curve = [held_out for _, held_out in losses(done)]
    best = sorted(range(5), key=curve.__getitem__)[:2]
    kept = {x.name for x in tmp_path.glob("best.*")}
    assert (
        kept == {f"best.{epoch + 1}.pt" for epoch in best} == {"best.2.pt", "best.3.pt"}
    )
    run(
        ["python", ROOT / "multigpu.py", 4, 4, "--snapshot-path", "best.3.pt"], tmp_path
    )


def test_the_best_checkpoints_survive_a_kill(tmp_path):
    """It had removed the file of epoch 1 before it saved the next snapshot."""
    case(tmp_path, "best", 1)
    before = (tmp_path / "snapshot.pt").read_bytes()
    case(tmp_path, "best", 2)
    assert {x.name for x in tmp_path.glob("best.*")} == {"best.2.pt"}
    (tmp_path / "snapshot.pt").write_bytes(before)
    case(tmp_path, "best", 3)
    assert {x.name for x in tmp_path.glob("best.*")} == {"best.3.pt"}
    ((_, name),) = load(tmp_path / "snapshot.pt")["CALLBACK_STATES"]["BestCheckpoints"][
        "best"
    ]
    assert name == "best.3.pt"


def test_callbacks_do_not_share_their_state(tmp_path):
    """Two of a user's, which make none themselves; and it goes to other processes."""
    one, other = Counts(), CountsToo()
    one.state["epochs"] = 7
    assert other.state == Counts().state == {}
    utils.save_loop(loop_of(callbacks=[one, other]), tmp_path / "loop.pt")
    there = torch.load(tmp_path / "loop.pt", weights_only=False)
    assert [x.state for x in there.callbacks] == [{"epochs": 7}, {}]


class Counts(Callback):
    pass


class CountsToo(Callback):
    pass


# The file


def test_it_can_be_read_in_one_sitting():
    lines = (ROOT / NAME).read_text().splitlines()
    assert len(lines) <= 400
    assert max(map(len, lines)) <= 88


def code_lines(text):
    """The lines without their depth and the comments at their ends; no blank ones."""
    lines = [x.partition("  # ")[0].strip() for x in text.splitlines()]
    return [x for x in lines if x]


def test_the_chapter_quotes_both_files():
    """The lines of each fence, in this order, in it and in the script named above."""
    text = (ROOT / "docs/train_loop.md").read_text()
    fences = re.findall(r"^(.*?)^```python\n(.*?)^```$", text, re.S | re.M)
    assert len(fences) > 10
    quoted = set()
    for above, quote in fences:
        source = re.findall(r"\]\(\.\./([\w/]+\.py)\)", above)[-1]
        quoted.add(source)
        for name in {NAME, source}:
            rest = iter(code_lines((ROOT / name).read_text()))
            for line in code_lines(quote):
                assert line in rest, f"{name} has no {line!r} there"
    assert quoted == {NAME, *FRAMEWORKS[NAME]}


def test_it_is_listed():
    readme = (ROOT / "README.md").read_text()
    assert f"[{NAME}]({NAME})" in readme
    assert " ".join(commands(NAME)[0]) in readme


def test_it_is_made_of_rungs():
    assert FRAMEWORKS[NAME] and set(FRAMEWORKS[NAME]) <= set(RUNGS)
    assert NAME not in RUNGS
