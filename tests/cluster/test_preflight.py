"""cluster/preflight.py on hosts with planted faults: each is named, and no other."""

import re

import pytest

from tests.helpers.needs import needs_hosts
from tools.run.hosts import PATH, Hosts
from tools.run.launch import copy_script
from tools.run.processes import Program
from tools.scripts import ROOT

pytestmark = [pytest.mark.waits, needs_hosts]
NAME = "cluster/preflight.py"
QUIET = {"PYTHONWARNINGS": "ignore"}

# Drops every TCP packet to a port above 30000 that has SYN and not ACK: classic BPF.
FIREWALL = """
no_syn='9,48 0 0 23,21 0 6 6,48 0 0 47,84 0 0 18,21 0 3 2,40 0 0 36,53 0 1 30000'
tc qdisc add dev eth0 ingress
tc filter add dev eth0 ingress bpf direct-action bytecode "$no_syn,6 0 0 2,6 0 0 0"
"""
# InfiniBand ports in these states; no other card says anything.
PORTS = """
mount -t tmpfs tmpfs /sys/class
for state; do
    number=$((number + 1))
    port=/sys/class/infiniband/mlx5_$number/ports/1
    mkdir -p $port
    echo "$state" > $port/state
    echo "400 Gb/sec (4X NDR)" > $port/rate
done
"""
# Little shared memory, and two GPUs, as the NVIDIA driver shows them, whatever torch
# sees.
LITTLE_MEMORY_AND_GPUS = """
mount -t tmpfs -o size=64m tmpfs /dev/shm
mount -t tmpfs tmpfs /proc/driver
mkdir -p /proc/driver/nvidia/gpus/0 /proc/driver/nvidia/gpus/1
"""
# For each GPU its name, whether hardware slows it, and its errors.
NVIDIA_SMI = """#!/bin/sh
gpu() {
    echo "
GPU $1
        HW Slowdown                   : $2
            HW Thermal Slowdown       : Not Active
        Volatile
            DRAM Correctable          : 7
            DRAM Uncorrectable        : $3
        Aggregate
            DRAM Uncorrectable        : 5"
}
gpu well "Not Active" N/A
gpu hot Active 0
gpu bad "" 2
"""
LISTEN = """
import socket
import time
server = socket.create_server(("", 29500))
print("ready", flush=True)
time.sleep(600)
"""
NAMES = "".join(f"10.77.0.{number + 1} node{number}\n" for number in range(5))


def start_check(host, count, flags, script=ROOT / NAME, **env):
    """Type the command for `count` hosts on one of them."""
    names = ",".join(f"node{number}" for number in range(count))
    words = f"python {script} --hosts={names} --nnodes={count}"
    words += f" --rdzv-backend=c10d --rdzv-endpoint=node0:29500 {flags}"
    return host.start(words.split(), **(QUIET | env))


def found_by(*jobs):
    """What is bad in what the first host prints, in order. All end with 1."""
    for job in jobs:
        assert job.finish().returncode == 1, jobs[0].output
    return re.findall(r"(?m)^(?:FAIL|warn)  +(.*)", jobs[0].output)


def assert_match(found, patterns):
    """Each line begins as the pattern in the same line says; that is all."""
    patterns = patterns.split("\n")
    assert len(found) == len(patterns), found
    for line, pattern in zip(found, patterns, strict=True):
        assert re.match(pattern, line), found


def plant_names(host, text):
    """Give it an /etc/hosts of its own."""
    file = host.folder / f"{host.name}.hosts"
    file.write_text(text)
    host.run("mount", "--bind", file, "/etc/hosts")


FAULTS_OF_A_HOST = r"""node1 has torch 1\.2\.3, the others have
node1 has InfiniBand \[400\.0\], the others have \[400\.0, 400\.0\]
node0: its own name, node0, is 127\.0\.1\.1 there
node0: --max-restarts: a restart may read what the attempt before
node1: there is no interface ib0, and there is lo, eth0; others could
node1: /dev/shm has 64 MiB, and may need 256 MiB
node1: there are 2 GPUs, and torch \S+ can use none$
node1: GPU hot says HW Slowdown : Active$
node1: GPU bad says DRAM Uncorrectable : 2$
slow link, rank 0 on node0 to rank 1 on node1: [01]\.\d+ Gbit/s; 10 expected
rank 1 on node1 multiplies wrongly
rank 1 .*: all-reduce is wrong: bfloat16, float32 \(gloo group\)$
slow link, rank 1 on node1 to rank 0 on node0: [01]\.\d+ Gbit/s; 10 expected"""


def test_faults_of_a_host(tmp_path):
    with Hosts(2, tmp_path) as hosts:
        node0, node1 = hosts
        plant_names(node0, "127.0.1.1 node0\n10.77.0.2 node1\n")  # as Debian does
        node0.run("sh", "-ec", PORTS, "sh", "4: ACTIVE", "4: ACTIVE")
        node1.run("sh", "-ec", PORTS, "sh", "4: ACTIVE", "1: DOWN")
        node1.slow("1gbit")
        node1.run("sh", "-ec", LITTLE_MEMORY_AND_GPUS)
        smi = tmp_path / "nvidia-smi"
        smi.write_text(NVIDIA_SMI)
        smi.chmod(0o755)
        sums = "            dist.all_reduce(mine, group=group)\n"
        of_one_type = "torch.float32 if group else torch.bfloat16"
        wrong = copy_script(
            NAME,
            tmp_path / "copy",
            ("str(torch.__version__)", "'1.2.3'"),
            ("ones @ ones", "ones @ ones + 1"),
            (sums, f"{sums}            mine[77] += dtype == ({of_one_type})\n"),
        )
        job0 = start_check(node0, 2, "--cpu --max-restarts=1")
        env = {"GLOO_SOCKET_IFNAME": "ib0", "PATH": f"{tmp_path}:{PATH}"}
        job1 = start_check(node1, 2, "", script=wrong, **env)
        assert_match(found_by(job0, job1), FAULTS_OF_A_HOST)
        assert found_by(job1) == []
        assert "try   on node0: export GLOO_SOCKET_IFNAME=eth0" in job0.output
        assert "this cluster can NOT train as it is: 1 warnings" in job0.output


def test_a_slow_card(tmp_path):
    with Hosts(2, tmp_path) as hosts:
        # Both have a limit, so low that a busy machine cannot halve the speed.
        for host in hosts:
            host.slow("200mbit")
        send = "                dist.send(data, peer)\n"
        wait = "                time.sleep(0.7 * (me == 3))\n"
        slow = copy_script(NAME, tmp_path / "copy", (send, wait + send))
        flags = "--link-gbit=0.2 --cpu --nproc-per-node=2"
        job0 = start_check(hosts[0], 2, flags)
        job1 = start_check(hosts[1], 2, flags, script=slow)
        link = r"slow link, rank 3 on node1 to rank 1 on node0: 0\.0\d Gbit/s; 0\.2 "
        assert_match(found_by(job0, job1), link)
        assert "on node1: ethtool eth0; iperf3 -c 10.77.0.1" in job0.output


WHO_IS_MISSED = r"""node3 did not come: something else listens at port 29500$
node4 did not come: node4:29500 .* is up, but nothing listens there$
node5 did not come: (no answer from node5:29500 |.*No route to host)
node6 did not come: node0 does not know the name node6$
node0 cannot connect to node1, which is 10\.77\.0\.2: no answer from node1:\d{5} \(10
node2 cannot connect to node0, which is 10\.77\.0\.1: .*10\.77\.0\.99
node2 cannot connect to node1, which is 10\.77\.0\.2: .* or a firewall drops the port"""


def test_who_does_not_come_and_who_cannot_connect(tmp_path):
    """node1 has a firewall, which lets the endpoint's port through; node2 is mistaken.

    On node3 something else listens, on node4 nothing is started, node5 is off, and
    nobody knows node6.
    """
    with Hosts(6, tmp_path) as hosts:
        node0, node1, node2, node3, _, node5 = hosts
        node1.run("sh", "-ec", FIREWALL)
        plant_names(node2, NAMES.replace("10.77.0.1", "10.77.0.99"))
        node3.start(["python", "-c", LISTEN]).wait_for("ready")
        node5.unplug()
        jobs = [
            start_check(host, 7, "--wait=15 --cpu") for host in (node0, node1, node2)
        ]
        assert_match(found_by(*jobs), WHO_IS_MISSED)
        assert "nc -vz 10.77.0.2" in jobs[0].output


NAMES_AND_CLOCKS = r"""node1: it would tell the others to connect to localhost$
node2: it does not know its own name: torchrun would crash or hang$
node4: torchrun would take it for the endpoint, node0$
node4: its clock is (99|100) s ahead$"""


def test_names_and_clocks(tmp_path):
    with Hosts(5, tmp_path) as hosts:
        node0, node1, node2, node3, node4 = hosts
        # Before all others: nothing is started at the endpoint.
        job = start_check(node1, 5, "--wait=1 --cpu")
        nobody = "node1 cannot meet node0: node0:29500 .* is up, but nothing"
        assert_match(found_by(job), nobody)
        plant_names(node1, f"127.0.0.1 localhost node1\n{NAMES}")
        plant_names(node2, NAMES.replace("10.77.0.3 node2\n", ""))
        plant_names(node3, NAMES.replace("10.77.0.4 node3\n", ""))
        plant_names(node4, "10.77.0.5 node4 node0\n")
        cure = "--local-addr=10.77.0.4 --rdzv-conf=is_host=false"
        now = '"time": time.time()'
        ahead = copy_script(NAME, tmp_path / "copy", (now, f"{now} + 100"))
        jobs = [start_check(host, 5, "--cpu") for host in (node0, node1, node2)]
        jobs.append(start_check(node3, 5, f"--cpu {cure}"))
        jobs.append(start_check(node4, 5, "--cpu", script=ahead))
        found = found_by(*jobs)
        wrong = "node4 cannot connect to node0, which is 10.77.0.1: on node4 the name "
        assert f"{wrong}node0 is 10.77.0.5, that of node4 itself" in found
        follows = "cannot connect|own name,"
        others = [line for line in found if not re.search(follows, line)]
        assert_match(others, NAMES_AND_CLOCKS)
        flags = "in torchrun's line: --local-addr=10.77.0.3 --rdzv-conf=is_host=false"
        assert f"10.77.0.3 node2' >> /etc/hosts; or {flags}" in jobs[0].output


def test_bad_input(tmp_path):
    hosts = "--hosts=node0,node1 --rdzv-endpoint=node0:29500 --nnodes=2"
    for said, words, env in (
        ("torchrun: ", "--nnodes=two", {}),
        ("no script", f"{hosts} multinode.py 50", {}),
        ("no script", "", {"LOCAL_RANK": 0}),  # as torchrun starts it
        ("has to name all, this host", hosts, {}),
    ):
        words = ["python", ROOT / NAME, *words.split()]
        done = Program(words, tmp_path, **QUIET, **env).end_with(2)
        assert not done.stdout
        assert re.fullmatch(f"preflight.py: error: .*{said}.*\n", done.stderr)


def test_a_process_that_fails_or_hangs_says_so(tmp_path):
    planted = """    if rank == 1:
        raise RuntimeError("planted")
    if rank == 2:
        time.sleep(1000)  # until it is ended
"""
    computes = "    ones = torch.ones(size, size, device=device)\n"
    script = copy_script(NAME, tmp_path / "copy", (computes, planted + computes))
    words = f"python {script} --nproc-per-node=3 --standalone --timeout=24 --cpu"
    done = Program(words.split(), tmp_path, real=True, **QUIET).end_with(1)
    for what in (
        r"rank 1 on \S+, allocating and computing on cpu: RuntimeError: planted",
        r"rank 0 on \S+, connecting all processes \(gloo\), .*: Dist",
        r"rank 2 on \S+, allocating and .*: stuck: all checks may take 24 s",
    ):
        assert re.search(rf"(?m)^FAIL  {what}", done.stdout), done.stdout
