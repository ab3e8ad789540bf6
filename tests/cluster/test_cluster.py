"""multinode.py on hosts that are really separate, and really fail.

What is planted in the copies that run here: a time-out of 10 s instead of five minutes,
so that a silent loss is noticed within a test's patience, and steps of 10 ms, so that
something can happen before the training is over.
"""

import re
import time

import pytest

from tests.helpers.checks import assert_same_weights
from tests.helpers.needs import needs_hosts
from tests.hooks.timing import slow_steps
from tools.run.hosts import Hosts
from tools.run.launch import copy_script
from tools.run.results import load
from tools.scripts import ROOT

pytestmark = [pytest.mark.waits, needs_hosts]

ENV = {
    # "Give every attempt a store of its own" in docs/when_machines_fail.md
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1,
    "OMP_NUM_THREADS": 1,
    "PYTHONWARNINGS": "ignore",
    "STEP_S": 0.01,  # for slow_steps
}
# How long torchrun waits, in seconds. By default: 30, 5, 3 times, 60, 600.
RENDEZVOUS = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
RENDEZVOUS += ",read_timeout=30,join_timeout=20"
RESET = "RuntimeError: .*(Connection (reset|closed) by peer|Broken pipe)"


def words_of(script, arguments, nnodes=2, nproc=1, host="node0", conf=RENDEZVOUS):
    """The words to type on each host."""
    words = f"torchrun --nnodes={nnodes} --nproc-per-node={nproc} --max-restarts=2"
    words += f" --rdzv-backend=c10d --rdzv-endpoint={host}:29500 --rdzv-conf={conf}"
    return f"{words} {script} {arguments}".split()


def impatient(folder, *changes):
    """A copy whose collectives wait for 10 s, and whose steps take 10 ms longer."""
    soon = ("timedelta(minutes=5)", "timedelta(seconds=10)")
    return copy_script(
        "multinode.py", folder / "copy", soon, *changes, hooks=[slow_steps]
    )


def epochs(job):
    """The epochs that a job has printed."""
    return [*map(int, re.findall(r"(?m)^epoch (\d+)/", job.output))]


def saved(job, until=None):
    """The newest epoch that it says to have saved, in its first `until` characters."""
    found = re.findall(r"epoch (\d+) saved", job.output[:until])
    return max(map(int, found), default=0)


def start_on(hosts, command):
    """Start the command on each of these hosts."""
    return [host.start(command, **ENV) for host in hosts]


def run_on(hosts, command):
    """Run the command on each of these hosts, and insist that it ends well."""
    jobs = start_on(hosts, command)
    for job in jobs:
        job.succeed()
    return jobs


def test_which_endpoint_a_machine_takes_for_itself(tmp_path):
    """Not an alias where /etc/hosts has 127.0.1.1, as Debian writes it.

    If nobody is the host, all end; `is_host` says it outright.
    """
    with Hosts(1, tmp_path) as (host,):
        debian = "127.0.0.1 localhost\n127.0.1.1 node0.lab node0\n10.77.0.1 alias"
        host.run("sh", "-c", 'echo "$0" > /etc/hosts', debian)
        for conf, status, said in (
            ("last_call_timeout=2", 1, "RendezvousConnectionError"),
            ("is_host=true", 0, "epoch 1/1"),
        ):
            command = words_of(
                ROOT / "multinode.py",
                "1 1",
                nnodes=1,
                host="alias",
                conf=f"{conf},read_timeout=2",
            )
            job = host.start(command, **ENV)
            job.end_with(status)
            assert said in job.output


def test_two_hosts_train_the_model_of_one_process(runs, tmp_path):
    """No disk is shared."""
    with Hosts(2, tmp_path, own_disks=True) as hosts:
        command = words_of(ROOT / "multinode.py", "5 2 --batch-size=16", nproc=2)
        first, second = run_on(hosts, command)
        one, other = [host.folder / "snapshot.pt" for host in hosts]
        folder, _ = runs("single_gpu.py")
        assert_same_weights(one, folder)
        assert "4 x cpu, batch 16 each: effective batch 64" in first.output
        # One process of all writes and prints, not one of each host.
        assert not other.exists()
        assert epochs(first) == [1, 2, 3, 4, 5]
        assert epochs(second) == []


def check_that_it_resumes(job, world_size):
    """After what has just happened, as so many processes, from the newest snapshot."""
    since = len(job.output)
    job.wait_for(f"^{world_size} x cpu", since)
    again = job.wait_for(r"(\d+) of \d+ epochs are finished", since)
    next_epoch = job.wait_for(r"epoch (\d+)/", again.end())
    epochs_run = int(again[1])
    assert int(next_epoch[1]) == epochs_run + 1
    # Ended between saving and saying so, it has one more.
    assert epochs_run >= saved(job, until=again.end())


def test_a_host_dies_and_comes_back(tmp_path):
    """The job shrinks and goes on, and grows again; no snapshot is lost on the way.

    First its processes are killed, of which the others learn at once. The next time the
    power goes, and they learn of it when the time-out has passed. Two restarts suffice:
    to grow costs none.
    """
    command = words_of(impatient(tmp_path), "1000000 2", nnodes="1:2")

    def come_back():
        other.boot()
        second = other.start(command, **ENV)
        check_that_it_resumes(first, 2)
        assert first.poll() is second.poll() is None

    with Hosts(2, tmp_path / "disk") as (one, other):
        first = one.start(command, **ENV)
        other.start(command, **ENV)
        first.wait_for("^2 x cpu")
        first.wait_for("epoch 5/")
        other.kill()
        check_that_it_resumes(first, 1)
        assert re.search(RESET, first.output)

        come_back()
        # It learns on, with what it had learnt before and in between.
        first.wait_for(f"epoch {saved(first) + 10}/")
        *_, loss = re.findall(r"held-out loss (\S+)", first.output)
        assert 0.009 < float(loss) < 0.011, "0.01 is the noise"

        other.unplug()
        check_that_it_resumes(first, 1)
        assert "Timed out waiting 10000ms" in first.output
        come_back()


def test_the_host_of_the_rendezvous_dies(tmp_path):
    """The job ends soon and says why; the survivor and a new host take it up again."""
    each_rank_writes = ("if dist.get_rank() == 0:  # one rank writes", "if True:")
    script = impatient(tmp_path, each_rank_writes)
    with Hosts(3, tmp_path / "disk", own_disks=True) as (one, other, new):
        first, second = start_on([one, other], words_of(script, "1000000 2"))
        first.wait_for("epoch 5/")
        one.kill()
        second.end_with(1)
        assert "RendezvousConnectionError: The connection" in second.output
        kept = load(other.folder)["EPOCHS_RUN"]
        assert kept >= 4
        command = words_of(script, f"{kept + 2} 2", host="node1")
        again, _ = run_on([other, new], command)
        assert f"{kept} of {kept + 2} epochs are finished" in again.output


def test_a_link_is_cut(tmp_path):
    """For less than the time-out, all wait; for longer, the job starts again.

    Cut for good, both hosts end, in bounded time, and say who did not answer.
    """
    command = words_of(impatient(tmp_path), "1000000 2")
    with Hosts(2, tmp_path / "disk") as hosts:
        first, second = start_on(hosts, command)
        other = hosts[1]
        first.wait_for("epoch 3/")
        other.cut()
        time.sleep(1)  # until what was sent before has come, and is printed
        cut = len(first.output)
        # An epoch takes half a second. The kernel tries again 3 s after the cut, and at
        # 6 s and 12 s: the last would be too late for the time-out.
        time.sleep(2)
        assert "epoch" not in first.output[cut:], "nobody can go on alone"
        other.mend()
        first.wait_for("epoch", len(first.output))
        every = epochs(first)
        assert every == [*range(1, len(every) + 1)], "nothing was done twice"
        assert "Error" not in first.output + second.output

        other.cut()
        first.wait_for("Timed out waiting 10000ms")
        second.wait_for("Timed out waiting 10000ms")
        other.mend()
        check_that_it_resumes(first, 2)

        # The host of the rendezvous ends after join_timeout. The other waits for an
        # answer of the store until the kernel gives up: after 15 minutes by default.
        other.run("sh", "-c", "echo 5 > /proc/sys/net/ipv4/tcp_retries2")
        other.cut()
        for job, before, error in (
            (second, len(second.output), "RendezvousConnectionError"),
            (first, len(first.output), "RendezvousTimeoutError"),
        ):
            job.end_with(1)
            said = job.output[before:]
            assert "Timed out waiting 10000ms" in said
            assert error in said
        assert load(other.folder)["EPOCHS_RUN"] == saved(first)
