"""Check all that one script needs, and say what is left to do.

    python -m tools.prove.check NAME            everything, in 3 to 20 minutes
    python -m tools.prove.check --text NAME     what only reads files, in seconds

NAME is the path of a script, such as `variants/preemptible.py`. All checks run, even if
one fails, and each is a command that you can type as well. The last line is "done", or
a list of the commands that fail (exit status 1).
"""

import contextlib
import subprocess
import sys
from pathlib import Path

from tools.cli import Parser
from tools.scripts import PARENTS, ROOT, InputError
from tools.site.build import chapters
from tools.site.pages import explanations

TEXT_TESTS = (
    "tests/tools/test_layout.py tests/trunk/test_diff.py tests/docs/test_docs.py"
)
SITE_TESTS = "tests/docs/test_site.py tests/docs/test_side_by_side.py"
# `-k` finds the tests that have the script among their parameters or in their file,
# those of the stand-in and the zoo as well.
OWN_TESTS = "pytest -q --all -p tools.prove.skip_proven -k"


def checks(name, text_only):
    """Yield what follows `python -m` in each check, the quickest first."""
    yield "ruff check ."
    yield "ruff format --check ."
    yield "tools.size"
    yield "tools.site.build --check --diffs"
    yield f"pytest -q {TEXT_TESTS}"
    if text_only:
        return
    yield f"{OWN_TESTS} {Path(name).name}"
    with contextlib.suppress(InputError):  # the check of the pages has said what it is
        for page in chapters(name, explanations()):
            yield f"tools.site.build --check --only {page}"
    if PARENTS[name]:
        yield f"tools.prove.lines {PARENTS[name]} {name}"
    yield f"pytest -q --all {SITE_TESTS}"


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("name", choices=PARENTS)
    parser.add_argument("--text", action="store_true", help="only read files")
    args = parser.parse_args()
    left = []
    for check in checks(args.name, args.text):
        command = f"python -m {check}"
        print(f"$ {command}", flush=True)
        words = [sys.executable, "-m", *check.split()]
        if subprocess.run(words, cwd=ROOT).returncode:
            left.append(command)
    if left:
        print(f"What is left to do for {args.name}:", *left, sep="\n- ")
    else:
        print("done")
    sys.exit(bool(left))
