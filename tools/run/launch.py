"""Launch a script: as a user types it, or in forks that have imported torch already."""

import functools
import re
import runpy
import shutil
import sys
from pathlib import Path

from tools.files import edit
from tools.run import processes
from tools.run.warm import Fork
from tools.scripts import ROOT, SCRIPTS, ancestry, commands

# Those that run as several processes
DISTRIBUTED = [name for name in SCRIPTS if "multigpu.py" in ancestry(name)]
UNDER_TORCHRUN = [x for x in SCRIPTS if any("torchrun" in y for y in commands(x))]
SPAWNED = [name for name in DISTRIBUTED if name not in UNDER_TORCHRUN]
HOOKS = ROOT / "tests" / "hooks"
ENTRY = 'if __name__ == "__main__":'


@functools.cache
def task_of(name):
    """The script from which `name` has its `load_train_objs`: they train one model."""
    text, parent = (ROOT / name).read_text(), SCRIPTS[name]
    objects = re.search(r"\ndef load_train_objs.*?\n\n\n", text, re.S)[0]
    same = parent and objects in (ROOT / parent).read_text()
    return task_of(parent) if same else name


OF_THE_TRUNKS_TASK = [x for x in SCRIPTS if task_of(x) == "single_gpu.py"]


def objects_of(name):
    """What the script's `load_train_objs` returns."""
    return runpy.run_path(ROOT / name)["load_train_objs"]()


def hooks_to_compare(name):
    """With these hooks, its numbers are another script's: autocast leaves float64."""
    return ("float64",) if "torch.autocast(" in (ROOT / name).read_text() else ()


def home(script):
    """The folder of the utils.py that belongs to `script`, a path to a script."""
    folder = Path(script).resolve().parent
    return folder.parent if folder.name == "variants" else folder


def shares_a_batch(name):
    """Whether its ranks may take one batch: the sampler is told of `num_replicas=`."""
    return "num_replicas=" in (ROOT / name).read_text()


def options_of(name, nprocs=2):
    """The options in the script's docstring command, such as `--accumulate 4`.

    Ranks that may share a batch do so: `--split 2` is `--split NPROCS`, one replica.
    """
    words = commands(name)[0]
    numbers = [i for i, word in enumerate(words) if word.isdecimal()]
    words = words[numbers[1] + 1 :]  # after total_epochs and save_every
    return [*words[:-1], nprocs] if shares_a_batch(name) else words


def command(script, total, every, *options, nprocs=2, own_options=True):
    """The words to type for `script`; own_options: add those of its docstring's."""
    name = str(Path(script).resolve().relative_to(home(script)))
    words = list(commands(name)[0])
    before = words[: next(i for i, word in enumerate(words) if word.isdecimal())]
    if "-m" not in before:
        before[before.index(name)] = str(script)
    if name in UNDER_TORCHRUN:
        before = [re.sub("(nproc-per-node=).*", rf"\g<1>{nprocs}", x) for x in before]
    elif name in SPAWNED:
        options = ("--nprocs", nprocs, *options)
    if own_options:
        options = (*options_of(name, nprocs), *options)
    return [str(x) for x in (*before, total, every, *options)]


def as_typed(words):
    """`words` for a new interpreter, the one of the tests."""
    program, *rest = words
    module = ["-m", "torch.distributed.run"] if program == "torchrun" else []
    return [sys.executable, *module, *rest]


def environment(script, env):
    """`env`, and where Python finds a variant, or its copy, as a module."""
    path = [env["PYTHONPATH"]] if "PYTHONPATH" in env else []
    return env | {"PYTHONPATH": ":".join(map(str, [home(script), *path]))}


def launch(
    script, *arguments, cwd, real, nprocs=2, own_options=True, timeout_s=None, **env
):
    """Run a script with `total_epochs save_every [options]` to its end: Done.

    script: a path to a script or to a copy that `plant` has made. env: variables to
    set. real: why it takes new interpreters, which cost ten times as much; "" if forks
    show the same. They do, unless the claim is about how a process starts or ends.
    """
    words = command(script, *arguments, nprocs=nprocs, own_options=own_options)
    return run_words(words, cwd, real, timeout_s, **environment(script, env))


def run_words(words, cwd, real, timeout_s=None, **env):
    """Done of any words, as typed; `real` as for `launch`."""
    if real:
        return processes.finish(processes.start(as_typed(words), cwd, **env), timeout_s)
    return Fork(words, cwd, **env).finish(timeout_s)


def train(script, *arguments, cwd, real="", **how):
    """`launch`, and insist that it ends well."""
    done = launch(script, *arguments, cwd=cwd, real=real, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def run_script(script, *arguments, cwd, **env):
    """Run a script that starts no other, with any arguments, in a fork: Done."""
    words = ["python", script, *arguments]
    return Fork(words, cwd, **environment(script, env)).finish()


def batch_size(name, effective, nprocs=2):
    """`--batch-size` of each process, so that a step takes `effective` samples."""
    whole = shares_a_batch(name) or name not in DISTRIBUTED
    return effective if whole else effective // nprocs


def plant(name, folder, *changes, hooks=()):
    """Copy a script and utils.py to `folder`; returns the path of the copy.

    changes: pairs (old, new) of texts to replace. hooks: what is attached to it, see
    tests/hooks/__init__.py.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "utils.py", folder)
    script = folder / (name if name in SCRIPTS else Path(name).name)
    script.parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / name, script)
    if hooks:
        shutil.copytree(HOOKS, folder / "hooks", dirs_exist_ok=True)
        names = ", ".join(f'"{hook}"' for hook in hooks)
        attach = f"import hooks\n\nhooks.attach(globals(), {names})\n\n"
        changes = (*changes, (ENTRY, f"{attach}{ENTRY}"))
    edit(script, *changes)
    return script
