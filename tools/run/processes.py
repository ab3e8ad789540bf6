"""Start processes, wait for their end, and find those that are left."""

import atexit
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

TIMEOUT_S = int(os.environ.get("TEST_TIMEOUT_S", 240))  # a run takes 1 to 10 s

# A launcher or a user may have set them, and a program would take them for its own.
NOT_INHERITED = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"}
NOT_INHERITED |= {"MASTER_PORT", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID"}


class TimedOut(Exception):
    """A process did not end in time; to tools/prove/lines.py that is no failure."""


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@functools.cache
def temporary_folder():
    """TMPDIR of all programs started from here: torchrun, for one, leaves folders."""
    folder = tempfile.mkdtemp(prefix="proofs-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def clean_env(**extra):
    """The environment without a launcher's, and with `extra`; None means not set."""
    env = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
    env |= {"TMPDIR": temporary_folder(), **extra}
    return {key: str(value) for key, value in env.items() if value is not None}


def start(command, cwd, merged=False, **env):
    """`command` in a session of its own: a Popen with two pipes, one if `merged`."""
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd,
        env=clean_env(**env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def finish(process, timeout_s=None):
    """Wait for it: Done. If it hangs, end its whole group and raise TimedOut."""
    timeout_s = timeout_s or TIMEOUT_S
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise TimedOut(f"no end within {timeout_s} s:\n{out}\n{err}") from None
    return Done(process.returncode, out, err)


def run(command, cwd, **env):
    return finish(start(command, cwd, **env))


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def left_over(mark, patience_s=20):
    """Kill the processes with MARK=`mark` in their environment that do not end soon.

    Return their numbers.
    """
    deadline, found = time.monotonic() + patience_s, [None]
    while found and time.monotonic() < deadline:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or is somebody else's
                if f"MARK={mark}".encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        time.sleep(0.1 * bool(found))
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def descendants(pid):
    """The processes that come from process `pid`, as far as their parents still run."""
    children = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            after_name = path.read_text().rpartition(")")[2].split()
            children.setdefault(int(after_name[1]), []).append(int(path.parent.name))
    found = list(children.get(pid, []))
    for child in found:
        found += children.get(child, [])
    return found


def began(pid):
    """When a process began, as time.time() counts; OSError if it has ended."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(after_name[19])  # since the machine was started: proc_pid_stat(5)
    uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - (uptime - ticks / os.sysconf("SC_CLK_TCK"))
