"""tools/preflight.py on hosts with planted faults: each is named, and nothing else."""

import argparse
import importlib.util
import os
import re
import shutil
import signal
import sys
import time
import types
import uuid

import pytest

from ladder.files import edit
from ladder.rungs import ROOT
from proofs import processes
from proofs.hosts import Hosts, Job, why_not
from proofs.processes import TIMEOUT_S, TimedOut, clean_env, left_over
from proofs.warm import Fork

SCRIPT = ROOT / "tools/preflight.py"
FAULTS = ROOT / "tests/faults"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d"]
TORCHRUN += ["--rdzv-endpoint=node0:29500"]
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
on_hosts = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

# Drops every TCP packet that has SYN and not ACK: classic BPF in an ingress filter.
NO_SYN = "7,48 0 0 23,21 0 4 6,48 0 0 47,84 0 0 18,21 0 1 2,6 0 0 2,6 0 0 0"


@pytest.fixture(scope="module")
def preflight():
    """The file as a module."""
    spec = importlib.util.spec_from_file_location("preflight", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_fault(folder, name):
    """The environment in which each Python runs tests/faults/NAME.py as it starts."""
    shutil.copy(FAULTS / f"{name}.py", folder / "sitecustomize.py")
    return QUIET | {"PYTHONPATH": folder}


def with_roll_call(hosts, *flags):
    """The command without torchrun in front; the file is a copy, away from here."""
    script = shutil.copy(SCRIPT, hosts.folder)
    return [sys.executable, script, *flags, "--rdzv-endpoint=node0:29500"]


def start_endpoint_last(hosts, *commands):
    """Start all but the endpoint's, then that: --wait is not for slow interpreters."""
    others = [
        host.start(command)
        for host, command in zip(hosts[1:], commands[1:], strict=True)
    ]
    deadline = time.monotonic() + TIMEOUT_S
    while not all(host.run("ss", "-ltnH", "sport = :29500") for host in hosts[1:]):
        if time.monotonic() > deadline:
            raise TimedOut([job.output for job in others])
        time.sleep(0.05)
    return [hosts[0].start(commands[0]), *others]


def findings(job, kind="FAIL|warn"):
    """The findings of a kind in what a host printed, in order."""
    return re.findall(rf"^(?:{kind})  +(.*)", job.output, re.M)


def plant_names(host, text):
    """Give it an /etc/hosts of its own."""
    file = host.folder / f"{host.name}.hosts"
    file.write_text(text)
    host.run("mount", "--bind", file, "/etc/hosts")


def assert_found(job, patterns):
    """Each pattern fits the finding at its place, and there are no others."""
    found = findings(job)
    assert len(patterns) == len(found), found
    for pattern, finding in zip(patterns, found, strict=True):
        assert re.search(pattern, finding), (pattern, found)


@pytest.mark.waits
@on_hosts
def test_a_healthy_cluster(tmp_path):
    with Hosts(2, tmp_path) as hosts:
        # A busy machine may not have the Gbit/s that the tool expects by default.
        flags = ["--hosts=node0,node1", "--link-gbit=0.1"]
        flags += ["--nnodes=2", "--nproc-per-node=2"]
        command = with_roll_call(hosts, *flags, "--rdzv-backend=c10d")
        jobs = [host.start(command, **QUIET) for host in hosts]
        assert [job.wait() for job in jobs] == [0, 0], jobs[0].output
        assert findings(jobs[0]) == [] == findings(jobs[1])
        assert "this cluster can train: 0 failed, 0 warnings" in jobs[0].output
        assert not re.search("^ok|can train", jobs[1].output, re.M)  # rank 0 alone
        for fact in ("node0: 10.77.0.1 on eth0", "node1: 10.77.0.2 on eth0"):
            assert fact in jobs[0].output
        assert "2 connections" in jobs[0].output
        assert "all-reduce is right: float32, bfloat16, int64" in jobs[0].output
        assert re.search(r"all-reduce of 1 MiB: .* Gbit/s", jobs[0].output)


@pytest.mark.waits
@on_hosts
def test_faults_of_a_host(tmp_path):
    with Hosts(2, tmp_path) as hosts:
        node0, node1 = hosts
        plant_names(node0, "127.0.1.1 node0\n10.77.0.2 node1\n")  # as Debian does
        node1.run("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm")
        flags = ["--nnodes=2", "--rdzv-backend=c10d", "--link-gbit=0.1"]
        command = with_roll_call(hosts, *flags)
        jobs = [node0.start(command, **QUIET)]
        faulty = with_fault(tmp_path, "preflight_faulty") | {"OMP_NUM_THREADS": 64}
        jobs += [node1.start([*command, "--nproc-per-node=2"], **faulty)]
        assert [job.wait() for job in jobs] == [1, 1], jobs[0].output
        assert_found(
            jobs[0],
            [
                r"^node1 has torch 1\.2\.3, the others have ",
                r"^node1: /dev/shm has 64 MiB, and may need 512 MiB",
                r"^node1: 2 x \d+ threads on \d+ cores",
                r"^rank 1 on node1 multiplies wrongly",
                r"^rank 2 on node1 multiplies wrongly",
                r"^node0: its own name, node0, is 127\.0\.1\.1 there",
                r"^node1: clock (99|100)\.\d+ s ahead of node0's",
                r"^rank 1 on node1: all-reduce is wrong: bfloat16$",
                r"^rank 2 on node1: all-reduce is wrong: bfloat16$",
            ],
        )
        assert findings(jobs[1]) == []
        cures = jobs[0].output
        assert "type  on node0: export GLOO_SOCKET_IFNAME=eth0" in cures
        assert "docker run --shm-size=512m" in cures
        assert "type  on node1: chronyc tracking" in cures


@pytest.mark.waits
@on_hosts
def test_a_slow_device_a_slow_link_and_a_wrong_name(tmp_path):
    with Hosts(3, tmp_path) as hosts:
        # All have a limit, so low that a busy machine cannot halve the speed.
        for host, rate in zip(hosts, ("200mbit", "200mbit", "20mbit"), strict=True):
            host.slow(rate)
        names = "10.77.0.1 node0\n10.77.0.99 node1\n10.77.0.3 node2\n"
        plant_names(hosts[0], names)
        command = [*TORCHRUN, "--nnodes=3", SCRIPT, "--link-gbit=0.2"]
        slow = with_fault(tmp_path, "preflight_slow")
        jobs = [
            host.start(command, **env)
            for host, env in zip(hosts, (QUIET, slow, QUIET), strict=True)
        ]
        assert [job.wait() for job in jobs] == [1, 1, 1], jobs[0].output
        assert_found(
            jobs[0],
            [
                r"^rank 1 on node1 computes at 1/\d+\.\d of the usual$",
                r"^on node0 the name node1 is 10\.77\.0\.99, and node1 is 10\.77",
                r"^node2 is slow: at best 0\.0\d Gbit/s; 0\.\d\d is usual, 0\.2 e",
            ],
        )


@pytest.mark.waits
@on_hosts
def test_a_slow_link_of_two_hosts(tmp_path):
    with Hosts(2, tmp_path) as hosts:
        hosts[1].slow("100mbit")
        command = [*TORCHRUN, "--nnodes=2", SCRIPT]
        jobs = [host.start(command, **QUIET) for host in hosts]
        assert [job.wait() for job in jobs] == [1, 1], jobs[0].output
        slow = r"^slow link, node{} to node{}: 0\.[01]\d Gbit/s; 1 expected \(--link-g"
        assert_found(jobs[0], [slow.format(0, 1), slow.format(1, 0)])
        assert "on node1: ethtool eth0; iperf3 -c 10.77.0.1" in jobs[0].output


@pytest.mark.parametrize(
    "count, usual, others, link_gbit, said",
    [
        (2, 15, {(1, 0): 7}, 1, []),  # nobody to compare with, and enough
        (2, 15, {(1, 0): 7}, 20, ["FAIL  slow link, node1 to node0: 7.00 Gbit/s; 20 "]),
        (4, 9, {}, 1, []),
        (4, 9, {}, 18, []),
        (4, 9, {(1, 2): 5}, 1, []),
        (4, 9, {(1, 2): 4}, 1, ["warn  slow link, node1 to node2: 4.00 Gbit/s; 9.00 "]),
        (4, 9, {(1, 2): 4}, 9, ["FAIL  slow link, node1 to node2: 4.00 Gbit/s; 9.00 "]),
        (  # it sends as fast as all
            4,
            9,
            {(x, 3): 4 for x in range(3)},
            1,
            [f"warn  slow link, node{x} to node3: 4.00" for x in range(3)],
        ),
        (
            4,
            9,
            {(x, y): 4 for x in range(4) for y in range(4) if 3 in (x, y)},
            9,
            ["FAIL  node3 is slow: at best 4.00 Gbit/s; 9.00 is usual, 9 expected"],
        ),
        (
            3,
            9,
            {(0, 2): 4, (2, 0): 4, (1, 2): 4, (2, 1): 0.4},
            1,
            [
                "warn  node2 is slow: at best 4.00",
                "FAIL  slow link, node2 to node1: 0.40",
            ],
        ),
    ],
)
def test_slow_links(preflight, capsys, count, usual, others, link_gbit, said):
    hosts = [
        types.SimpleNamespace(
            name=f"node{number}",
            processes=1,
            gbit=0,
            interface="eth0",
            address="",
        )
        for number in range(count)
    ]
    speeds = [
        {b: others.get((a, b), usual) for b in range(count) if a != b}
        for a in range(count)
    ]
    preflight.report_speeds(hosts, [(4, 1e-3), (1 << 20, 1e-2)], speeds, link_gbit)
    output = capsys.readouterr().out
    lines = re.findall(r"^(?:FAIL|warn).*", output, re.M)
    assert len(lines) == len(said), output
    for line, start in zip(lines, said, strict=True):
        assert line.startswith(start), output
    assert ("ok    between hosts" in output) == (not said)
    slowest = min(others.values(), default=usual)
    gbit = (1 << 20) * 2 * (count - 1) / count * 8e-9 / 1e-2
    share = f"10.00 ms, {gbit:.2f} Gbit/s, {gbit / slowest:.0%} of the slowest link"
    assert f"all-reduce of 1 MiB: {share}\n" in output
    assert "all-reduce of 4 B: 1.00 ms\n" in output


@pytest.mark.waits
@on_hosts
def test_one_direction_is_blocked(tmp_path):
    with Hosts(2, tmp_path) as hosts:
        hosts[1].run("tc", "qdisc", "add", "dev", "eth0", "ingress")
        block = ["tc", "filter", "add", "dev", "eth0", "ingress", "bpf"]
        hosts[1].run(*block, "direct-action", "bytecode", NO_SYN)
        command = [*TORCHRUN, "--nnodes=2", "--max-restarts=1", SCRIPT]
        jobs = [host.start(command, **QUIET) for host in hosts]
        assert [job.wait() for job in jobs] == [1, 1], jobs[0].output
        assert_found(
            jobs[0],  # once: a restart does not say it again
            [
                r"^--max-restarts: a restart may read what the attempt before",
                r"^node0 cannot connect to node1 \(10\.77\.0\.2\): no answer in 3 s$",
            ],
        )
        assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in jobs[0].output
        assert "type  on node1, all ports: ufw allow from 10.77.0.1" in jobs[0].output


@pytest.mark.waits
@on_hosts
def test_those_who_do_not_come_are_named(tmp_path):
    with Hosts(5, tmp_path) as hosts:
        # node1 reaches no port 29500 of node0; for node2, node0 is somebody else; on
        # node3 nothing is started; node4 is off; nobody knows node5.
        for rule in ("pref 20 lookup local", "pref 10 from 10.77.0.2 {} blackhole"):
            rule = rule.format("iif eth0 ipproto tcp dport 29500")
            hosts[0].run("ip", "rule", "add", *rule.split())
        hosts[0].run("ip", "rule", "del", "pref", "0")
        plant_names(hosts[2], "10.77.0.99 node0\n10.77.0.3 node2\n")
        hosts[4].unplug()
        names = ",".join(f"node{i}" for i in range(6))
        command = with_roll_call(hosts, "--nnodes=6", f"--hosts={names}", "--wait=5")
        jobs = start_endpoint_last(hosts[:3], *[command] * 3)
        assert [job.wait() for job in jobs] == [1, 1, 1], jobs[0].output
        off = r"(no answer from node4:29500 \(10\.77\.0\.5\)|.*No route to host)"
        assert_found(
            jobs[0],
            [
                r"^1 of 6 hosts came in 5 s: node0$",
                r"^node1 did not come: it is up, but no answer from node0:29500 "
                r"\(10\.77\.0\.1\): it is off, or a firewall drops the port$",
                r"^node2 did not come: it is up, but there the name node0 is "
                r"10\.77\.0\.99, and node0 is 10\.77\.0\.1$",
                r"^node3 did not come: node3:29500 .* is up, but nothing listens",
                rf"^node4 did not come: {off}",
                r"^node5 did not come: node0 does not know the name node5$",
            ],
        )
        assert_found(jobs[1], [r"^node1 cannot come to node0: no answer"])
        assert_found(jobs[2], [r"^node2 cannot come to node0: there the name"])


@pytest.mark.waits
@on_hosts
def test_those_who_take_themselves_for_the_endpoint(tmp_path):
    said = ["127.0.1.1", "127.0.0.1", "10.77.0.4"]
    with Hosts(4, tmp_path) as hosts:
        plant_names(hosts[1], "127.0.1.1 node0\n10.77.0.2 node1\n")  # a cloned image
        plant_names(hosts[2], "127.0.0.1 localhost node0\n10.77.0.3 node2\n")
        plant_names(hosts[3], "10.77.0.4 node3 node0\n")
        flags = ["--nnodes=4", "--hosts=node0,node1,node2,node3", "--wait=3"]
        jobs = start_endpoint_last(hosts, *[with_roll_call(hosts, *flags)] * 4)
        assert [job.wait() for job in jobs] == [1] * 4, jobs[0].output
        why = "there the name node0 is {}, and node0 is 10.77.0.1"
        wrong = [why.format(x).replace(".", r"\.") for x in said]
        patterns = [r"^1 of 4 hosts came in 3 s: node0$"]
        for number, text in enumerate(wrong, 1):
            patterns += [rf"^node{number} did not come: it is up, but {text}$"]
            mine = rf"^node{number} cannot come to node0: {text}$"
            assert_found(jobs[number], [mine])
            cure = "getent hosts node0; cat /etc/hosts"
            assert f"type  {cure}" in jobs[number].output
            assert f"type  on node{number}: {cure}" in jobs[0].output
        assert_found(jobs[0], patterns)


def test_a_name_that_leads_to_this_host_itself(preflight):
    connection, why, cure = preflight.probe_port("localhost", 29500)
    assert not connection and "the name localhost is 127.0.0.1, that of " in why
    assert cure == "getent hosts localhost; cat /etc/hosts"


@pytest.mark.waits
@on_hosts
def test_the_endpoint_does_not_come(tmp_path):
    with Hosts(2, tmp_path) as hosts:
        command = with_roll_call(hosts, "--nnodes=2", "--wait=1")
        job = hosts[1].start(command)
        assert job.wait() == 1
        want = [r"^node1 cannot come to node0: node0:29500 .* is up, but nothing"]
        assert_found(job, want)


@pytest.mark.waits
@on_hosts
def test_a_host_that_calls_itself_localhost(tmp_path):
    with Hosts(3, tmp_path) as hosts:
        for host in hosts[1:]:
            plant_names(host, f"127.0.0.1 localhost {host.name}\n10.77.0.1 node0\n")
        command = with_roll_call(hosts, "--nnodes=4", "--wait=3")
        cured = [*command, "--local-addr=10.77.0.3"]
        jobs = start_endpoint_last(hosts, command, command, cured)
        assert [job.wait() for job in jobs] == [1, 1, 1], jobs[0].output
        assert_found(
            jobs[0],
            [
                r"^3 of 4 hosts came in 3 s: node0, node1, node2$",
                r"^node1 would tell the others to call localhost$",
            ],
        )
        assert "in torchrun's line: --local-addr=10.77.0.2" in jobs[0].output


@pytest.mark.skipif(not shutil.which("scontrol"), reason="there is no Slurm")
def test_slurm_names_the_hosts(preflight, tmp_path, monkeypatch):
    (tmp_path / "slurm.conf").write_text("ClusterName=c\nSlurmctldHost=node0\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[0-1]")
    args = argparse.Namespace(hosts="")
    assert preflight.names_of_hosts(args, 2) == ["node0", "node1"]
    assert preflight.names_of_hosts(args, 1) == []  # the job has nodes to spare


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_every_pair_meets_once(preflight, count):
    partners = [preflight.partners(count, index) for index in range(count)]
    pairs = []
    for others in zip(*partners, strict=True):  # in one round
        for index, other in enumerate(others):
            assert other is None or others[other] == index != other
            if other is not None and index < other:
                pairs.append((index, other))
    assert len(pairs) == count * (count - 1) // 2
    assert len(set(pairs)) == len(pairs)


def error_line(done):
    """What bad input ends with."""
    assert done.returncode == 2 and done.stdout == "", done
    (line,) = done.stderr.splitlines()
    assert line.startswith("preflight.py: error: ")
    return line


def test_bad_input(tmp_path):
    def bad(*words):
        command = ["python", SCRIPT, *words]  # torchrun's parser imports torch
        return error_line(Fork(command, tmp_path, **QUIET).finish())

    endpoint = "--rdzv-endpoint=node0:29500"
    assert "torchrun's flags" in bad()
    assert "number" in bad("--nnodes=two", endpoint)
    assert "script" in bad("--nnodes=2", endpoint, "multinode.py", "50", "10")
    assert "where do they meet" in bad("--nnodes=2")
    assert "2 hosts and --nnodes says 3" in bad("--hosts=a,b", "--nnodes=3", endpoint)
    assert "--wait" in bad("--wait=soon", "--nnodes=2", endpoint)
    assert "value: two" in bad("--standalone", "--nproc-per-node=two")
    assert "value: x" in bad("--standalone", "--nproc-per-nod=x")
    assert "--max-restarts" in bad("--standalone", "--max-restarts=some")


def test_half_an_environment_is_bad_input(tmp_path):
    def bad(**env):
        fork = Fork(["python", SCRIPT], tmp_path, **QUIET, **env)  # it imports torch
        return error_line(fork.finish())

    assert "MASTER_ADDR" in bad(RANK=0, LOCAL_RANK=0)
    # As a Kubernetes operator sets it. Without torch, a new interpreter is cheap.
    done = processes.run([sys.executable, SCRIPT], tmp_path, **QUIET, RANK=0)
    assert "torchrun's flags" in error_line(done)


@pytest.mark.waits
def test_who_fails_says_so_and_who_hangs_is_named(tmp_path):
    script = tmp_path / "preflight.py"
    shutil.copy(SCRIPT, script)
    edit(script, ("STEP_S = 30", "STEP_S = 10"), ("ALL_S = 60", "ALL_S = 40"))
    command = [sys.executable, script, "--nproc-per-node=3", "--standalone"]
    fault = with_fault(tmp_path, "preflight_broken")
    done = processes.run(command, tmp_path, **fault)
    assert done.returncode == 1, done
    for what in (
        r"rank 1 on \S+, allocating and computing on cpu: RuntimeError: planted",
        r"rank 0 on \S+, waiting for facts: TimeoutError: nothing from rank 1, 2",
        r"rank 2 did not fail: the others may wait for it",
    ):
        assert re.search(rf"^FAIL  {what}", done.stdout, re.M), done.stdout


@pytest.mark.waits
def test_sigterm_leaves_nothing_behind(tmp_path):
    (tmp_path / "tmp").mkdir()
    mark = uuid.uuid4().hex
    fault = with_fault(tmp_path, "preflight_hanging")
    env = clean_env(**fault, TMPDIR=tmp_path / "tmp", MARK=mark)
    command = [sys.executable, SCRIPT, "--standalone", "--nproc-per-node=2"]
    job = Job(command, cwd=tmp_path, env=env)
    job.wait_for("here")
    job.process.terminate()
    left = left_over(mark, TIMEOUT_S)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
    assert job.wait() == 143
    assert not list((tmp_path / "tmp").iterdir())
