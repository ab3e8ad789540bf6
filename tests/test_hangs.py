"""What docs/it_hangs.md says of stragglers and hangs, and of what names the rank."""

import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import Backend
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _get_default_timeout
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

from ladder.rungs import ROOT
from proofs import launch
from proofs.launch import plant, run_script
from proofs.processes import TIMEOUT_S, finish, run, start
from proofs.warm import Fork

HANG = "docs/hangs/hang.py"
STACKS = ROOT / "docs/hangs/stacks.sh"
BIN = Path(sys.executable).parent
PATH = f"{BIN}{os.pathsep}{os.environ['PATH']}"
HEADERS = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"

waits = pytest.mark.waits  # for time-outs of collectives

py_spy = pytest.mark.skipif(
    not shutil.which("py-spy", path=PATH)
    or not shutil.which("pgrep")
    or os.geteuid() != 0,
    reason="needs py-spy (pip install py-spy), pgrep (procps) and root",
)


def command(script, fault, nprocs=2):
    return ["torchrun", "--standalone", f"--nproc-per-node={nprocs}", script, fault]


def timed(folder, *changes):
    """A copy of hang.py that notes its times, with texts replaced."""
    return plant(HANG, folder / "copy", *changes, hooks=["time_in_loop"])


def hang(folder, fault, *changes, nprocs=2, **env):
    """Done of a copy of hang.py with texts replaced."""
    script = timed(folder, *changes)
    return run(launch.as_typed(command(script, fault, nprocs)), folder, **env)


def in_the_loop(done):
    """{rank: seconds} of the ranks that came out of their loop."""
    found = re.findall(r"rank (\d) was in the loop for (\S+) s", done.stdout)
    return {int(rank): float(took_s) for rank, took_s in found}


def calls(folder, rank):
    """The collectives in a rank's record, in their order."""
    trace = pickle.loads((folder / f"trace_{rank}").read_bytes())
    return [entry["profiling_name"] for entry in trace["entries"]]


def torchfrtrace(folder):
    """(exit status, what it printed) about the records in `folder`."""
    script = Path(torch.__file__).parent / "distributed/flight_recorder/fr_trace.py"
    done = run_script(script, "--prefix", "trace_", folder, cwd=folder)
    return done.returncode, done.stdout + done.stderr


TIMEOUT = 8  # seconds: leaves py-spy time on a busy machine


@pytest.fixture(scope="module")
def skipped(tmp_path_factory):
    """(folder, Done, what stacks.sh printed while it hung) of a run with `skip`."""
    folder = tmp_path_factory.mktemp("skipped")
    change = "timedelta(seconds=5)", f"timedelta(seconds={TIMEOUT})"
    script = timed(folder, change)
    process = start(launch.as_typed(command(script, "skip")), folder)
    deadline = time.monotonic() + TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        if (folder / "trace_0").exists() and (folder / "trace_1").exists():
            break  # the first is written after 1 s, and the loop takes less
        time.sleep(0.1)
    looked = subprocess.run(
        ["sh", STACKS, str(process.pid)],
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": PATH},
        timeout=TIMEOUT_S,
    )
    return folder, finish(process), looked.stdout


def test_the_default_time_outs():
    """NCCL's own holds only if the backend is named."""
    assert default_pg_timeout == timedelta(minutes=30)
    for backend in ("gloo", "undefined"):  # undefined: init_process_group got none
        assert _get_default_timeout(Backend(backend)) == default_pg_timeout
    text = (HEADERS / "ProcessGroupNCCL.hpp").read_text()
    (ms,) = re.findall(r"DefaultTimeout =\s+std::chrono::milliseconds\((.*)\)", text)
    assert ms == "10 * 60 * 1000"


def test_the_flight_recorder_is_on_by_default():
    text = (HEADERS / "FlightRecorder.hpp").read_text()
    (size,) = re.findall(r'"TORCH_FR_BUFFER_SIZE", "\w+"}, (\d+)\);', text)
    assert size == "2000"


OWN, OTHER_CARD = "10.0.0.1", "10.9.9.1"  # both are addresses of this machine
NAMES = {"node0": OWN, "node0.lan": OWN, "alias": OWN, "node0-ib": OTHER_CARD}
HOSTS_ITSELF = {
    "what hostname says": ("node0", OWN, True),
    "another name for the same address": ("alias", OWN, True),
    "the address that the own name leads to": (OWN, OWN, True),
    "an address of another network card": (OTHER_CARD, OWN, False),
    "a name of another network card": ("node0-ib", OWN, False),
    "Debian's 127.0.1.1: what hostname says": ("node0", "127.0.1.1", True),
    "Debian's 127.0.1.1: the machine's address": (OWN, "127.0.1.1", False),
    "Debian's 127.0.1.1: the full name from DNS": ("node0.lan", "127.0.1.1", False),
    "no own address: what hostname says": ("node0", None, True),
}


@pytest.fixture
def machine(monkeypatch):
    """A function: this machine is node0, and its own name leads to an address."""

    def become(own_address):
        known = NAMES | {x: x for x in NAMES.values()} | {"node0": own_address}

        def getaddrinfo(host, *_args, **_kwargs):
            if not known.get(host):
                raise socket.gaierror
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, host, (known[host], 0))]

        monkeypatch.setattr(socket, "gethostname", lambda: "node0")
        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    return become


@pytest.mark.parametrize("endpoint", HOSTS_ITSELF)
def test_a_machine_knows_the_endpoint_by_its_own_name(machine, endpoint):
    """Whether c10d's torchrun hosts the rendezvous if nobody sets is_host."""
    name, own_address, expected = HOSTS_ITSELF[endpoint]
    machine(own_address)
    assert _matches_machine_hostname(name) is expected


def test_without_an_address_of_its_own_a_machine_cannot_tell(machine):
    machine(None)
    with pytest.raises(socket.gaierror):
        _matches_machine_hostname("alias")


def test_a_straggler_makes_all_slow_and_is_named(tmp_path):
    done = Fork(command(timed(tmp_path), "slow"), tmp_path).finish()
    assert done.returncode == 0, done.stderr
    took_s = in_the_loop(done)
    assert min(took_s[0], took_s[1]) > 6 * 0.3 - 0.3  # the last wait may be another's
    found = re.findall(r"^rank (\d) worked for (\S+) s", done.stdout, re.M)
    worked_s = {int(rank): float(work) for rank, work in found}
    assert worked_s[1] >= 6 * 0.3
    assert worked_s[0] < worked_s[1] / 2
    assert "the slowest is rank 1\n" in done.stdout


@waits
def test_the_rank_that_waits_raises_at_the_time_out(skipped):
    _, done, _ = skipped
    assert done.returncode == 1
    took_s = in_the_loop(done)
    assert list(took_s) == [0]  # rank 1 is ended where it is
    assert TIMEOUT <= took_s[0] < TIMEOUT + 30
    assert f"Timed out waiting {TIMEOUT}000ms for recv operation" in done.stderr
    assert "[rank0]: RuntimeError" in done.stderr
    assert "[rank1]" not in done.stderr
    failed, cause = done.stderr.split("Root Cause (first observed failure):")
    assert re.search(r"rank      : 1 .*\n +exitcode  : -15 ", failed)
    assert re.search(r"rank      : 0 .*\n +exitcode  : 1 ", cause)


@waits
@py_spy
def test_py_spy_shows_the_line_of_each_rank(skipped):
    _, _, stacks = skipped
    ranks = dict(re.findall(r"^RANK=(\d)\n(.*?)(?=^RANK|\Z)", stacks, re.M | re.S))
    assert sorted(ranks) == ["0", "1"]
    main = {rank: text.split('"MainThread"')[1] for rank, text in ranks.items()}
    assert re.match(r"\s+all_reduce \(torch/distributed", main["0"])
    assert re.match(r"\s+save \(hang.py:\d+\)", main["1"])


@waits
def test_the_flight_recorder_shows_who_called_less(skipped):
    folder, _, _ = skipped
    assert calls(folder, 0) == ["gloo:all_reduce"] * 4
    assert calls(folder, 1) == ["gloo:all_reduce"] * 3


@waits
def test_torchfrtrace_names_the_missing_rank(skipped, tmp_path):
    """And needs the line about `pg_config` for gloo."""
    folder, _, _ = skipped
    status, text = torchfrtrace(folder)
    assert status == 0, text
    assert "Not all ranks joining collective, sequence number: 4\n" in text
    assert "missing ranks: {1}\n" in text
    for rank in range(2):
        trace = pickle.loads((folder / f"trace_{rank}").read_bytes())
        trace["pg_config"] = {"": {"name": "", "desc": "", "ranks": "[0, 1]"}}  # gloo's
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(trace))
    status, text = torchfrtrace(tmp_path)
    assert status == 1
    assert "KeyError: ('0', 0)" in text


@waits
def test_monitored_barrier_names_the_missing_rank(tmp_path):
    call = "            dist.all_reduce(gradient)"
    ask = "timedelta(seconds=5 + 9 * dist.get_rank()), wait_all_ranks=True"
    ask = f"            dist.monitored_barrier(timeout={ask})"
    done = hang(tmp_path, "skip", (call, f"{ask}\n{call}"), nprocs=3)
    assert done.returncode == 1
    assert "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 5000 ms" in done.stderr


@waits
def test_detail_names_the_mismatch(tmp_path):
    """And long before the time-out, which is longer than the test would wait."""
    long = "timedelta(seconds=5)", f"timedelta(seconds={10 * TIMEOUT_S})"
    done = hang(tmp_path, "mismatch", long, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert done.returncode == 1
    found = r"Rank (\d) is running collective: .*?SequenceNumber=3, OpType=(\w+)"
    found = set(re.findall(found, done.stderr))
    assert found == {("0", "ALLREDUCE"), ("1", "BROADCAST")}


def test_bad_input_is_one_line(tmp_path):
    done = run_script(ROOT / HANG, "slow", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: torchrun ")
    assert done.stderr.count("\n") == 1
