"""multinode_spawn.py: machines that find each other without a launcher.

Most machines here are processes of one host. Those of the last test have a name, an
address and a disk of their own.
"""

import contextlib
import json
import random
import resource
import shutil
import socket
import sys

import pytest

import utils
from tests.conftest import needs_hosts
from tests.helpers.checks import assert_same_weights, import_script, noted
from tools.run.hosts import Hosts
from tools.run.launch import command, environment, plant, train
from tools.run.processes import Program, TimedOut
from tools.run.results import load
from tools.scripts import ROOT

NAME = "variants/multinode_spawn.py"
ERROR = "multinode_spawn.py: error: "


@pytest.fixture
def port():
    """A port that is free, and that no process is given when it asks for any."""
    while True:
        number = random.randrange(20000, 30000)
        with contextlib.suppress(OSError), socket.create_server(("", number)):
            return number


def machine(nr, port, folder, *options, nodes=2, gpus=1, script=ROOT / NAME):
    """Start what one types on machine `nr`, in `folder`: a Program."""
    folder.mkdir(exist_ok=True)
    options = ("--nr", nr, "--master_port", port, "--wait", 20, *options)
    words = command(script, 5, 2, "--nodes", nodes, *options, nprocs=gpus)
    return Program(words, folder, **environment(script, {}))


def ended(machines, status=0):
    """[Done of each], once all have ended with this status."""
    try:
        all_done = [program.finish(timeout_s=30) for program in machines]
    except TimedOut as reason:
        pytest.fail(str(reason))
    for done in all_done:
        assert done.returncode == status, all_done
    return all_done


def faults(machines):
    """The one line with which each of them refuses to start."""
    lines = []
    for done in ended(machines, status=2):
        assert done.stderr.startswith(ERROR)
        assert done.stderr.count("\n") == 1, done.stderr
        lines.append(done.stderr.removeprefix(ERROR).strip())
    return lines


def test_two_machines_train_the_model_of_one_process(tmp_path, runs, port):
    """Two processes each, no disk shared: they resume what machine 0 alone has."""
    homes = [tmp_path / "0", tmp_path / "1"]
    homes[0].mkdir()
    train(ROOT / "single_gpu.py", 2, 2, "--batch-size", 64, cwd=homes[0])
    script = plant(NAME, tmp_path / "copy", hooks=["notes:device"])

    def start(nr):
        options = "--batch-size", 16
        return machine(nr, port, homes[nr], *options, gpus=2, script=script)

    second = start(1)
    second.wait_for("waits for")
    first = start(0)
    first_done, second_done = ended([first, second])
    shown = first_done.stdout
    assert "4 x cpu, batch 16 each: effective batch 64" in shown
    assert "epochs saved, by rank: [2, 2, -1, -1]. All take rank 0's" in shown
    lines = second_done.stdout.splitlines()
    assert len(lines) == 1, "it says that it waits, and nothing more"
    alone, _ = runs("single_gpu.py")
    assert_same_weights(homes[0] / "snapshot.pt", alone / "snapshot.pt")
    assert not (homes[1] / "snapshot.pt").exists(), "rank 0 alone saves"
    # The rank counts through all machines, the number of the device begins anew.
    for rank, local_rank in enumerate([0, 1, 0, 1]):
        path = homes[rank // 2] / f"device.{rank}.json"
        device = json.loads(path.read_text())
        assert device["local_rank"] == local_rank
        assert device["nprocs"] == 2, "a machine's cores are shared"


@pytest.mark.waits
def test_one_machine_is_typed_as_in_older_scripts(tmp_path):
    """`--epochs N` is short for `N 1`; one machine needs no address and no port."""
    words = "python -m variants.multinode_spawn -n 1 -g 3 -nr 0 --epochs 5"
    words += " --master-addr no.such.host"
    words = [*words.split(), "--snapshot-path"]
    first = Program([*words, "first.pt"], tmp_path, PYTHONPATH=ROOT)
    second = Program([*words, "second.pt"], tmp_path, PYTHONPATH=ROOT)
    for done in ended([first, second]):
        assert done.stdout.startswith("3 x cpu, batch 32 each: effective batch 96")
        assert "epochs saved, by rank" not in done.stdout
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
    "5 1 --wait 0": f"argument --wait: {ZERO}",
    "5 1 --master-port 0": f"argument --master-port/--master_port: {ZERO}",
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
    "--wait WAIT seconds to wait for the other machines (default: 300)",
)


@pytest.mark.parametrize("words", [*LINES, "--help"])
def test_bad_argument_and_help(words, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)  # the repository may not be writable
    multinode_spawn = import_script(NAME)
    monkeypatch.setattr(sys, "argv", ["multinode_spawn.py", *words.split()])
    with pytest.raises(SystemExit):
        multinode_spawn.parse_args(utils.make_parser(multinode_spawn.__doc__))
    shown = capsys.readouterr()
    if words == "--help":
        help_text = " ".join(shown.out.split())
        for line in HELP:
            assert line in help_text
    else:
        assert shown.err == f"{ERROR}{LINES[words]}\n"


@pytest.mark.waits
def test_a_machine_that_does_not_come_is_named(tmp_path, port):
    """On all machines, with the place where they wait. Waiting takes no CPU time."""

    def cpu_s():
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    began = cpu_s()
    (line,) = faults([machine(1, port, tmp_path, "--wait", 6)])
    assert "Connection refused" in line
    assert cpu_s() - began < 0.5
    began = cpu_s()
    # Machine 2 looks a second late: machine 0 keeps its store until then.
    until_late = "max(0.2, deadline + 1 - time.time())"
    sleep = f"time.sleep({until_late} if args.nr == 2 else 0.2)"
    late = "time.sleep(0.2)\n    if fault", f"{sleep}\n    if fault"
    script = plant(NAME, tmp_path / "copy", late)
    there = []
    for nr in (2, 0):
        options = "--wait", 6
        there.append(machine(nr, port, tmp_path, *options, nodes=4, script=script))
    line = f"after 6 s, not at localhost:{port}: machine 1, machine 3"
    assert faults(there) == [line] * 2
    assert cpu_s() - began < 1


@pytest.mark.waits
def test_machines_whose_commands_do_not_fit(tmp_path, port):
    """Also another number of machines: neither waits for one that never comes."""
    pair = [machine(0, port, tmp_path), machine(1, port, tmp_path, nodes=3)]
    assert faults(pair) == ["nodes is 2 on machine 0 and 3 on machine 1"] * 2
    lines = faults([machine(nr, port, tmp_path, nodes=3) for nr in (0, 1, 1)])
    line = "two machines have --nr 1: each needs a number of its own"
    assert lines == [line] * 3


@pytest.mark.waits
@pytest.mark.parametrize("changed", ["script", "utils.py"])
def test_machines_with_different_files(changed, tmp_path, port):
    """Somebody has changed the learning rate, or utils.py, on one machine."""
    script = plant(NAME, tmp_path / "copy", ("lr=0.001", "lr=0.01"))
    if changed == "utils.py":
        shutil.copy(ROOT / NAME, script)
        (tmp_path / "copy" / "utils.py").open("a").write("# with a change\n")
    pair = [machine(0, port, tmp_path), machine(1, port, tmp_path, script=script)]
    one, other = faults(pair)
    assert one == other
    assert one.startswith(f"the checksum of {changed} is ")


@pytest.mark.waits
def test_what_machines_may_have_of_their_own(tmp_path, port):
    """How they name machine 0's store, where they save, how long they wait.

    And how they say which device it is.
    """
    script = plant(NAME, tmp_path / "copy", hooks=["notes:store"])
    own = ["--snapshot-path", "own.pt", "--master_addr", "127.0.0.2", "--wait", 19]
    own += ["--device", "cpu"]  # what `auto` means on the other
    first = machine(0, port, tmp_path, script=script)
    second = machine(1, port, tmp_path, *own, script=script)
    ended([first, second])
    hosts = noted(tmp_path, "store")
    assert hosts == ["localhost", "127.0.0.2"], "each connects to where it is told"
    (saved,) = tmp_path.glob("*.pt")
    assert saved.name == "snapshot.pt"


@pytest.mark.waits
@pytest.mark.parametrize("nr", [0, 1])
def test_an_address_that_cannot_be_used(nr, tmp_path):
    """The port of machine 0 is taken; machine 1 is not answered, as by a firewall."""
    with (
        socket.create_server(("", 0), backlog=0) as server,
        contextlib.ExitStack() as stack,
    ):
        _, port = server.getsockname()
        for _ in range(4):  # until the kernel lets nobody else wait
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("localhost", port))
        (line,) = faults([machine(nr, port, tmp_path, "--wait", 2)])
    reason = "timed out" if nr == 1 else "[Errno 98] Address already in use"
    start = f"localhost:{port} should be machine 0's address: "
    assert line.startswith(start + reason)


@pytest.mark.waits
@needs_hosts
def test_a_host_dies_and_the_same_commands_resume(tmp_path):
    """No disk is shared. All end when one dies; nothing but its last epochs is lost."""
    slow = plant(NAME, tmp_path / "copy", hooks=["timing:slow_steps"])
    env = {"OMP_NUM_THREADS": 1, "PYTHONWARNINGS": "ignore", "STEP_S": 0.01}

    def on_host(host, nr, total, script):
        options = ("--nodes", 2, "--nr", nr, "--master-addr", "node0", "--wait", 20)
        words = command(script, total, 2, *options, nprocs=1)
        return host.start(words, **environment(script, env))

    with Hosts(2, tmp_path / "disk", own_disks=True) as (host0, host1):
        first = on_host(host0, 0, 10**6, slow)
        on_host(host1, 1, 10**6, slow)
        first.wait_for("epoch 3/")
        host1.kill()
        assert first.finish().returncode == 1
        assert "Connection" in first.output  # closed or reset by peer
        saved = load(host0.folder / "snapshot.pt")["EPOCHS_RUN"]
        host1.boot()
        end = saved + 1
        first = on_host(host0, 0, end, ROOT / NAME)
        second = on_host(host1, 1, end, ROOT / NAME)
        assert first.finish().returncode == 0, first.output
        assert second.finish().returncode == 0, first.output
        line = f"epochs saved, by rank: [{saved}, -1]. All take rank 0's"
        assert line in first.output
        assert f"epoch {end}/{end}" in first.output
