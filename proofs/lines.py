"""Every line earns its place: take one out, and a test fails.

    python -m proofs.lines [--jobs N] [PARENT CHILD]

Takes each statement that a rung's diff adds back out again, one at a time, runs the
tests on what is left, and prints which of them fails. A statement that replaces one of
the parent's becomes that one again; an `if` goes with its body, and also alone; a
function goes whole, and statement by statement; lines that are only taken away are put
back. Tests marked `text` do not count: they compare files, and so fail for any line.

The tests that the line's explanation names run first, and one of them must fail: else
the chapter is wrong. Exit status 1 if no test fails, or none that is named. Run pytest
first: a test that fails without a line says something only if it passes with it.
"""

import argparse
import ast
import difflib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from ladder.diffs import hunks
from ladder.rungs import EDGES, ROOT
from website.build import named_tests as explained_by

# The quickest to miss a line first. What is not named here comes last.
FIRST = ["diff", "probe", "input", "failure", "snapshot"]
NEVER = ["docs", "lines", "pictures", "site", "convert", "hosts", "hangs", "preflight"]
NEVER += ["cluster", "chaos", "slurm"]  # they test no rung, or take too long


def nearest(text, candidates):
    """The line of the parent that `text` stands for now, or None."""
    ratios = [(difflib.SequenceMatcher(None, text, x).ratio(), x) for x in candidates]
    ratio, line = max(ratios, default=(0, None))
    return line if ratio > 0.6 else None


def mutations(parent, child):
    """[(line number, what is taken out, the text without it)] of two files' texts."""
    old, new = parent.splitlines(), child.splitlines()
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    put_back = []  # (index in the child, lines that are only the parent's)
    replaced, hunks = {}, {}  # by an added line's number: the parent's lines, the hunk
    for _, i1, i2, j1, j2 in matcher.get_opcodes():
        if j1 == j2 and i1 < i2:
            put_back.append((j1, old[i1:i2]))
        if old[i1:i2] != new[j1:j2]:
            gone = [x.strip() for x in old[i1:i2] if x.strip()]
            replaced |= {j + 1: gone for j in range(j1, j2) if new[j].strip()}
            hunks |= {j + 1: (j1 + 1, j2, old[i1:i2]) for j in range(j1, j2)}
    found = {}

    def without(first, last, lines):
        text = "\n".join([*new[: first - 1], *lines, *new[last:]]) + "\n"
        try:
            ast.parse(text)
        except SyntaxError:
            return False
        what = " ".join(x.strip() for x in new[first - 1 : last])
        found.setdefault(text, (first, what))
        return True

    def take_out(first, last):
        indent = re.match(" *", new[first - 1])[0]
        gone = [x for line in range(first, last + 1) for x in replaced.get(line, [])]
        stands_for = nearest(" ".join(x.strip() for x in new[first - 1 : last]), gone)
        if stands_for and without(first, last, [indent + stands_for]):
            return
        if not without(first, last, [f"{indent}pass"]):  # then its hunk as a whole
            assert without(*hunks[first]), f"cannot take out line {first}"

    covered = set()
    for node in ast.walk(ast.parse(child)):
        for decorator in getattr(node, "decorator_list", []):
            if decorator.lineno in replaced:
                without(decorator.lineno, decorator.lineno, [])
                covered.add(decorator.lineno)
        if not isinstance(node, ast.stmt):
            continue
        lines = range(node.lineno, node.end_lineno + 1)
        if not all(line in replaced or not new[line - 1].strip() for line in lines):
            continue
        take_out(lines[0], lines[-1])
        covered |= set(lines)
        if isinstance(node, ast.If):
            body = new[node.body[0].lineno - 1 : node.end_lineno]
            indent = re.match(" *", new[node.lineno - 1])[0]
            body = textwrap.indent(textwrap.dedent("\n".join(body)), indent)
            without(lines[0], lines[-1], body.splitlines())
    for line in sorted(set(replaced) - covered):  # a header or the like
        take_out(line, line)
    for at, lines in put_back:
        text = "\n".join([*new[:at], *lines, *new[at:]]) + "\n"
        found[text] = at + 1, f"(put back) {' '.join(x.strip() for x in lines)}"
    cases = [(line, what, text) for text, (line, what) in found.items()]
    return sorted(cases, key=lambda case: case[:2])


def test_files(root):
    """The files of the rungs' tests, the quickest to fail first."""
    files = {x.stem.removeprefix("test_"): x for x in root.glob("tests/test_*.py")}
    others = sorted({*files} - {*FIRST, *NEVER})
    return [str(files[x].relative_to(root)) for x in [*FIRST, *others]]


def named_tests(parent, child, line):
    """The tests that are named where the chapters explain this line of the child."""
    for hunk in hunks(parent, child):
        if hunk.new_start <= line < hunk.new_start + max(1, len(hunk.added)):
            return explained_by(parent, child)[hunk.number]
    raise AssertionError(f"{child}:{line} is in no hunk")


def start_tests(root, child, log, groups):
    """Fork a pytest run (torch is imported already) on the tree at `root`.

    Of the groups of tests, the second runs only if nothing in the first fails.
    """
    stem = Path(child).stem
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    for fd in (1, 2):
        os.dup2(os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), fd)
    status = 3
    try:
        os.environ["TEST_TIMEOUT_S"] = "60"
        os.chdir(root)
        ours = r"(tests|docs|utils)($|\.)"
        for name in [x for x in sys.modules if re.match(ours, x)]:
            del sys.modules[name]
        sys.path.insert(0, str(root))
        import pytest

        options = [
            "-x",
            "-q",
            "-m",
            "not text",
            "-p",
            "no:cacheprovider",
            f"--basetemp={root}/.basetemp",
        ]
        # Of each group first the tests that name this rung, then all the others.
        which = [stem, f"not {stem}"]
        for tests, names in itertools.product(filter(None, groups), which):
            status = pytest.main([*options, "-k", names, *tests])
            if status == pytest.ExitCode.TESTS_FAILED:
                break
    finally:
        sys.stdout.flush()
        os._exit(int(status))


def copy_tree(root, to):
    """Copy what git knows of, and what it does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(
        command, cwd=root, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    for name in names:
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, to / name)


def missing_test(log):
    """The first test that failed, as pytest's summary names it."""
    match = re.search(r"^(?:FAILED|ERROR) (\S+(?: \S+\])?)", log.read_text(), re.M)
    return match and match[1]


def main(edges, jobs, only=None, names=None, root=ROOT):
    """Run all mutations of `edges`; return those that no test misses."""
    todo, running, survivors = [], {}, []
    for parent, child in edges:
        texts = [(root / name).read_text() for name in (parent, child)]
        todo += [(parent, child, *case) for case in mutations(*texts)]
    todo = [x for x in todo if only is None or only in x[3]]
    print(f"{len(todo)} statements to take out, one at a time")
    while todo or running:
        while todo and len(running) < jobs:
            case = todo.pop(0)
            folder = Path(tempfile.mkdtemp(prefix="lines-"))
            copy_tree(root, folder)
            (folder / case[1]).write_text(case[4])
            files = [
                x for x in test_files(folder) if not names or Path(x).stem in names
            ]
            named = named_tests(*case[:3]) if not names else []
            pid = start_tests(folder, case[1], folder / ".log", [named, files])
            running[pid] = case, named, folder, time.monotonic()
        pid, _ = os.wait()
        (_, child, line, what, _), named, folder, began = running.pop(pid)
        test = missing_test(folder / ".log")
        seconds = time.monotonic() - began
        where, verdict = f"{child}:{line}", test or "NO TEST MISSES IT"
        if test and named and not test.startswith(tuple(named)):
            verdict, test = f"NONE THAT ITS CHAPTER NAMES, BUT {test}", None
        print(f"{where:18} {what[:70]:70} {verdict} ({seconds:.0f} s)", flush=True)
        if not test:
            survivors.append((child, line, what))
        shutil.rmtree(folder)
    return survivors


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("edge", nargs="*", metavar="PARENT CHILD")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tested at once")
    parser.add_argument("--only", help="only statements with this text in them")
    parser.add_argument("--tests", nargs="*", help="only these, such as test_diff")
    parser.add_argument("--root", type=Path, default=ROOT)
    args = parser.parse_args()
    if args.edge and tuple(args.edge) not in EDGES:
        parser.error(f"the edges are {', '.join(map(' '.join, EDGES))}")
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    import torch
    import torch._dynamo  # noqa: F401  once here, not in each fork

    torch.set_num_threads(1)
    edges = [tuple(args.edge)] if args.edge else EDGES
    survivors = main(edges, args.jobs, args.only, args.tests, args.root)
    print(f"{len(survivors)} statements that no test misses, or not the one named")
    sys.exit(1 if survivors else 0)
