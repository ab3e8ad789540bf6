"""Interpreters for the documents' commands that have imported torch already.

`torchrun --nproc-per-node=2 multinode.py 5 5` starts three interpreters, which spend
some 10 CPU seconds on imports and less than one on training. Here one process imports
torch, and the commands find shims named `python` and `torchrun` first on their PATH:
website/shim.py hands the program to that process, a fork of which becomes it.

torchrun itself runs as always: it starts each rank by PYTHON_EXEC, which is the shim.
So exit statuses, signals, log files and the files of `@record` go their usual way.
"""

import contextlib
import io
import json
import os
import select
import shlex
import signal
import socket
import sys
import tempfile
import warnings
from pathlib import Path

SHIM = Path(__file__).with_name("shim.py")


class Forks:
    """A process that forks, from `with` to its end. `bin` is the folder of the shims.

    It imports torch when it is asked for the first time. Make it before any thread.
    """

    def __enter__(self):
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self.bin = folder / "bin"
        self.bin.mkdir()
        address = str(folder / "socket")
        for program in ("python", "torchrun"):
            words = [sys.executable, "-I", "-S", str(SHIM), address, program]
            words = shlex.join(words)
            shim = self.bin / program
            shim.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
            shim.chmod(0o755)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen(64)
        # The process sees the end of this pipe, however this one ends.
        ours, self._open = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._open)
                serve(listener, ours, self.bin / "python")
            finally:
                os._exit(0)
        os.close(ours)
        listener.close()
        return self

    def __exit__(self, *error):
        os.close(self._open)
        os.waitpid(self._pid, 0)
        self._folder.cleanup()


def forked(mark):
    """The forks made for a command whose MARK is this folder: leaders of sessions.

    /proc shows them with the environment of the process that they were forked from, so
    that proofs.processes.marked does not find them.
    """
    path = Path(mark, "forks")
    found = path.read_text().split() if path.exists() else []
    return [int(pid) for pid in found if is_alive(int(pid))]


def is_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def serve(listener, closing, python):
    """Answer each request in a process of its own, until `closing` is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # then `closing` is closed as well
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for these processes
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    while True:
        ready, _, _ = select.select([listener, closing], [], [])
        if closing in ready:
            return
        from proofs import warm  # not before it is needed: it takes 5 s

        warm.FRESH_THREADS = 1  # two commands at a time share the machine
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            answer(connection, python)
            os._exit(0)
        connection.close()


def answer(connection, python):
    """Fork the program of a request; tell its process id, then its exit status."""
    from proofs import warm

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, files, _, _ = socket.recv_fds(connection, 2**16, 3)
    while part := connection.recv(2**16):
        message += part
    request = json.loads(message)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        connection.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.chdir(request["cwd"])
        warm.exit_as(lambda: become(request["words"], python), request["env"])
    for file in files:
        os.close(file)
    if mark := request["env"].get("MARK"):
        with open(Path(mark, "forks"), "a") as file:
            file.write(f"{pid}\n")
    # The shim may have been killed.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def become(words, python):
    """proofs.warm.become, but that torchrun starts its ranks itself, by the shim."""
    import torch.distributed

    from proofs import warm

    torch.distributed.set_debug_level_from_env()  # otherwise done by its import
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    program, *arguments = words
    if program == "torchrun":
        os.environ["PYTHON_EXEC"] = str(python)
        warm.use_fresh_threads()
        torch.distributed.run.main(arguments)
        return
    if arguments[0] == "-u":
        arguments = arguments[1:]
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0), write_through=True)
    warm.become([program, *arguments])
