"""Run programs in forks of this process, which has imported torch already.

A new interpreter spends some 4 CPU seconds on that. A fork computes the same bits, but
it does not show how an interpreter starts or ends.

Import this module before any tensor is computed: a pool of threads does not survive a
fork.
"""

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib.util
import io
import os
import re
import runpy
import signal
import sys
import tempfile
import time
import types
from multiprocessing import forkserver
from pathlib import Path

import torch
import torch._dynamo  # noqa: F401  any optimizer imports it: once here, not in each fork
import torch.distributed.run

from tools.run import processes
from tools.run.processes import TIMEOUT_S, Done, TimedOut, clean_env
from tools.scripts import ROOT

FRESH_THREADS = torch.get_num_threads()  # what a new interpreter would use here
torch.set_num_threads(1)  # no pool of threads may exist in a process that forks

# Modules that a copy of the repository has as well: each program imports its own.
OF_A_COPY = ("utils", "hooks", "variants", "mingpt", "tools", "tests", "benchmarks")


def become(words):
    """Go on as the program that `words` would start, to its end; for a forked process.

    words: `python SCRIPT ...`, `python -m MODULE ...` or `torchrun ...`, as typed.
    """
    torch.set_num_threads(1)  # makes this fork's pool; two threads at once would abort
    program, *arguments = words
    if program == "torchrun":
        _torchrun(arguments)
        return
    is_module = arguments[0] == "-m"
    script, *arguments = arguments[is_module:]
    set_path_for(script, is_module)
    path = importlib.util.find_spec(script).origin if is_module else script
    # A script that spawns its ranks forks once more here, so that it must not compute
    # with several threads before.
    if not re.search(r"\bspawn\(", Path(path).read_text()):
        use_fresh_threads()
    torch.multiprocessing.spawn = _spawn
    run_main(script, arguments, is_module)


def _spawn(fn, args=(), nprocs=1, join=True, daemon=False):
    """`torch.multiprocessing.spawn`, whose processes are forks."""
    rank = functools.partial(_spawned, fn)
    return _start_forks(rank, args, nprocs, join, daemon)


def _start_forks(
    fn,
    args=(),
    nprocs=1,
    join=True,
    daemon=False,
    start_method="fork",
    start_processes=torch.multiprocessing.start_processes,
):
    """`torch.multiprocessing.start_processes`, whose forks begin when all are there.

    While a store's thread looks up the name of a rank that connects, it holds a lock of
    glibc. A process forked just then would wait for it for ever.
    """
    all_forked = torch.multiprocessing.get_context("fork").Event()

    def begin(*given):
        all_forked.wait()
        return fn(*given)

    context = start_processes(begin, args, nprocs, False, daemon, start_method)
    all_forked.set()
    while join and not context.join():
        pass
    return context


def _spawned(fn, *args):
    """`fn` of the script as a spawned process imports it, or of another module."""
    use_fresh_threads()
    script = runpy.run_path(sys.argv[0], run_name="__mp_main__")
    return script.get(fn.__name__, fn)(*args)


def _torchrun(words):
    """What `torchrun WORDS` does: its own code, but that the ranks are forks."""
    config_from_args = torch.distributed.run.config_from_args

    def rank(script, arguments, is_module):
        set_path_for(script, is_module)
        use_fresh_threads()
        run_main(script, arguments, is_module)

    def with_forks(args):
        config, _, _ = config_from_args(args)
        config.start_method = "fork"
        script = args.training_script, args.training_script_args, args.module
        return config, rank, script

    torch.distributed.run.config_from_args = with_forks
    torch.multiprocessing.start_processes = _start_forks
    torch.distributed.run.main(words)


def set_path_for(script, is_module):
    """Import from where a new Python would."""
    first = os.getcwd() if is_module else os.path.dirname(os.path.abspath(script))
    added = [x for x in os.environ.get("PYTHONPATH", "").split(os.pathsep) if x]
    ours = {str(ROOT), os.getcwd(), ""}
    sys.path[:] = [first, *added, *(path for path in sys.path if path not in ours)]
    for name in list(sys.modules):
        if name.partition(".")[0] in OF_A_COPY:
            del sys.modules[name]
    # A new Python imports such a module by itself.
    for path in [f"{folder}/sitecustomize.py" for folder in added]:
        if os.path.exists(path):
            runpy.run_path(path)


def use_fresh_threads():
    """Compute with as many threads as a new interpreter would."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", FRESH_THREADS)))


def run_main(script, arguments, is_module):
    sys.argv = [str(script), *arguments]
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    # As Python does it: the path is absolute in tracebacks, and argv has it as typed.
    main = types.ModuleType("__main__")
    main.__file__ = os.path.abspath(script)
    sys.modules["__main__"] = main
    exec(compile(Path(script).read_bytes(), main.__file__, "exec"), vars(main))


def uses_fork_server(words, folders):
    """Whether a script or a file of tests that `words` name speaks of one."""
    names = [x.partition("::")[0] for x in words if ".py" in x]
    names += [f"{x.replace('.', '/')}.py" for x in words]  # after -m
    paths = {os.path.join(folder, name) for folder in folders for name in names}
    files = filter(os.path.isfile, paths)
    return any("forkserver" in Path(x).read_text() for x in files)


@functools.cache
def share_a_fork_server():
    """One for the DataLoaders of all forks: it takes as long to import torch."""
    if not forkserver._forkserver._forkserver_address:  # nor has a parent started one
        torch.multiprocessing.set_forkserver_preload(["torch"])
        forkserver.ensure_running()
        torch.multiprocessing.set_forkserver_preload([])  # each fork's to say
    forkserver._forkserver.ensure_running = lambda: None


class Fork:
    """A program in a fork of this process, in a session of its own.

    merged: its stderr goes to where its stdout goes.
    """

    unfinished = set()  # `end_all` ends those that nobody has waited for

    def __init__(self, words, cwd, merged=False, **env):
        self.out = tempfile.TemporaryFile()  # noqa: SIM115  closed by finish()
        self.err = tempfile.TemporaryFile()  # noqa: SIM115
        environment, words = clean_env(**env), [str(word) for word in words]
        if uses_fork_server(words, [cwd, environment.get("PYTHONPATH", "")]):
            share_a_fork_server()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        self.unfinished.add(self)
        if self.pid == 0:
            os.setsid()
            # If a pytest is killed, SIGTERM ends its forks, and torchrun their ranks.
            torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGTERM)  # on Linux
            os.dup2(self.out.fileno(), 1)
            os.dup2((self.out if merged else self.err).fileno(), 2)
            os.chdir(cwd)
            exit_as(functools.partial(become, words), environment)

    def finish(self, timeout_s=None):
        """Wait for its end: Done. If it hangs, end all that it started: TimedOut."""
        timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        deadline, in_time = time.monotonic() + timeout_s, True
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            if in_time and time.monotonic() > deadline:
                in_time, family = False, processes.descendants(self.pid)
                for number in (signal.SIGABRT, signal.SIGKILL):  # first the stacks
                    for pid in reversed(family):  # a rank ends with its parent
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, number)
                        time.sleep(0.03)  # one stack after the other
                    os.killpg(self.pid, number)
                    time.sleep(0.5)
            time.sleep(0.01)
        self.unfinished.discard(self)
        texts = []
        for file in (self.out, self.err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
            file.close()
        if not in_time:
            raise TimedOut("\n".join([f"no end within {timeout_s} s:", *texts]))
        return Done(os.waitstatus_to_exitcode(ended[1]), *texts)


def end_all():
    """End the forks that nobody has waited for, as after a failure beside them."""
    for fork in list(Fork.unfinished):
        with contextlib.suppress(TimedOut):
            fork.finish(timeout_s=0)


def exit_as(program, environment):
    """In a fork: call `program`, then exit with its status. Never returns."""
    status = 1
    try:
        gc.freeze()  # or each collection would copy all that the parent has: 0.2 s
        # The parent's objects on these numbers must not be closed by the collector.
        code = environment.get("PYTHONIOENCODING")
        sys.stdout = io.TextIOWrapper(os.fdopen(os.dup(1), "wb"), code)
        sys.stderr = io.TextIOWrapper(os.fdopen(os.dup(2), "wb"), line_buffering=True)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # the parent's; so are the functions to call at exit
        atexit._clear()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        faulthandler.enable(2)
        try:
            program()
            status = 0
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            status = end.code if isinstance(end.code, int) else bool(end.code)
        except BaseException:
            sys.excepthook(*sys.exc_info())  # torch.distributed's names the rank
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(int(status))
