"""Every line earns its place: take one out, and a test fails.

    python -m tools.prove.lines [PARENT CHILD] [--only TEXT]

Takes each statement, each block's header and each argument that a script's diff adds
back out again, one at a time, and runs the tests that the line's explanation names, the
quickest of them first, until one fails. Without names it does all scripts. One takes 1
to 3 minutes, and more if torchrun starts it.

Tests marked `text` do not count, because they compare files, nor do tests that run only
other scripts. As a control, the tests run on the script as it is before. Only a test
that ran and failed kills a mutant. A test that times out, whose fixture fails or that
pytest cannot collect is no verdict: the others decide.

A script is skipped if it, its parents, utils.py and the tests that its explanations
name have the same code as in a green run, which tools/prove/green.json records; --full
skips none. Exit status 1 if any mutant survives, and if the control fails.
"""

import ast
import hashlib
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from tools.cli import Parser
from tools.diffs import hunks
from tools.files import copy_tree
from tools.prove.mutants import mutants
from tools.run.processes import TimedOut
from tools.run.warm import Fork, end_all
from tools.scripts import ALL_EDGES, EDGES, ROOT, SCRIPTS, ancestry
from tools.site.pages import named_tests

WAIT_S = "100"  # for one process of a test, unless TEST_TIMEOUT_S says otherwise
LIMIT_S = 600  # for all tests of one mutant
JOBS = 2  # mutants tested at once
GREEN = Path(__file__).with_name("green.json")


# In the fork, this module is a plugin of pytest: it chooses the tests, stops when one
# has failed, and writes down `facts`.

facts = {"killer": "", "no_verdict": [], "took_s": {}}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Keep the tests that the environment names, in its order.

    They are no arguments of pytest: if one file cannot be imported, it would run none.
    """
    order = json.loads(os.environ["TESTS"])
    found = [x for x in items if function_of(x.nodeid) in order]
    found = [x for x in found if about(x.nodeid, os.environ["CHILD"])]
    items[:] = sorted(found, key=lambda item: order.index(function_of(item.nodeid)))


def pytest_collectreport(report):
    if report.failed:
        facts["no_verdict"].append(f"{report.nodeid} cannot be collected")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    test = item.nodeid
    facts["took_s"][test] = facts["took_s"].get(test, 0) + report.duration
    if report.failed and isinstance(call.excinfo.value, TimedOut):
        facts["no_verdict"].append(f"{test} times out")
    elif report.failed and report.when != "call":
        facts["no_verdict"].append(f"{test} fails in its {report.when}")
    elif report.failed:
        facts["killer"] = test
        item.session.shouldstop = "a test has failed"
    return report


def pytest_sessionfinish():
    Path(os.environ["FACTS"]).write_text(json.dumps(facts))


def function_of(test):
    """A test's id without its parameters."""
    return test.partition("[")[0]


def about(test, child):
    """Whether a test's id names the script `child`, or no script at all."""
    stems = {name: rf"(?<![a-z]){Path(name).stem}(?![a-z])" for name in SCRIPTS}
    named = {name for name, stem in stems.items() if re.search(stem, test)}
    return child in named or not named or child not in SCRIPTS


# Copies of the tree


class Case:
    """`tests` run in a fork, on a copy of the tree that has `mutant`, or a control."""

    def __init__(self, folder, child, mutant, tests):
        self.folder, self.mutant, self.began = Path(folder), mutant, time.monotonic()
        copy_tree(self.folder)
        if mutant:
            (self.folder / child).write_text(mutant.text)
        temporary, self.facts = self.folder / ".tmp", self.folder / ".facts"
        temporary.mkdir()
        words = ["python", "-m", "pytest", "--all", "-q", "-m", "not text"]
        words += ["-p", "tools.prove.lines", "--continue-on-collection-errors"]
        words += sorted({test.partition("::")[0] for test in tests})
        env = {"TMPDIR": temporary, "CHILD": child, "FACTS": self.facts}
        env["TESTS"] = json.dumps(tests)
        env["TEST_TIMEOUT_S"] = os.environ.get("TEST_TIMEOUT_S", WAIT_S)
        self.fork = Fork(words, folder, merged=True, **env)

    def ended(self):
        late = time.monotonic() > self.began + LIMIT_S
        how = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return late or os.waitid(os.P_PID, self.fork.pid, how)

    def result(self):
        """(mutant, facts, output)"""
        try:
            output = self.fork.finish(timeout_s=0).stdout
            found = facts | {"no_verdict": ["pytest does not start"]}
            if self.facts.exists():
                found = json.loads(self.facts.read_text())
        except TimedOut as error:
            late = f"the tests take more than {LIMIT_S} s"
            output, found = str(error), facts | {"no_verdict": [late]}
        shutil.rmtree(self.folder)
        return self.mutant, found, output


def run(child, tasks):
    """Yield `Case.result()` of each task, (mutant, tests), as they end."""
    tasks, running = list(tasks), []
    with tempfile.TemporaryDirectory(prefix="lines-") as folder:
        try:
            while tasks or running:
                while tasks and len(running) < JOBS:
                    place = tempfile.mkdtemp(dir=folder)
                    running.append(Case(place, child, *tasks.pop(0)))
                for case in [x for x in running if x.ended()]:
                    running.remove(case)
                    yield case.result()
                time.sleep(0.02)
        finally:
            end_all()


# The proof


def named_by_line(edge):
    """{line of the child: the tests that its explanation names}."""
    tests = named_tests(*edge)
    return {
        hunk.new_start + i: tests.get(hunk.number, [])  # tools.site.build finds it
        for hunk in hunks(*edge)
        for i in range(max(1, len(hunk.added)))
    }


def prove(edge, only=""):
    """Run all mutants of one edge, and print what is found: whether all is well."""
    child, began, bad, took_s = edge[1], time.monotonic(), [], {}
    found = mutants(*((ROOT / name).read_text() for name in edge))
    found = [x for x in found if only in x.what]
    kinds = [mutant.kind for mutant in found]
    counts = [f"{kinds.count(kind)} of {kind}" for kind in sorted({*kinds})]
    print(f"{child}: {len(kinds)} mutants: {', '.join(counts)}", flush=True)
    named = named_by_line(edge)
    every = sorted({test for tests in named.values() for test in tests})
    named = {x.line: named.get(x.line, every) for x in found}
    tests = sorted({test for mutant in found for test in named[mutant.line]})

    def took(named):
        """How many seconds the tests that a chapter names so took in the control."""
        return sum(took_s[x] for x in took_s if function_of(x) == named)

    by_file = itertools.groupby(tests, key=lambda test: test.partition("::")[0])
    for _, result, output in run(child, [(None, [*x]) for _, x in by_file]):
        took_s |= result["took_s"]
        wrong = [result["killer"], *result["no_verdict"]]
        if any(wrong):
            bad.append(f"The control is not green: {' '.join(wrong)}\n{output}")
    bad = bad or [f"{x} does not run in the control" for x in tests if not took(x)]
    if not bad:
        tasks = [(x, sorted(named[x.line], key=took)) for x in found]
        for mutant, result, _ in run(child, [x for x in tasks if x[1]]):
            report(child, mutant, result, bad)
        for mutant in [x for x, tests in tasks if not tests]:
            report(child, mutant, facts, bad)
    took_s = time.monotonic() - began
    print(*bad, f"{child}: {len(bad)} bad, {took_s:.0f} s", sep="\n", flush=True)
    return not bad


def report(child, mutant, result, bad):
    """Print one line, which is `bad` unless a test has failed."""
    verdict = result["killer"] or "NO TEST MISSES IT"
    if result["no_verdict"] and not result["killer"]:
        verdict = f"NO VERDICT: {', '.join(result['no_verdict'])}"
    line = f"{child}:{mutant.line:<4} {mutant.kind:9} {mutant.what[:70]:70} {verdict}"
    print(line, flush=True)
    bad += [] if result["killer"] else [line]


# Green runs


def code(name, tests=()):
    """A file's code, without comments and layout, and of its tests only these `tests`.

    Not the bytes: a comment that changes costs no new proof, nor does another test, nor
    the mark of a test that waits.
    """
    tree = ast.parse((ROOT / name).read_text())
    ours = {test.partition("::")[2] for test in tests}
    found = [getattr(node, "name", "") for node in tree.body]
    keep = [x in ours or not x.startswith("test_") for x in found]
    tree.body = [*itertools.compress(tree.body, keep)]
    for node in tree.body:
        marks = getattr(node, "decorator_list", [])
        marks[:] = [x for x in marks if ast.unparse(x) != "pytest.mark.waits"]
    return f"{name}\n{ast.unparse(tree)}\n"


def fingerprint(edge):
    """A hash of PyTorch's version, the scripts, utils.py, and the tests by change."""
    named = named_tests(*edge)
    parts = [torch.__version__, str(sorted(named.items()))]
    parts += map(code, sorted({*edge, *ancestry(edge[1]), "utils.py"}))
    tests = {test for tests in named.values() for test in tests}
    files = sorted({test.partition("::")[0] for test in tests})
    parts += [code(name, tests) for name in files]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def prove_changed(edges, full):
    """`prove` those that have changed since a green run: whether all is well."""
    fine = True
    for edge in edges:
        key, now = " ".join(edge), fingerprint(edge)
        green = json.loads(GREEN.read_text()) if GREEN.exists() else {}
        if green.pop(key, None) == now and not full:
            print(f"{edge[1]}: skipped, nothing has changed since a green run (--full)")
            continue
        if prove(edge):
            green[key] = now
        fine &= key in green
        GREEN.write_text(json.dumps(green, indent=1, sort_keys=True))
    return fine


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="PARENT CHILD")
    parser.add_argument("--only", default="", help="only what has this text in it")
    parser.add_argument("--full", action="store_true", help="skip none")
    args = parser.parse_args()
    if args.names and tuple(args.names) not in ALL_EDGES:
        parser.error(f"the edges are {', '.join(map(' '.join, ALL_EDGES))}")
    edges = [tuple(args.names)] if args.names else EDGES
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    if args.only:
        fine = all(prove(edge, args.only) for edge in edges)
    else:
        fine = prove_changed(edges, args.full)
    sys.exit(0 if fine else 1)
