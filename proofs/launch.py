"""Launch a rung: as a user types it, or in forks that have imported torch already."""

import ast
import functools
import importlib
import re
import shutil
import sys
from pathlib import Path

from ladder.files import edit
from ladder.rungs import ROOT, RUNGS, ancestry, commands
from proofs import processes
from proofs.warm import Fork

# The rungs that run as several processes: multigpu.py and all that come from it.
DISTRIBUTED = [name for name in RUNGS if "multigpu.py" in ancestry(name)]
UNDER_TORCHRUN = [x for x in RUNGS if any("torchrun" in y for y in commands(x))]
SPAWNED = [name for name in DISTRIBUTED if name not in UNDER_TORCHRUN]


@functools.cache
def task_of(name):
    """The rung from which `name` has its task: it may have `load_train_objs` anew.

    Rungs of one task train the same model. A rung with a task of its own is compared
    with itself on one process where others are compared with their parent.
    """
    text = (ROOT / name).read_text()
    (objects,) = (
        ast.get_source_segment(text, x)
        for x in ast.parse(text).body
        if getattr(x, "name", "") == "load_train_objs"
    )
    parent = RUNGS[name]
    if parent and objects in (ROOT / parent).read_text():
        return task_of(parent)
    return name


def objects_of(name):
    """What the rung's `load_train_objs` returns."""
    module = name.removesuffix(".py").replace("/", ".")
    return importlib.import_module(module).load_train_objs()


OF_THE_TRUNKS_TASK = [x for x in RUNGS if task_of(x) == "single_gpu.py"]


def hooks_to_compare(name):
    """The hooks with which this rung's numbers can be compared with another's.

    A rung that mixes precisions differs from its parent by what it rounds. But autocast
    leaves float64 alone: there, nothing but this rounding is taken out.
    """
    mixes = "torch.autocast(" in (ROOT / name).read_text()
    return ("float64",) if mixes else ()


HOOKS = Path(__file__).parent / "hooks"
ENTRY = 'if __name__ == "__main__":'


def home(script):
    """The folder of the utils.py that belongs to `script`, a path to a rung."""
    folder = Path(script).resolve().parent
    return folder.parent if folder.name == "variants" else folder


def rung_of(script):
    """The name of the rung that `script`, a path, is a copy of, or None."""
    name = str(Path(script).resolve().relative_to(home(script)))
    return name if name in RUNGS else None


def options_of(name):
    """The options in the rung's docstring command, such as `--accumulate 4`.

    A rung whose idea needs an option is tested with what its docstring has.
    """
    words = commands(name)[0]
    numbers = [i for i, word in enumerate(words) if word.isdecimal()]
    return words[numbers[1] + 1 :]  # after total_epochs and save_every


def command(script, total, every, *options, nprocs=2, own_options=True):
    """The words to type for `script`, a path to a rung or to a copy of one.

    own_options: whether to add the options in its docstring's command.
    """
    name = rung_of(script)
    words = list(commands(name)[0])
    at = next(i for i, word in enumerate(words) if word.isdecimal())
    before = words[:at]
    if "-m" not in before:
        before[before.index(name)] = str(script)
    if name in UNDER_TORCHRUN:
        before = [re.sub("(nproc-per-node=).*", rf"\g<1>{nprocs}", x) for x in before]
    elif name in SPAWNED:
        options = ("--nprocs", nprocs, *options)
    if own_options:
        options = (*options_of(name), *options)
    return [str(x) for x in (*before, total, every, *options)]


def as_typed(words):
    """`words` for a new interpreter: the one of the tests, whatever PATH has."""
    program, *rest = words
    module = ["-m", "torch.distributed.run"] if program == "torchrun" else []
    return [sys.executable, *module, *rest]


def environment(script, env):
    """A variant is a module, and so is its copy: it is found by PYTHONPATH."""
    return {"PYTHONPATH": home(script)} | env


def start(script, *arguments, cwd, nprocs=2, **env):
    """Start a rung as a user does, for tests that do something to it: a Popen."""
    words = as_typed(command(script, *arguments, nprocs=nprocs))
    return processes.start(words, cwd, **environment(script, env))


def launch(
    script, *arguments, cwd, real, nprocs=2, own_options=True, timeout_s=None, **env
):
    """Run a rung with `total_epochs save_every [options]` to its end: Done.

    script: a path to a rung or to a copy that `plant` has made. cwd: the folder that it
    runs in. env: variables to set. real: why it takes new interpreters, which cost ten
    times as much; "" if forks show the same. They do, unless the claim is about how a
    process starts or ends: its exit status after a crash, threads that outlive `main`,
    kills, restarts. own_options: see `command`.
    """
    words = command(script, *arguments, nprocs=nprocs, own_options=own_options)
    if real:
        process = processes.start(as_typed(words), cwd, **environment(script, env))
        return processes.finish(process, timeout_s)
    return Fork(words, cwd, **environment(script, env)).finish(timeout_s)


def train(script, *arguments, cwd, real="", **how):
    """`launch`, and insist that it ends well."""
    done = launch(script, *arguments, cwd=cwd, real=real, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def run_script(script, *arguments, cwd, **env):
    """Run a script that starts no other, with any arguments, in a fork: Done."""
    return Fork(
        ["python", script, *arguments], cwd, **environment(script, env)
    ).finish()


def batch_size(name, effective, nprocs=2):
    """`--batch-size` of each process, so that a step takes `effective` samples."""
    if name not in DISTRIBUTED:
        return effective
    return effective // nprocs


def plant(name, folder, *changes, hooks=()):
    """Copy a rung and utils.py to `folder`; returns the path of the copy.

    changes: pairs (old, new) of texts to replace. hooks: names of modules in
    proofs/hooks that are attached to it; see proofs/hooks/__init__.py.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "utils.py", folder)
    script = folder / (name if name in RUNGS else Path(name).name)
    script.parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / name, script)
    if hooks:
        shutil.copytree(HOOKS, folder / "hooks", dirs_exist_ok=True)
        names = ", ".join(f'"{hook}"' for hook in hooks)
        attach = f"import hooks\n\nhooks.attach(globals(), {names})\n\n"
        changes = (*changes, (ENTRY, f"{attach}{ENTRY}"))
    edit(script, *changes)
    return script
