"""Compute gradients and compile in a fork, because both count a process' devices.

Later forks of that process would inherit the count. The stand-in for GPUs has its
devices only in a fork, and would then have none. A PyTorch that is built for CUDA would
start threads for eight GPUs. tests/conftest.py refuses both in pytest's own process.
"""

import functools
import gc
import os
import tempfile
import traceback

import torch


def in_a_fork(function):
    """`function`, but it runs in a fork: what it returns comes back, or its failure."""

    @functools.wraps(function)
    def call(*arguments, **options):
        with tempfile.TemporaryFile() as file:
            pid = os.fork()
            if pid == 0:
                write_down(file, function, *arguments, **options)
            _, status = os.waitpid(pid, 0)
            status = os.waitstatus_to_exitcode(status)
            assert status == 0, f"the fork of {function.__name__} ended with {status}"
            file.seek(0)
            result, failure = torch.load(file)
        assert not failure, failure
        return result

    return call


def write_down(file, function, *arguments, **options):
    """In the fork: write down (result, failure) and end."""
    gc.freeze()  # or each collection would copy all that the parent has: 0.2 s
    torch.set_num_threads(1)  # makes this fork's pool; two threads at once would abort
    try:
        answer = function(*arguments, **options), None
    except BaseException:
        answer = None, traceback.format_exc()
    torch.save(answer, file)
    file.flush()
    os._exit(0)
