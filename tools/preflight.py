"""Say in about a minute whether this cluster can train, and what to type if it cannot.

Type on every host what starts your training, with this file instead of the script:

    torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d \\
        --rdzv-endpoint=node0:29500 tools/preflight.py

torchrun starts no script before all hosts have come, so nothing can say who is missing.
Type `python tools/preflight.py` instead of `torchrun`, and the hosts first call the
roll at the endpoint and name the missing ones. If all came, torchrun is started:

    python tools/preflight.py --hosts node0,node1 --nnodes=2 --nproc-per-node=2 \\
        --rdzv-backend=c10d --rdzv-endpoint=node0:29500

Under Slurm --hosts is known. Rank 0 prints the report: `FAIL` is what makes a training
hang, crash, be wrong or much too slow; `warn` is what may; `try` is what to type next.
Exit status: 0 nothing failed, 1 a check failed, 2 the input is bad. To run it, copy the
folder tools to the cluster. It needs nothing but torch and Linux. IPv4 only.
"""

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import types
from datetime import timedelta
from pathlib import Path

import roll_call
from roll_call import COUNTS, bad_input, ok_if_all_is, resolve, say

# torchrun sets LOCAL_RANK (RANK, Kubernetes operators do as well). The roll call needs
# no torch, so that it is quick, and works where torch does not.
if "LOCAL_RANK" in os.environ:
    import torch
    import torch.distributed as dist

SHM_MIB = 256  # for each process; Docker gives 64 to a whole container
DTYPES = ("float32", "bfloat16", "int64")
MUST_AGREE = ("torch", "CUDA", "NCCL", "backend", "InfiniBand")  # on all hosts
SHOULD_AGREE = ("driver", "Python", "device", "network card")
ROUNDS = 8  # of pairs that are measured, shared out among a host's processes
MESSAGES = 4  # in each direction of a pair; the quickest counts
MEASURE_S = 5  # that all rounds together may take, at the all-reduce's rate
TCP_GBIT = 10  # one connection seldom fills a faster card
MOST_LINES = 8  # of slow links
ECC, LANES = "ecc.errors.uncorrected.volatile.total", "pcie.link.width"
HARDWARE = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")


# --- What this host is: nothing here speaks to another host


def read(path, default):
    try:
        return Path(path).read_text().strip() or default
    except OSError:  # the kernel refuses some files of a card that is down
        return default


def infiniband_ports():
    """{port: (state, Gbit/s)} of this host's InfiniBand and RoCE ports."""
    found = {}
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        state = read(port / "state", "unknown").split()[-1]  # 4: ACTIVE
        rate = read(port / "rate", "0").split()[0]  # 400 Gb/sec (4X NDR)
        found[f"{port.parts[4]}/{port.name}"] = state, float(rate)
    return found


def ask_nvidia_smi(fields):
    """([{field: value} of each GPU], why not all could be asked)."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}"]
    command += ["--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], str(error)
    output = f"{done.stdout}{done.stderr}".strip()
    unknown = re.search(r'Field "(.+?)" is not a valid field', output)
    if unknown and "_event_" in unknown[1]:  # older drivers call it so:
        return ask_nvidia_smi([x.replace("_event_", "_throttle_") for x in fields])
    if unknown:
        gpus, why = ask_nvidia_smi([x for x in fields if x != unknown[1]])
        return gpus, why or f"it does not know {unknown[1]}"
    if done.returncode:
        return [], output.splitlines()[-1] if output else f"status {done.returncode}"
    rows = [line.split(", ") for line in output.splitlines()]
    return [dict(zip(fields, row, strict=False)) for row in rows], ""


def gpu_findings():
    """(kind, what, cure) of GPUs that torch cannot use, and that are not well."""
    files = [*Path("/proc/driver/nvidia/gpus").glob("*")]
    files = files or [*Path("/dev").glob("nvidia[0-9]*")]
    count = max(len(files), torch.accelerator.device_count())
    if count and not torch.accelerator.is_available():
        cure = "nvidia-smi; python -m torch.utils.collect_env"
        if not (torch.version.cuda or torch.version.hip):
            cure = "install a torch that is built for GPUs (https://pytorch.org)"
        what = f"there are {count} GPUs, and torch {torch.__version__} can use none"
        yield "FAIL", what, f"{cure}; or --cpu, to train on CPUs"
    if not files and not shutil.which("nvidia-smi"):
        return  # no NVIDIA GPUs
    fields = ["index", ECC, f"{LANES}.current", f"{LANES}.max"]
    fields += [f"clocks_event_reasons.{name}" for name in HARDWARE]
    gpus, why = ask_nvidia_smi(fields)
    if why:
        yield "warn", f"nvidia-smi does not say all of the GPUs: {why}", "nvidia-smi -q"
    for gpu in gpus:
        name, cure = f"GPU {gpu['index']}", f"nvidia-smi -q -i {gpu['index']}"
        numbers = {key: int(x) for key, x in gpu.items() if x.isdecimal()}  # no [N/A]
        if errors := numbers.get(ECC):
            yield "FAIL", f"{name} has {errors} uncorrected memory errors (ECC)", cure
        if slowed := [key.split(".")[1] for key in gpu if gpu[key] == "Active"]:
            yield "FAIL", f"its hardware slows {name} down: {', '.join(slowed)}", cure
        # The width: an idle GPU lowers the link's generation, and keeps its lanes.
        lanes, most = (numbers.get(f"{LANES}.{x}", 0) for x in ("current", "max"))
        if lanes < most:
            yield "warn", f"{name} uses {lanes} PCIe lanes of {most}", cure


def host_findings(backend, processes, devices, shm, cpu):
    """(kind, what, cure) of what is wrong with this host, whatever the others are."""
    need, cores = processes * SHM_MIB, len(os.sched_getaffinity(0))
    if shm < need:
        cure = f"docker run --shm-size={need}m; mount -o remount,size={need}m /dev/shm"
        yield "FAIL", f"/dev/shm has {shm} MiB, and may need {need} MiB", cure
    if (threads := torch.get_num_threads()) * processes > cores:
        cure = f"export OMP_NUM_THREADS={max(1, cores // processes)}"
        yield "warn", f"{processes} x {threads} threads on {cores} cores", cure
    if processes > devices > 0:
        what = f"{processes} processes for {devices} devices"
        yield "FAIL", what, f"--nproc-per-node={devices}"
    if not cpu:
        yield from gpu_findings()
    for port, (state, _) in infiniband_ports().items():
        if state != "ACTIVE":
            what = f"the InfiniBand port {port} is {state}"
            yield "warn", what, f"ibstat {port.partition('/')[0]}"
    for name in sorted({backend, "gloo"}):
        interface, _, complaint = roll_call.choose_interface(name)
        if complaint and processes < int(os.environ["WORLD_SIZE"]):
            cure = f"export {name.upper()}_SOCKET_IFNAME={interface}"
            yield "FAIL", f"{complaint}; others could not connect to that", cure


def host_facts(backend, device, cpu):
    """What rank 0 needs to know of a host, as JSON can carry it."""
    processes = int(os.environ["LOCAL_WORLD_SIZE"])
    devices = 0 if device.type == "cpu" else torch.accelerator.device_count()
    shm = shutil.disk_usage("/dev/shm").total >> 20
    interface, address, _ = roll_call.choose_interface(backend)
    card = 0
    if os.path.exists(f"/sys/class/net/{interface}/device"):  # a virtual one may lie
        card = max(0, int(read(f"/sys/class/net/{interface}/speed", "0"))) / 1000
    ports = infiniband_ports().values()
    active = sorted(gbit for state, gbit in ports if state == "ACTIVE")
    expected = min(active, default=card)
    if backend == "gloo" or not active:  # NCCL alone speaks InfiniBand
        expected = min(expected, TCP_GBIT)
    rates = [f"{active.count(gbit)} x {gbit:g} Gbit/s" for gbit in sorted(set(active))]
    about = f"{devices} GPUs, {len(os.sched_getaffinity(0))} cores"
    facts = {
        "name": socket.gethostname(),
        "fqdn": os.environ.get("PREFLIGHT_NAME") or socket.getfqdn(),
        "address": address,
        "interface": interface,
        "addresses": list(roll_call.interfaces().values()),
        "about": f"{address} on {interface}, {about}, /dev/shm {shm} MiB",
        "findings": list(host_findings(backend, processes, devices, shm, cpu)),
        "expected": expected,  # Gbit/s to another host; 0 if no port says any
        "crowded": processes > devices > 0,
        "device": "CPU",
        "backend": backend,
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda or torch.version.hip or "none",
        "NCCL": "none",
        "driver": read("/sys/module/nvidia/version", "none"),
        "Python": platform.python_version(),
        "network card": f"{card:g} Gbit/s" if card else "unknown",
        "InfiniBand": ", ".join(rates) or "none",
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        facts["device"] = f"{gpu.name} {gpu.total_memory >> 30} GiB"
        if dist.is_nccl_available():
            facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


# --- The checks: in the processes that torchrun has started


def choose_device(local_rank, cpu):
    """What the training would use: utils.get_device."""
    if cpu or not torch.accelerator.is_available():
        return torch.device("cpu")
    index = local_rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(torch.accelerator.current_accelerator().type, index)


def synchronize(device):
    if device.type != "cpu":
        torch.accelerator.synchronize()


def wrong_sums(rank, world_size, device, group=None):
    """Dtypes that all_reduce adds up wrongly, of sums that each of them has exactly."""
    # Each element is the same number from two ranks, and 0 from all others.
    wrong, index = [], torch.arange(10_000, device=device)
    number = index % 64
    for name in DTYPES:
        dtype = getattr(torch, name)
        mine = (number * ((index - rank) % world_size < 2)).to(dtype)
        dist.all_reduce(mine, group=group)
        if not torch.equal(mine, (number * min(2, world_size)).to(dtype)):
            wrong.append(name)
    return wrong


def all_reduce_seconds(device, size):
    """Of an all-reduce of `size` bytes, the same on all ranks."""
    data, seconds = torch.ones(size // 4, device=device), []
    for _ in range(4):  # the first opens connections
        start = time.perf_counter()
        dist.all_reduce(data)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    took = torch.tensor(min(seconds), device=device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


def partners(count, index, local_rank=0, local_count=1):
    """With whom of `count` hosts host `index` is paired, one round after the other.

    In each round the numbers of a pair add up to the same: so the pairs are disjoint.
    Who would be its own partner sits out: None. Two rounds are enough to pair all.
    """
    rounds = min(count, max(2, ROUNDS // local_count))
    for turn in range(local_rank * rounds, (local_rank + 1) * rounds):
        other = (turn - index) % count
        yield None if other == index else other


def measure(device, peer, begins, size):
    """Gbit/s of messages of `size` bytes to `peer`. Each sends in turn; one begins."""
    data, token = torch.ones(size // 4, device=device), torch.ones(1, device=device)
    best = float("inf")
    for turn in range(2 + 2 * MESSAGES):  # the first two open the connection
        message, sends = data if turn > 1 else token, begins == (turn % 2 == 0)
        start = time.perf_counter()
        if sends:
            dist.send(message, peer)
            dist.recv(token, peer)
        else:
            dist.recv(message, peer)
            dist.send(token, peer)
        synchronize(device)
        if sends and turn > 1:
            best = min(best, time.perf_counter() - start)
    return size * 8e-9 / best


def measure_links(device, ranks, me, bytes_per_s, cpu_group):
    """{rank: Gbit/s to it} from `me` to ranks of other hosts with its own local rank.

    One local rank after the other, so that no two share a host's way out.
    """
    speeds, local_count = {}, max(rank.local_rank for rank in ranks) + 1
    for local_rank in range(local_count):
        peers = [rank.rank for rank in ranks if rank.local_rank == local_rank]
        if me in peers:
            index = peers.index(me)
            others = list(partners(len(peers), index, local_rank, local_count))
            messages = 2 * MESSAGES * len(others) * local_count
            size = min(16 << 20, int(bytes_per_s * MEASURE_S / messages) // 4 * 4)
            for other in [other for other in others if other is not None]:
                gbit = measure(device, peers[other], index < other, max(4, size))
                speeds[peers[other]] = gbit
        dist.barrier(group=cpu_group)
    return speeds


# --- What rank 0 makes of it


def report_hosts(hosts, ranks):
    """A line for each host, in what they differ, and what is wrong with each."""
    say("", f"{len(hosts)} hosts, {len(ranks)} processes, {hosts[0].backend}")
    keys = MUST_AGREE + SHOULD_AGREE
    for host in hosts:
        facts = ", ".join(f"{key} {getattr(host, key)}" for key in keys)
        say("", f"{host.name}: {host.about}, {facts}")
    with ok_if_all_is(f"the same on all hosts: {', '.join(keys)}"):
        for key in keys:
            values = [getattr(host, key) for host in hosts]
            usual = max(values, key=values.count)  # in a tie, what rank 0's host has
            for host in hosts:
                if (value := getattr(host, key)) != usual:
                    what = f"{host.name} has {key} {value}, the others have {usual}"
                    cure = f"on {host.name}: python -m torch.utils.collect_env; ibstat"
                    say("FAIL" if key in MUST_AGREE else "warn", what, cure)
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        what = "--max-restarts: a restart may read what the attempt before it stored"
        say("warn", what, "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
    checked = "shared memory, threads, devices, ports, own names, matrix products"
    with ok_if_all_is(checked):
        for host in hosts:
            for kind, what, cure in host.findings:
                say(kind, f"{host.name}: {what}", f"on {host.name}: {cure}")
        for rank in ranks:
            if not rank.right:
                cure = f"on {rank.host}: nvidia-smi -q; dmesg | grep -i xid"
                say("FAIL", f"rank {rank.rank} on {rank.host} multiplies wrongly", cure)


def report_network(hosts):
    """Wrong names, and connections that fail."""
    with ok_if_all_is(f"{len(hosts)} hosts know each other's names, and can connect"):
        for host, (index, other) in itertools.product(hosts, enumerate(hosts)):
            address, why = host.resolved[index], host.calls[index]
            if address not in other.addresses and host is not other:
                what = f"on {host.name} the name {other.fqdn} is {address or 'unknown'}"
                cure = f"on {host.name}: getent hosts {other.fqdn}; cat /etc/hosts"
                kind = "FAIL" if address else "warn"
                say(kind, f"{what}, and {other.name} is {other.address}", cure)
            if why:
                what = f"{host.name} cannot connect to {other.name}"
                cure = f"on {other.name}, all ports: ufw allow from {host.address}"
                say("FAIL", f"{what}: {why}", cure)


def report_links(host_of, links, link_gbit):
    """host_of: {rank: its host}. links: {(rank, rank): Gbit/s}."""
    slow = []
    for (a, b), speed in links.items():
        ports = min(host_of[a].expected, host_of[b].expected)
        expected, source = ports, "from the ports' speed"
        if link_gbit or not ports:
            expected, source = link_gbit or 1, "--link-gbit"
        if speed < expected / 2:
            slow.append((speed, a, b, f"{expected:g} expected ({source})"))
    between = f"{min(links.values()):.2f} to {max(links.values()):.2f} Gbit/s"
    with ok_if_all_is(f"{len(links)} links between hosts, {between}"):
        for speed, a, b, expected in sorted(slow)[:MOST_LINES]:
            x, y = host_of[a], host_of[b]
            what = f"slow link, rank {a} on {x.name} to rank {b} on {y.name}"
            cure = f"on {x.name}: ethtool {x.interface}; iperf3 -c {y.address}"
            if x.backend == "nccl":
                cure += "; NCCL_DEBUG=INFO says which network it uses"
            say("FAIL", f"{what}: {speed:.2f} Gbit/s; {expected}", cure)
        if len(slow) > MOST_LINES:
            say("", f"{len(slow)} of {len(links)} links are slow; these are the worst")


class Board:
    """The store as a notice board: each rank puts up what it found, under a title.

    doing, cure: what this process is at, and what to type if it fails there.
    """

    def __init__(self, rank):
        self.rank, self.who = rank, f"rank {rank} on {socket.gethostname()}"
        self.store, self.doing, self.cure = None, "the start", "nvidia-smi"

    def put(self, title, value):
        self.store.set(f"{title}/{self.rank}", json.dumps(value))

    def read(self, title, ranks):
        """[what each of `ranks` put], once all have."""
        self.doing, self.cure = f"waiting for {title}", "py-spy dump --pid PID"
        found = self.store.multi_get([f"{title}/{rank}" for rank in ranks])
        return [json.loads(value) for value in found]

    def fail(self, why):
        """Whichever rank it is says it itself: nobody else may be there to do it."""
        say("FAIL", f"{self.who}, {self.doing}: {why}"[:400], self.cure)


def end_process(status):
    """End at once: a half-dead connection could hold up the usual exit."""
    verdict = os.environ.get("PREFLIGHT_VERDICT")
    if verdict and os.environ["LOCAL_RANK"] == "0":
        Path(verdict).write_text(str(status))
    sys.stdout.flush()
    os._exit(0 if verdict else status)


def check(args):
    """All checks, in each process that torchrun has started; the exit status."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    names += ("MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in os.environ]:
        bad_input(f"torchrun sets {', '.join(missing)}")
    rank, local_rank, world_size = (int(os.environ[name]) for name in names[:3])
    master, port = (os.environ[name] for name in names[4:])
    board, everybody = Board(rank), range(world_size)

    def stuck():
        board.fail(f"stuck: all checks may take {args.timeout:g} s (--timeout)")
        end_process(1)

    timer = threading.Timer(args.timeout, stuck)
    timer.daemon = True
    timer.start()
    try:
        board.doing = f"connecting to rank 0's store at {master}:{port}"
        board.cure = f"getent hosts {master}; nc -vz {master} {port}"
        step = timedelta(seconds=args.timeout / 2)
        board.store = next(dist.rendezvous("env://", timeout=step))[0]
        examine(args, board, local_rank, world_size)
    except Exception as error:  # whatever it is, the report says what it was doing
        board.fail(f"{type(error).__name__}: {error}".splitlines()[0])
        if not board.store:
            return 1
        with contextlib.suppress(dist.DistError):  # the store may be gone as well
            board.put("failed", "")
            if rank == 0:
                time.sleep(2)  # the others fail a moment later
                failed = [board.store.check([f"failed/{x}"]) for x in everybody]
                silent = [str(x) for x in everybody if not failed[x]]
                if silent:
                    what = f"rank {', '.join(silent)} did not fail"
                    what += ": all others probably wait for it"
                    say("FAIL", what, "on its host: py-spy dump --pid PID")
    try:
        if rank == 0:
            failed, warned = COUNTS["FAIL"], COUNTS["warn"]
            verdict = "can NOT train as it is" if failed else "can train"
            say("", f"this cluster {verdict}: {failed} failed, {warned} warnings")
            board.put("verdict", int(failed > 0))
        # Rank 0 may fail later than this rank.
        board.store.set_timeout(timedelta(seconds=args.timeout))
        (status,) = board.read("verdict", [0])
        board.put("bye", "")
        if rank == 0:  # the store may be in this process
            said = [f"bye/{rank}" for rank in everybody]
            board.store.wait(said, timedelta(seconds=5))
    except (dist.DistError, TimeoutError):  # somebody is gone
        status = 1
    return status


def examine(args, board, local_rank, world_size):
    """Every check in turn; rank 0 says what came of it. What cannot go on raises."""
    rank, everybody = board.rank, range(world_size)
    device = choose_device(local_rank, args.cpu)
    backend = dist.get_default_backend_for_device(device.type)
    board.doing, board.cure = f"allocating and computing on {device}", "nvidia-smi"
    mine = {"rank": rank, "local_rank": local_rank, "host": socket.gethostname()}
    ones = torch.ones(*[256 if device.type == "cpu" else 4096] * 2, device=device)
    mine["right"] = bool((ones @ ones == len(ones)).all())
    if local_rank == 0:  # it speaks for its host
        mine |= host_facts(backend, device, args.cpu)
        # Whoever connects is content with that: nobody needs to accept.
        listener = socket.create_server(("", 0), backlog=1024)
        mine["listens"] = (mine["address"], listener.getsockname()[1])
    board.put("facts", mine)
    ranks = [types.SimpleNamespace(**facts) for facts in board.read("facts", everybody)]
    hosts = [facts for facts in ranks if facts.local_rank == 0]

    if local_rank == 0:
        board.doing = "connecting to the other hosts"
        others = [host.rank != rank and host.listens for host in hosts]
        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            calls = pool.map(lambda x: x and roll_call.probe_port(*x)[1], others)
        names = [resolve(host.fqdn) for host in hosts]
        board.put("connections", {"calls": [*calls], "resolved": names})
    if rank == 0:
        found = board.read("connections", [host.rank for host in hosts])
        for host, more in zip(hosts, found, strict=True):
            vars(host).update(more)
        report_hosts(hosts, ranks)
        report_network(hosts)
        blocked = any(any(host.calls) for host in hosts)
        mixed = any(host.crowded or host.backend != backend for host in hosts)
        if blocked or mixed:
            say("", "all-reduce and bandwidth: not tried, fix the above first")
        board.put("go", not blocked and not mixed)
    if not board.read("go", [0])[0]:
        return

    for name in {backend, "gloo"}:
        interface, _, complaint = roll_call.choose_interface(name)
        if complaint:  # it is reported: go on as with the cure
            os.environ[f"{name.upper()}_SOCKET_IFNAME"] = interface
    board.doing = f"the first all-reduce ({backend})"
    board.cure = "export NCCL_DEBUG=INFO TORCH_CPP_LOG_LEVEL=INFO"
    step = timedelta(seconds=args.timeout / 2)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", board.store),
        rank=rank,
        world_size=world_size,
        # NCCL's own time-out would kill the process before it can say at what.
        timeout=step if backend == "gloo" else 4 * step,
    )
    wrong = wrong_sums(rank, world_size, device)
    # variants/preemptible.py needs gloo on GPUs as well: a second group, on the CPUs.
    board.doing = "the first all-reduce of a second group, on CPUs (gloo)"
    cpu_group = dist.new_group(timeout=step, backend="gloo")
    on_cpu = wrong_sums(rank, world_size, torch.device("cpu"), cpu_group)
    board.put("sums", wrong + [f"{name} (gloo group)" for name in on_cpu])
    board.doing = "measuring the all-reduce"
    size, speeds = 1 << 20, {}
    took = all_reduce_seconds(device, size)
    if len(hosts) > 1:
        board.doing = "measuring each link"
        speeds = measure_links(device, ranks, rank, size / took, cpu_group)
    board.put("speeds", speeds)
    if rank != 0:
        return
    with ok_if_all_is(f"all-reduce is right: {', '.join(DTYPES)}"):
        for other, dtypes in zip(ranks, board.read("sums", everybody), strict=True):
            if dtypes:
                what = f"rank {other.rank} on {other.host}: all-reduce is wrong:"
                say("FAIL", f"{what} {', '.join(dtypes)}")
    gbit = 2 * (world_size - 1) / world_size * size * 8e-9 / took  # of each, on a ring
    say("", f"all-reduce of 1 MiB: {took * 1e3:.2f} ms, {gbit:.2f} Gbit/s")
    found = zip(ranks, board.read("speeds", everybody), strict=True)
    links = {(a.rank, int(b)): gbit for a, x in found for b, gbit in x.items()}
    leaders = {host.rank: host for host in hosts}
    host_of = {rank.rank: leaders[rank.rank - rank.local_rank] for rank in ranks}
    if links:
        report_links(host_of, links, args.link_gbit)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = bad_input
    parser.add_argument("--hosts", default="", help="the names of all: node0,node1")
    for name, default, what in (
        ("--wait", 30, "seconds for all hosts to come (30)"),
        ("--timeout", 60, "seconds for all checks together (60)"),
        ("--link-gbit", 0, "Gbit/s from host to host; half will do (as ports say)"),
    ):
        number = {"type": float, "metavar": "N", "default": default}
        parser.add_argument(name, help=what, **number)
    parser.add_argument("--cpu", action="store_true", help="check without the GPUs")
    args, flags = parser.parse_known_args()
    if not args.wait > 0 or not args.timeout > 0 or not args.link_gbit >= 0:
        bad_input("--wait, --timeout and --link-gbit are numbers above 0")
    if "LOCAL_RANK" not in os.environ:
        words = [f"--link-gbit={args.link_gbit}", f"--timeout={args.timeout}"]
        words += ["--cpu"] if args.cpu else []
        sys.exit(roll_call.launch(args, flags, [__file__, *words]))
    if flags:
        bad_input(f"unknown: {' '.join(flags)}")
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        os._exit(1)  # the first attempt has said it
    end_process(check(args))


if __name__ == "__main__":
    main()
