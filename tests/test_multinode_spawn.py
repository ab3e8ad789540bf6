"""multinode_spawn.py: machines that find each other without a launcher.

Most machines here are processes of one host. Those of the last part have a name, an
address and a disk of their own.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import time

import pytest
import torch

from ladder.rungs import ROOT
from proofs.hosts import Hosts, why_not
from proofs.launch import command, environment, plant, run_script, train
from proofs.results import load, same_bits, weights
from proofs.warm import Fork
from tests.test_input import files, refused

NAME = "variants/multinode_spawn.py"
SCRIPT = ROOT / NAME
ERROR = "multinode_spawn.py: error: "


def free_port():
    """A port that is free, and that no process is given when it asks for any."""
    while True:
        number = random.randrange(20000, 30000)
        with contextlib.suppress(OSError), socket.create_server(("", number)):
            return number


@pytest.fixture
def port():
    return free_port()


def machine(nr, port, folder, *options, nodes=2, gpus=1, script=SCRIPT, **env):
    """Start what one types on machine `nr`, in `folder`: a Fork."""
    folder.mkdir(exist_ok=True)
    options = ("--nodes", nodes, "--nr", nr, "--master-port", port, *options)
    words = command(script, 5, 2, *options, nprocs=gpus)
    return Fork(words, folder, **environment(script, env))


def ended(machines, status=0):
    """What they print, [(stdout, stderr)], once all have ended with this status."""
    done = [x.finish() for x in machines]
    assert [x.returncode for x in done] == [status] * len(done), done
    return [x[1:] for x in done]


def faults(machines):
    """The one line with which each of them refuses to start."""
    lines = []
    for _, stderr in ended(machines, status=2):
        assert stderr.count("\n") == 1 and stderr.startswith(ERROR), stderr
        lines.append(stderr.removeprefix(ERROR).strip())
    return lines


# They train


@pytest.fixture(scope="module")
def two_by_two(tmp_path_factory):
    """(folder, [(stdout, stderr)]): two machines of two processes, no disk shared.

    They resume a run of two epochs, whose snapshot only the first machine has.
    """
    folder = tmp_path_factory.mktemp("two_by_two")
    (folder / "0").mkdir()
    train(ROOT / "single_gpu.py", 2, 2, "--batch-size", 64, cwd=folder / "0")
    script = plant(NAME, folder / "copy", hooks=["note_rank", "on_device"])
    port, how = free_port(), {"gpus": 2, "script": script}
    both = [
        machine(nr, port, folder / str(nr), "--batch-size", 16, **how) for nr in (1, 0)
    ]
    return folder, ended(both)[::-1]


def test_two_machines_train_the_model_of_one_process(two_by_two, runs):
    folder, (first, _) = two_by_two
    assert "4 x cpu, batch 16 each: effective batch 64" in first[0]
    alone, _ = runs("single_gpu.py")
    mine, theirs = (weights(x / "snapshot.pt") for x in (folder / "0", alone))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_each_process_has_a_rank_and_a_device_of_its_own(two_by_two):
    """The rank counts through all machines, the number of the device begins anew."""
    folder, _ = two_by_two
    paths = [folder / str(rank // 2) / f"rank.{rank}" for rank in range(4)]
    noted = [json.loads(path.read_text()) for path in paths]
    assert [x["local_rank"] for x in noted] == [0, 1, 0, 1]
    assert [x["nprocs"] for x in noted] == [2] * 4, "the cores of a machine are shared"


def test_the_newest_snapshot_reaches_all_machines(two_by_two):
    """Only machine 0 saves, so that the others' disks have none."""
    folder, ((first, _), (second, _)) = two_by_two
    host = socket.gethostname()
    there, none = (f"{host}:{folder}/{i}/snapshot.pt" for i in (0, 1))
    line = f"all take rank 0's, {there}, with 2 epochs ({none} has none)"
    assert line in first
    assert "resuming from snapshot.pt: 2 of 5 epochs are finished" in first
    assert load(folder / "0" / "snapshot.pt")["EPOCHS_RUN"] == 5
    assert not list((folder / "1").glob("*.pt"))
    assert second.splitlines()[1:] == [], "it says that it waits, and nothing more"


def test_without_a_comparison_machines_train_on_different_models(runs, tmp_path, port):
    """As far as each other, of two runs: no error, and neither's model."""
    for nr, name in enumerate(("multigpu.py", NAME)):
        (tmp_path / str(nr)).mkdir()
        snapshot = load(runs(name)[0] / "snapshot.pt") | {"EPOCHS_RUN": 4}
        if nr == 1:
            snapshot["MODEL_STATE"]["weight"].zero_()
        torch.save(snapshot, tmp_path / str(nr) / "snapshot.pt")
    lost = shutil.copytree(tmp_path / "0", tmp_path / "lost")
    shutil.copytree(tmp_path / "1", tmp_path / "lost1")
    (first, _), _ = ended([machine(nr, port, tmp_path / str(nr)) for nr in (0, 1)])
    assert "ranks found different snapshots: all take rank 0's" in first
    blind = plant(NAME, tmp_path / "copy", ("if differences:", "if False:"))
    both = [machine(0, port, lost, script=blind)]
    both.append(machine(1, port, tmp_path / "lost1", script=blind))
    (silent, _), _ = ended(both)
    assert "different" not in silent
    right, wrong = (weights(x / "snapshot.pt") for x in (tmp_path / "0", lost))
    assert (right - wrong).abs().max() > 0.1


def test_one_machine_is_typed_as_in_older_scripts(tmp_path):
    """`--epochs N` is short for `N 1`; one machine needs no port that is agreed on."""
    both = []
    for name in ("a", "b"):
        words = "python -m variants.multinode_spawn --nodes 1 --gpus 2 --epochs 5"
        words = [*words.split(), "--snapshot-path", f"{name}.pt"]
        both.append(Fork(words, tmp_path, PYTHONPATH=ROOT))
    for stdout, stderr in ended(both):
        assert stdout.startswith("2 x cpu, batch 32 each: effective batch 64")
        assert not stderr
        assert stdout.count(" saved to ") == 5
    assert same_bits(load(tmp_path / "a.pt"), load(tmp_path / "b.pt"))


def test_without_gpus_it_starts_one_process_per_device(tmp_path):
    """And two on the CPU, however many GPUs there are."""
    script = plant(NAME, tmp_path / "copy", hooks=["silent_accelerators"])
    words = ["python", script, 1, 1, "--device", "cpu"]
    ((stdout, _),) = ended([Fork(words, tmp_path, **environment(script, {}))])
    assert stdout.startswith("2 x cpu, batch 32 each")
    script = plant(NAME, tmp_path / "copy", hooks=["three_accelerators"])
    args = ("--batch-size", 1024)
    line = refused(NAME, tmp_path, 1, 1, *args, script=script)
    assert line.startswith("one step takes 3 x 1024 samples")


def test_each_machine_has_accelerators_of_its_own(tmp_path):
    """One here and one there are enough for one process each, not for two."""
    hooks = ["one_accelerator", "no_patience"]
    script = plant(NAME, tmp_path / "copy", hooks=hooks)
    nodes = ("--nodes", 2, "--nr", 0)
    line = refused(NAME, tmp_path, 5, 1, "--gpus", 2, *nodes, script=script)
    assert line.startswith("2 processes here need 2 accelerators: there is 1. ")
    args = ("--gpus", 1, "--batch-size", 2000)
    line = refused(NAME, tmp_path, 5, 1, *args, *nodes, script=script)
    assert line.startswith("one step takes 2 x 2000 samples and there are 2048")


# Somebody has mistyped

TWO = "of --nodes 2, the first has --nr 0 and the last --nr 1"
ZERO = "'0' is not a whole number above 0"


@pytest.mark.parametrize(
    ("args", "said"),
    {
        "5 1 --nodes 2": "--nodes 2: type --nr 0 on the first machine, and so on",
        "5 1 --nodes 2 --nr 2": f"--nr 2: {TWO}",
        "5 1 --nodes 2 --nr -1": f"--nr -1: {TWO}",
        "5 1 --nr 1": "--nr 1: of --nodes 1, the first has --nr 0 and the last --nr 0",
        "5 1 --nr one": "argument --nr: invalid int value: 'one'",
        "5 1 --nodes 0": f"argument --nodes: {ZERO}",
        "5 1 --gpus 0": f"argument --gpus/--nprocs: {ZERO}",
        "5 1 --wait 0": f"argument --wait: {ZERO}",
        "5 1 --master-port 0": f"argument --master-port/--master_port: {ZERO}",
        "5 1 --master-port 65536": "--master-port 65536: the last port is 65535",
        "--epochs": "argument --epochs: expected one argument",
        "--epochs 0": f"argument total_epochs: {ZERO}",
        "--epochs 5 2": "unrecognized arguments: 2",
    }.items(),
)
def test_bad_argument(args, said, tmp_path):
    assert refused(NAME, tmp_path, *args.split()) == said


def test_help(tmp_path):
    words = run_script(SCRIPT, "--help", cwd=tmp_path).stdout.split()
    words = " ".join(words)
    for line in (
        "With `--nodes 2 --nr 0 --master-addr HOST` it is typed on HOST, machine 0 of"
        " two; the same with `--nr 1` on machine 1.",
        "--epochs N the same as N 1: total_epochs is N, and every epoch is saved",
        "--nodes NODES machines (default: 1)",
        "--nr NR the number of this machine: 0, 1 and so on",
        "the name or address of machine 0 (default: localhost)",
        "the port at which machine 0 waits for the others (default: 29500)",
        "--wait SECONDS how long to wait for the other machines (default: 300)",
    ):
        assert line in words


@pytest.mark.parametrize(
    ("there", "missing"), [([0], "1, 2"), ([0, 2], "1"), ([2, 0], "1")]
)
def test_a_machine_that_does_not_come_is_named(there, missing, tmp_path, port):
    """On all machines, before any process is started."""
    script = plant(NAME, tmp_path / "copy", hooks=["end_at_setup"])
    how = {"nodes": 3, "script": script}
    lines = faults([machine(nr, port, tmp_path, "--wait", 2, **how) for nr in there])
    line = f"after 2 s, there is no machine with --nr {missing} (of --nodes 3)"
    assert lines == [line] * len(there)
    assert not files(tmp_path)


def test_two_machines_with_one_number(tmp_path, port):
    """All end at once, those who are right as well, and long before the time-out."""
    lines = faults([machine(nr, port, tmp_path, nodes=3) for nr in (0, 1, 1)])
    host = socket.gethostname()
    line = (
        f"two machines have --nr 1: {host} and {host}. Each needs a number of its own"
    )
    assert lines == [line] * 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpus", 2], "gpus is 2 on machine 1 ({host}) and 1 on machine 0 ({host})"),
        (
            ["--nodes", 3],
            "nodes is 3 on machine 1 ({host}) and 2 on machine 0",
        ),
        (["--batch-size", 16], "batch_size is 16 on machine 1 ({host}) and 32 on"),
    ],
)
def test_machines_that_were_started_differently(options, said, tmp_path, port):
    """Both say it. The number of machines and of processes, and what else is typed."""
    pair = [machine(0, port, tmp_path), machine(1, port, tmp_path, *options)]
    one, other = faults(pair)
    assert one == other
    assert one.startswith(said.format(host=socket.gethostname()))
    assert one.endswith(": all machines need the same")


def test_machines_with_different_scripts(tmp_path, port):
    """Somebody has changed the learning rate, and not copied the file."""
    other = plant(NAME, tmp_path / "copy", ("lr=0.001", "lr=0.01"))
    pair = [machine(0, port, tmp_path), machine(1, port, tmp_path, script=other)]
    one, other = faults(pair)
    assert one == other and one.startswith("the script's checksum is ")


def test_machines_with_different_modules(tmp_path, port):
    """Somebody has changed a file that the script imports. The line names it."""
    pair = []
    for nr in (0, 1):
        script = plant(NAME, tmp_path / f"copy{nr}")
        if nr == 1:
            module = script.parents[1] / "utils.py"
            module.write_text(module.read_text() + "# with a change\n")
        pair.append(machine(nr, port, tmp_path / str(nr), script=script))
    one, other = faults(pair)
    assert one == other and one.startswith("utils.py's checksum is ")


@pytest.mark.parametrize("samples", [("2050", "512"), ("2048", "500")])
def test_machines_with_different_data(samples, tmp_path, port):
    """Each has the data on a disk of its own. As many steps, but another order."""
    changes = [
        (f"MyTrainDataset({x}", f'MyTrainDataset(int(os.environ["N{x}"])')
        for x in ("2048", "512")
    ]
    changes.append(("import functools", "import functools\nimport os"))
    script = plant(NAME, tmp_path / "copy", *changes)
    pair = []
    for nr, sizes in enumerate([("2048", "512"), samples]):
        sizes = dict(zip(("N2048", "N512"), sizes, strict=True))
        pair.append(machine(nr, port, tmp_path / str(nr), script=script, **sizes))
    one, other = faults(pair)
    assert one == other
    there, here = (f"({', '.join(x)})" for x in (samples, ("2048", "512")))
    assert one.startswith(f"samples is {there} on machine 1 (")
    assert f"and {here} on machine 0" in one


def test_what_machines_may_have_of_their_own(tmp_path, port):
    """Their number, machine 0's name as they know it, their paths, their patience.

    And how they say which device it is.
    """
    own = ["--snapshot-path", "other.pt", "--master-addr", "127.0.0.1", "--wait", 99]
    own += ["--device", "cpu"]  # what `auto` means on the other
    ended([machine(0, port, tmp_path), machine(1, port, tmp_path, *own)])
    assert list(files(tmp_path)) == ["snapshot.pt"]


def test_all_processes_connect_to_the_store_of_machine_0(tmp_path, port):
    """At its address, and not at localhost, which is another machine on each."""
    # Processes that wait at another store raise soon, and not after five minutes.
    soon = ("timedelta(minutes=5)", "timedelta(seconds=30)")
    script = plant(NAME, tmp_path / "copy", soon, hooks=["note_store", "quick_stores"])
    address = ["--master-addr", "127.0.0.2"]
    ended([machine(x, port, tmp_path, *address, script=script) for x in (0, 1)])
    assert {(tmp_path / f"store.{x}").read_text() for x in (0, 1)} == {"127.0.0.2"}


def test_machine_0_does_not_answer(tmp_path, port):
    (line,) = faults([machine(1, port, tmp_path, "--wait", 1)])
    place = f"localhost:{port}"
    reason = "Connection refused"
    assert line == (
        f"after 1 s, machine 0 does not answer at {place} ({reason}). Start it there,"
        " or give another --master-addr"
    )


@pytest.mark.parametrize("said", ["", "SSH-2.0-OpenSSH\n", "[1]\n", "{}\n"])
def test_somebody_else_answers(said, tmp_path):
    """Another service has the port: nothing, text, or JSON of another kind."""
    with socket.create_server(("", 0)) as server:
        other_port = server.getsockname()[1]
        one = machine(1, other_port, tmp_path, "--wait", 1)
        connection, _ = server.accept()
        with connection:
            connection.sendall(said.encode())
            if not said:
                connection.close()
            (line,) = faults([one])
    assert line == f"localhost:{other_port} gave no answer: see what machine 0 says"


@pytest.mark.parametrize("nr", [0, 1])
def test_an_address_that_does_not_resolve(nr, tmp_path):
    (line,) = faults([machine(nr, 29500, tmp_path, "--master-addr", "no.invalid")])
    assert line.startswith("--master-addr no.invalid: ")


def test_machine_0_is_the_one_at_the_address(tmp_path):
    """192.0.2.1 is nobody's: it is reserved for documentation."""
    (line,) = faults([machine(0, 29500, tmp_path, "--master-addr", "192.0.2.1")])
    assert line == (
        "--nr 0 belongs to the machine at --master-addr 192.0.2.1: this machine,"
        f" {socket.gethostname()}, does not have that address"
    )


def test_a_port_that_is_taken(tmp_path):
    """Two jobs wait on one machine at once."""
    with socket.create_server(("", 0)) as server:
        taken = server.getsockname()[1]
        (line,) = faults([machine(0, taken, tmp_path)])
    assert line == (
        f"--master-port {taken}: Address already in use. Choose another one, on all"
        " machines"
    )


def test_strangers_and_machines_that_leave_do_not_count(tmp_path, port):
    """A port scan, a machine that is stopped by Ctrl-C and started again."""
    how = {"nodes": 3}
    first = machine(0, port, tmp_path, **how)
    wait_for_port(port)
    for text in (b"", b"GET / HTTP/1.1\n", b"7\n", b'{"nr": 1}\n'):
        with socket.create_connection(("localhost", port)) as stranger:
            stranger.sendall(text)
    left = machine(1, port, tmp_path, **how)
    says_that_it_waits(left)
    os.kill(left.pid, signal.SIGINT)
    done = left.finish()
    assert "stopped by Ctrl-C" in done.stderr and done.returncode == 1
    (one, _), *_ = ended([first, *(machine(x, port, tmp_path, **how) for x in (1, 2))])
    assert one.count("epoch 5/5") == 1


def test_a_stranger_that_says_nothing(tmp_path, port):
    """It is not waited for without end."""
    first = machine(0, port, tmp_path, "--wait", 1)
    wait_for_port(port)
    with socket.create_connection(("localhost", port)):
        done = first.finish(timeout_s=60)
    assert done.returncode == 2 and "there is no machine with --nr 1" in done.stderr


def wait_for_port(port, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            return socket.create_connection(("localhost", port)).close()
        except OSError:
            time.sleep(0.05)
    raise TimeoutError(port)


def says_that_it_waits(fork, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if b"waits for" in os.pread(fork.out.fileno(), 1000, 0):
            return time.sleep(0.5)  # until it has come to machine 0
        time.sleep(0.05)
    raise TimeoutError


# Hosts that are separate

NO_HOSTS = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
QUIET = {"OMP_NUM_THREADS": 1, "PYTHONWARNINGS": "ignore"}


def on_host(host, nr, *options, total=5, script=SCRIPT, **env):
    """Start what one types on a host of its own: a Job."""
    nodes = ("--nodes", 2, "--nr", nr, "--master-addr", "node0")
    words = command(script, total, 2, *nodes, *options, nprocs=1)
    words = [sys.executable, *words[1:]]
    return host.start(words, **environment(script, QUIET | env))


def fault_of(job):
    """The one line of its own with which it refuses to start."""
    assert job.wait() == 2, job.output
    (line,) = [x for x in job.output.splitlines() if x.startswith(ERROR)]
    return line.removeprefix(ERROR)


@pytest.mark.waits
@NO_HOSTS
def test_a_host_dies_and_the_same_commands_resume(tmp_path):
    """No disk is shared. All end when one dies; nothing but its last epochs is lost."""
    script = plant(NAME, tmp_path / "copy", hooks=["slow_steps"])
    with Hosts(2, tmp_path / "disk", own_disks=True) as hosts:
        how = {"script": script, "STEP_S": 0.01}
        first, _ = (on_host(x, nr, total=10**6, **how) for nr, x in enumerate(hosts))
        first.wait_for("^2 x cpu, batch 32 each")
        first.wait_for("epoch 3/")
        hosts[1].kill()
        assert first.wait() == 1
        assert "Connection" in first.output  # closed or reset by peer
        saved = load(hosts[0].folder / "snapshot.pt")["EPOCHS_RUN"]
        assert saved >= 2
        hosts[1].boot()
        how = {"total": saved + 1}
        jobs = [on_host(host, nr, **how) for nr, host in enumerate(hosts)]
        assert [job.wait() for job in jobs] == [0, 0], jobs[0].output
        there, none = (f"{host}:{host.folder}/snapshot.pt" for host in hosts)
        line = f"all take rank 0's, {there}, with {saved} epochs ({none} has none)"
        assert line in jobs[0].output
        assert f"epoch {saved + 1}/{saved + 1}" in jobs[0].output
        assert not list(hosts[1].folder.iterdir())


@pytest.mark.waits
@NO_HOSTS
def test_what_hosts_say_of_each_other(tmp_path):
    with Hosts(3, tmp_path, own_disks=True) as hosts:
        # Started before machine 0, which is somewhere else, and by two people.
        nodes = ("--nodes", 3)
        twice = [on_host(hosts[nr], 1, *nodes) for nr in (1, 2)]
        elsewhere = on_host(hosts[1], 0)
        assert fault_of(elsewhere) == (
            "--nr 0 belongs to the machine at --master-addr node0: this machine, node1,"
            " does not have that address"
        )
        lines = [fault_of(job) for job in [on_host(hosts[0], 0, *nodes), *twice]]
        assert len({*lines}) == 1
        ends = [f"{x}. Each needs a number of its own" for x in ("node1", "node2")]
        assert lines[0].startswith("two machines have --nr 1: node")
        assert lines[0].endswith(tuple(ends))
        # Debian lets a machine's own name lead to itself alone.
        for one, other in (hosts[:2], hosts[1::-1]):
            names = f"127.0.0.1 localhost\n127.0.1.1 {one}\n{other.address} {other}"
            one.run("sh", "-c", 'echo "$0" > /etc/hosts', names)
        lines = [fault_of(job) for job in [on_host(hosts[nr], nr) for nr in (0, 1)]]
        assert lines[0] == lines[1]
        assert lines[0].startswith(
            "node0 is 127.0.1.1 on machine 0 and node1 is 127.0.1.1 on machine 1, where"
            " no other machine can connect to it. Type there: export GLOO_SOCKET_IFNAME"
        )
        mended = {"GLOO_SOCKET_IFNAME": "eth0"}
        both = [on_host(hosts[nr], nr, **mended) for nr in (0, 1)]
        assert [job.wait() for job in both] == [0, 0], both[0].output
        hosts[0].unplug()
        line = fault_of(on_host(hosts[1], 1, "--wait", 2))
        assert re.fullmatch(
            r"after 2 s, machine 0 does not answer at node0:29500"
            r" \((timed out|No route to host)\)\. Start it there, or .*",
            line,
        )
