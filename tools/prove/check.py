"""Check one script: its text, its tests, its chapter, and every line that it adds.

    python -m tools.prove.check NAME            everything, in 2 to 5 minutes
    python -m tools.prove.check --text NAME     what only reads files, in seconds

NAME is the path of a script, such as `variants/preemptible.py`. If torchrun starts it,
its proof alone takes more than 3 minutes. Each check is a command that you can type as
well. Exit status 1: one of them failed.
"""

import subprocess
import sys
from pathlib import Path

from tools.cli import Parser
from tools.scripts import PARENTS, ROOT, own_tests
from tools.site.pages import explanations

TEXT_TESTS = [f"tests/{x}.py" for x in ("tools/test_layout", "trunk/test_diff")]
TEXT_TESTS += ["tests/docs/test_docs.py"]


def checks(name, text_only):
    """The words after `python -m` of each check, the quickest first."""
    parent, stem = PARENTS[name], Path(name).stem
    files = [x for x in (name, own_tests(name)) if (ROOT / x).exists()]
    yield from (["ruff", "check", *files], ["ruff", "format", "--check", *files])
    yield ["pytest", "-q", *TEXT_TESTS]
    yield ["tools.site.build", "--check", "--diffs"]
    if text_only:
        return
    # `-k` finds the tests that have the script among their parameters or in their file
    yield ["pytest", "-q", "--all", "-k", stem]
    places = explanations().get((parent, name), {}).values()
    for page in sorted({page for page, *_ in places}):
        yield ["tools.site.build", "--check", "--only", page]
    if parent:
        yield ["tools.prove.lines", parent, name]


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("name", choices=PARENTS)
    parser.add_argument("--text", action="store_true", help="only read files")
    args = parser.parse_args()
    failed = []
    for words in checks(args.name, args.text):
        print(f"== python -m {' '.join(words)}", flush=True)
        if subprocess.run([sys.executable, "-m", *words], cwd=ROOT).returncode:
            failed.append(f"FAILED: python -m {' '.join(words)}")
    print(args.name, *(failed or ["ok"]), sep="\n")
    sys.exit(bool(failed))
