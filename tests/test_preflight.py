"""tools/preflight.py on hosts with planted faults: each is named, and nothing else."""

import importlib
import os
import re
import shutil
import signal
import sys
import time
import types
import uuid

import pytest

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


@pytest.fixture
def preflight(monkeypatch):
    """The file as a module, as in a process that torchrun has started."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    yield importlib.import_module("preflight")
    for name in ("preflight", "roll_call"):
        sys.modules.pop(name)


def with_fault(folder, name):
    """The environment in which each Python runs tests/faults/NAME.py as it starts."""
    shutil.copy(FAULTS / f"{name}.py", folder / "sitecustomize.py")
    return QUIET | {"PYTHONPATH": folder}


def with_roll_call(hosts, *flags):
    """The command without torchrun in front; the files are copies, away from here."""
    for file in SCRIPT.parent.glob("*.py"):
        shutil.copy(file, hosts.folder)
    script = hosts.folder / SCRIPT.name
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


def plant_ports(host, **states):
    """InfiniBand ports of 400 Gbit/s, in these states; no other card says anything."""
    folder = host.folder / f"{host.name}.sys"
    for name, state in states.items():
        port = folder / f"infiniband/{name}/ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    host.run("mount", "--bind", folder, "/sys/class")


def plant_gpus(host, count):
    """As the NVIDIA driver shows them, whatever torch sees."""
    host.run("mount", "-t", "tmpfs", "tmpfs", "/proc/driver")
    gpus = [f"/proc/driver/nvidia/gpus/0000:0{number}:00.0" for number in range(count)]
    host.run("mkdir", "-p", *gpus)


def plant_nvidia_smi(folder, answer, *unknown):
    """A PATH with an nvidia-smi that prints `answer`, if asked for no `unknown`."""
    script = folder / "bin/nvidia-smi"
    script.parent.mkdir()
    refuse = "echo 'Field \"{0}\" is not a valid field to query.'; exit 2"
    cases = "".join(f"*{x}*) {refuse.format(x)};;\n" for x in unknown)
    script.write_text(f"#!/bin/sh\ncase $1 in\n{cases}esac\ncat <<END\n{answer}\nEND\n")
    script.chmod(0o755)
    return f"{script.parent}:{os.environ['PATH']}"


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
        plant_gpus(hosts[1], 8)
        # A busy machine may not have the Gbit/s that the tool expects by default.
        flags = ["--hosts=node0,node1", "--link-gbit=0.1", "--cpu"]
        flags += ["--nnodes=2", "--nproc-per-node=2"]
        command = with_roll_call(hosts, *flags, "--rdzv-backend=c10d")
        jobs = [host.start(command, **QUIET) for host in hosts]
        assert [job.wait() for job in jobs] == [0, 0], jobs[0].output
        assert findings(jobs[0]) == [] == findings(jobs[1])
        assert "this cluster can train: 0 failed, 0 warnings" in jobs[0].output
        assert not re.search("^ok|can train", jobs[1].output, re.M)  # rank 0 alone
        for fact in ("node0: 10.77.0.1 on eth0", "node1: 10.77.0.2 on eth0"):
            assert fact in jobs[0].output
        assert "2 hosts know each other's names, and can connect" in jobs[0].output
        assert "all-reduce is right: float32, bfloat16, int64" in jobs[0].output
        assert re.search(r"of 1 MiB: .* Gbit/s", jobs[0].output)
        assert "4 links between hosts" in jobs[0].output


@pytest.mark.waits
@on_hosts
def test_faults_of_a_host(tmp_path):
    with Hosts(2, tmp_path) as hosts:
        node0, node1 = hosts
        plant_names(node0, "127.0.1.1 node0\n10.77.0.2 node1\n")  # as Debian does
        plant_ports(node0, mlx5_0="4: ACTIVE", mlx5_1="4: ACTIVE")
        plant_ports(node1, mlx5_0="4: ACTIVE", mlx5_1="1: DOWN")
        node1.run("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm")
        flags = ["--nnodes=2", "--rdzv-backend=c10d", "--link-gbit=0.1", "--cpu"]
        command = with_roll_call(hosts, *flags)
        jobs = [node0.start(command, **QUIET)]
        faulty = with_fault(tmp_path, "preflight_faulty") | {"OMP_NUM_THREADS": 64}
        jobs += [node1.start([*command, "--nproc-per-node=2"], **faulty)]
        assert [job.wait() for job in jobs] == [1, 1], jobs[0].output
        wrong = r"bfloat16, float32 \(gloo group\)$"
        assert_found(
            jobs[0],
            [
                r"^node1 has torch 1\.2\.3, the others have ",
                r"^node1 has InfiniBand 1 x 400 Gbit/s, the others have 2 x 400 ",
                r"^node0: its own name, node0, is 127\.0\.1\.1 there",
                r"^node1: /dev/shm has 64 MiB, and may need 512 MiB",
                r"^node1: 2 x \d+ threads on \d+ cores",
                r"^node1: the InfiniBand port mlx5_1/1 is DOWN$",
                r"^rank 1 on node1 multiplies wrongly",
                r"^rank 2 on node1 multiplies wrongly",
                rf"^rank 1 on node1: all-reduce is wrong: {wrong}",
                rf"^rank 2 on node1: all-reduce is wrong: {wrong}",
            ],
        )
        assert findings(jobs[1]) == []
        cures = jobs[0].output
        assert "try   on node0: export GLOO_SOCKET_IFNAME=eth0" in cures
        assert "docker run --shm-size=512m" in cures


@pytest.mark.waits
@on_hosts
def test_a_slow_card_and_a_wrong_name(tmp_path):
    with Hosts(2, tmp_path) as hosts:
        plant_names(hosts[0], "10.77.0.1 node0\n10.77.0.99 node1\n")
        # Both have a limit, so low that a busy machine cannot halve the speed.
        for host in hosts:
            host.slow("200mbit")
        flags = ["--nnodes=2", "--nproc-per-node=2"]
        command = [*TORCHRUN, *flags, SCRIPT, "--link-gbit=0.2", "--cpu"]
        slow = with_fault(tmp_path, "preflight_slow")
        jobs = [
            host.start(command, **env)
            for host, env in zip(hosts, (QUIET, slow), strict=True)
        ]
        assert [job.wait() for job in jobs] == [1, 1], jobs[0].output
        assert_found(
            jobs[0],
            [
                r"^on node0 the name node1 is 10\.77\.0\.99, and node1 is 10\.77",
                r"^slow link, rank 3 on node1 to rank 1 on node0: 0\.0\d Gbit/s; 0",
            ],
        )


@pytest.mark.waits
@on_hosts
def test_links_slower_than_the_ports_say(tmp_path):
    with Hosts(2, tmp_path) as hosts:
        for host in hosts:
            plant_ports(host, mlx5_0="4: ACTIVE")
        hosts[1].slow("1gbit")
        command = [*TORCHRUN, "--nnodes=2", SCRIPT, "--cpu"]
        jobs = [host.start(command, **QUIET) for host in hosts]
        assert [job.wait() for job in jobs] == [1, 1], jobs[0].output
        slow = r"^slow link, rank {0} on node{0} to rank {1} on node{1}: [01]\.\d+ "
        slow += r"Gbit/s; 10 expected \(from the ports' speed\)$"
        found = sorted(findings(jobs[0]))
        assert len(found) == 2, found
        assert re.search(slow.format(0, 1), found[0])
        assert re.search(slow.format(1, 0), found[1])
        assert "on node1: ethtool eth0; iperf3 -c 10.77.0.1" in jobs[0].output


@pytest.mark.parametrize(
    "ports, others, link_gbit, said",
    [
        (0, {}, 0, []),
        (
            0,
            {(1, 0): 0.4},
            0,
            ["rank 1 on node1 to rank 0 on node0: 0.40 Gbit/s; 1 expected (--"],
        ),
        (18, {}, 0, []),
        (20, {}, 10, []),
        (10, {(1, 2): 4}, 0, ["rank 1 on node1 to rank 2 on node2: 4.00 Gbit/s; 10 "]),
        (
            10,
            {(1, 2): 4, (2, 0): 3},
            16,
            [
                "rank 2 on node2 to rank 0 on node0: 3.00 Gbit/s; 16 expected (--link-",
                "rank 1 on node1 to rank 2 on node2: 4.00 Gbit/s; 16 expected (--link-",
            ],
        ),
    ],
)
def test_slow_links(preflight, capsys, ports, others, link_gbit, said):
    host_of = {
        number: types.SimpleNamespace(
            name=f"node{number}",
            expected=ports,
            interface="eth0",
            address="",
            backend="gloo",
        )
        for number in range(3)
    }
    pairs = [(a, b) for a in host_of for b in host_of if a != b]
    links = {pair: others.get(pair, 9) for pair in pairs}
    preflight.report_links(host_of, links, link_gbit)
    output = capsys.readouterr().out
    lines = re.findall(r"^(?:FAIL|warn).*", output, re.M)
    assert len(lines) == len(said), output
    for line, text in zip(lines, said, strict=True):
        assert line.startswith(f"FAIL  slow link, {text}"), output
    assert ("ok    6 links between hosts" in output) == (not said)


def test_many_slow_links_are_counted(preflight, capsys):
    host = types.SimpleNamespace(
        name="node0", expected=10, interface="eth0", address="", backend="nccl"
    )
    links = {(a, b): 1 for a in range(4) for b in range(4) if a != b}
    preflight.report_links(dict.fromkeys(range(4), host), links, 0)
    output = capsys.readouterr().out
    assert output.count("FAIL") == 8
    assert "12 of 12 links are slow" in output
    assert "NCCL_DEBUG=INFO says which network it uses" in output


@pytest.mark.waits
@on_hosts
def test_gpus_that_torch_cannot_use(tmp_path):
    with Hosts(1, tmp_path) as hosts:
        plant_gpus(hosts[0], 2)
        answer = "0, 3, 16, 16, Not Active, Not Active, Not Active"
        path = plant_nvidia_smi(tmp_path, answer)
        command = [sys.executable, SCRIPT, "--standalone", "--nproc-per-node=1"]
        commands = [["env", f"PATH={x}", *command] for x in (path, tmp_path)]
        jobs = [hosts[0].start(command, **QUIET) for command in commands]
        assert [job.wait() for job in jobs] == [1, 1], jobs[0].output
        blind = r"^node0: there are 2 GPUs, and torch \S+ can use none$"
        ecc = r"^node0: GPU 0 has 3 uncorrected memory errors \(ECC\)$"
        assert_found(jobs[0], [blind, ecc])
        assert_found(
            jobs[1], [blind, "^node0: nvidia-smi .* No such file or directory"]
        )
        assert "or --cpu, to train on CPUs" in jobs[0].output


def test_a_gpu_that_torch_counts_and_cannot_use(preflight, monkeypatch):
    monkeypatch.setattr(preflight.torch.accelerator, "device_count", lambda: 99)
    monkeypatch.setattr(preflight.torch.accelerator, "is_available", lambda: False)
    kind, what, _ = next(preflight.gpu_findings())
    assert kind == "FAIL" and what.startswith("there are 99 GPUs, and torch ")


OK = "Not Active"
THROTTLE = "clocks_event_reasons.hw_slowdown"


@pytest.mark.parametrize(
    "answer, unknown, said",
    [
        (f"0, 0, 16, 16, {OK}, {OK}, {OK}\n1, 0, 16, 16, {OK}, {OK}, {OK}", (), []),
        (f"0, [N/A], [N/A], [N/A], [N/A], {OK}, [Not Supported]", (), []),
        (f"5, 2, 16, 16, {OK}, {OK}, {OK}", (), ["FAIL GPU 5 has 2 uncorrected"]),
        (f"5, 0, 8, 16, {OK}, {OK}, {OK}", (), ["warn GPU 5 uses 8 PCIe lanes of 16"]),
        (
            f"5, 0, 16, 16, Active, {OK}, Active",
            (),
            ["FAIL its hardware slows GPU 5 down: hw_slowdown, hw_power_brake"],
        ),
        (
            f"5, 0, 16, 16, Active, {OK}, {OK}",
            [THROTTLE],
            ["FAIL its hardware slows GPU 5 down: hw_slowdown"],
        ),
        (
            f"5, 4, 16, 16, {OK}, {OK}",
            [THROTTLE, THROTTLE.replace("event", "throttle")],
            [
                "warn nvidia-smi does not say all of the GPUs: it does not know clocks",
                "FAIL GPU 5 has 4 uncorrected",
            ],
        ),
    ],
)
def test_nvidia_smi(preflight, monkeypatch, tmp_path, answer, unknown, said):
    monkeypatch.setenv("PATH", plant_nvidia_smi(tmp_path, answer, *unknown))
    # On a machine with GPUs, the first finding is that these tests hide them.
    found = [
        finding for finding in preflight.gpu_findings() if "can use" not in finding[1]
    ]
    assert len(found) == len(said), found
    for (kind, what, _), start in zip(found, said, strict=True):
        assert f"{kind} {what}".startswith(start)


def test_nvidia_smi_that_fails(preflight, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU is lost\nexit 15\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    kind, what, _ = list(preflight.gpu_findings())[-1]
    assert kind == "warn" and what.endswith(": GPU is lost")


@pytest.mark.waits
@on_hosts
def test_one_direction_is_blocked(tmp_path):
    with Hosts(2, tmp_path) as hosts:
        hosts[1].run("tc", "qdisc", "add", "dev", "eth0", "ingress")
        block = ["tc", "filter", "add", "dev", "eth0", "ingress", "bpf"]
        hosts[1].run(*block, "direct-action", "bytecode", NO_SYN)
        command = [*TORCHRUN, "--nnodes=2", "--max-restarts=1", SCRIPT, "--cpu"]
        jobs = [host.start(command, **QUIET) for host in hosts]
        assert [job.wait() for job in jobs] == [1, 1], jobs[0].output
        assert_found(
            jobs[0],  # once: a restart does not say it again
            [
                r"^--max-restarts: a restart may read what the attempt before",
                r"^node0 cannot connect to node1: no answer from 10\.77\.0\.2:\d+: ",
            ],
        )
        assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in jobs[0].output
        assert "try   on node1, all ports: ufw allow from 10.77.0.1" in jobs[0].output


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
            assert f"try   {cure}" in jobs[number].output
            assert f"try   on node{number}: {cure}" in jobs[0].output
        assert_found(jobs[0], patterns)


def test_a_name_that_leads_to_this_host_itself(preflight):
    connection, why, cure = preflight.roll_call.probe_port("localhost", 29500)
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
def test_hosts_without_a_name_of_their_own(tmp_path):
    with Hosts(5, tmp_path) as hosts:
        for host in hosts[1:3]:
            plant_names(host, f"127.0.0.1 localhost {host.name}\n10.77.0.1 node0\n")
        for host in hosts[3:]:
            plant_names(host, "10.77.0.1 node0\n")
        flags = ["--nnodes=6", "--wait=3", "--rdzv-backend=c10d"]
        command = with_roll_call(hosts, *flags)
        cured = ["--local-addr=10.77.0.3"]
        cured_too = ["--local-addr=10.77.0.5", "--rdzv-conf=is_host=false"]
        ends = [], [], cured, [], cured_too
        jobs = start_endpoint_last(hosts, *[[*command, *end] for end in ends])
        assert [job.wait() for job in jobs] == [1] * 5, jobs[0].output
        unknown = r"^node3 cannot resolve its own name: torchrun would crash or hang$"
        count, *named = findings(jobs[0])
        assert count == "5 of 6 hosts came in 3 s: node0, node1, node2, node3, node4"
        assert len(named) == 2, named
        assert "node1 would tell the others to connect to localhost" in named
        assert re.search(unknown, max(named))
        assert "in torchrun's line: --local-addr=10.77.0.2" in jobs[0].output
        assert_found(jobs[3], [unknown, "^node3 came, but not all is well"])
        flags = "--local-addr=10.77.0.4 --rdzv-conf=is_host=false"
        assert f"10.77.0.4 node3' >> /etc/hosts; or in torchrun's line: {flags}" in (
            jobs[3].output
        )
        assert findings(jobs[4]) == ["node4 came, but not all is well: see node0"]
        # Of a single host, too: torchrun would hang.
        job = hosts[3].start([sys.executable, SCRIPT, "--standalone", "--timeout=5"])
        assert job.wait() == 1
        assert_found(job, [unknown])
        assert "in torchrun's line: --local-addr=10.77.0.4" in job.output


@pytest.mark.waits
@on_hosts
def test_a_clock_that_is_ahead(tmp_path):
    with Hosts(2, tmp_path) as hosts:
        # A third one never comes, so that this ends with the roll call in any case.
        command = with_roll_call(hosts, "--nnodes=3", "--wait=3")
        ahead = with_fault(tmp_path, "preflight_clock")
        jobs = [hosts[0].start(command), hosts[1].start(command, **ahead)]
        assert [job.wait() for job in jobs] == [1, 1], jobs[0].output
        clock = r"^node1: its clock is (99|100) s ahead$"
        assert_found(jobs[0], [clock, "^2 of 3 hosts came in 3 s: node0, node1$"])
        assert_found(jobs[1], ["^node1 came, but not all is well: see node0$"])


@pytest.mark.skipif(not shutil.which("scontrol"), reason="there is no Slurm")
def test_slurm_names_the_hosts(preflight, tmp_path, monkeypatch):
    (tmp_path / "slurm.conf").write_text("ClusterName=c\nSlurmctldHost=node0\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[0-1]")
    names_of_hosts = preflight.roll_call.names_of_hosts
    assert names_of_hosts("", 2) == ["node0", "node1"]
    assert names_of_hosts("", 1) == []  # the job has nodes to spare


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


@pytest.mark.parametrize("count", [2, 3, 4, 5, 100])
@pytest.mark.parametrize("local_count", [2, 8])
def test_every_card_is_paired(preflight, count, local_count):
    for local_rank in range(local_count):
        for index in range(count):
            others = set(preflight.partners(count, index, local_rank, local_count))
            assert others - {None, index}


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
    assert "--timeout" in bad("--timeout=0", "--nnodes=2", endpoint)
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
    command = [sys.executable, SCRIPT, "--nproc-per-node=3", "--standalone"]
    command += ["--timeout=16", "--cpu"]
    fault = with_fault(tmp_path, "preflight_broken")
    done = processes.run(command, tmp_path, **fault)
    assert done.returncode == 1, done
    for what in (
        r"rank 1 on \S+, allocating and computing on cpu: RuntimeError: planted",
        r"rank 0 on \S+, waiting for facts: DistStoreError: wait timeout after 8000ms",
        r"rank 2 did not fail: all others probably wait for it",
        r"rank 2 on \S+, .*: stuck: all checks may take 16 s",
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
