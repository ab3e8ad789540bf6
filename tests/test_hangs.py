"""What docs/it_hangs.md says of stragglers and hangs, and of what names the rank."""

import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tools.proofs import launch
from tools.proofs.launch import plant, run_script
from tools.proofs.processes import TIMEOUT_S, finish, run, start
from tools.proofs.warm import Fork
from tools.scripts import ROOT

HANG = "docs/hangs/hang.py"
STACKS = ROOT / "docs/hangs/stacks.sh"
BIN = Path(sys.executable).parent
PATH = f"{BIN}{os.pathsep}{os.environ['PATH']}"

pytestmark = pytest.mark.waits  # for time-outs of collectives

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
    return plant(HANG, folder / "copy", *changes, hooks=["notes:loop"])


def hang(folder, fault, *changes, nprocs=2, **env):
    """Done of a copy of hang.py with texts replaced."""
    script = timed(folder, *changes)
    return run(launch.as_typed(command(script, fault, nprocs)), folder, **env)


def in_the_loop(done):
    """{rank: seconds} of the ranks that came out of their loop."""
    found = re.findall(r"rank (\d) was in the loop for (\S+) s", done.stdout)
    return {int(rank): float(took_s) for rank, took_s in found}


TIMEOUT = 8  # seconds: leaves py-spy time on a busy machine


@pytest.fixture(scope="module")
def skipped(tmp_path_factory):
    """(folder, Done, what stacks.sh printed while it hung) of a run with `skip`.

    Rank 1 has a DataLoader, whose worker also sleeps.
    """
    folder = tmp_path_factory.mktemp("skipped")
    change = "timedelta(seconds=5)", f"timedelta(seconds={TIMEOUT})"
    loader = "DataLoader([0], num_workers=1, collate_fn=lambda _: time.sleep(12))"
    loader = f"loader = iter(torch.utils.data.{loader}); save()  # this"
    script = timed(folder, change, ("save()  # this", loader))
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


def test_a_straggler_makes_all_slow_and_is_named(tmp_path):
    done = Fork(command(timed(tmp_path), "slow"), tmp_path).finish()
    assert done.returncode == 0, done.stderr
    assert min(in_the_loop(done).values()) > 5 * 0.3  # the last wait may be another's
    found = re.findall(r"^rank (\d) worked for (\S+) s", done.stdout, re.M)
    worked_s = {int(rank): float(work) for rank, work in found}
    assert worked_s[1] >= 6 * 0.3
    assert worked_s[0] < worked_s[1] / 2
    assert "the slowest is rank 1\n" in done.stdout


def test_the_rank_that_waits_raises_at_the_time_out(skipped):
    _, done, _ = skipped
    assert done.returncode == 1
    took_s = in_the_loop(done)
    assert list(took_s) == [0]  # rank 1 is ended where it is
    assert TIMEOUT <= took_s[0] < TIMEOUT + 30
    assert f"Timed out waiting {TIMEOUT}000ms for recv operation" in done.stderr
    assert "[rank0]: RuntimeError" in done.stderr
    assert "[rank1]" not in done.stderr


@py_spy
def test_py_spy_shows_the_line_of_each_rank(skipped):
    _, _, stacks = skipped
    ranks = dict(re.findall(r"^RANK=(\d)\n(.*?)(?=^RANK|\Z)", stacks, re.M | re.S))
    assert sorted(ranks) == ["0", "1"]
    main = {rank: text.split('"MainThread"')[1] for rank, text in ranks.items()}
    assert re.match(r"\s+all_reduce \(torch/distributed", main["0"])
    assert re.match(r"\s+save \(hang.py:\d+\)", main["1"])
    assert "<lambda> (hang.py:" in ranks["1"].split('"MainThread"')[2]


def test_torchfrtrace_names_the_missing_rank(skipped):
    folder, _, _ = skipped
    for rank, count in ((0, 4), (1, 3)):
        trace = pickle.loads((folder / f"trace_{rank}").read_bytes())
        calls = [entry["profiling_name"] for entry in trace["entries"]]
        assert calls == ["gloo:all_reduce"] * count
    script = Path(torch.__file__).parent / "distributed/flight_recorder/fr_trace.py"
    done = run_script(script, "--prefix", "trace_", folder, cwd=folder)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert "Not all ranks joining collective, sequence number: 4\n" in text
    assert "missing ranks: {1}\n" in text


def test_monitored_barrier_names_the_missing_rank(tmp_path):
    call = "            dist.all_reduce(gradient)"
    ask = "timedelta(seconds=5 + 9 * dist.get_rank()), wait_all_ranks=True"
    ask = f"            dist.monitored_barrier(timeout={ask})"
    done = hang(tmp_path, "skip", (call, f"{ask}\n{call}"), nprocs=3)
    assert done.returncode == 1
    assert "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 5000 ms" in done.stderr


def test_detail_names_the_mismatch(tmp_path):
    """And long before the time-out, which is longer than the test would wait."""
    long = "timedelta(seconds=5)", f"timedelta(seconds={10 * TIMEOUT_S})"
    done = hang(tmp_path, "mismatch", long, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert done.returncode == 1
    found = r"Rank (\d) is running collective: .*?SequenceNumber=3, OpType=(\w+)"
    found = set(re.findall(found, done.stderr))
    assert found == {("0", "ALLREDUCE"), ("1", "BROADCAST")}
