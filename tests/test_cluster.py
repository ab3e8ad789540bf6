"""multinode.py on hosts that are really separate, and really fail.

What is planted in the copies that run here: a time-out of 10 s instead of five minutes,
so that a silent loss is noticed within a test's patience, and steps of 10 ms, so that
something can happen before the training is over.

`pytest -s tests/test_cluster.py | grep measured` prints how long each recovery took.
"""

import math
import re
import sys
import time

import pytest

from ladder.rungs import ROOT
from proofs.hosts import Hosts, why_not
from proofs.launch import plant, train
from proofs.processes import TIMEOUT_S
from proofs.results import load, losses, weights

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

# A restart gets a store of its own, see "Starting again" in docs/3_fault_tolerance.md.
CURE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}
ENV = CURE | {"OMP_NUM_THREADS": 1, "PYTHONWARNINGS": "ignore"}
# torchrun's patience, shorter than by default: 30 s, 5 s, 3 times, 60 s, 600 s.
PATIENCE = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
PATIENCE += ",read_timeout=30,join_timeout=20"
SLOW = """
class Trainer(Trainer):
    def _run_batch(self, source, targets):
        time.sleep(0.01)
        return super()._run_batch(source, targets)
"""
RESET = "Connection reset by peer|Connection closed by peer|Broken pipe"


def torchrun(script, *args, nnodes=2, nproc=1, host="node0", restarts=3, options=()):
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nnodes}"]
    command += [f"--nproc-per-node={nproc}", f"--max-restarts={restarts}"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={host}:29500"]
    return [*command, "--rdzv-conf", PATIENCE, *options, script, *map(str, args)]


def impatient(folder, *changes):
    changes = (("timedelta(minutes=5)", "timedelta(seconds=10)"), *changes)
    return plant("multinode.py", folder / "copy", *changes, before_main=SLOW)


def epochs(job, since=0):
    """The epochs that a job has printed since then."""
    found = [re.match(r"epoch (\d+)/", line) for t, line in job.lines if t >= since]
    return [int(x[1]) for x in found if x]


def saved(job, until=math.inf):
    """The newest epoch that it had saved by then."""
    lines = [line for t, line in job.lines if t <= until]
    found = re.findall(r"epoch (\d+) saved", "\n".join(lines))
    return max(map(int, found), default=0)


def measured(what, since, until):
    print(f"\nmeasured: {until - since:5.1f} s {what}")


def test_two_hosts_train_the_model_of_one_process(runs, tmp_path):
    """2 hosts x 2 processes x batch 16, no disk shared: batch 64 on one process."""
    with Hosts(2, tmp_path, own_disks=True) as hosts:
        command = torchrun(ROOT / "multinode.py", 5, 2, "--batch-size", 16, nproc=2)
        jobs = [host.start(command, **ENV) for host in hosts]
        assert [job.wait(TIMEOUT_S) for job in jobs] == [0, 0], jobs[0].output
    folder, done = runs("single_gpu.py")
    alone = weights(folder / "snapshot.pt")
    together = weights(tmp_path / "node0" / "snapshot.pt")
    assert (together - alone).abs().max() < 1e-6
    assert "4 x cpu, batch 16 each: effective batch 64" in jobs[0].output
    # One process of all writes and prints, not one of each host.
    assert not (tmp_path / "node1" / "snapshot.pt").exists()
    assert not epochs(jobs[1])
    assert len(epochs(jobs[0])) == len(losses(done)) == 5


def test_hosts_of_different_size_and_ranks_that_move(tmp_path):
    """1 and 2 processes, no disk shared; the second run has its rank 0 elsewhere.

    torchrun sorts machines by the name that they give themselves.
    """
    with Hosts(2, tmp_path, own_disks=True) as hosts:

        def both(total, names):
            jobs = []
            for host, nproc, name in zip(hosts, (1, 2), names, strict=True):
                options = [f"--local-addr={name}"]
                script = ROOT / "multinode.py"
                command = torchrun(script, total, 2, nproc=nproc, options=options)
                jobs.append(host.start(command, **ENV))
            assert [job.wait(TIMEOUT_S) for job in jobs] == [0, 0], jobs[0].output
            return jobs

        one, other = both(2, ["node0", "node1"])
        assert epochs(one) == [1, 2] and not epochs(other)
        one, other = both(4, ["node0", hosts[1].address])
        assert epochs(other) == [3, 4] and not epochs(one)
        assert "3 x cpu, batch 32 each: effective batch 96" in other.output
        assert "resuming from snapshot.pt: 2 of 4 epochs are finished" in other.output
    alone = tmp_path / "alone"
    alone.mkdir()
    train(ROOT / "single_gpu.py", 4, 4, "--batch-size", 96, cwd=alone)
    folders = tmp_path / "node1", alone
    mine, theirs = (weights(folder / "snapshot.pt") for folder in folders)
    assert (mine - theirs).abs().max() < 1e-6
    assert load(tmp_path / "node0" / "snapshot.pt")["EPOCHS_RUN"] == 2


def test_a_host_dies_and_comes_back(tmp_path):
    """The job shrinks and goes on, and grows again; no snapshot is lost on the way.

    First its processes are killed, of which the others learn at once. The next time the
    power goes, and they learn of it when the time-out has passed. Two restarts suffice:
    to grow costs none.
    """
    command = torchrun(impatient(tmp_path), 10**6, 2, nnodes="1:2", restarts=2)

    def resumed(job, since, world, what):
        """From which epoch it went on, as that many processes, and what was saved."""
        job.wait_for(f"^{world} x cpu", TIMEOUT_S, since)
        again, found = job.wait_for(r"resuming from \S+ (\d+) of", TIMEOUT_S, since)
        when, then = job.wait_for(r"epoch (\d+)/", TIMEOUT_S, since=again)
        measured(f"from {what} to the end of the next epoch", since, when)
        assert int(then[1]) == int(found[1]) + 1
        return int(found[1]), saved(job, until=again)

    def come_back():
        other.boot()
        back = time.monotonic()
        second = other.start(command, **ENV)
        epoch, newest = resumed(first, back, 2, "the return")
        assert epoch >= newest, "ended between saving and saying so, it has one more"
        assert first.process.poll() is None and second.process.poll() is None
        # A launcher and its process, on both hosts.
        assert len(one.processes()) == len(other.processes()) == 2

    with Hosts(2, tmp_path / "disk") as (one, other):
        first = one.start(command, **ENV)
        other.start(command, **ENV)
        first.wait_for("^2 x cpu", TIMEOUT_S)
        first.wait_for("epoch 5/", TIMEOUT_S)
        other.kill()
        gone = time.monotonic()
        epoch, newest = resumed(first, gone, 1, "the kill")
        assert epoch == newest
        assert re.search(f"RuntimeError: .*({RESET})", first.output)

        come_back()
        first.wait_for(f"epoch {saved(first) + 30}/", TIMEOUT_S)
        floor = [float(x) for x in re.findall(r"held-out loss (\S+)", first.output)]
        assert 0.009 < floor[-1] < 0.011, "0.01 is the noise"

        other.unplug()
        gone = time.monotonic()
        epoch, newest = resumed(first, gone, 1, "the unplugging")
        assert epoch == newest
        assert "Timed out waiting 10000ms" in first.output
        come_back()


COPIES = [
    ("if dist.get_rank() != 0:", 'if int(os.environ["LOCAL_RANK"]) != 0:'),
    ("import gc\n", "import gc\nimport os\n"),
]


@pytest.mark.parametrize("disks", ["shared", "own"])
def test_the_host_of_the_rendezvous_dies(tmp_path, disks):
    """The job ends soon and says why; the survivor and a new host take it up again.

    Where each has its own disk, the first process of each host saves (a line differs).
    """
    changes = COPIES if disks == "own" else []
    script = impatient(tmp_path, *changes)
    with Hosts(3, tmp_path / "disk", own_disks=disks == "own") as (one, other, new):
        first = one.start(torchrun(script, 10**6, 2), **ENV)
        second = other.start(torchrun(script, 10**6, 2), **ENV)
        first.wait_for("epoch 5/", TIMEOUT_S)
        one.kill()
        killed = time.monotonic()
        assert second.wait(TIMEOUT_S) == 1
        what = (
            "from the death of the rendezvous' host to the end of the other's launcher"
        )
        measured(what, killed, time.monotonic())
        assert (
            "RendezvousConnectionError: The connection to the C10d store"
            in second.output
        )
        kept = saved(second if disks == "own" else first)
        assert kept >= 4
        command = torchrun(script, kept + 2, 2, host="node1")
        jobs = [host.start(command, **ENV) for host in (other, new)]
        assert [job.wait(TIMEOUT_S) for job in jobs] == [0, 0], jobs[0].output
        line = f"resuming from snapshot.pt: {kept} of {kept + 2} epochs are finished"
        assert line in jobs[0].output
        for host in (other, new):
            assert load(host.folder / "snapshot.pt")["EPOCHS_RUN"] == kept + 2


def test_a_link_is_cut_and_mended(tmp_path):
    """For less than the time-out, all wait; for longer, the job starts again."""
    command = torchrun(impatient(tmp_path), 10**6, 2)
    with Hosts(2, tmp_path / "disk") as (one, other):
        jobs = [host.start(command, **ENV) for host in (one, other)]
        jobs[0].wait_for("epoch 3/", TIMEOUT_S)
        other.cut()
        time.sleep(1)
        cut = time.monotonic()
        time.sleep(3)
        assert not epochs(jobs[0], since=cut), "nobody can go on alone"
        other.mend()
        mended = time.monotonic()
        when, _ = jobs[0].wait_for("epoch", TIMEOUT_S, since=mended)
        measured("from the mending of a short cut to the next epoch", mended, when)
        every = epochs(jobs[0])
        assert every == list(range(1, len(every) + 1)), "nothing was done twice"
        assert "Error" not in jobs[0].output + jobs[1].output
        other.cut()
        cut = time.monotonic()
        for job in jobs:
            job.wait_for("Timed out waiting 10000ms", TIMEOUT_S, since=cut)
        kept = saved(jobs[0])
        other.mend()
        mended = time.monotonic()
        _, found = jobs[0].wait_for(
            r"resuming from \S+ (\d+) of", TIMEOUT_S, since=mended
        )
        assert int(found[1]) == kept
        when, _ = jobs[0].wait_for("epoch", TIMEOUT_S, since=mended)
        measured("from the mending of a long cut to the next epoch", mended, when)


def test_a_link_is_cut_for_good(tmp_path):
    """Both hosts end, in bounded time, and say that the other did not answer.

    The host of the rendezvous ends after join_timeout. The other waits for an answer of
    the store, until the kernel gives the connection up: after 15 minutes by default.
    """
    command = torchrun(impatient(tmp_path), 10**6, 2)
    with Hosts(2, tmp_path / "disk") as (one, other):
        other.run("sh", "-c", "echo 5 > /proc/sys/net/ipv4/tcp_retries2")
        jobs = [host.start(command, **ENV) for host in (one, other)]
        jobs[0].wait_for("epoch 3/", TIMEOUT_S)
        other.cut()
        cut, statuses = time.monotonic(), []
        for job, where in ((jobs[1], "the host cut off"), (jobs[0], "the other")):
            statuses.append(job.wait(2 * TIMEOUT_S))
            measured(
                f"from the cut to the launcher's end on {where}", cut, time.monotonic()
            )
        kept = saved(jobs[0])
        assert load(tmp_path / "disk" / "snapshot.pt")["EPOCHS_RUN"] == kept
        assert statuses == [1, 1]
        for job in jobs:
            assert "Timed out waiting 10000ms" in job.output
        assert "RendezvousTimeoutError" in jobs[0].output
        assert "RendezvousConnectionError" in jobs[1].output
