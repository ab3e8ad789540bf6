"""Launch a script: as a user types it, or in forks that have imported torch already."""

import re
import shutil
from pathlib import Path

from tools.files import edit
from tools.run.processes import TIMEOUT_S, Program
from tools.run.warm import ENTRY  # before any tensor is computed
from tools.scripts import ROOT, SCRIPTS, ancestry, calls, commands

# Those that run as several processes
DISTRIBUTED = [name for name in SCRIPTS if "multigpu.py" in ancestry(name)]
UNDER_TORCHRUN = [name for name in SCRIPTS if "torchrun" in sum(commands(name), [])]
SPAWNED = [name for name in DISTRIBUTED if name not in UNDER_TORCHRUN]


def home(script):
    """The folder of the utils.py that belongs to `script`, a name or a path."""
    folder = (ROOT / script).resolve().parent
    return folder.parent if folder.name == "variants" else folder


def shares_a_batch(name):
    """Whether a script's ranks may share a batch: its sampler gets `num_replicas=`."""
    return any("num_replicas" in keywords for keywords in calls(name).values())


def split_command(name):
    """The words of the docstring's command before total_epochs, after save_every."""
    words = commands(name)[0]
    first = next(i for i, word in enumerate(words) if word.isdecimal())
    return words[:first], words[first + 2 :]


def options_of(name, nprocs):
    """The options in the script's docstring command, such as `--accumulate 4`.

    If its ranks may share a batch, all of them do. The option that has the value of
    torchrun's `--nproc-per-node` there, such as `--split 2`, then gets `nprocs`.
    """
    before, options = split_command(name)
    if shares_a_batch(name):
        written = re.search(r"--nproc-per-node=(\d+)", " ".join(before))[1]
        options[options.index(written)] = str(nprocs)
    return options


def command(script, total, every, *options, nprocs=2, batch=64, own_options=True):
    """The words to type for `script`; see `start`."""
    script = ROOT / script
    name = str(script.resolve().relative_to(home(script)))
    words, _ = split_command(name)
    if "-m" not in words:
        words[words.index(name)] = str(script)
    if name in UNDER_TORCHRUN:
        number = rf"\g<1>{nprocs}"
        words = [re.sub("(nproc-per-node=).*", number, word) for word in words]
    words += [total, every]
    if own_options:
        words += options_of(name, nprocs)
    if name in SPAWNED:
        words += ["--nprocs", nprocs]
    each_has_all = shares_a_batch(name) or name not in DISTRIBUTED
    words += ["--batch-size", batch if each_has_all else batch // nprocs]
    return [str(word) for word in (*words, *options)]


def environment(script, env):
    """`env`, and where Python finds a variant, or its copy, as a module."""
    folders = [str(home(script))]
    if "PYTHONPATH" in env:
        folders.append(str(env["PYTHONPATH"]))
    return env | {"PYTHONPATH": ":".join(folders)}


def start(
    script,
    *arguments,
    cwd,
    real=False,
    nprocs=2,
    batch=64,
    own_options=True,
    changes=(),
    hooks=(),
    **env,
):
    """Start a script with `total_epochs save_every [options]`: a Program.

    script: its name, or a path to what `copy_script` has made. cwd, env: of Program.
    real: start new interpreters, which cost ten times as much as forks. Forks show the
    same, unless the claim is about how a process starts or ends.
    nprocs: how many processes, if the script runs as several. batch: the samples that
    they take together in a step. own_options: the options of its docstring's command
    are typed, too; of one given twice, yours counts.
    changes: pairs (old, new) of texts to replace in the script. hooks: functions
    that each process of the script calls with the script's globals, a dict, before it
    calls `main`. A test may define them inside; with `real`, they are in tests/hooks.
    """
    of_copy = hooks if real else ()
    of_fork = () if real else hooks
    if changes or of_copy:
        script = copy_script(script, cwd / "copy", *changes, hooks=of_copy)
    words = command(
        script, *arguments, nprocs=nprocs, batch=batch, own_options=own_options
    )
    return Program(words, cwd, real, hooks=of_fork, **environment(script, env))


def train(script, *arguments, status=0, timeout_s=TIMEOUT_S, **how):
    """`start` a script and insist on its exit status: Done. pytest shows its output."""
    done = start(script, *arguments, **how).end_with(status, timeout_s)
    print(done.stdout, done.stderr)
    return done


def torchrun_words(nprocs):
    """What to type before a program, to start it so many times on this machine."""
    return ["torchrun", "--standalone", f"--nproc-per-node={nprocs}"]


def torchrun(*words, cwd, nprocs=2, timeout_s=TIMEOUT_S, **how):
    """Run `torchrun WORDS` on this machine, and insist that it ends well: Done."""
    return Program([*torchrun_words(nprocs), *words], cwd, **how).succeed(timeout_s)


def run_script(script, *arguments, cwd, **env):
    """Run a script that starts no other, with any arguments, in a fork: Done."""
    words = ["python", script, *arguments]
    return Program(words, cwd, **environment(script, env)).finish()


def copy_script(name, folder, *changes, hooks=()):
    """Copy a script and utils.py to `folder`; returns the path of the copy.

    changes: pairs (old, new) of texts to replace. hooks: functions of tests/hooks that
    it calls, see tests/hooks/__init__.py.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "utils.py", folder)
    script = folder / name
    if name not in SCRIPTS:
        script = folder / Path(name).name
    script.parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / name, script)
    if hooks:
        shutil.copytree(ROOT / "tests/hooks", folder / "hooks", dirs_exist_ok=True)
        lines = []
        for hook in hooks:
            module = hook.__module__.removeprefix("tests.")
            lines += [f"import {module}", f"{module}.{hook.__name__}(globals())"]
        changes = (*changes, (ENTRY, "\n".join([*lines, ENTRY])))
    edit(script, *changes)
    return script
