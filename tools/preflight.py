"""Say in under a minute whether this cluster can train, and what to type if it cannot.

On every host the training's own line, with this file as the script:

    torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d \\
        --rdzv-endpoint=node0:29500 tools/preflight.py

torchrun starts nothing before all hosts have come, so that nothing can say who has not.
Put `python tools/preflight.py` in torchrun's place, and the hosts call the roll at the
endpoint first and name the missing ones; if all are there, torchrun is started:

    python tools/preflight.py --hosts node0,node1 --nnodes=2 --nproc-per-node=2 \\
        --rdzv-backend=c10d --rdzv-endpoint=node0:29500

Under Slurm --hosts is known. Rank 0 prints the report: `FAIL` is what makes a training
hang, crash, be wrong or much too slow; `warn` is what may; `type` is what to type next.
Exit status: 0 nothing failed, 1 a check failed, 2 the input is bad. This file needs
nothing but torch and Linux: copy it to the cluster alone. IPv4 only.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import faulthandler
import fcntl
import json
import multiprocessing
import os
import platform
import shutil
import signal
import socket
import socketserver
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
from datetime import timedelta
from pathlib import Path

# torchrun sets LOCAL_RANK (RANK, Kubernetes operators do as well). The roll call does
# without torch: so it is quick, and runs where torch does not.
IS_WORKER = "LOCAL_RANK" in os.environ
if IS_WORKER:
    import torch
    import torch.distributed as dist

CONNECT_S = 3  # a host that takes longer to answer is as good as away
STEP_S = 30  # nor is any other step waited for longer
ALL_S = 60  # all checks together; then a process that is stuck says where
SHM_PER_PROCESS = 256 << 20  # bytes; Docker gives 64 MiB to a whole container
SKEW_WARN_S, SKEW_FAIL_S = 0.1, 2  # torchrun takes a host 15 s behind for dead
SIZES = (4, 64 << 10, 1 << 20, 16 << 20, 256 << 20)  # bytes of an all-reduce
DTYPES = ("float32", "bfloat16", "int64")
SAME = {  # what all hosts should have the same of, and what to type where it differs
    "torch": ("FAIL", "pip list | grep torch"),
    "CUDA": ("FAIL", "python -m torch.utils.collect_env"),
    "NCCL": ("FAIL", "pip list | grep nccl"),
    "driver": ("warn", "nvidia-smi"),
    "Python": ("warn", "python --version"),
    "backend": ("FAIL", "nvidia-smi"),
    "device": ("warn", "nvidia-smi"),
}
ROUNDS = 8  # of pairs that are measured: enough to tell who is slow
COUNTS = collections.Counter()  # of what was said, by kind


def say(kind, what, *cures):
    """kind: ok, warn, FAIL, or "" for a fact; cures: what to type next."""
    COUNTS[kind] += 1
    lines = [f"{kind:<6}{what}", *(f"type  {cure}" for cure in cures)]
    print("\n".join(lines), flush=True)


@contextlib.contextmanager
def ok_if_all_is(what):
    """Say it in the end, if nothing bad was said in between."""
    before = COUNTS["FAIL"] + COUNTS["warn"]
    yield
    if COUNTS["FAIL"] + COUNTS["warn"] == before:
        say("ok", what)


def bad_input(message):
    """One line on stderr from one process of each host, and exit status 2."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"preflight.py: error: {message}", file=sys.stderr)
    sys.exit(2)


# --- What this host is: nothing here speaks to another host


def read(path, default=""):
    try:
        return Path(path).read_text().strip()
    except OSError:
        return default


def resolve(name):
    """The IPv4 address of `name`, or "" if it has none here."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def interfaces():
    """{name: IPv4 address} of this host's network interfaces."""
    found, ask_address = {}, 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(any_socket, ask_address, request)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def choose_interface(backend):
    """(interface, address, complaint): where `backend` will listen on this host.

    As they choose: what the variable names; else gloo takes what the host's own name
    resolves to, and NCCL InfiniBand, or else what is no loopback and no container's.
    """
    there_are, own = interfaces(), socket.gethostname()
    wanted = os.environ.get(f"{backend.upper()}_SOCKET_IFNAME", "")
    local = ("lo", "docker", "virbr")
    outward = [name for name in there_are if not name.startswith(local)]
    infiniband = [name for name in outward if name.startswith("ib")]
    default = (infiniband or outward or ["lo"])[0]
    found, complaint = [name for name in wanted.split(",") if name in there_are], ""
    if backend == "gloo" and not wanted:
        found = [name for name in outward if there_are[name] == resolve(own)]
        complaint = f"its own name, {own}, is {resolve(own) or 'unknown'} there"
    elif backend == "gloo":  # which knows no patterns, as NCCL does
        complaint = f"there is no {wanted}, and there is {', '.join(there_are)}"
    chosen = (found or [default])[0]
    return chosen, there_are.get(chosen, ""), "" if found else complaint


def gbit_of(interface):
    """Gbit/s that a network card says it has; 0 if it does not, or is no real card."""
    if not os.path.exists(f"/sys/class/net/{interface}/device"):
        return 0  # a virtual one names any number
    return max(0, int(read(f"/sys/class/net/{interface}/speed", "0"))) / 1000


def host_facts(backend, device):
    """What the report says of a host, as JSON can carry it: sizes in bytes."""
    interface, address, complaint = choose_interface(backend)
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*/rate"))
    facts = {
        "name": socket.gethostname(),
        "fqdn": os.environ.get("PREFLIGHT_NAME") or socket.getfqdn(),
        "address": address,
        "interface": interface,
        "complaint": complaint,
        "addresses": list(interfaces().values()),
        "gbit": gbit_of(interface),
        "more": [f"{port.parts[4]} {read(port)}" for port in ports],
        "shm": shutil.disk_usage("/dev/shm").total,
        "cores": len(os.sched_getaffinity(0)),
        "numa": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        "threads": torch.get_num_threads(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "processes": int(os.environ["LOCAL_WORLD_SIZE"]),
        "devices": torch.accelerator.device_count(),
        "device": "CPU",
        "backend": backend,
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda or torch.version.hip or "none",
        "NCCL": "none",
        "driver": read("/sys/module/nvidia/version", "none"),
        "Python": platform.python_version(),
    }
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        built = torch.cuda.get_arch_list()
        facts["device"], facts["memory"] = about.name, about.total_memory
        facts["more"] += [f"sm_{about.major}{about.minor}, torch has {' '.join(built)}"]
        if dist.is_nccl_available():
            facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


# --- The roll call: before torchrun, and without torch


def probe_port(name, port):
    """(connection, "", "") if `name` answers at `port`, else (None, why, cure)."""
    address, me = resolve(name), socket.gethostname()
    if not address:
        return None, f"{me} does not know the name {name}", f"getent hosts {name}"
    if address.startswith("127.") or address in interfaces().values():
        why = f"on {me} the name {name} is {address}, that of {me} itself"
        return None, why, f"getent hosts {name}; cat /etc/hosts"
    there = f"{name}:{port}" + (f" ({address})" if address != name else "")
    try:
        return socket.create_connection((address, port), CONNECT_S), "", ""
    except ConnectionRefusedError:
        why = f"{there} is up, but nothing listens there"
        return None, why, f"on {name}, the same command as here"
    except TimeoutError:
        why = f"no answer from {there}: it is off, or a firewall drops the port"
    except OSError as error:
        why = f"{there}: {error.strerror}"
    return None, why, f"ping -c 3 {address}; nc -vz {address} {port}"


def send(connection, message):
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive(connection, timeout_s=CONNECT_S):
    """The next message; OSError or ValueError if there comes none in time."""
    connection.settimeout(timeout_s)
    return json.loads(connection.makefile("rb").readline())


def is_this_host(name, hosts):
    """Whether that is this host; another one of `hosts` is not, wherever it leads."""
    own = socket.gethostname()
    own, short, *known = (full.split(".")[0] for full in (own, name, *hosts))
    if short == own or {own, short} <= set(known):
        return short == own
    return resolve(name) in interfaces().values()


def roll_call(hosts, fqdn, endpoint, port, count, wait_s):
    """Whether `count` hosts come to the endpoint within `wait_s`; if not, say who not.

    hosts: their names, or [] if nobody knows. fqdn: what torchrun will call this one.
    Each listens at `port`: so the endpoint's host can ask one that does not come why.
    """
    known = (name for name in hosts if is_this_host(name, hosts))
    me = next(known, socket.gethostname())
    try:
        listener = socket.create_server(("", port), backlog=1024)
    except OSError as error:
        why = f"{me} cannot listen at port {port}: {error.strerror}"
        say("FAIL", why, f"ss -ltnp 'sport = :{port}'")
        return False
    deadline = time.monotonic() + wait_s
    with listener:
        if not is_this_host(endpoint, hosts):
            return report_to_endpoint(listener, me, fqdn, endpoint, port, deadline)
        arrived = {choose_interface("nccl")[1]: (me, fqdn, None)}  # by address
        while len(arrived) < count and time.monotonic() < deadline:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                connection, (address, _) = listener.accept()
                hello = receive(connection)
                arrived[address] = hello["name"], hello["fqdn"], connection
        names = sorted(name for name, *_ in arrived.values())
        if len(arrived) < count:
            found = f"{len(arrived)} of {count} hosts came in {wait_s:g} s"
            cures = ["--hosts with all names, to hear which is missing"]
            if hosts:
                cures = []  # the missing ones are named below
            say("FAIL", f"{found}: {', '.join(names)}", *cures)
        missing = [name for name in hosts if name not in names]
        with concurrent.futures.ThreadPoolExecutor(256) as pool:
            asked = pool.map(lambda name: ask_missing(name, port), missing)
        for name, (why, cure) in zip(missing, asked, strict=True):
            say("FAIL", f"{name} did not come: {why}", cure)
        for address, (name, fqdn, _) in arrived.items():
            if fqdn.startswith("localhost"):
                cure = f"on {name}, in torchrun's line: --local-addr={address}"
                say("FAIL", f"{name} would tell the others to call {fqdn}", cure)
    # Only now that the port is free again may the others start their torchrun.
    for *_, connection in list(arrived.values())[1:]:
        with contextlib.suppress(OSError):
            send(connection, {"failed": COUNTS["FAIL"], "at": me})
    if not COUNTS["FAIL"]:
        say("ok", f"all hosts came: {', '.join(names)}")
    return not COUNTS["FAIL"]


def ask_missing(name, port):
    """(why it did not come, what to type)."""
    connection, why, cure = probe_port(name, port)
    if not connection:
        return why, cure
    with connection, contextlib.suppress(OSError, ValueError, KeyError):
        send(connection, {"asks": True})
        reply = receive(connection, 2 * CONNECT_S)
        return f"it is up, but {reply['why']}", f"on {name}: {reply['cure']}"
    return f"something else listens at port {port}", f"on {name}: ss -ltnp"


def report_to_endpoint(listener, me, fqdn, endpoint, port, deadline):
    """Go to the endpoint; while it cannot be reached, tell it why if it asks."""
    asked, connection = False, None
    # The endpoint's host waits as long, then asks; or it is not there at all.
    while not asked and time.monotonic() < deadline + 2 * CONNECT_S:
        connection, why, cure = probe_port(endpoint, port)
        if connection:
            break
        listener.settimeout(0.5)
        with contextlib.suppress(OSError, ValueError, KeyError):
            caller_connection, (caller, _) = listener.accept()
            asked = receive(caller_connection)["asks"]  # or it took us for the endpoint
            if resolve(endpoint) != caller and not endpoint[0].isdigit():
                said = resolve(endpoint) or "unknown"
                why = f"there the name {endpoint} is {said}, and {endpoint} is {caller}"
                cure = f"getent hosts {endpoint}; cat /etc/hosts"
            send(caller_connection, {"why": why, "cure": cure})
    if not connection:
        say("FAIL", f"{me} cannot come to {endpoint}: {why}", cure)
        return False
    try:
        send(connection, {"name": me, "fqdn": fqdn})
        patience = max(0, deadline - time.monotonic()) + 5 * CONNECT_S
        verdict = receive(connection, patience)
    except (OSError, ValueError) as error:
        why = f"{endpoint}:{port} answers, but not as a preflight would: {error}"
        say("FAIL", why, f"on {endpoint}: ss -ltnp 'sport = :{port}'")
        return False
    if verdict["failed"]:
        say("FAIL", f"{me} came, but not all is well: see {verdict['at']}")
    return not verdict["failed"]


def names_of_hosts(args, count):
    """--hosts, or what Slurm says, or [] if nobody knows."""
    hosts = [name for name in args.hosts.split(",") if name]
    if not hosts and "SLURM_JOB_NODELIST" in os.environ:
        command = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
        with contextlib.suppress(OSError):
            done = subprocess.run(command, capture_output=True, text=True)
            hosts = done.stdout.split() if len(done.stdout.split()) == count else []
    if hosts and len(set(hosts)) != count:
        bad_input(f"--hosts names {len(set(hosts))} hosts and --nnodes says {count}")
    return hosts


def torchrun(words):
    """In a process of its own; its exit status is 2 if `words` are wrong."""
    from torch.distributed import run

    try:
        parser = run.get_args_parser()
        parser.error = bad_input
        args = parser.parse_args(words)
        run.config_from_args(args)
    except (ValueError, AssertionError, RuntimeError) as error:
        bad_input(f"torchrun: {error!r}")
    run.run(args)


def launch(args, flags):
    """Call the roll, then run torchrun with `flags` and this file; the exit status."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    parser = argparse.ArgumentParser(allow_abbrev=False)
    names = ("nnodes", "rdzv_endpoint", "master_addr", "master_port", "local_addr")
    for flag in names:
        default = os.environ.get(f"PET_{flag.upper()}", "")  # torchrun reads them, too
        parser.add_argument(f"--{flag.replace('_', '-')}", f"--{flag}", default=default)
    given = parser.parse_known_args(flags)[0]
    example = "--nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d"
    example += " --rdzv-endpoint=node0:29500"
    if not flags and not given.nnodes:
        bad_input(f"type torchrun's flags: python tools/preflight.py {example}")
    if any(flag.endswith(".py") or flag in ("-m", "--module") for flag in flags):
        bad_input("leave the script of the training and what follows it out")
    nnodes = given.nnodes.split(":")[-1] or "1"
    endpoint, _, port = (given.rdzv_endpoint or given.master_addr).partition(":")
    default = "29400" if given.rdzv_endpoint else "29500"  # torchrun's own
    port = port or given.master_port or default
    if not nnodes.isdecimal() or not port.isdecimal() or not int(port) < 1 << 16:
        bad_input(f"--nnodes={given.nnodes}, or the port {port}, is no such number")
    nnodes, port, fqdn = int(nnodes), int(port), given.local_addr or socket.getfqdn()
    hosts = names_of_hosts(args, nnodes)
    if nnodes > 1:
        if not endpoint or port == 0:
            bad_input(f"where do they meet? For example: {example}")
        if not roll_call(hosts, fqdn, endpoint, port, nnodes, args.wait):
            return 1
    with tempfile.TemporaryDirectory(prefix="preflight") as folder:
        verdict = Path(folder, "verdict")
        # Workers that fail would have torchrun bury the report under its own.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        os.environ |= {"PREFLIGHT_VERDICT": str(verdict), "PREFLIGHT_NAME": fqdn}
        words = [*flags, __file__, f"--link-gbit={args.link_gbit}"]
        tempfile.tempdir = folder  # torchrun leaves its own folders there
        fork = multiprocessing.get_context("fork")  # torch is imported there alone
        child = fork.Process(target=torchrun, args=[words])
        try:
            child.start()
            for _ in range(2 * ALL_S * 10):  # tenths of a second
                child.join(0.1)
                if verdict.exists() or child.exitcode is not None:
                    break  # the others' torchrun may yet be stuck: not this one
        finally:  # it may have got the same signal, and be ending its workers
            child.join(5)
            status = child.exitcode
            for stop in (child.terminate, child.kill):
                stop()
                child.join(5)
        if verdict.exists():
            return int(verdict.read_text())
    if status == 2:
        return 2
    what, cures = f"torchrun ended with {status}", []
    if status is None:
        what = "the checks did not end"
        if nnodes > 1:
            conf = f"is_host=true on {endpoint}, =false on the others"
            cures = [f"if torchrun's hosts did not meet: --rdzv-conf={conf}"]
    say("FAIL", f"{what} on {socket.gethostname()}: see above", *cures)
    return 1


# --- The checks: in the processes that torchrun has started


class Clock(socketserver.BaseRequestHandler):
    """Answers each byte with the time here, and who answers."""

    def handle(self):
        while self.request.recv(1):
            answer = time.time(), int(os.environ["RANK"])
            self.request.sendall(struct.pack("dq", *answer))


class Server(socketserver.ThreadingTCPServer):
    request_queue_size = 1024  # all hosts may call at once


def probe_host(host):
    """(seconds of a round trip, seconds that its clock is ahead); or str: why not.

    The quickest of eight round trips: its answer is from within that time of ours.
    """
    try:
        with socket.create_connection(host.listens, CONNECT_S) as connection:
            times = []
            for _ in range(8):
                sent = time.time()
                connection.sendall(b"?")
                there, rank = struct.unpack("dq", connection.recv(16))
                now = time.time()
                times.append((now - sent, there - (sent + now) / 2))
            return min(times) if rank == host.rank else "another host answers there"
    except TimeoutError:
        return f"no answer in {CONNECT_S} s"
    except (OSError, struct.error) as error:
        return getattr(error, "strerror", None) or str(error)


def synchronize(device):
    if device.type != "cpu":
        torch.accelerator.synchronize()


def compute(device):
    """Allocate and multiply: (whether the result is right, seconds of the fastest)."""
    size, repeats, clock, threads = 4096, 20, time.perf_counter, torch.get_num_threads()
    if device.type == "cpu":  # which may have other work: that is not its fault
        size, repeats, clock = 256, 100, time.thread_time
        torch.set_num_threads(1)  # to wait for other threads would count as work
    ones, times = torch.ones(size, size, device=device), []
    for _ in range(repeats):
        synchronize(device)
        start = clock()
        product = ones @ ones
        synchronize(device)
        times.append(clock() - start)
    torch.set_num_threads(threads)
    return bool((product == size).all()), min(times)


def wrong_sums(rank, world_size, device):
    """Dtypes that all_reduce adds up wrongly, of sums that each of them has exactly.

    Each element is the same number from two ranks, and 0 from all others.
    """
    wrong, index = [], torch.arange(10_000, device=device)
    number = index % 64
    for name in DTYPES:
        dtype = getattr(torch, name)
        mine = (number * ((index - rank) % world_size < 2)).to(dtype)
        dist.all_reduce(mine)
        if not torch.equal(mine, (number * min(2, world_size)).to(dtype)):
            wrong.append(name)
    return wrong


def all_reduce_times(device):
    """[(bytes, seconds)] of an all-reduce, the same on all ranks; stops when slow."""
    found = []
    for size in SIZES:
        if len(found) > 1 and found[-1][1] * size / found[-1][0] > 0.5:
            break  # at this rate it would take more than half a second
        data = torch.ones(size // 4, device=device)
        repeats = 20 if size < 1 << 20 else 3
        dist.all_reduce(data)  # opens connections
        synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            dist.all_reduce(data)
        synchronize(device)
        took = torch.tensor((time.perf_counter() - start) / repeats, device=device)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        found.append((size, took.item()))
    return found


def partners(count, index):
    """With whom of `count` hosts host `index` is paired, one round after the other.

    In each round the numbers of a pair add up to the same: so the pairs are disjoint,
    and none comes twice. Who would be its own partner sits out: None.
    """
    for turn in range(min(ROUNDS, count)):
        other = (turn - index) % count
        yield None if other == index else other


def pair_speeds(device, leaders, index, size):
    """{host: Gbit/s to it} from host `index`; `leaders`: one rank of each host."""
    data, speeds = torch.ones(size // 4, device=device), {}
    token = torch.ones(1, device=device)
    for other in partners(len(leaders), index):
        if other is None:
            continue
        peer, best = leaders[other], float("inf")
        for turn in range(10):  # in turn; the first two meet, and open the connection
            message = data if turn > 1 else token
            if (turn % 2 == 0) == (index < other):
                start = time.perf_counter()
                dist.send(message, peer)
                dist.recv(token, peer)
                synchronize(device)
                best = min(best, time.perf_counter() - start if turn > 1 else best)
            else:
                dist.recv(message, peer)
                dist.send(token, peer)
                synchronize(device)
        speeds[other] = size * 8e-9 / best
    return speeds


# --- What rank 0 makes of it


def human(size):
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def report_hosts(hosts):
    """A line for each host, and in what they differ."""
    for host in hosts:
        link = f" ({host.gbit:g} Gbit/s)" if host.gbit else ""
        facts = [f"{host.address} on {host.interface}{link}", f"{host.devices} GPUs"]
        facts += [human(host.memory), f"{host.cores} cores, {host.numa} NUMA"]
        facts += [f"/dev/shm {human(host.shm)}"]
        facts += [f"{key} {getattr(host, key)}" for key in SAME]
        say("", f"{host.name}: {', '.join(facts + host.more)}")
    with ok_if_all_is(f"the same on all hosts: {', '.join(SAME)}"):
        for key, (kind, cure) in SAME.items():
            values = [getattr(host, key) for host in hosts]
            # What most have; in a tie, what rank 0's has.
            usual = max(values, key=values.count)
            for host, value in zip(hosts, values, strict=True):
                if value != usual:
                    what = f"{host.name} has {key} {value}, the others have {usual}"
                    say(kind, what, f"on {host.name}: {cure}")
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        what = "--max-restarts: a restart may read what the attempt before it stored"
        say("warn", what, "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")


def report_limits(host):
    """What a host has too little of."""
    name, processes = host.name, host.processes
    need = processes * SHM_PER_PROCESS
    if host.shm < need:
        what = f"{name}: /dev/shm has {human(host.shm)}, and may need {human(need)}"
        machine = f"on {name}: mount -o remount,size={need >> 20}m /dev/shm"
        say("FAIL", what, f"docker run --shm-size={need >> 20}m, or {machine}")
    if host.threads * processes > host.cores:
        what = f"{name}: {processes} x {host.threads} threads on {host.cores} cores"
        threads = max(1, host.cores // processes)
        say("warn", what, f"on {name}: export OMP_NUM_THREADS={threads}")
    if processes > host.devices > 0:
        what = f"{name}: {processes} processes for {host.devices} devices"
        say("FAIL", what, f"--nproc-per-node={host.devices}")
    if host.driver != "none" and not host.devices:
        what = f"{name}: has an NVIDIA driver, and torch sees no GPU"
        cure = f"on {name}: nvidia-smi; python -c 'import torch; torch.cuda.init()'"
        say("warn", what, cure)


def report_devices(ranks):
    """Devices that compute wrongly, or slowly beside the others."""
    usual = statistics.median(rank.seconds for rank in ranks)
    for rank in ranks:
        who, times = f"rank {rank.rank} on {rank.host}", rank.seconds / usual
        if not rank.right:
            cure = f"on {rank.host}: nvidia-smi -q; dmesg | grep -i xid"
            say("FAIL", f"{who} multiplies wrongly", cure)
        elif times > (2 if ranks[0].devices else 3):  # CPUs have more to do
            cure = f"on {rank.host}: top; nvidia-smi -q -d CLOCK,TEMPERATURE"
            say("warn", f"{who} computes at 1/{times:.1f} of the usual", cure)


def report_names(hosts):
    """Own names that lead nowhere, and names of others that lead elsewhere."""
    for host in hosts:
        if host.complaint:
            what = f"{host.name}: {host.complaint}; others could not connect to that"
            variable = f"{host.backend.upper()}_SOCKET_IFNAME"
            say("FAIL", what, f"on {host.name}: export {variable}={host.interface}")
        for other, address in zip(hosts, host.resolved, strict=True):
            cure = f"on {host.name}: getent hosts {other.fqdn}; cat /etc/hosts"
            if other is not host and not address:
                say("warn", f"{host.name} does not know {other.fqdn}", cure)
            elif other is not host and address not in other.addresses:
                what = f"on {host.name} the name {other.fqdn} is {address}"
                say("FAIL", f"{what}, and {other.name} is {other.address}", cure)


def report_connections(hosts):
    """Who cannot connect to whom."""
    calls = [call for host in hosts for call in host.calls]
    found = [call for call in calls if isinstance(call, list)]
    slowest = max((seconds for seconds, _ in found), default=0) * 1e3
    what = f"{len(found)} connections, the slowest round trip {slowest:.2f} ms"
    with ok_if_all_is(what):
        for host in hosts:
            for other, why in zip(hosts, host.calls, strict=True):
                if isinstance(why, str):
                    there = f"{other.name} ({other.address})"
                    what = f"{host.name} cannot connect to {there}: {why}"
                    cure = f"on {other.name}, all ports: ufw allow from {host.address}"
                    say("FAIL", what, cure)


def report_clocks(hosts):
    """Whose clock is off, as rank 0's host sees it."""
    found = list(zip(hosts, hosts[0].calls, strict=True))
    found = [(host.name, *call) for host, call in found if isinstance(call, list)]
    worst = max((abs(ahead) + took for _, took, ahead in found), default=0)
    with ok_if_all_is(f"clocks agree to {worst * 1e3:.2f} ms"):
        for name, took, ahead in found:
            if abs(ahead) - took > SKEW_WARN_S:
                kind = "FAIL" if abs(ahead) > SKEW_FAIL_S else "warn"
                side = "ahead of" if ahead > 0 else "behind"
                what = f"{name}: clock {abs(ahead):.2f} s {side} {hosts[0].name}'s"
                say(kind, what, f"on {name}: chronyc tracking; timedatectl")


def report_speeds(hosts, times, speeds, link_gbit):
    """All-reduce by size, then which host or link is slow. speeds[a][b]: Gbit/s."""
    links = {(a, b): speed for a, x in enumerate(speeds) for b, speed in x.items()}
    slowest = min(links.values(), default=0)
    world_size = sum(host.processes for host in hosts)
    for size, seconds in times:
        sent = size * 2 * (world_size - 1) / world_size  # by each, on a ring
        gbit = sent * 8e-9 / seconds
        share = f", {gbit / slowest:.0%} of the slowest link" if links else ""
        rate = f", {gbit:.2f} Gbit/s{share}" if size > 4 else ""
        say("", f"all-reduce of {human(size)}: {seconds * 1e3:.2f} ms{rate}")
    if not links:
        return
    between = f"{slowest:.2f} to {max(links.values()):.2f} Gbit/s"
    # A host is slow if it is so with everybody; if with one alone, it is that link.
    bests = [max(links[pair] for pair in links if x in pair) for x in range(len(hosts))]
    usual, should = 0, f"{link_gbit:g} expected (--link-gbit)"
    if len(hosts) > 2:  # two cannot tell what is usual
        usual = statistics.median(bests)
        should = f"{usual:.2f} is usual, {should}"
    with ok_if_all_is(f"between hosts {between}"):
        for host, best in zip(hosts, bests, strict=True):
            if best < usual / 2:
                kind = "FAIL" if best < link_gbit / 2 else "warn"
                what = f"{host.name} is slow: at best {best:.2f} Gbit/s; {should}"
                say(kind, what, f"on {host.name}: ethtool {host.interface}; ip -s link")
        for (a, b), speed in links.items():
            worst = min(bests[a], bests[b])
            if worst < usual / 2 and not worst >= link_gbit / 2 > speed:
                continue  # that host was named above
            x, y = hosts[a], hosts[b]
            card = min(x.gbit, y.gbit)
            what = f"{x.name} to {y.name}: {speed:.2f} Gbit/s"
            cure = f"on {x.name}: ethtool {x.interface}; iperf3 -c {y.address}"
            if speed < max(usual, link_gbit) / 2:
                kind = "FAIL" if speed < link_gbit / 2 else "warn"
                say(kind, f"slow link, {what}; {should}", cure)
            elif speed < min(card, 10) / 2:  # one connection seldom fills a faster card
                say("warn", f"{what}, and the network cards have {card:g}", cure)


def report_all(hosts, ranks):
    """All but the collectives; whether there is any use in trying those."""
    say("", f"{len(hosts)} hosts, {len(ranks)} processes, {hosts[0].backend}")
    report_hosts(hosts)
    with ok_if_all_is("shared memory, threads, devices"):
        for host in hosts:
            report_limits(host)
    with ok_if_all_is("every process allocates, computes rightly, and as fast"):
        report_devices(ranks)
    if len(hosts) > 1:
        with ok_if_all_is("every host knows the others by the right name"):
            report_names(hosts)
        report_connections(hosts)
        report_clocks(hosts)
    calls = [call for host in hosts for call in host.calls]
    blocked = [call for call in calls if isinstance(call, str)]
    crowded = [host for host in hosts if host.processes > host.devices > 0]
    mixed = len({host.backend for host in hosts}) > 1
    if blocked or crowded or mixed:
        say("", "all-reduce and bandwidth: not tried, mend the above first")
    return not (blocked or crowded or mixed)


class Board:
    """The store as a notice board: each rank puts up what it found, under a title.

    doing: what this process is at, for the message if it fails or is stuck; cure: what
    to type then.
    """

    def __init__(self, rank):
        self.rank, self.who = rank, f"rank {rank} on {socket.gethostname()}"
        self.store, self.doing, self.cure = None, "the start", "nvidia-smi"

    def put(self, title, value):
        self.store.set(f"{title}/{self.rank}", json.dumps(value))

    def read(self, title, ranks):
        """[what each of `ranks` put]; TimeoutError names those that put nothing."""
        self.doing, self.cure = f"waiting for {title}", "py-spy dump --pid PID"
        try:
            found = self.store.multi_get([f"{title}/{rank}" for rank in ranks])
        except dist.DistError:
            missing = self.missing(title, ranks)
            raise TimeoutError(f"nothing from rank {missing}") from None
        return [json.loads(value) for value in found]

    def missing(self, title, ranks):
        put = {rank: self.store.check([f"{title}/{rank}"]) for rank in ranks}
        return ", ".join(str(rank) for rank in ranks if not put[rank])

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


def check(link_gbit):
    """All checks, in each process that torchrun has started; the exit status."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    try:
        rank, local_rank, world_size, _, port = (
            int(os.environ[name]) for name in names
        )
        master = os.environ["MASTER_ADDR"]
    except (KeyError, ValueError) as error:
        bad_input(f"torchrun sets {', '.join(names)} and MASTER_ADDR: {error}")
    board, everybody = Board(rank), range(world_size)

    def stuck():
        board.fail(f"stuck: all checks together may take {ALL_S} s")
        end_process(1)

    timer = threading.Timer(ALL_S, stuck)
    timer.daemon = True
    timer.start()
    # Should Python itself not get to run: C ends it, and says in which line.
    faulthandler.dump_traceback_later(ALL_S + 5, exit=True)
    try:
        board.doing = f"connecting to rank 0's store at {master}:{port}"
        board.cure = f"getent hosts {master}; nc -vz {master} {port}"
        step = timedelta(seconds=STEP_S)
        board.store = next(dist.rendezvous("env://", timeout=step))[0]
        examine(link_gbit, board, local_rank, world_size)
    except Exception as error:  # whatever it is, the report says what it was doing
        board.fail(f"{type(error).__name__}: {error}".splitlines()[0])
        if not board.store:
            return 1
        with contextlib.suppress(dist.DistError):  # the store may be gone as well
            board.put("failed", "")
            if rank == 0:
                time.sleep(2)  # the others fail a moment later
                if silent := board.missing("failed", everybody):
                    what = f"rank {silent} did not fail: the others may wait for it"
                    say("FAIL", what, "on its host: py-spy dump --pid PID")
    try:
        if rank == 0:
            failed, warned = COUNTS["FAIL"], COUNTS["warn"]
            verdict = "can NOT train as it is" if failed else "can train"
            say("", f"this cluster {verdict}: {failed} failed, {warned} warnings")
            board.put("verdict", int(failed > 0))
        board.store.set_timeout(timedelta(seconds=ALL_S))  # rank 0 may fail later
        (status,) = board.read("verdict", [0])
        board.put("bye", "")
        if rank == 0:  # the store may be in this process
            said = [f"bye/{rank}" for rank in everybody]
            board.store.wait(said, timedelta(seconds=5))
    except (dist.DistError, TimeoutError):  # somebody is gone
        status = 1
    return status


def examine(link_gbit, board, local_rank, world_size):
    """Every check in turn; rank 0 says what came of it. What cannot go on raises."""
    rank, count = board.rank, torch.accelerator.device_count()
    device = torch.device("cpu")
    if count:
        torch.accelerator.set_device_index(local_rank % count)
        kind = torch.accelerator.current_accelerator().type
        device = torch.device(kind, local_rank % count)
    backend = dist.get_default_backend_for_device(device.type)
    board.doing, board.cure = f"allocating and computing on {device}", "nvidia-smi"
    right, seconds = compute(device)
    mine = {"rank": rank, "right": right, "seconds": seconds}
    mine["host"] = socket.gethostname()
    if local_rank == 0:  # it speaks for its host
        server = Server(("", 0), Clock)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        mine |= host_facts(backend, device)
        mine["listens"] = (mine["address"], server.server_address[1])
    board.put("facts", mine)
    ranks = board.read("facts", range(world_size))
    ranks = [types.SimpleNamespace(**facts) for facts in ranks]
    hosts = [facts for facts in ranks if hasattr(facts, "listens")]
    leaders = [host.rank for host in hosts]

    if local_rank == 0:
        board.doing = "connecting to the other hosts"
        others = [None if host.rank == rank else host for host in hosts]
        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            calls = list(pool.map(lambda host: host and probe_host(host), others))
        names = [resolve(host.fqdn) for host in hosts]
        board.put("connections", {"calls": calls, "resolved": names})
    if rank == 0:
        found = board.read("connections", leaders)
        for host, more in zip(hosts, found, strict=True):
            vars(host).update(more)
        board.put("go", report_all(hosts, ranks))
    if not board.read("go", [0])[0]:
        return

    interface, _, complaint = choose_interface(backend)
    if complaint:  # it is reported: go on as with the cure
        os.environ[f"{backend.upper()}_SOCKET_IFNAME"] = interface
    board.doing = f"the first all-reduce ({backend})"
    board.cure = "export NCCL_DEBUG=INFO TORCH_CPP_LOG_LEVEL=INFO"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", board.store),
        rank=rank,
        world_size=world_size,
        # NCCL's own time-out would kill the process before it can say at what.
        timeout=timedelta(seconds=STEP_S if backend == "gloo" else 2 * ALL_S),
    )
    board.put("sums", wrong_sums(rank, world_size, device))
    board.doing = "measuring the all-reduce"
    times, speeds = all_reduce_times(device), {}
    if local_rank == 0 and len(hosts) > 1:
        board.doing = "measuring each link"
        largest, seconds = times[-1]  # and now of about a third of a second
        size = min(16 << 20, int(largest * 0.3 / seconds) // 4 * 4)
        speeds = pair_speeds(device, leaders, leaders.index(rank), size)
    board.put("speeds", speeds)
    if rank == 0:
        with ok_if_all_is(f"all-reduce is right: {', '.join(DTYPES)}"):
            for other, dtypes in enumerate(board.read("sums", range(world_size))):
                if dtypes:
                    host = ranks[other].host
                    what = f"rank {other} on {host}: all-reduce is wrong:"
                    say("FAIL", f"{what} {', '.join(dtypes)}")
        found = board.read("speeds", leaders)
        found = [{int(a): speed for a, speed in x.items()} for x in found]
        report_speeds(hosts, times, found, link_gbit)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = bad_input
    number = {"type": float, "metavar": "N"}
    wait, link = "seconds for all to come (30)", "Gbit/s of a link; half will do (1)"
    parser.add_argument("--hosts", default="", help="the names of all: node0,node1")
    parser.add_argument("--wait", default=30, help=wait, **number)
    parser.add_argument("--link-gbit", default=1, help=link, **number)
    args, flags = parser.parse_known_args()
    if not args.wait > 0 or not args.link_gbit > 0:
        bad_input("--wait and --link-gbit are numbers above 0")
    if not IS_WORKER:
        sys.exit(launch(args, flags))
    if flags:
        bad_input(f"unknown: {' '.join(flags)}")
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        os._exit(1)  # the first attempt has said it
    end_process(check(args.link_gbit))


if __name__ == "__main__":
    main()
