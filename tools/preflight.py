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
import fcntl
import functools
import json
import os
import platform
import re
import resource
import socket
import socketserver
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
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
SIZES = (4, 64 << 10, 1 << 20, 16 << 20)  # bytes of an all-reduce; on GPUs, too:
LARGE = (256 << 20,)
DTYPES = ("float32", "bfloat16", "int64")
FAIL_GPU, WARN_GPU = ("FAIL", "nvidia-smi"), ("warn", "nvidia-smi")
SAME = {  # what all hosts should have the same of, and what to type where it differs
    "torch": ("FAIL", "pip list | grep torch"),
    "CUDA": ("FAIL", "python -m torch.utils.collect_env"),
    "NCCL": ("FAIL", "pip list | grep nccl"),
    "driver": WARN_GPU,
    "Python": ("warn", "python --version"),
}
ROUNDS = 8  # with so many others each host is measured: enough to tell who is slow


class Report:
    """Print findings as they come, if `speaks`, and count them by kind."""

    def __init__(self, speaks=True):
        self.speaks, self.counts = speaks, collections.Counter()

    def say(self, kind, what, *cures):
        """kind: ok, warn, FAIL, or "" for a fact; cures: what to type next."""
        self.counts[kind] += 1
        if self.speaks:
            lines = [f"{kind:<6}{what}", *(f"type  {cure}" for cure in cures)]
            print("\n".join(lines), flush=True)

    @property
    def bad(self):
        return self.counts["FAIL"] + self.counts["warn"]

    def ok_since(self, before, what):
        """Say `what` if nothing bad was said since `bad` was `before`."""
        if self.bad == before:
            self.say("ok", what)

    def end(self):
        """Say what it comes to; return the exit status."""
        failed, warned = self.counts["FAIL"], self.counts["warn"]
        verdict = "can NOT train as it is" if failed else "can train"
        self.say("", f"this cluster {verdict}: {failed} failed, {warned} warnings")
        return int(failed > 0)


def bad_input(message):
    """One line on stderr from one process of each host, and exit status 2."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"preflight.py: error: {message}", file=sys.stderr, flush=True)
    os._exit(2)


def first_line(error):
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


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

    As gloo and NCCL choose: the variable, else gloo takes what the host's own name
    resolves to, and NCCL the first that is neither loopback nor a container's.
    """
    there_are, variable = interfaces(), f"{backend.upper()}_SOCKET_IFNAME"
    outward = [x for x in there_are if not x.startswith(("lo", "docker", "virbr"))]
    outward = (outward or ["lo"])[0]
    wanted = os.environ.get(variable, "").split(",")[0]
    if wanted and (backend == "gloo" or wanted[0] != "^"):  # gloo knows names alone
        exact = backend == "gloo" or wanted[0] == "="
        name = wanted if backend == "gloo" else wanted.lstrip("=")
        chosen = [x for x in there_are if x == name or not exact and x.startswith(name)]
        if chosen:
            return chosen[0], there_are[chosen[0]], ""
        complaint = f"{variable}={wanted}, and there is {', '.join(there_are)}"
        return outward, there_are.get(outward, ""), complaint
    if backend == "gloo":
        own = socket.gethostname()
        mine = [x for x, address in there_are.items() if address == resolve(own)]
        if mine and mine[0] != "lo":
            return mine[0], resolve(own), ""
        complaint = f"its own name, {own}, is {resolve(own) or 'unknown'} there"
        return outward, there_are.get(outward, ""), complaint
    return outward, there_are.get(outward, ""), ""


def gbit_of(interface):
    """Gbit/s that a network card says it has; 0 if it does not, or is no real card."""
    if not os.path.exists(f"/sys/class/net/{interface}/device"):
        return 0  # a virtual one names any number
    return max(0, int(read(f"/sys/class/net/{interface}/speed", "0"))) / 1000


def host_facts(backend, device):
    """What the report says of a host, as JSON can carry it: sizes in bytes."""
    interface, address, complaint = choose_interface(backend)
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    infiniband = sorted(Path("/sys/class/infiniband").glob("*/ports/*/rate"))
    kept = re.compile(r"(NCCL|GLOO|TORCH|UCX|FI)_")
    facts = {
        "name": socket.gethostname(),
        "fqdn": os.environ.get("PREFLIGHT_NAME") or socket.getfqdn(),
        "address": address,
        "interface": interface,
        "complaint": complaint,
        "addresses": list(interfaces().values()),
        "gbit": gbit_of(interface),
        "more": ", ".join(f"{x.parts[4]} {read(x)}" for x in infiniband),
        "infiniband": bool(infiniband),
        "shm": shm.f_blocks * shm.f_frsize if shm else -1,
        "shm_free": shm.f_bavail * shm.f_frsize if shm else -1,
        "cores": len(os.sched_getaffinity(0)),
        "numa": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        "threads": torch.get_num_threads(),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        % (1 << 63),  # -1: no limit
        "locked": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
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
        "variables": {x: y for x, y in os.environ.items() if kept.match(x)},
    }
    if device.type == "cuda":
        nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else ()
        about = torch.cuda.get_device_properties(0)
        free, facts["memory"] = torch.cuda.mem_get_info(0)
        arch, built = torch.cuda.get_device_capability(0), torch.cuda.get_arch_list()
        facts["NCCL"] = ".".join(map(str, nccl)) or "none"
        facts["device"] = about.name
        facts["taken"] = facts["memory"] - free
        facts["more"] += f" sm_{arch[0]}{arch[1]}, torch has {' '.join(built)}"
    return facts


# --- The roll call: before torchrun, and without torch


def knock(name, port):
    """(connection, "", "") if `name` answers at `port`, else (None, why, cure)."""
    address, me = resolve(name), socket.gethostname()
    if not address:
        return None, f"{me} does not know the name {name}", f"getent hosts {name}"
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


def is_me(name):
    if name.split(".")[0] == socket.gethostname().split(".")[0]:
        return True
    return name == "localhost" or resolve(name) in interfaces().values()


def roll_call(hosts, fqdn, endpoint, port, count, wait_s):
    """Whether `count` hosts come to the endpoint within `wait_s`; if not, say who not.

    hosts: their names, or [] if nobody knows. fqdn: what torchrun will call this one.
    Each listens at `port`: so the endpoint's host can ask one that does not come why.
    """
    report, me = Report(), next(filter(is_me, hosts), socket.gethostname())
    try:
        listener = socket.create_server(("", port), backlog=1024)
    except OSError as error:
        why = f"{me} cannot listen at port {port}: {error.strerror}"
        report.say("FAIL", why, f"ss -ltnp 'sport = :{port}'")
        return False
    deadline = time.monotonic() + wait_s
    with listener:
        if not is_me(endpoint):
            return answer(report, listener, me, fqdn, endpoint, port, deadline)
        came = []  # [name, its fqdn, its address, connection]
        while len(came) < count - 1 and time.monotonic() < deadline:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                connection, (address, _) = listener.accept()
                hello = receive(connection)
                came.append([hello["name"], hello["fqdn"], address, connection])
        own = came[0][3].getsockname()[0] if came else ""
        came.append([me, fqdn, own, None])
        judge(report, hosts, came, count, port, wait_s)
    # Only now that the port is free again may the others start their torchrun.
    for *_, connection in came[:-1]:
        with contextlib.suppress(OSError, ValueError):
            send(connection, {"failed": report.counts["FAIL"], "at": me})
            receive(connection)  # nothing: it hangs up first, which frees the port
    return not report.counts["FAIL"]


def judge(report, hosts, came, count, port, wait_s):
    """Name who is missing and why, as far as can be seen from the endpoint's host."""
    names = collections.Counter(name for name, *_ in came)
    missing = [x for x in hosts if x not in names]
    here = ", ".join(sorted(names))
    if len(came) < count:
        cures = [] if hosts else ["--hosts with all names, to hear which is missing"]
        what = f"{len(came)} of {count} hosts came in {wait_s:g} s: {here}"
        report.say("FAIL", what, *cures)
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        asked = pool.map(functools.partial(ask_missing, port=port), missing)
        for name, (why, cure) in zip(missing, asked, strict=True):
            report.say("FAIL", f"{name} did not come: {why}", cure)
    for name, fqdn, address, _ in came:
        if names[name] > 1:
            cure = f"on {address or 'this host'}: hostnamectl set-hostname ANOTHER"
            report.say("FAIL", f"more than one host has the name {name}", cure)
        if count > 1 and fqdn.startswith("localhost"):
            cure = f"on {name}, in torchrun's line: --local-addr={address or 'ADDRESS'}"
            report.say("FAIL", f"{name} would tell the others to call {fqdn}", cure)
    if not report.counts["FAIL"]:
        report.say("ok", f"all hosts came: {here}")


def ask_missing(name, port):
    """(why it did not come, what to type)."""
    connection, why, cure = knock(name, port)
    if not connection:
        return why, cure
    with connection, contextlib.suppress(OSError, ValueError, KeyError):
        send(connection, {})
        reply = receive(connection, 2 * CONNECT_S)
        return f"it is up, but {reply['why']}", f"on {name}: {reply['cure']}"
    return f"something else listens at port {port}", f"on {name}: ss -ltnp"


def answer(report, listener, me, fqdn, endpoint, port, deadline):
    """Go to the endpoint; while it cannot be reached, tell it why if it asks."""
    asked = None
    while True:
        connection, why, cure = knock(endpoint, port)
        if connection:
            break
        listener.settimeout(0.5)
        with contextlib.suppress(OSError, ValueError):
            asked, (caller, _) = listener.accept()
            receive(asked)
            if resolve(endpoint) != caller and not endpoint[0].isdigit():
                said = resolve(endpoint) or "unknown"
                why = f"there the name {endpoint} is {said}, and {endpoint} is {caller}"
                cure = f"getent hosts {endpoint}; grep -n {endpoint} /etc/hosts"
            send(asked, {"why": why, "cure": cure})
        # The endpoint's host waits as long, then asks; or it is not there at all.
        if asked or time.monotonic() > deadline + 2 * CONNECT_S:
            report.say("FAIL", f"{me} cannot come to {endpoint}: {why}", cure)
            return False
    with connection:
        try:
            send(connection, {"name": me, "fqdn": fqdn})
            patience = max(0, deadline - time.monotonic()) + 5 * CONNECT_S
            verdict = receive(connection, patience)
        except (OSError, ValueError) as error:
            why = f"{endpoint}:{port} answers, but not as a preflight would: {error}"
            report.say("FAIL", why, f"on {endpoint}: ss -ltnp 'sport = :{port}'")
            return False
    if verdict["failed"]:
        report.say("FAIL", f"{me} came, but not all is well: see {verdict['at']}")
    return not verdict["failed"]


def names_of_hosts(args, count):
    """--hosts, or what Slurm says, or [] if nobody knows."""
    hosts = [x for x in args.hosts.split(",") if x]
    if not hosts and "SLURM_JOB_NODELIST" in os.environ:
        command = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
        with contextlib.suppress(OSError):
            done = subprocess.run(command, capture_output=True, text=True)
            hosts = done.stdout.split() if len(done.stdout.split()) == count else []
    if hosts and len(set(hosts)) != count:
        bad_input(f"--hosts names {len(set(hosts))} hosts and --nnodes says {count}")
    return hosts


def launch(args, flags):
    """Call the roll, then run torchrun with `flags` and this file; the exit status."""
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
    if any(x.endswith(".py") or x in ("-m", "--module") for x in flags):
        bad_input("leave the script of the training and what follows it out")
    nnodes = given.nnodes.split(":")[-1] or "1"
    where = given.rdzv_endpoint or given.master_addr
    endpoint, _, port = where.partition(":")
    default = "29400" if given.rdzv_endpoint else "29500"  # torchrun's own
    port = port or given.master_port or default
    if not nnodes.isdecimal() or not port.isdecimal() or not int(port) < 1 << 16:
        bad_input(f"--nnodes={given.nnodes}, or the port {port}, is no such number")
    hosts, fqdn = (
        names_of_hosts(args, int(nnodes)),
        given.local_addr or socket.getfqdn(),
    )
    if int(nnodes) > 1:
        if not endpoint or int(port) == 0:
            bad_input(f"where do they meet? For example: {example}")
        if not roll_call(hosts, fqdn, endpoint, int(port), int(nnodes), args.wait):
            return 1
    with tempfile.TemporaryDirectory() as folder:
        verdict = Path(folder, "verdict")
        command = [sys.executable, "-m", "torch.distributed.run", *flags, __file__]
        command += [f"--link-gbit={args.link_gbit}"]
        # Workers that fail would have torchrun bury the report under its own.
        environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
        environment |= {"PREFLIGHT_VERDICT": str(verdict), "PREFLIGHT_NAME": fqdn}
        torchrun = subprocess.Popen(command, env=environment)
        deadline = time.monotonic() + 2 * ALL_S
        while torchrun.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
            if verdict.exists():  # the others' torchrun may yet be stuck: not this one
                deadline = min(deadline, time.monotonic() + 5)
        torchrun.terminate()  # it ends its workers, with SIGKILL after 30 s
        torchrun.wait()
        if verdict.exists():
            return int(verdict.read_text())
    what = f"the checks did not end on {socket.gethostname()}: see above"
    cure = f"--rdzv-conf=is_host=true on {endpoint}, is_host=false on the others"
    Report().say("FAIL", what, f"if torchrun's hosts did not meet: {cure}")
    return 1


# --- The checks: in the processes that torchrun has started


class Clock(socketserver.BaseRequestHandler):
    """Answers each byte with the time here, and who answers."""

    def handle(self):
        while self.request.recv(1):
            answer = time.time(), int(os.environ["RANK"])
            self.request.sendall(struct.pack("dq", *answer))


class Server(socketserver.ThreadingTCPServer):
    request_queue_size, daemon_threads = 1024, True


def call(host):
    """(seconds of a round trip, seconds that its clock is ahead); or str: why not.

    The quickest of eight round trips: its answer is from within that time of ours.
    """
    try:
        with socket.create_connection(host["listens"], CONNECT_S) as connection:
            times = []
            for _ in range(8):
                sent = time.time()
                connection.sendall(b"?")
                there, rank = struct.unpack("dq", connection.recv(16))
                now = time.time()
                times.append((now - sent, there - (sent + now) / 2))
            return min(times) if rank == host["rank"] else "another host answers there"
    except TimeoutError:
        return f"no answer in {CONNECT_S} s"
    except (OSError, struct.error) as error:
        return getattr(error, "strerror", None) or str(error)


def wait_for(device):
    if device.type != "cpu":
        torch.accelerator.synchronize()


def compute(device):
    """Allocate and multiply: (whether the result is right, seconds of the fastest)."""
    size, clock = 4096, time.perf_counter
    if device.type == "cpu":  # which may have other work: that is not its fault
        size, clock = 256, time.thread_time
    ones, times = torch.ones(size, size, device=device), []
    for _ in range(20):
        wait_for(device)
        start = clock()
        product = ones @ ones
        wait_for(device)
        times.append(clock() - start)
    return bool((product == size).all()), min(times)


def wrong_sums(rank, world_size, device):
    """Dtypes that all_reduce adds up wrongly; element i of rank r is (r + i) % 3."""
    wrong, index = [], torch.arange(10_000, device=device)
    for dtype in DTYPES:
        dtype = getattr(torch, dtype)
        mine = ((index + rank) % 3).to(dtype)
        dist.all_reduce(mine)
        want = sum((index + x) % 3 for x in range(world_size)).double()
        room = torch.finfo(dtype).eps * world_size if dtype.is_floating_point else 0
        if bool(((mine.double() - want).abs() > room * want).any()):
            wrong.append(str(dtype))
    return wrong


def all_reduce_times(device):
    """[(bytes, seconds)] of an all-reduce, the same on all ranks; stops when slow."""
    found = []
    for size in SIZES + (LARGE if device.type != "cpu" else ()):
        if size > SIZES[2] and found[-1][1] * size / found[-1][0] > 3:
            break  # at this rate it would take more than 3 s
        data = torch.ones(size // 4, device=device)
        repeats = 20 if size < SIZES[2] else 3
        dist.all_reduce(data)  # opens connections
        wait_for(device)
        start = time.perf_counter()
        for _ in range(repeats):
            dist.all_reduce(data)
        wait_for(device)
        took = torch.tensor((time.perf_counter() - start) / repeats, device=device)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        found.append((size, took.item()))
    return found


def partners(count, index):
    """With whom of `count` hosts host `index` is paired, one round after the other.

    The circle method: no pair comes twice, the pairs of a round are disjoint. Of an odd
    number one sits out: None.
    """
    even = count + count % 2
    for turn in range(min(ROUNDS, even - 1)):
        circle = [0, *((x + turn) % (even - 1) + 1 for x in range(even - 1))]
        other = circle[even - 1 - circle.index(index)]
        yield other if other < count else None


def pair_speeds(device, leaders, index, size):
    """{host: Gbit/s to it} from host `index`; `leaders`: one rank of each host."""
    data, speeds = torch.ones(size // 4, device=device), {}
    token = torch.ones(1, device=device)
    for other in filter(lambda x: x is not None, partners(len(leaders), index)):
        peer, best = leaders[other], float("inf")
        for turn in range(6):  # in turn; the first two meet, and open the connection
            message = data if turn > 1 else token
            if (turn % 2 == 0) == (index < other):
                start = time.perf_counter()
                dist.send(message, peer)
                dist.recv(token, peer)
                wait_for(device)
                best = min(best, time.perf_counter() - start if turn > 1 else best)
            else:
                dist.recv(message, peer)
                dist.send(token, peer)
                wait_for(device)
        speeds[other] = size * 8e-9 / best
    return speeds


# --- What rank 0 makes of it


def human(size):
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def compare(report, hosts, key, kind, cure):
    """Name the hosts where `key` is not as on most (or, in a tie, as on rank 0's)."""
    counts = collections.Counter(x[key] for x in hosts)
    usual = max(counts, key=lambda x: (counts[x], x == hosts[0][key]))
    for x in hosts:
        if x[key] != usual:
            what = f"{x['name']} has {key} {x[key]}, the others have {usual}"
            report.say(kind, what, f"on {x['name']}: {cure}")


def report_hosts(report, hosts):
    """A line for each host, and in what they differ."""
    for x in hosts:
        device = f"{x['devices']} x {x['device']}" if x["devices"] else "CPU"
        link = f" ({x['gbit']:g} Gbit/s)" if x["gbit"] else ""
        facts = [f"{x['address']} on {x['interface']}{link}", device]
        facts += [human(x["memory"]), f"{x['cores']} cores, {x['numa']} NUMA"]
        facts += [f"/dev/shm {human(x['shm'])}"]
        facts += [f"{key} {x[key]}" for key in SAME]
        facts += [x["more"]] * bool(x["more"])
        report.say("", f"{x['name']}: {', '.join(facts)}")
    before = report.bad
    for key, (kind, cure) in (SAME | {"backend": FAIL_GPU, "device": WARN_GPU}).items():
        compare(report, hosts, key, kind, cure)
    report.ok_since(before, f"the same on all hosts: {', '.join(SAME)}")
    for name in sorted({name for x in hosts for name in x["variables"]}):
        values = {x["name"]: x["variables"].get(name, "unset") for x in hosts}
        if len(set(values.values())) > 1 and not name.endswith("_IFNAME"):
            what = ", ".join(f"{value} on {host}" for host, value in values.items())
            report.say("warn", f"{name} is {what}")
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        what = "--max-restarts: a restart may read what the attempt before it stored"
        report.say("warn", what, "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")


def report_limits(report, x, world_size):
    """What host `x` has too little of."""
    on, processes = f"on {x['name']}: ", x["processes"]

    def say(kind, what, cure):
        report.say(kind, f"{x['name']}: {what}", cure)

    need = processes * SHM_PER_PROCESS
    if 0 <= x["shm"] < need:
        what = f"/dev/shm has {human(x['shm'])}, and may need {human(need)}"
        machine = f"mount -o remount,size={need >> 20}m /dev/shm"
        say("FAIL", what, f"docker run --shm-size={need >> 20}m, or {on}{machine}")
    elif 0 <= x["shm_free"] < need // 4:
        what = f"of /dev/shm only {human(x['shm_free'])} are free"
        say("warn", what, f"{on}ls -l /dev/shm")
    if x["threads"] * processes > x["cores"]:
        what = f"{processes} x {x['threads']} threads on {x['cores']} cores"
        threads = max(1, x["cores"] // processes)
        say("warn", what, f"{on}export OMP_NUM_THREADS={threads}")
    files = max(1024, 32 * world_size)
    if x["files"] < files:
        what = f"a process may open {x['files']} files"
        say("warn", what, f"{on}ulimit -n {max(files, 65536)}")
    if x["infiniband"] and x["locked"] != resource.RLIM_INFINITY:
        cure = "ulimit -l unlimited, or docker run --ulimit memlock=-1"
        say("warn", "InfiniBand needs locked memory, and it is limited", on + cure)
    if processes > x["devices"] > 0:
        what = f"{processes} processes for {x['devices']} devices"
        say("FAIL", what, f"--nproc-per-node={x['devices']}")
    if x.get("taken", 0) > x["memory"] / 5:
        what = f"of device 0, {human(x['taken'])} are taken already"
        say("warn", what, f"{on}nvidia-smi")


def report_devices(report, ranks):
    """Devices that compute wrongly, or slowly beside the others."""
    usual, before = statistics.median(x["seconds"] for x in ranks), report.bad
    for x in ranks:
        who, times = f"rank {x['rank']} on {x['host']}", x["seconds"] / usual
        if not x["right"]:
            cure = f"on {x['host']}: nvidia-smi -q; dmesg | grep -i xid"
            report.say("FAIL", f"{who} multiplies wrongly", cure)
        elif times > (2 if ranks[0]["devices"] else 3):  # CPUs have more to do
            cure = f"on {x['host']}: top; nvidia-smi -q -d CLOCK,TEMPERATURE"
            report.say("warn", f"{who} computes at 1/{times:.1f} of the usual", cure)
    report.ok_since(before, "every process allocates, computes rightly, and as fast")


def report_names(report, hosts):
    """Own names that lead nowhere, and names of others that lead elsewhere."""
    before = report.bad
    for x in hosts:
        if x["complaint"]:
            variable = f"{x['backend'].upper()}_SOCKET_IFNAME"
            what = f"{x['name']}: {x['complaint']}; others could not connect to that"
            cure = f"on {x['name']}: export {variable}={x['interface']}"
            report.say("FAIL", what, cure)
        for y, address in zip(hosts, x["resolved"], strict=True):
            cure = f"on {x['name']}: getent hosts {y['fqdn']}; cat /etc/hosts"
            if x is y or address in y["addresses"]:
                continue
            if not address:
                report.say("warn", f"{x['name']} does not know {y['fqdn']}", cure)
                continue
            what = f"on {x['name']} the name {y['fqdn']} is {address}, and"
            report.say("FAIL", f"{what} {y['name']} is {y['address']}", cure)
    report.ok_since(before, "every host knows the others by the right name")


def report_calls(report, hosts):
    """Who cannot connect to whom; whose clock is off, as rank 0's host sees it."""
    before, slowest, worst = report.bad, 0, 0
    for x in hosts:
        for y, found in zip(hosts, x["calls"], strict=True):
            if isinstance(found, str):
                where = f"{x['name']} cannot connect to {y['name']} ({y['address']})"
                cure = f"on {y['name']}, all ports: ufw allow from {x['address']}"
                report.say("FAIL", f"{where}: {found}", cure)
            elif x is not y:
                slowest = max(slowest, found[0])
    count = len(hosts) * (len(hosts) - 1)
    best = f"{count} connections, the slowest round trip {slowest * 1e3:.2f} ms"
    report.ok_since(before, best)
    before = report.bad
    for y, found in list(zip(hosts, hosts[0]["calls"], strict=True))[1:]:
        if isinstance(found, str):
            continue
        took, ahead = found
        worst = max(worst, abs(ahead) + took)
        if abs(ahead) - took > SKEW_WARN_S:
            kind = "FAIL" if abs(ahead) > SKEW_FAIL_S else "warn"
            side = "ahead of" if ahead > 0 else "behind"
            what = f"{y['name']}: clock {abs(ahead):.2f} s {side} {hosts[0]['name']}'s"
            report.say(kind, what, f"on {y['name']}: chronyc tracking; timedatectl")
    if worst:
        report.ok_since(before, f"clocks agree to {worst * 1e3:.2f} ms")


def report_speeds(report, hosts, times, speeds, link_gbit):
    """All-reduce by size, then which host or link is slow. speeds[a][b]: Gbit/s."""
    world_size = sum(x["processes"] for x in hosts)
    for size, seconds in times:
        sent = size * 2 * (world_size - 1) / world_size  # by each, on a ring
        gbit = f", {sent * 8e-9 / seconds:.2f} Gbit/s" if size > 4 else ""
        what = f"all-reduce of {human(size)}: {seconds * 1e3:.2f} ms{gbit}"
        report.say("", what)
    links = {(a, b): speed for a, x in enumerate(speeds) for b, speed in x.items()}
    if not links:
        return
    # A host is slow if it is so with everybody; if with one alone, it is that link.
    bests = [
        max(y for pair, y in links.items() if x in pair) for x in range(len(hosts))
    ]
    usual, before = statistics.median(bests), report.bad
    for x, best in enumerate(bests):
        if best < usual / 2:
            what = f"{hosts[x]['name']} is slow: at best {best:.2f} Gbit/s"
            cure = f"on {hosts[x]['name']}: ethtool {hosts[x]['interface']}; ip -s link"
            report.say("FAIL", f"{what}, and {usual:.2f} is usual", cure)
            links = {pair: speed for pair, speed in links.items() if x not in pair}
    for (a, b), speed in links.items():
        card = min(hosts[a]["gbit"], hosts[b]["gbit"])
        what = f"{hosts[a]['name']} to {hosts[b]['name']}: {speed:.2f} Gbit/s"
        cure = f"ethtool {hosts[a]['interface']}; iperf3 -c {hosts[b]['address']}"
        cure = f"on {hosts[a]['name']}: {cure}"
        if speed < max(usual, link_gbit) / 2:
            should = f"{usual:.2f} is usual, {link_gbit:g} expected (--link-gbit)"
            report.say("FAIL", f"slow link, {what}; {should}", cure)
        elif speed < min(card, 10) / 2:  # one connection seldom fills a faster card
            report.say("warn", f"{what}, and the network cards have {card:g}", cure)
    low, high = min(links.values(), default=0), max(links.values(), default=0)
    report.ok_since(before, f"between hosts {low:.2f} to {high:.2f} Gbit/s")


class Board:
    """The store as a notice board: each rank puts up what it found, under a title.

    doing: what this process is at, for the message if it fails or is stuck.
    """

    def __init__(self, store, rank):
        self.store, self.rank, self.doing = store, rank, "the start"
        self.who = f"rank {rank} on {socket.gethostname()}"

    def put(self, title, value):
        self.store.set(f"{title}/{self.rank}", json.dumps(value))

    def read(self, title, ranks):
        """[what each of `ranks` put]; TimeoutError names those that put nothing."""
        self.doing = f"waiting for {title}"
        try:
            found = self.store.multi_get([f"{title}/{x}" for x in ranks])
        except dist.DistError:
            late = [str(x) for x in ranks if not self.store.check([f"{title}/{x}"])]
            raise TimeoutError(f"nothing from rank {', '.join(late)}") from None
        return [json.loads(x) for x in found]

    def stuck(self):
        print(f"FAIL  {self.who} is stuck at {self.doing}", flush=True)
        os._exit(1)


def check(link_gbit):
    """All checks, in each process that torchrun has started; the exit status."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    try:
        rank, local_rank, world_size, _, port = (int(os.environ[x]) for x in names)
        master = os.environ["MASTER_ADDR"]
    except (KeyError, ValueError) as error:
        bad_input(f"torchrun sets {', '.join(names)} and MASTER_ADDR: {error}")
    report = Report(rank == 0)
    try:
        store = next(dist.rendezvous("env://", timeout=timedelta(seconds=STEP_S)))[0]
    except Exception as error:  # of one type or another: the cure is the same
        _, why, cure = knock(master, port)
        report.speaks = local_rank == 0
        what = f"{socket.gethostname()} cannot reach rank 0's store at {master}:{port}"
        report.say("FAIL", f"{what}: {why or first_line(error)}", cure)
        return 1
    board = Board(store, rank)
    timer = threading.Timer(ALL_S, board.stuck)
    timer.daemon = True
    timer.start()
    try:
        examine(link_gbit, report, board, local_rank, world_size)
    except Exception as error:  # whatever it is, the report says what it was doing
        what = f"{board.who}, {board.doing}: {first_line(error)}"
        report.say("FAIL", what, "export NCCL_DEBUG=INFO")
        with contextlib.suppress(dist.DistError):  # the store may be gone as well
            board.put("error", what)
            if rank == 0:
                time.sleep(2)  # the others fail a moment later
                report_errors(report, board, world_size)
    try:
        if rank == 0:
            board.put("verdict", report.end())
        (status,) = board.read("verdict", [0])
        board.put("bye", "")
        if rank == 0:  # the store may be in this process
            store.wait([f"bye/{x}" for x in range(world_size)], timedelta(seconds=5))
    except (dist.DistError, TimeoutError):  # somebody is gone
        status = 1
    return status


def report_errors(report, board, world_size):
    """Those who failed, too; and those who did not, which may be what they wait for."""
    for x in range(1, world_size):
        if board.store.check([f"error/{x}"]):
            report.say("FAIL", *board.read("error", [x]))
        else:
            what = f"rank {x} did not fail: it may hang, and the others wait for it"
            report.say("FAIL", what, "on its host: py-spy dump --pid PID")


def examine(link_gbit, report, board, local_rank, world_size):
    """Every check in turn; rank 0 says what came of it. What cannot go on raises."""
    rank, count = board.rank, torch.accelerator.device_count()
    device = torch.device("cpu")
    if count:
        torch.accelerator.set_device_index(local_rank % count)
        kind = torch.accelerator.current_accelerator().type
        device = torch.device(kind, local_rank % count)
    backend = dist.get_default_backend_for_device(device.type)
    board.doing = f"allocating and computing on {device}"
    right, seconds = compute(device)
    mine = {"rank": rank, "right": right, "seconds": seconds}
    mine["host"] = socket.gethostname()
    if local_rank == 0:  # it speaks for its host
        board.doing = "looking at its host"
        server = Server(("", 0), Clock)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        mine |= host_facts(backend, device)
        mine["listens"] = (mine["address"], server.server_address[1])
    board.put("facts", mine)
    ranks = board.read("facts", range(world_size))
    hosts = [x for x in ranks if "listens" in x]
    leaders = [x["rank"] for x in hosts]

    if local_rank == 0:
        board.doing = "connecting to the other hosts"
        others = [None if x["rank"] == rank else x for x in hosts]
        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            calls = list(pool.map(lambda x: x and call(x), others))
        names = [resolve(x["fqdn"]) for x in hosts]
        board.put("connections", {"calls": calls, "resolved": names})
    if rank == 0:
        report.say("", f"{len(hosts)} hosts, {world_size} processes, {backend}")
        for x, found in zip(hosts, board.read("connections", leaders), strict=True):
            x |= found
        report_hosts(report, hosts)
        before = report.bad
        for x in hosts:
            report_limits(report, x, world_size)
        report.ok_since(before, "shared memory, threads, open files")
        report_devices(report, ranks)
        if len(hosts) > 1:
            report_names(report, hosts)
            report_calls(report, hosts)
        blocked = [y for x in hosts for y in x["calls"] if isinstance(y, str)]
        crowded = [x for x in hosts if x["processes"] > x["devices"] > 0]
        mixed = len({x["backend"] for x in hosts}) > 1
        board.put("go", not (blocked or crowded or mixed))
    if not board.read("go", [0])[0]:
        report.say("", "all-reduce and bandwidth: not tried, mend the above first")
        return

    interface, _, complaint = choose_interface(backend)
    if complaint:  # it is reported: go on as with the cure
        os.environ[f"{backend.upper()}_SOCKET_IFNAME"] = interface
    board.doing = f"the first all-reduce ({backend})"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", board.store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=STEP_S),
    )
    board.put("sums", wrong_sums(rank, world_size, device))
    board.doing = "measuring the all-reduce"
    times, speeds = all_reduce_times(device), {}
    if local_rank == 0 and len(hosts) > 1:
        board.doing = "measuring each link"
        mebibytes = min(16, max(0.1, 0.3 / dict(times)[1 << 20]))  # a third of a second
        size = int(mebibytes * (1 << 20)) // 4 * 4
        speeds = pair_speeds(device, leaders, leaders.index(rank), size)
    board.put("speeds", speeds)
    if rank == 0:
        before = report.bad
        for x, dtypes in enumerate(board.read("sums", range(world_size))):
            if dtypes:
                what = f"rank {x} on {ranks[x]['host']}: all-reduce is wrong:"
                report.say("FAIL", f"{what} {', '.join(dtypes)}")
        report.ok_since(before, f"all-reduce is right: {', '.join(DTYPES)}")
        found = board.read("speeds", leaders)
        found = [{int(a): speed for a, speed in x.items()} for x in found]
        report_speeds(report, hosts, times, found, link_gbit)


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
    status = check(args.link_gbit)
    verdict = os.environ.get("PREFLIGHT_VERDICT")
    if verdict and os.environ["LOCAL_RANK"] == "0":
        Path(verdict).write_text(str(status))
    sys.stdout.flush()
    os._exit(0 if verdict else status)  # a half-dead connection could hold up the exit


if __name__ == "__main__":
    main()
