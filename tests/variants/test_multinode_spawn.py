"""multinode_spawn.py: machines that find each other without a launcher.

Most machines here are processes of one host. Those of the last test have a name, an
address and a disk of their own.
"""

import json
from datetime import timedelta

import pytest

from tests.helpers.checks import assert_same_weights, help_of
from tests.helpers.needs import needs_hosts
from tests.helpers.own_disks import free_port
from tests.hooks import replace
from tests.hooks.notes import note_device, note_store
from tests.hooks.timing import slow_steps
from tools.run.hosts import Hosts
from tools.run.launch import copy_script, run_script, train
from tools.run.processes import Program, TimedOut, wait
from tools.run.results import load
from tools.scripts import ROOT

NAME = "variants/multinode_spawn.py"
COMMAND = "python -m variants.multinode_spawn"
ERROR = "multinode_spawn.py: error: "


def typed_on(nr, total=5, gpus=1):
    """The words to type on machine `nr` of two."""
    words = f"{COMMAND} {total} 2 --nodes 2 --nr {nr} --gpus {gpus}"
    return words.split()


def machine(nr, port, folder, *options, gpus=1, hooks=()):
    """Start what one types on machine `nr` of two, in `folder`: a Program."""
    words = [*typed_on(nr, gpus=gpus), "--master_port", port, *options]
    return Program(words, folder, hooks=hooks, PYTHONPATH=ROOT)


def ended(machines, status=0):
    """[Done of each], once all have ended with this status."""
    try:
        all_done = [program.finish(timeout_s=30) for program in machines]
    except TimedOut as reason:
        pytest.fail(str(reason))
    for done in all_done:
        assert done.returncode == status, all_done
    return all_done


def test_two_machines_train_the_model_of_one_process(tmp_path, runs):
    """Two processes each, no disk shared: they resume what machine 0 alone has.

    Each connects to where it is told: the second has another name for the first.
    """
    port = free_port()
    homes = [tmp_path / "0", tmp_path / "1"]
    addresses = ["localhost", "127.0.0.1"]
    train("single_gpu.py", 2, 2, cwd=homes[0])

    def start(nr):
        return machine(
            nr,
            port,
            homes[nr],
            "--batch-size",
            16,
            "--master_addr",
            addresses[nr],
            gpus=2,
            hooks=[note_device, note_store],
        )

    second = start(1)
    assert wait(lambda: "machine 1 waits" in second.output, 20)
    first = start(0)
    first_done, second_done = ended([first, second])
    line = "epochs saved, by rank: [2, 2, -1, -1]. All take rank 0's"
    assert line in first_done.stdout
    assert second_done.stdout.count("\n") == 1, "that it waits, and nothing more"
    alone, _ = runs("single_gpu.py")
    assert_same_weights(homes[0], alone)
    assert not (homes[1] / "snapshot.pt").exists(), "rank 0 alone saves"
    for rank in range(4):
        nr, local_rank = divmod(rank, 2)
        device = json.loads((homes[nr] / f"device.{rank}.json").read_text())
        assert device == {"local_rank": local_rank, "nprocs": 2}, "they share the cores"
        host = json.loads((homes[nr] / f"store.{rank}.json").read_text())
        assert host == addresses[nr]


@pytest.mark.waits
def test_one_machine_is_typed_as_in_older_scripts(tmp_path):
    """`--epochs N` is short for `N 1`; one machine needs no address and no port."""
    options = "-n 1 -g 3 -nr 0 --epochs 5 --master-addr no.such.host"
    words = f"{COMMAND} {options} --snapshot-path".split()
    first = Program([*words, "first.pt"], tmp_path, PYTHONPATH=ROOT)
    second = Program([*words, "second.pt"], tmp_path, PYTHONPATH=ROOT)
    for done in ended([first, second]):
        assert done.stdout.startswith("3 x cpu, batch 32 each: effective batch 96")
        assert done.stdout.count(" saved to ") == 5
        assert not done.stderr


NR = "--nr is 0 on the first machine, and so on"
ZERO = "'0' is not a whole number above 0"
LINES = {  # with which it refuses them
    "5 1 --nodes 2": f"--nodes 2: {NR}",
    "5 1 --nodes 2 --nr 2": f"--nodes 2: {NR}",
    "5 1 --nr one": "argument --nr/-nr: invalid int value: 'one'",
    "5 1 --nodes 0": f"argument --nodes/-n: {ZERO}",
    "5 1 --gpus 0": f"argument --gpus/--nprocs/-g: {ZERO}",
    "5 1 --master-port x": (
        "argument --master-port/--master_port: invalid int value: 'x'"
    ),
    "--epochs": "the following arguments are required: total_epochs, save_every",
}
HELP = (
    "machine 0: python -m variants.multinode_spawn 50 10 --nodes 2 --nr 0",
    "--epochs N the same as N 1: N epochs, and all are saved",
    "machines, default 1",
    "-nr NR the number of this machine: 0, 1 and so on",
    "GPUS processes on each",
    "--master_addr MASTER_ADDR",
    "name or address of machine 0 (default: localhost)",
    "MASTER_PORT where machine 0 waits (default: 29500)",
)


@pytest.mark.parametrize("words", LINES)
def test_bad_argument(words, tmp_path):
    script = copy_script(
        NAME,
        tmp_path,
        ("args, timeout=timedelta(minutes=5)", "args, timeout=timedelta(seconds=2)"),
    )
    done = run_script(script, *words.split(), cwd=tmp_path)
    assert done == (2, "", f"{ERROR}{LINES[words]}\n")


def test_help(tmp_path):
    shown = help_of(NAME, tmp_path)
    for line in HELP:
        assert line in shown


@pytest.mark.waits
@pytest.mark.parametrize("nr", [0, 1])
def test_machines_that_do_not_meet(nr, tmp_path):
    """One line tells it, below what PyTorch prints, and no process has started."""
    port = free_port()

    def wait_two_seconds(script):
        soon = timedelta(seconds=2)
        replace(script, "meet", lambda meet, args: meet(args, soon))

    alone = machine(nr, port, tmp_path, hooks=[wait_two_seconds])
    (done,) = ended([alone], status=2)
    assert done.stdout == f"machine {nr} waits for 2 at localhost:{port}\n"
    line = f"{ERROR}2 machines should meet at localhost:{port}: "
    assert done.stderr.splitlines()[-1].startswith(line)


@pytest.mark.waits
@needs_hosts
def test_a_host_dies_and_the_same_commands_resume(tmp_path):
    """No disk is shared. All end when one dies; nothing but its last epochs is lost."""
    slow = tmp_path / "copy"
    copy_script(NAME, slow, hooks=[slow_steps])

    def start_both(hosts, total):
        env = {"PYTHONPATH": slow, "OMP_NUM_THREADS": 1, "STEP_S": 0.01}
        programs = []
        for nr, host in enumerate(hosts):
            words = [*typed_on(nr, total), "--master-addr", "node0"]
            programs.append(host.start(words, **env))
        return programs

    with Hosts(2, tmp_path / "disk", own_disks=True) as hosts:
        host0, host1 = hosts
        first, _ = start_both(hosts, 10**6)
        first.wait_for("epoch 3/")
        host1.kill()
        assert first.finish().returncode == 1
        assert "Connection" in first.output  # closed or reset by peer
        saved = load(host0.folder)["EPOCHS_RUN"]
        host1.boot()
        end = saved + 1
        first, second = start_both(hosts, end)
        first.succeed()
        second.succeed()
        assert f"epoch {end}/{end}" in first.output
