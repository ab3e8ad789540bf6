"""Name the hosts that do not come, before torchrun waits for them in silence.

torchrun starts no script before all hosts have come, so no script can say which host is
missing. Therefore each host first listens at the port that torchrun will use, and
reports to the endpoint's host. That host asks those that did not come why, and names
them. If all came, each host starts torchrun. Nothing here imports torch before that.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import fcntl
import json
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONNECT_S = 3  # a host that takes longer to answer is as good as away
SKEW_S = 5  # torchrun takes a host for dead whose clock is 15 s behind
COUNTS = collections.Counter()  # of what was said, by kind


def say(kind, what, *cures):
    """kind: ok, warn, FAIL, or "" for a fact; cures: what to try next."""
    COUNTS[kind] += 1
    lines = [f"{kind:<6}{what}", *(f"try   {cure}" for cure in cures)]
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

    They choose what the variable names. Without it, gloo takes what the host's own name
    leads to; NCCL takes InfiniBand, or else what is no loopback and no container's.
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
    elif backend == "gloo":  # gloo knows no patterns, NCCL does
        complaint = f"there is no {wanted}, and there is {', '.join(there_are)}"
    chosen = (found or [default])[0]
    return chosen, there_are.get(chosen, ""), "" if found else complaint


def is_this_host(name, hosts):
    """Whether that is this host; another one of `hosts` is not, wherever it leads."""
    own = socket.gethostname()
    own, short, *known = (full.split(".")[0] for full in (own, name, *hosts))
    if short == own or {own, short} <= set(known):
        return short == own
    return resolve(name) in interfaces().values()


def problem_with_own_name(given, count, endpoint):
    """[what is wrong with this host's own name, cure], or []; given: torchrun's flags.

    torchrun tells the others to connect to --local-addr, or else to what the own name
    leads to. c10d also compares the own name with the endpoint's, unless it is told
    `is_host`.
    """
    own, (_, address, _) = socket.gethostname(), choose_interface("nccl")
    flags, cured = f"in torchrun's line: --local-addr={address}", given.local_addr
    if count > 1 and (cured or socket.getfqdn()).startswith("localhost"):
        what = f"{own} would tell the others to connect to localhost"
        return [what, f"on {own}, {flags}"]
    if count > 1 and given.rdzv_backend == "c10d":
        cured = cured and "is_host" in given.rdzv_conf and resolve(endpoint)
        flags += " --rdzv-conf=is_host=false"
    if cured or resolve(own):
        return []
    cure = f"on {own}: echo '{address} {own}' >> /etc/hosts"
    cure += f"; or {flags}" if own != endpoint else ""
    return [f"{own} cannot resolve its own name: torchrun would crash or hang", cure]


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


def roll_call(hosts, problem, endpoint, port, count, wait_s):
    """Whether `count` hosts come to the endpoint within `wait_s`; if not, say who not.

    hosts: their names, or [] if nobody knows. problem: with this host's own name.
    Each listens at `port`, so that the endpoint's host can ask one that does not come.
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
            hello = {"name": me, "problem": problem}
            return report_to_endpoint(listener, hello, endpoint, port, deadline)
        others = {}  # {address: (name, problem, connection)}
        while len(others) + 1 < count and time.monotonic() < deadline:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                connection, (address, _) = listener.accept()
                hello = receive(connection)
                others[address] = hello["name"], hello["problem"], connection
                ahead = hello["time"] - time.time()  # the message took no time to come
                if abs(ahead) > SKEW_S:
                    side = "ahead" if ahead > 0 else "behind"
                    what = f"{hello['name']}: its clock is {abs(ahead):.0f} s {side}"
                    say("FAIL", what, f"on {hello['name']}: timedatectl")
        names = sorted([me, *(name for name, *_ in others.values())])
        if len(names) < count:
            found = f"{len(names)} of {count} hosts came in {wait_s:g} s"
            cure = "--hosts with all names, to hear which is missing"
            cures = [] if hosts else [cure]  # they are named below
            say("FAIL", f"{found}: {', '.join(names)}", *cures)
        missing = [name for name in hosts if name not in names]
        with concurrent.futures.ThreadPoolExecutor(256) as pool:
            asked = pool.map(lambda name: ask_missing(name, port), missing)
        for name, (why, cure) in zip(missing, asked, strict=True):
            say("FAIL", f"{name} did not come: {why}", cure)
        for _, its_problem, _ in others.values():
            if its_problem:
                say("FAIL", *its_problem)
    # Only now that the port is free again may the others start their torchrun.
    for *_, connection in others.values():
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


def report_to_endpoint(listener, hello, endpoint, port, deadline):
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
        say("FAIL", f"{hello['name']} cannot come to {endpoint}: {why}", cure)
        return False
    try:
        send(connection, hello | {"time": time.time()})
        patience = max(0, deadline - time.monotonic()) + 5 * CONNECT_S
        verdict = receive(connection, patience)
    except (OSError, ValueError) as error:
        why = f"{endpoint}:{port} answers, but not as a preflight would: {error}"
        say("FAIL", why, f"on {endpoint}: ss -ltnp 'sport = :{port}'")
        return False
    if verdict["failed"]:
        what = f"{hello['name']} came, but not all is well: see {verdict['at']}"
        say("FAIL", what)
    return not verdict["failed"]


def names_of_hosts(names, count):
    """Those in --hosts, or what Slurm says, or [] if nobody knows."""
    hosts = [name for name in names.split(",") if name]
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


def launch(args, flags, script):
    """Call the roll, then run torchrun with `flags` and `script`; the exit status."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    parser = argparse.ArgumentParser(allow_abbrev=False)
    names = ("nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_conf")
    names += ("master_addr", "master_port", "local_addr")
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
    hosts = names_of_hosts(args.hosts, nnodes)
    if nnodes > 1 and (not endpoint or port == 0):
        bad_input(f"where do they meet? For example: {example}")
    problem = problem_with_own_name(given, nnodes, endpoint)
    if problem:  # at once: the roll call may take a while
        say("FAIL", *problem)
    if nnodes > 1:
        all_came = roll_call(hosts, problem, endpoint, port, nnodes, args.wait)
    if problem or (nnodes > 1 and not all_came):
        return 1
    with tempfile.TemporaryDirectory(prefix="preflight") as folder:
        verdict = Path(folder, "verdict")
        # Workers that fail would have torchrun bury the report under its own.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        os.environ |= {"PREFLIGHT_VERDICT": str(verdict), "PREFLIGHT_NAME": fqdn}
        tempfile.tempdir = folder  # torchrun leaves its own folders there
        fork = multiprocessing.get_context("fork")  # torch is imported there alone
        child = fork.Process(target=torchrun, args=[[*flags, *script]])
        try:
            child.start()
            deadline = time.monotonic() + 2 * args.timeout
            while time.monotonic() < deadline:
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
    if status != 2:
        what = f"torchrun on {socket.gethostname()} ended with {status}: see above"
        conf = f"is_host=true on {endpoint}, =false on the others"
        say("FAIL", what, f"if the hosts did not meet: --rdzv-conf={conf}")
    return 2 if status == 2 else 1
