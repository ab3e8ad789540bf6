"""Say in about a minute whether this cluster can train, and what to type if it cannot.

Type this on every host. The flags are those of your torchrun, without a script:

    python cluster/preflight.py --hosts node0,node1 --nnodes=2 --nproc-per-node=2 \\
        --rdzv-backend=c10d --rdzv-endpoint=node0:29500

The endpoint names the hosts that do not come, and compares those that come. Then
torchrun starts processes with your flags, which compute, add up and measure the links.
`FAIL` is what makes a training hang, crash, be wrong or much too slow; `warn` is what
may; `try` is what to type next. Exit status: 0 nothing failed, 1 a check failed, 2 the
input is bad. It needs torch, NumPy and Linux, and knows IPv4 only.
"""

import argparse
import contextlib
import fcntl
import json
import logging
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent import futures
from datetime import timedelta
from pathlib import Path

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # or torch tells how connections end
import torch
import torch.distributed as dist
from torch.distributed import run
from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.rendezvous import utils as rendezvous

CONNECT_S = 3  # a host that takes longer to answer is as good as away
SKEW_S = 5  # torchrun takes a host for dead whose clock is 15 s behind
SHM_MIB = 256  # for each process; Docker gives 64 to a whole container
TURNS = 4  # with so many others a process is measured
MESSAGES = 4  # and so often with each
TCP_GBIT = 10  # one connection seldom fills a faster card
COMPARED = {  # what must be the same on all hosts, and what else a difference is
    "torch": "FAIL",
    "CUDA": "FAIL",
    "NCCL": "FAIL",
    "backend": "FAIL",
    "InfiniBand": "FAIL",
    "device": "warn",
}
BAD_GPU = r"HW .*Slowdown +: Active|\w+ Uncorr.*: [1-9].*"  # in nvidia-smi's words
COUNTS = {"FAIL": 0, "warn": 0}  # of the findings that were printed


def show(findings, checked=""):
    """Print each (kind, what, cure), or that what was checked is well."""
    for kind, what, cure in findings:
        COUNTS[kind] += 1
        text = f"{kind:<6}{what}"
        if cure:
            text += f"\ntry   {cure}"
        print(text, flush=True)  # at once, because other processes print as well
    if checked and not findings:
        print(f"ok    {checked}", flush=True)


def resolve(name):
    """The IPv4 address of `name`, or "" if it has none here."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def interfaces():
    """{name: IPv4 address} of this host's network interfaces."""
    ask_address = 0x8915  # SIOCGIFADDR
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(any_socket, ask_address, request)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def choose_interface():
    """(interface, what is wrong): where gloo listens, by a variable or the own name."""
    there_are = interfaces()
    own = socket.gethostname()
    inward = ("lo", "docker", "virbr")
    outward = [name for name in there_are if not name.startswith(inward)]
    wanted = os.environ.get("GLOO_SOCKET_IFNAME")  # one name, and no ^docker
    if wanted:
        found = [name for name in there_are if name == wanted]
        wrong = f"there is no interface {wanted}, and there is {', '.join(there_are)}"
    else:
        found = [name for name in outward if there_are[name] == resolve(own)]
        wrong = f"its own name, {own}, is {resolve(own) or 'unknown'} there"
    first = [*found, *outward, "lo"][0]
    return first, "" if found else wrong


def probe_port(name, port):
    """(why `name` does not answer at `port`, what to type), or two empty strings."""
    address = resolve(name)
    own = socket.gethostname()
    if not address:
        return f"{own} does not know the name {name}", f"getent hosts {name}"
    if address.startswith("127.") or address in interfaces().values():
        why = f"on {own} the name {name} is {address}, that of {own} itself"
        return why, f"getent hosts {name}; cat /etc/hosts"
    there = f"{name}:{port} ({address})"
    try:
        socket.create_connection((address, port), CONNECT_S).close()
        return "", ""
    except ConnectionRefusedError:
        why = f"{there} is up, but nothing listens there"
        return why, f"on {name}, the same command as here"
    except TimeoutError:
        why = f"no answer from {there}: it is off, or a firewall drops the port"
    except OSError as problem:
        why = f"{there}: {problem.strerror}"
    return why, f"getent hosts {name}; ping -c 3 {address}; nc -vz {address} {port}"


def read(path):
    try:
        return Path(path).read_text().strip()
    except OSError:  # the kernel refuses some files of a card that is down
        return ""


def find_in_gpus():
    """Findings: GPUs that torch cannot use, and GPUs that are not well."""
    count = len([*Path("/proc/driver/nvidia/gpus").glob("*")])
    known = torch.accelerator.device_count()
    if (count or known) and not torch.accelerator.is_available():
        what = f"there are {count or known} GPUs, and torch {torch.__version__} can use"
        cure = "python -m torch.utils.collect_env (is this torch built for GPUs?)"
        yield "FAIL", f"{what} none", f"{cure}; or --cpu, to train on CPUs"
    _, *gpus = subprocess.getoutput("timeout 20 nvidia-smi -q").split("\nGPU ")
    for gpu in gpus:
        name = gpu.split()[0]
        now, _, _ = gpu.partition("Aggregate")  # without old memory errors
        for line in re.findall(BAD_GPU, now):
            said = " ".join(line.split())
            yield "FAIL", f"GPU {name} says {said}", f"nvidia-smi -q -i {name}"


def active_ports():
    """Gbit/s of the InfiniBand and RoCE ports that are up."""
    rates = []
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        if read(port / "state").endswith("ACTIVE"):  # 4: ACTIVE
            rate = read(port / "rate").split()[0]  # 400 Gb/sec (4X NDR)
            rates.append(float(rate))
    return rates


def describe_host(args, config, endpoint, is_endpoint):
    """What the endpoint needs to know of this host, and what is wrong with it."""
    findings = []
    interface, wrong = choose_interface()
    address = interfaces()[interface]
    own = socket.gethostname()

    def add(kind, what, cure):
        findings.append((kind, f"{own}: {what}", f"on {own}: {cure}"))

    several = config.max_nodes > 1
    announced = args.local_addr or socket.getfqdn()  # by torchrun, to the others
    c10d = several and args.rdzv_backend == "c10d"
    asks = c10d and "is_host" not in config.rdzv_configs  # whether it is the endpoint
    # torchrun's own answer, by a function that another PyTorch may not have
    is_host = getattr(rendezvous, "_matches_machine_hostname", None)
    cure = f"in torchrun's line: --local-addr={address}"
    if several and announced.startswith("localhost"):
        add("FAIL", "it would tell the others to connect to localhost", cure)
    elif not resolve(own) and (asks or not args.local_addr or is_endpoint):
        if c10d:
            cure += " --rdzv-conf=is_host=false"
        tell = f"echo '{address} {own}' >> /etc/hosts"
        cure = tell if own == endpoint else f"{tell}; or {cure}"
        add("FAIL", "it does not know its own name: torchrun would crash or hang", cure)
    elif asks and is_host and is_host(endpoint) != is_endpoint:
        would = "would not" if is_endpoint else "would"
        cure = f"in torchrun's line: --rdzv-conf=is_host={is_endpoint}"
        add("FAIL", f"torchrun {would} take it for the endpoint, {endpoint}", cure)
    if several and wrong:  # a script may have a gloo group on GPUs as well
        cure = f"export GLOO_SOCKET_IFNAME={interface}"
        add("FAIL", f"{wrong}; others could not connect to that", cure)
        os.environ["GLOO_SOCKET_IFNAME"] = interface  # from here on, as with the cure
    variable = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    if args.max_restarts and os.environ.get(variable) != "1":
        what = "--max-restarts: a restart may read what the attempt before it stored"
        add("warn", what, f"export {variable}=1")
    need = config.nproc_per_node * SHM_MIB
    disk = os.statvfs("/dev/shm")
    shm = disk.f_blocks * disk.f_frsize >> 20  # MiB
    if shm < need:
        cure = f"docker run --shm-size={need}m; mount -o remount,size={need}m /dev/shm"
        add("FAIL", f"/dev/shm has {shm} MiB, and may need {need} MiB", cure)
    if not args.cpu:
        for kind, what, cure in find_in_gpus():
            add(kind, what, cure)
    cpu = args.cpu or not torch.accelerator.is_available()
    device = "cpu" if cpu else torch.accelerator.current_accelerator().type
    backend = dist.get_default_backend_for_device(device)
    nccl = "none"
    if backend == "nccl" and device == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        device = torch.cuda.get_device_name(0)
    expected = 0  # Gbit/s to another host
    folder = f"/sys/class/net/{interface}"
    if os.path.exists(f"{folder}/device"):  # the speed of a virtual card may be a lie
        mbit = int(read(f"{folder}/speed") or 0)  # -1 if nobody knows
        expected = min(TCP_GBIT, max(0, mbit) / 1000)
    active = active_ports()
    if active:  # gloo does not speak InfiniBand, but TCP by the same cards
        expected = min(active) if backend == "nccl" else min(*active, TCP_GBIT)
    return {
        "name": own,
        "announced": announced,
        "address": address,
        "interface": interface,
        "expected": expected,
        "findings": findings,
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda or torch.version.hip,
        "NCCL": nccl,
        "backend": backend,
        "InfiniBand": active,
        "device": device,
    }


def open_store(name, port, serve=False):
    """The store of host `name`: a table, which this process keeps if it serves."""
    store = dist.TCPStore(
        name,
        port,
        is_master=serve,
        multi_tenant=serve,
        wait_for_workers=False,
        timeout=timedelta(seconds=CONNECT_S),
    )
    return dist.PrefixStore("preflight", store)


def get(store, key, wait_s=30):
    """The value, once it is there."""
    store.wait([key], timedelta(seconds=wait_s))
    return json.loads(store.get(key))


def ask(name, port, deadline):
    """(the store of host `name`, its facts), or (None, why it did not come)."""
    why, cure = probe_port(name, port)
    while why and time.monotonic() < deadline:
        time.sleep(0.5)
        why, cure = probe_port(name, port)
    with contextlib.suppress(dist.DistError, futures.TimeoutError):
        if not why:
            why = f"something else listens at port {port}"
            cure = f"on {name}: ss -ltnp"
            opened = futures.ThreadPoolExecutor(1).submit(open_store, name, port)
            store = opened.result(2 * CONNECT_S)  # it may wait for an answer for ever
            store.set("asked", "1")
            host = get(store, "host")
            ahead = host["time"] - time.time()  # the message took no time to come
            if abs(ahead) > SKEW_S:
                side = "ahead" if ahead > 0 else "behind"
                what = f"{name}: its clock is {abs(ahead):.0f} s {side}"
                host["findings"].append(("FAIL", what, f"on {name}: timedatectl"))
            return store, host
    return None, ("FAIL", f"{name} did not come: {why}", cure)


def compare(hosts):
    """Findings: in what the hosts differ, and what each has found in itself."""
    for key, kind in COMPARED.items():
        values = [host[key] for host in hosts]
        usual = max(values, key=values.count)  # in a tie, what the endpoint has
        for host in hosts:
            if host[key] != usual:
                name = host["name"]
                what = f"{name} has {key} {host[key]}, the others have {usual}"
                yield kind, what, f"on {name}: python -m torch.utils.collect_env"
    for host in hosts:
        yield from host["findings"]


def call(host, others):
    """Findings: hosts that cannot be connected to from `host`, which is this one."""
    own = host["name"]
    for other in others:
        why, cure = probe_port(other["announced"], other["port"])
        if why and other["name"] != own:
            there = f"{other['name']}, which is {other['address']}"
            yield "FAIL", f"{own} cannot connect to {there}: {why}", f"on {own}: {cure}"


def lead(host, port, others, wait_s):
    """On the endpoint: ask all, compare them, let them call; may torchrun start?"""
    wait = CONNECT_S * len(others) + 60
    deadline = time.monotonic() + wait_s
    with futures.ThreadPoolExecutor(256) as pool:
        answers = [*pool.map(lambda name: ask(name, port, deadline), others)]
        stores = [store for store, _ in answers if store]
        hosts = [host, *(facts for store, facts in answers if store)]
        missing = [finding for store, finding in answers if not store]
        show(missing, f"{len(hosts)} of {len(hosts)} hosts came")
        alike = ", ".join(COMPARED)
        show([*compare(hosts)], f"each host is well, and all have the same {alike}")
        for store in stores:
            store.set("hosts", json.dumps(hosts))
        calls_of_others = [*pool.map(lambda store: get(store, "calls", wait), stores)]
    calls = [*call(host, hosts)]
    for found in calls_of_others:
        calls += found
    show(calls, "all know each other's names, and can connect")
    go = not missing and not calls
    for store in stores:
        store.set("go", json.dumps([go, COUNTS["FAIL"]]))
    return go


def follow(store, host, endpoint, port, wait_s):
    """On all other hosts: answer what the endpoint asks; may torchrun start?"""
    deadline = time.monotonic() + wait_s + CONNECT_S
    while not store.check(["asked"]):
        if time.monotonic() > deadline:
            why, cure = probe_port(endpoint, port)
            why = why or f"{endpoint} does not reach port {port} of this host"
            show([("FAIL", f"{host['name']} cannot meet {endpoint}: {why}", cure)])
            return False
        time.sleep(0.1)
    store.set("host", json.dumps(host | {"time": time.time()}))
    hosts = get(store, "hosts", wait_s + 60)
    store.set("calls", json.dumps([*call(host, hosts)]))
    go, COUNTS["FAIL"] = get(store, "go", CONNECT_S * len(hosts) + 60)
    return go


def measure(me, peer, device):
    """Gbit/s of messages to `peer`, which answers each with a token."""
    size = 1 << 20 if device.type == "cpu" else 1 << 24
    data = torch.ones(size // 4, device=device)
    token = torch.ones(1, device=device)
    best = float("inf")
    for sender in sorted((me, peer)):
        for _ in range(MESSAGES):  # the first opens the connection
            start = time.perf_counter()
            if sender == me:
                dist.send(data, peer)
                dist.recv(token, peer)
            else:
                dist.recv(data, peer)
                dist.send(token, peer)
            token.item()  # until the device has done it
            if sender == me:
                best = min(best, time.perf_counter() - start)
    return size * 8e-9 / best


def peers_of(rank, locals_of_ranks):
    """The ranks that this one is measured with, turn by turn: disjoint pairs.

    They have its local rank. In a turn, the places of a pair in this list add up to the
    same number.
    """
    local = locals_of_ranks[rank]
    alike = [peer for peer, its in enumerate(locals_of_ranks) if its == local]
    mine = alike.index(rank)
    turns = range(local, local + min(TURNS, len(alike)))
    pairs = [alike[(turn - mine) % len(alike)] for turn in turns]
    return [peer for peer in pairs if peer != rank]


def check(rank, local, everybody, host, timeout_s, cpu, link_gbit):
    """Yields what a process does next, and what to type if that fails; then does it."""
    own = host["name"]
    who = f"rank {rank} on {own}"
    backend = host["backend"]
    findings = []
    device = torch.device("cpu")
    if not cpu and torch.accelerator.is_available():
        torch.accelerator.set_device_index(local)
        device = torch.device(torch.accelerator.current_accelerator().type, local)
    yield f"allocating and computing on {device}", "nvidia-smi"
    size = 256 if device.type == "cpu" else 4096
    ones = torch.ones(size, size, device=device)
    if not (ones @ ones == len(ones)).all():
        cure = f"on {own}: nvidia-smi -q; dmesg | grep -i xid"
        findings.append(("FAIL", f"{who} multiplies wrongly", cure))
    address = os.environ["MASTER_ADDR"]
    port = os.environ["MASTER_PORT"]
    cure = f"nc -vz {address} {port}"
    if backend == "nccl":  # PyTorch 2.15 starts it here
        cure += "; export NCCL_DEBUG=INFO"
    yield f"connecting all processes ({backend}), by way of {address}:{port}", cure
    step = timedelta(seconds=timeout_s / 2)
    # NCCL's own time-out would kill the process before it can say at what.
    dist.init_process_group(backend, timeout=step if backend == "gloo" else 4 * step)
    cure = "export NCCL_DEBUG=INFO TORCH_CPP_LOG_LEVEL=INFO"
    gloo = dist.new_group(timeout=step, backend="gloo")  # a script may have one, too
    ranks = len(everybody)
    index = torch.arange(10_000)
    number = index % 64
    # Two ranks send the number, and all others 0, so that each type is exact.
    sent = number * ((index - rank) % ranks < 2)
    expected = number * min(2, ranks)
    wrong = []
    for group, where, name in (
        (None, device, f" ({backend})"),
        (gloo, "cpu", " (gloo group)"),
    ):
        yield f"the first all-reduce{name}", cure
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            mine = sent.to(where, dtype, copy=True)
            dist.all_reduce(mine, group=group)
            if not mine.cpu().equal(expected.to(dtype)):
                kind = str(dtype).removeprefix("torch.")
                wrong.append(kind if group is None else f"{kind}{name}")
    if wrong:
        findings.append(("FAIL", f"{who}: all-reduce is wrong: {', '.join(wrong)}", ""))
    dist.all_gather_object(everybody, (local, host, findings), gloo)
    yield "measuring each link", cure
    # One local rank after the other, so that no two share a host's way out.
    locals_of_ranks = [its_local for its_local, *_ in everybody]
    for now in range(max(locals_of_ranks) + 1):
        if now == local:
            for peer in peers_of(rank, locals_of_ranks):
                gbit = measure(rank, peer, device)
                _, there, _ = everybody[peer]
                expected = link_gbit or min(host["expected"], there["expected"]) or 1
                if gbit < expected / 2:
                    what = f"slow link, {who} to rank {peer} on {there['name']}: "
                    what += f"{gbit:.2f} Gbit/s; {expected:g} expected"
                    what += " (or say --link-gbit)"
                    cure = f"on {own}: ethtool {host['interface']}; iperf3 -c "
                    cure += f"{there['address']}; NCCL_DEBUG=INFO names the network"
                    findings.append(("FAIL", what, cure))
        dist.barrier(group=gloo)
    dist.all_gather_object(everybody, (local, host, findings), gloo)


def work(host, timeout_s, cpu, link_gbit):
    """All checks of one process. If it fails, or hangs, it says so itself."""
    rank = int(os.environ["RANK"])
    local = int(os.environ["LOCAL_RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    at = ("the start", "nvidia-smi")  # what it does, what to type if that fails
    everybody = [None] * world_size  # gets (local rank, host, findings) of each rank

    def stop(why, wait_s):
        if not COUNTS["FAIL"]:
            doing, cure = at
            what = f"rank {rank} on {host['name']}, {doing}: {why}"
            show([("FAIL", what[:400], cure)])
        time.sleep(wait_s)  # or torchrun would end those that hang, before they say so
        os._exit(1)

    stuck = f"stuck: all checks may take {timeout_s:g} s (--timeout)"
    threading.Timer(timeout_s, stop, [stuck, timeout_s / 4]).start()
    try:
        for now in check(rank, local, everybody, host, timeout_s, cpu, link_gbit):
            at = now
    except Exception as problem:
        stop(f"{type(problem).__name__}: {problem}".splitlines()[0], 1.25 * timeout_s)
    findings = [finding for *_, found in everybody for finding in found]
    if rank == 0:
        hosts = len({its["name"] for _, its, _ in everybody})
        links = "the links between hosts are fast" if hosts > 1 else "no link is timed"
        show(findings, f"{world_size} processes compute and add up; {links}")
    # A half-dead connection could hold up the usual exit.
    os._exit(int(bool(findings or COUNTS["FAIL"])))


def main():
    if "PREFLIGHT" in os.environ:  # torchrun has started this process
        work(*json.loads(os.environ["PREFLIGHT"]))
    logging.disable()  # torchrun's
    parser = run.get_args_parser()
    parser.usage = argparse.SUPPRESS
    parser.description = __doc__
    parser.add_argument("--hosts", default="", help="the names of all: node0,node1")
    parser.add_argument("--cpu", action="store_true", help="check without the GPUs")
    for name, default, what in (
        ("--wait", 60, "seconds for all hosts to come (60)"),
        ("--timeout", 60, "seconds for all checks of the processes (60)"),
        ("--link-gbit", 0, "Gbit/s from host to host; half will do (as ports say)"),
    ):
        parser.add_argument(name, type=float, default=default, help=what)
    args = parser.parse_args([*sys.argv[1:], __file__])
    if args.training_script != __file__ or "LOCAL_RANK" in os.environ:
        parser.error("type python, preflight.py and torchrun's flags, and no script")
    endpoint = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port or 29500}"
    try:
        config = run.config_from_args(args)[0]
        endpoint, port = rendezvous.parse_rendezvous_endpoint(endpoint, 29400)
    except (ValueError, AssertionError, RuntimeError) as problem:
        parser.error(f"torchrun: {problem}")
    names = [name for name in args.hosts.split(",") if name]
    several = config.max_nodes > 1
    own = socket.gethostname()
    short = own.split(".")[0]
    mine = [name for name in names if name.split(".")[0] == short]
    mine += [name for name in names if resolve(name) in interfaces().values()]
    known = len(set(names)) == config.max_nodes and endpoint in names and mine
    if several and not known:
        parser.error(f"--hosts has to name all, this host ({own}) and the endpoint")
    is_endpoint = not several or mine[0] == endpoint
    host = describe_host(args, config, endpoint, is_endpoint)
    others = [name for name in names if name != mine[0]]
    listener = socket.create_server(("", 0), backlog=1024)  # for those who call
    host["port"] = port if is_endpoint else listener.getsockname()[1]
    go = False
    try:
        store = open_store("127.0.0.1", port if several else 0, serve=True)
        if is_endpoint:
            go = lead(host, port, others, args.wait)
        else:
            go = follow(store, host, endpoint, port, args.wait)
    except dist.DistError as problem:
        what = f"{own}, meeting at port {port}: {problem}".splitlines()[0]
        show([("FAIL", what, f"ss -ltnp 'sport = :{port}'")])
    if go and (several or resolve(own) or args.local_addr):  # or torchrun would hang
        settings = [host, args.timeout, args.cpu, args.link_gbit]
        os.environ["PREFLIGHT"] = json.dumps(settings)
        args.max_restarts = 0  # the first failure says it all
        try:
            run.run(args)
        except multiprocessing.errors.ChildFailedError:
            COUNTS["FAIL"] += 1  # its processes have said why
        except multiprocessing.SignalException as stop:
            sys.exit(128 + stop.sigval)
    if is_endpoint:
        verdict = "can NOT train as it is" if COUNTS["FAIL"] else "can train"
        print(f"      this cluster {verdict}: {COUNTS['warn']} warnings", flush=True)
    os._exit(int(COUNTS["FAIL"] > 0))  # a thread may still wait for an answer


if __name__ == "__main__":
    main()
