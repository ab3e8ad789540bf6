"""Start processes, wait for their end, and find those that are left."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

TIMEOUT_S = int(os.environ.get("TEST_TIMEOUT_S", 240))  # a run takes 1 to 10 s

# What a launcher or a user may have set, and what would be taken for it.
NOT_INHERITED = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
NOT_INHERITED |= {"MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}
NOT_INHERITED |= {"TORCHELASTIC_RUN_ID"}


class TimedOut(Exception):
    """A process did not end in time. This says nothing about what it would have done.

    It is no AssertionError, so that nobody takes it for a claim that was found wrong:
    proofs/lines.py gives it a verdict of its own.
    """


class Done(NamedTuple):
    """How a process ended; the status is minus the signal's number if it was killed."""

    returncode: int
    stdout: str
    stderr: str


def clean_env(**extra):
    """The environment without what a launcher has set in it, and with `extra`.

    What is None in `extra` is not set.
    """
    env = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
    env |= extra
    return {key: str(value) for key, value in env.items() if value is not None}


def start(command, cwd, **env):
    """Start `command` in a session of its own: a Popen with pipes for its output."""
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd,
        env=clean_env(**env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
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
    """Start `command` as a user would, and wait for it: Done."""
    return finish(start(command, cwd, **env))


def marked(mark):
    """The processes that have MARK=`mark` in their environment, by /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if f"MARK={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def left_over(mark, patience_s=20):
    """What of `marked` is still there after a while."""
    deadline = time.monotonic() + patience_s
    while (found := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
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
