"""What `python` and `torchrun` are for the documents' commands: see website/forks.py.

    python -I -S shim.py SOCKET python|torchrun WORDS

A script, a module of variants/ or mingpt/, and torchrun are handed to the process that
listens on SOCKET: the words, the folder, the environment and the three open files. That
process makes a fork. The shim lives as long as the fork, passes signals on to it, and
ends as it ends. All else is run by the real program.

It is started for every process of a command, so that it imports next to nothing.
"""

import contextlib
import json
import os
import signal
import socket
import sys

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def is_shared(program, words):
    """Whether a fork that has imported torch does what `program words` would.

    `python -c` and modules of others start as they always do: they are no rungs, and a
    page may show how an interpreter behaves.
    """
    if program == "torchrun":
        return True
    words = [word for word in words if word != "-u"]
    if words[:1] == ["-m"]:
        ours = ("variants.", "mingpt.")
        return words[1].startswith(ours) or words[1] == "website.flags"
    return words != [] and words[0].endswith(".py") and os.path.isfile(words[0])


def main(address, program, words):
    if not is_shared(program, words):
        real = os.path.join(os.path.dirname(sys.executable), program)
        os.execv(real, [real, *words])
    # A signal waits until there is somebody to pass it on to.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    request = {"words": [program, *words], "cwd": os.getcwd(), "env": {**os.environ}}
    socket.send_fds(connection, [b" "], [0, 1, 2])  # files travel with a byte
    connection.sendall(json.dumps(request).encode())
    connection.shutdown(socket.SHUT_WR)
    answers = connection.makefile()
    pid = int(answers.readline())

    def pass_on(number, frame):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)

    for number in SIGNALS:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    status = int(answers.readline())
    if status < 0:  # killed by a signal: so is this process
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
