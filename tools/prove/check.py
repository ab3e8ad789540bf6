"""Check all that one script needs, and say what is left to do.

    python -m tools.prove.check NAME            everything, in 5 to 15 minutes
    python -m tools.prove.check --text NAME     what only reads files, in seconds

NAME is the path of a script, such as `variants/preemptible.py`. All checks run, even if
one fails, and each is a command that you can type as well. Of those that pass, you see
one line. The last line is "done", or a list of commands that fail and files to edit
(exit status 1).
"""

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from tools.cli import Parser
from tools.scripts import PARENTS, ROOT, SCRIPTS, InputError, own_tests
from tools.site.build import chapters
from tools.site.pages import READING_ORDER, explanations

TEXT_TESTS = [
    "tests/tools/test_layout.py",
    "tests/trunk/test_diff.py",
    "tests/docs/test_docs.py",
]
SITE_TESTS = ["tests/docs/test_site.py", "tests/docs/test_side_by_side.py"]
# What other checks here run as well
TWICE = [
    "test_nothing_is_stale_and_every_changed_line_is_explained",
    "test_which_one_names_every_script",
    "test_every_page_is_in_one_group",
]


def to_edit(name, pages):
    """Yield the files that lack something about a script, and what."""
    stem = Path(name).stem
    if "/" in name and not (ROOT / own_tests(name)).exists():
        yield f"{own_tests(name)}: write the tests of what only this script claims"
    if not pages:
        yield f"docs/{stem}.md: write a section for each change of the diff"
    for page in pages:
        if page not in READING_ORDER:
            yield f"tools/site/pages.py: put {page} into GROUPS"
    for place in "docs/which_one.md", "docs/pictures/which_one.svg":
        if name in SCRIPTS and Path(name).name not in (ROOT / place).read_text():
            yield f"{place}: say who needs {Path(name).name}"


def checks(name, pages, text_only):
    """Yield the words after `python -m` of each check, the quickest first."""
    yield ["ruff", "check", "."]
    yield ["ruff", "format", "--check", "."]
    yield ["tools.size"]
    yield ["tools.site.build", "--check", "--diffs"]
    yield ["pytest", "-q", *TEXT_TESTS, "-k", f"not {' and not '.join(TWICE)}"]
    if text_only:
        return
    # `-k` finds the tests that have the script among their parameters or in their file,
    # those of the stand-in and the zoo as well.
    others = [f"--ignore={path}" for path in TEXT_TESTS + SITE_TESTS]
    yield ["pytest", "-q", "--all", "-k", Path(name).name, *others]
    for page in pages:
        yield ["tools.site.build", "--check", "--only", page]
    if PARENTS[name]:
        yield ["tools.prove.lines", PARENTS[name], name]
    yield ["pytest", "-q", "--all", *SITE_TESTS]


def run(words):
    """Run a check, print a line, and return the commands that fail."""
    command = shlex.join(["python", "-m", *words])
    print(command, end="", flush=True)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    verdict = "FAILED" if done.returncode else "ok"
    print(f": {verdict}, {time.monotonic() - began:.0f} s", flush=True)
    if done.returncode == 0:
        for line in re.findall(r"(?m)^SKIPPED .*", done.stdout):
            print(f"  NOT RUN: {line}")
        return []
    print(done.stdout)
    failed = re.findall(r"(?m)^(?:FAILED|ERROR) (\S+)", done.stdout)
    return [f"python -m pytest {shlex.quote(test)}" for test in failed] or [command]


def main():
    parser = Parser(__doc__)
    parser.add_argument("name", choices=PARENTS)
    parser.add_argument("--text", action="store_true", help="only read files")
    args = parser.parse_args()
    pages = []
    left = []
    try:
        pages = chapters(args.name, explanations())
    except InputError as error:
        left.append(str(error))
    for words in checks(args.name, pages, args.text):
        left += run(words)
    left += to_edit(args.name, pages)
    if left:
        print(f"What is left to do for {args.name}:")
        print(*(f"- {item}" for item in left), sep="\n")
    else:
        print("done")
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
