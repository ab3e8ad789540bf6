"""Check one script: its text, its tests, its chapter, and every line that it adds.

    python -m proofs.check NAME            everything, in some two minutes
    python -m proofs.check --text NAME     what only reads files, in seconds

NAME is the path of a rung, such as `variants/preemptible.py`, or of a sequel, such as
`mingpt/train.py`. The lines of a sequel are too many to check here: the table says what
to type instead. Each check is a command that you can type as well. The table at the end
says how long each took and which failed. Exit status 1: one of them failed.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

from ladder.pages import explanations
from ladder.rungs import FRAMEWORKS, PARENTS, ROOT, SEQUELS, InputError, own_tests

TEXT_TESTS = ["tests/test_diff.py", "tests/test_docs.py"]


def checks(name, text_only):
    """[(what it checks, command as words)] for one script, the quickest first."""
    parent, is_sequel = PARENTS.get(name), name in SEQUELS
    # `-k` finds the tests that have the script among their parameters. A rung's stem
    # finds its own file, too; but `train` would find half of all tests.
    about = name if is_sequel else Path(name).stem
    files = [x for x in (name, own_tests(name)) if (ROOT / x).exists()]
    python, pytest = [sys.executable], [sys.executable, "-m", "pytest", "-q"]
    found = [
        ("lint", ["ruff", "check", *files]),
        ("format", ["ruff", "format", "--check", *files]),
        ("diff and pages", [*pytest, *TEXT_TESTS, "-k", about]),
        ("chapter", [*python, "-m", "website.build", "--check", "--diffs"]),
    ]
    if text_only:
        return found
    some = [own_tests(name), "--all"] if is_sequel else ["-k", about, "-m", "not text"]
    found.append(("tests", [*pytest, *some]))
    for chapter in chapters(name):
        command = [*python, "-m", "website.build", "--check", "--only", chapter]
        found.append((f"commands of docs/{chapter}.md", command))
    if parent:
        found.append(("lines", [*python, "-m", "proofs.lines", parent, name]))
    return found


def chapters(name):
    """The pages in docs/ that explain the script's diff to its parent.

    A framework has no diff, but a page of its name.
    """
    if name in FRAMEWORKS:
        return [Path(name).stem]
    places = explanations().get((PARENTS[name], name), {}).values()
    return sorted({page for page, *_ in places})


def main(name, text_only):
    """Run all checks, whatever fails; return the exit status."""
    table = []
    for what, command in checks(name, text_only):
        print(f"== {what}: {' '.join(command)}", flush=True)
        began = time.monotonic()
        if command[0] == "ruff":
            if importlib.util.find_spec("ruff") is None:
                table.append((what, "not checked: pip install ruff", 0))
                continue
            command = [sys.executable, "-m", *command]
        if what == "lines" and name in SEQUELS:
            table.append((what, f"not checked: python {' '.join(command[1:])}", 0))
            continue
        status = subprocess.run(command, cwd=ROOT, stderr=subprocess.STDOUT).returncode
        verdict = "ok" if status == 0 else f"FAILED, exit status {status}"
        table.append((what, verdict, time.monotonic() - began))
    print(f"\n{name}")
    for what, verdict, seconds in table:
        print(f"{what:40} {seconds:6.1f} s  {verdict}")
    return int(any(verdict.startswith("FAILED") for _, verdict, _ in table))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m proofs.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", help=f"one of {', '.join(PARENTS)}")
    parser.add_argument("--text", action="store_true", help="only read files")
    args = parser.parse_args()
    # A path from another folder, or a module's name, is understood as well.
    name = os.path.relpath(args.name, ROOT) if os.path.exists(args.name) else args.name
    if not (ROOT / name).is_file():
        parser.error(f"there is no file {name}")
    if name not in {*PARENTS, *FRAMEWORKS}:
        parser.error(
            f"{args.name} is no rung: its docstring must say `Parent: multigpu.py`, or"
            f" what else its parent is. The rungs are {', '.join(PARENTS)}"
        )
    try:
        sys.exit(main(name, args.text))
    except InputError as error:
        parser.error(str(error))
