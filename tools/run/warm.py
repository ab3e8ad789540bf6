"""Run programs in forks of this process, which has imported torch already.

A new interpreter spends some 4 CPU seconds on that. A fork computes the same bits, but
it does not show how an interpreter starts or ends.

Read `fork` and `become` first. Import this module before any tensor is computed: a pool
of threads does not survive a fork.
"""

import atexit
import faulthandler
import functools
import gc
import importlib.util
import io
import os
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
import torch.distributed.checkpoint  # noqa: F401  too
import torch.distributed.run
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from tools.scripts import ROOT, calls

ENTRY = 'if __name__ == "__main__":'
FRESH_THREADS = torch.get_num_threads()  # what a new interpreter would use here
torch.set_num_threads(1)  # no pool of threads may exist in a process that forks

start_processes = torch.multiprocessing.start_processes  # `_torchrun` replaces it

# Modules that a copy of the repository has as well: each program imports its own.
OF_A_COPY = ("utils", "hooks", "variants", "mingpt", "tools", "tests", "benchmarks")


def become(words, hooks):
    """Go on as the program that `words` would start, to its end; for a forked process.

    words: `python SCRIPT ...`, `python -m MODULE ...` or `torchrun ...`, as typed.
    hooks: functions that each process calls with the script's globals.
    """
    torch.set_num_threads(1)  # makes this fork's pool; two threads at once would abort
    program, *arguments = words
    if program == "torchrun":
        _torchrun(arguments, hooks)
        return
    is_module = arguments[0] == "-m"
    script, *arguments = arguments[is_module:]
    set_path_for(script, is_module)
    path = importlib.util.find_spec(script).origin if is_module else script
    # A script that spawns its ranks forks once more here, so that it must not compute
    # with several threads before.
    if "spawn" not in calls(os.path.abspath(path)):
        use_fresh_threads()
    torch.multiprocessing.spawn = functools.partial(_spawn, hooks)
    run_main(script, arguments, is_module, hooks)


def _spawn(hooks, fn, args, nprocs):
    """`torch.multiprocessing.spawn`, whose processes are forks."""
    rank = functools.partial(_spawned, hooks, fn)
    return _start_forks(rank, args, nprocs, join=True, start_method="fork")


def _start_forks(fn, args, nprocs, join, **how):
    """`torch.multiprocessing.start_processes`, whose forks begin when all are there.

    While a store's thread looks up the name of a rank that connects, it holds a lock of
    glibc. A process forked just then would wait for it for ever.
    """
    all_forked = torch.multiprocessing.get_context("fork").Event()

    def begin(*given):
        all_forked.wait()
        return fn(*given)

    context = start_processes(begin, args, nprocs, join=False, **how)
    all_forked.set()
    while join and not context.join():
        pass
    return context


def _spawned(hooks, fn, *args):
    """Call `fn` in a spawned process, which imports the script anew.

    If the script has a function of this name, that is the one to call.
    """
    use_fresh_threads()
    script = execute(sys.argv[0], "__mp_main__", hooks)
    return script.get(fn.__name__, fn)(*args)


def _torchrun(words, hooks):
    """Do what `torchrun WORDS` does, with torchrun's own code, but fork the ranks.

    It hardly pauses before it meets other machines and before it looks at its ranks.
    """
    config_from_args = torch.distributed.run.config_from_args

    def rank(script, arguments, is_module):
        set_path_for(script, is_module)
        use_fresh_threads()
        run_main(script, arguments, is_module, hooks)

    def with_forks(args):
        config, _, _ = config_from_args(args)
        config.start_method = "fork"
        config.monitor_interval = 0.01
        script = args.training_script, args.training_script_args, args.module
        return config, rank, script

    dynamic_rendezvous._delay = lambda seconds: time.sleep(0.01)  # not 0.3 or 1 s
    torch.distributed.run.config_from_args = with_forks
    torch.multiprocessing.start_processes = _start_forks
    torch.distributed.run.main(words)


def set_path_for(script, is_module):
    """Import from where a new Python would."""
    first = os.path.dirname(os.path.abspath(script))
    if is_module:
        first = os.getcwd()
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    added = [*filter(None, added)]
    ours = {str(ROOT), os.getcwd(), ""}
    others = [path for path in sys.path if path not in ours]
    sys.path[:] = [first, *added, *others]
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


def run_main(script, arguments, is_module, hooks):
    sys.argv = [str(script), *arguments]
    if is_module and not hooks:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    if is_module:
        sys.argv[0] = importlib.util.find_spec(script).origin
    execute(sys.argv[0], "__main__", hooks)


def execute(script, name, hooks):
    """Run a script as the module `name`, as Python does; returns its globals.

    The path is absolute in tracebacks, and argv has it as typed. hooks: functions to
    call with the globals before the script's last block.
    """
    module = types.ModuleType(name)
    module.__file__ = os.path.abspath(script)
    sys.modules[name] = module
    body, entry, last = Path(script).read_text().partition(f"\n{ENTRY}")
    exec(compile(body, module.__file__, "exec"), vars(module))
    for hook in hooks:
        hook(vars(module))
    lines_before = "\n" * body.count("\n")
    exec(compile(lines_before + entry + last, module.__file__, "exec"), vars(module))
    return vars(module)


@functools.cache
def share_a_fork_server():
    """The DataLoaders of all forks share a fork server, which has to import torch."""
    if not forkserver._forkserver._forkserver_address:  # nor has a parent started one
        torch.multiprocessing.set_forkserver_preload(["torch"])
        forkserver.ensure_running()
        torch.multiprocessing.set_forkserver_preload([])  # each fork's to say
    forkserver._forkserver.ensure_running = lambda: None


def fork(words, cwd, environment, out, err, hooks):
    """Run `words` in a fork, in a session of its own: the fork's process number.

    out, err: open files for what it prints. hooks: functions that each process of
    the script calls with the script's globals, before its last block. Programs are
    started by tools/run/processes.py, which also waits for their end.
    """
    share_a_fork_server()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        # If a pytest is killed, SIGTERM ends its forks, and torchrun their ranks.
        torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGTERM)  # on Linux
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        become_and_exit(words, cwd, environment, hooks)
    return pid


def become_and_exit(words, cwd, environment, hooks):
    """In a fork: `become` the program, then exit with its status. Never returns."""
    status = 1
    try:
        gc.freeze()  # or each collection would copy all that the parent has: 0.2 s
        # The parent's objects on these numbers must not be closed by the collector.
        out = os.fdopen(os.dup(1), "wb")
        err = os.fdopen(os.dup(2), "wb")
        sys.stdout = io.TextIOWrapper(out, environment.get("PYTHONIOENCODING"))
        sys.stderr = io.TextIOWrapper(err, line_buffering=True)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # the parent's; so are the functions to call at exit
        atexit._clear()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        faulthandler.enable(2)
        try:
            os.chdir(cwd)
            become(words, hooks)
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
