"""The rungs: every script whose docstring names its parent, found by listing folders.

`RUNGS` is {name: parent's name, or None}; `EDGES` is [(parent, child)]. A name is a
path from the root of the repository, such as `variants/preemptible.py`.

`SEQUELS` is {name: parent's name}: files of mingpt/ that go on from a rung, or from
another file of mingpt/. The chapters explain each change of their diffs, as they do for
rungs. But a sequel has a command line, a task and tests of its own, and many ideas
instead of one. So the tests of all rungs leave it out, and its diff has a budget of its
own. `PARENTS` and `ALL_EDGES` hold rungs and sequels.

`FRAMEWORKS` is {name: names of rungs}: scripts that put the lines of several rungs into
one, and switch between them. A framework is no rung: its docstring has the line
`Made of: single_gpu.py, multigpu.py` and names no parent.
"""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class InputError(Exception):
    """Bad input: its message is the one line to print before exit status 2."""


def read_lines(name):
    """The lines of a text file of the repository, or InputError. Ends are cut off."""
    try:
        text = (ROOT / name).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name}:1: cannot be read: {error}") from None
    lines = text.removesuffix("\n").split("\n")
    for number, line in enumerate(lines, 1):
        if re.search("[\0\r\f\v\u2028\ufeff]", line):
            raise InputError(
                f"{name}:{number}: a line ends with LF and has no control codes"
            )
    return lines


def docstring(path):
    """The text of a script's docstring, or "" if it does not begin with one.

    Read as text and not parsed, so that a script with a syntax error has one as well.
    """
    text = Path(path).read_bytes().decode(errors="replace")
    found = re.match(r"""(?:#.*\n|\s)*("{3}|'{3})(.*?)\1""", text, re.S)
    return found[2] if found else ""


def summary(name):
    """What a rung does: the first sentence of its docstring, without the full stop."""
    return docstring(ROOT / name).split(". ")[0]


def commands(name):
    """The shell commands in the rung's docstring, as lists of words."""
    lines = docstring(ROOT / name).splitlines()
    starts = ("python ", "torchrun ")
    lines = [line for line in lines if line.startswith(starts)]
    return [shlex.split(line, comments=True) for line in lines]


def find_children(*patterns):
    """{name: parent name or None} of every script there that names its parent."""
    children = {}
    for path in sorted(x for pattern in patterns for x in ROOT.glob(pattern)):
        parent = re.search(r"Parent: (\S+)", docstring(path))
        if parent:
            name = str(path.relative_to(ROOT))
            children[name] = None if parent[1] == "none" else parent[1]
    return children


def find_sequels():
    """{name: parent's name}, those of rungs first."""
    found = [x for x in find_children("mingpt/**/*.py").items() if x[1]]
    return dict(sorted(found, key=lambda pair: pair[1] not in RUNGS))


def find_frameworks():
    """{name: the rungs that it is made of} of every script that names those."""
    frameworks = {}
    for path in sorted(ROOT.glob("variants/**/*.py")):
        made_of = re.search(r"^Made of: (.+(?:(?<=,)\n.+)*)$", docstring(path), re.M)
        if made_of:
            frameworks[str(path.relative_to(ROOT))] = re.split(r",\s+", made_of[1])
    return frameworks


RUNGS = find_children("*.py", "variants/**/*.py")
SEQUELS = find_sequels()
PARENTS = RUNGS | SEQUELS
FRAMEWORKS = find_frameworks()
EDGES = [(parent, child) for child, parent in RUNGS.items() if parent]
ALL_EDGES = [(parent, child) for child, parent in PARENTS.items() if parent]


def check_rungs():
    """Raise InputError unless all scripts are on one tree: one has no parent.

    A framework is on no tree, but made of scripts that are. A sequel may come from a
    file of its folder.
    """
    for name, rungs in FRAMEWORKS.items():
        if name in RUNGS:
            raise InputError(f"{name}:1: a framework (Made of: ...) has no parent")
        for rung in rungs:
            if rung not in RUNGS:
                raise InputError(f"{name}:1: it is made of {rung}, which is no rung")
    for path in ROOT.glob("variants/**/*.py"):
        name = str(path.relative_to(ROOT))
        if name not in {*RUNGS, *FRAMEWORKS} and path.name != "__init__.py":
            raise InputError(
                f"{name}:1: the docstring names no parent (Parent: multinode.py)"
            )
    files = {str(x.relative_to(ROOT)) for x in ROOT.glob("mingpt/**/*.py")}
    for name, parent in PARENTS.items():
        known = RUNGS if name in RUNGS else {*RUNGS, *files}
        kind = "rung" if name in RUNGS else "rung, and no file of mingpt/"
        above = []
        while parent:
            if parent not in known:
                raise InputError(f"{name}:1: its parent {parent} is no {kind}")
            if parent in above:
                raise InputError(f"{name}:1: its parents go round in a circle")
            above.append(parent)
            parent = PARENTS.get(parent)
    if list(RUNGS.values()).count(None) != 1:
        raise InputError(
            "single_gpu.py:1: one rung has no parent (Parent: none), not more"
        )


def ancestry(name):
    """Where a script stands in the tree: its ancestors' names, then its own."""
    path = []
    while name:
        path, name = [name, *path], PARENTS.get(name)
    return path


def trunk():
    """The rungs in the root, from the first to the last: the ladder without leaves."""
    return sorted((name for name in RUNGS if "/" not in name), key=ancestry)


def steps():
    """The whole ladder: the trunk, and the sequel that goes on from a rung."""
    return [*trunk(), *(name for name, parent in SEQUELS.items() if parent in RUNGS)]


def step_of(name):
    """The number of the step that a script stands on, from 0.

    A sequel whose parent is a file of its folder stands on the last one.
    """
    numbers = [i for i, step in enumerate(steps()) if step in ancestry(name)]
    return numbers[-1] if numbers else len(steps()) - 1


def variants():
    """The other rungs, those of the first script of the trunk first."""
    others = (name for name in RUNGS if "/" in name)
    return sorted(others, key=lambda name: (step_of(name), ancestry(name)))


def leaves():
    """All that is no step of the ladder."""
    return [*variants(), *(name for name in SEQUELS if name not in steps())]


def own_tests(name):
    """The file of the tests that are about this script alone."""
    prefix = "gpt_" if name in SEQUELS else ""
    return f"tests/test_{prefix}{Path(name).stem}.py"
