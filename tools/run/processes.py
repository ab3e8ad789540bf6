"""Start programs, wait for what they print and their end, and find what is left."""

import atexit
import contextlib
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

TIMEOUT_S = int(os.environ.get("TEST_TIMEOUT_S", 240))  # a run takes 1 to 10 s

# `python` and `torchrun` are those of this interpreter.
PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"

# A launcher or a user may have set them, and a program would take them for its own.
NOT_INHERITED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "TORCHELASTIC_RUN_ID",
)


class TimedOut(Exception):
    """A process did not end in time; to tools/prove/verdict.py that is no failure."""


class Done(NamedTuple):
    """How a program has ended, and what it has printed."""

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
    for name in extra:
        assert name.isupper(), f"{name!r} is no option, and no variable"
    env = {**os.environ}
    for name in NOT_INHERITED:
        env.pop(name, None)
    env |= {"TMPDIR": temporary_folder(), "PATH": PATH, **extra}
    return {name: str(value) for name, value in env.items() if value is not None}


def wait(condition, timeout_s, pause_s=0.01):
    """What `condition()` returns as soon as that is true, or when the time is up."""
    deadline = time.monotonic() + timeout_s
    while True:
        result = condition()
        if result or time.monotonic() > deadline:
            return result
        time.sleep(pause_s)


def wait_until(condition):
    if not wait(condition, TIMEOUT_S):
        raise TimedOut(f"nothing within {TIMEOUT_S} s")


def text_of(path):
    return path.read_bytes().decode(errors="replace")


class Program:
    """A program that runs, in a session of its own.

    words: what a person types: `python SCRIPT ...`, `python -m MODULE ...` or
    `torchrun ...`. They run in a fork of this process, as tools/run/warm.py does it.
    cwd: the folder that they run in, which is made.
    real: start it as a shell does. Any other program needs this, and so does a claim
    about a start or an end. merged: its stderr goes to where its stdout goes.
    hooks: functions that a fork of a script calls, see `start` in launch.py. env:
    variables to set; None means not set.
    """

    running = set()  # the programs for whose end nobody has waited

    def __init__(self, words, cwd, real=False, merged=False, hooks=(), **env):
        assert not (real and hooks)
        self.words = [str(word) for word in words]
        if cwd:
            os.makedirs(cwd, exist_ok=True)
        environment = clean_env(**env)
        # No pipes: a full one blocks, and what a program leaves behind keeps it open.
        folder = Path(tempfile.mkdtemp(dir=temporary_folder()))
        self.files = [folder / "stdout", folder / "stderr"]
        self.process = None
        self.status = None
        self.timed_out = False
        with open(self.files[0], "wb") as out, open(self.files[1], "wb") as err:
            if merged:
                err = out
            if real:
                self.process = subprocess.Popen(
                    self.words,
                    cwd=cwd,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
                self.pid = self.process.pid
            else:
                # Here, because it imports torch: that takes seconds, and a real program
                # is started without it.
                from tools.run import warm

                self.pid = warm.fork(self.words, cwd, environment, out, err, hooks)
        self.running.add(self)

    def poll(self):
        """The exit status, or None while it runs."""
        if self.process:
            return self.process.poll()
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status

    @property
    def output(self):
        """What it has printed so far; without its stderr, unless they are merged."""
        return text_of(self.files[0])

    def wait_for(self, pattern, since=0):
        """The first match of `pattern` in `output`, from its character `since` on."""

        def found_or_ended():
            ended = self.poll() is not None  # first: then nothing can follow
            found = re.compile(pattern, re.M).search(self.output, since)
            return found or ended

        found = wait(found_or_ended, TIMEOUT_S)
        assert found is not True, self.failure(f"ended without printing {pattern!r}")
        if not found:
            reason = f"did not print {pattern!r} within {TIMEOUT_S} s"
            raise TimedOut(self.failure(reason))
        return found

    def finish(self, timeout_s=TIMEOUT_S):
        """Wait for its end: Done. If it hangs, end all that it started: TimedOut."""
        if not wait(lambda: self.poll() is not None, timeout_s):
            self.timed_out = True  # also for all who ask again
            self._end()
        self.running.discard(self)
        if self.timed_out:
            raise TimedOut(self.failure(f"did not end within {timeout_s} s"))
        return Done(self.poll(), *map(text_of, self.files))

    def end_with(self, status, timeout_s=TIMEOUT_S):
        """`finish`, and insist on this exit status."""
        done = self.finish(timeout_s)
        ended = f"ended with status {done.returncode}, not {status}"
        assert done.returncode == status, self.failure(ended)
        return done

    def succeed(self, timeout_s=TIMEOUT_S):
        """`finish`, and insist that it ends well."""
        return self.end_with(0, timeout_s)

    def failure(self, what):
        """The command as a person types it, what went wrong, and all it has printed."""
        printed = "".join(map(text_of, self.files))
        return f"{shlex.join(self.words)}: {what}\n{printed}"

    def _end(self):
        family = descendants(self.pid)
        if not self.process:  # forks show their stacks first
            os.killpg(self.pid, signal.SIGABRT)
            time.sleep(0.5)
        os.killpg(self.pid, signal.SIGKILL)  # before the others: a shell would go on
        kill(family)
        wait_until(lambda: self.poll() is not None)


def kill(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(pid, signal.SIGKILL)


def end_all(but=frozenset()):
    """End the programs that nobody has waited for, as after a failure beside them."""
    for program in Program.running - but:
        with contextlib.suppress(TimedOut):
            program.finish(timeout_s=0)


def marked(mark):
    """The processes that began with MARK=`mark` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            variables = path.read_bytes().split(b"\0")
            if f"MARK={mark}".encode() in variables:
                found.append(int(path.parent.name))
    return found


def left_over(mark, patience_s=20):
    """Kill the processes with MARK=`mark` in their environment that do not end soon.

    Return their numbers.
    """
    wait(lambda: not marked(mark), patience_s)
    found = marked(mark)
    kill(found)
    return found


def descendants(pid):
    """The processes that come from process `pid`, as far as their parents still run."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            for child in map(int, path.read_text().split()):
                found += [child, *descendants(child)]
    return found
