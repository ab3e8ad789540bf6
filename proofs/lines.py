"""Every line earns its place: take one out, and a test fails.

    python -m proofs.lines [--jobs N] [PARENT CHILD | utils.py] [--only TEXT]

Takes each statement, each block's header and each argument that a rung's diff adds back
out again, one at a time (proofs/mutations.py), runs the tests on what is left, and
prints which of them fails. With `utils.py`, all of it counts as added. Without names it
does all rungs.

The tests that the line's explanation names run first, and one of them must fail: else
the chapter is wrong. If none of them fails, the other tests of rungs run too. Tests
marked `text` do not count, because they compare files and so fail for any line. Nor do
tests whose names have other rungs in them only: they never run this one.

The rung as it is comes first, as a control. All tests must pass on it: a test that
fails without a line says something only if it passes with it. A test that times out is
no verdict: the others decide, and if none of them fails, the line counts as TIMED OUT.

Lines of proofs/survivors.txt justify what no test can miss. Exit status 1 if anything
else survives, if a line of that file is not needed, at a time-out and if the control
fails. The logs of those cases are kept.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from ladder.diffs import hunks
from ladder.files import copy_tree
from ladder.pages import named_tests
from ladder.rungs import EDGES, ROOT, RUNGS
from proofs import processes, warm
from proofs.mutations import Mutant, mutants

UTILS = "", "utils.py"  # has no parent: all of it is added
OURS = {"ladder", "proofs", "benchmarks", "website", "tests", "utils", "hooks"}
OURS |= {"variants"}  # what a fork imports again, from its copy
WAIT_S = 60  # for one process of a test: its TEST_TIMEOUT_S
LIMIT_S = 600  # for all tests of one mutant


class Task(NamedTuple):
    """Tests to run on a copy of the tree.

    `mutant` of the file `child` is written into the copy; None: nothing is changed.
    `stages` are lists of tests as pytest takes them: the second runs only if no test of
    the first has failed. The first one decides whether the mutant is missed.
    """

    parent: str
    child: str
    mutant: Mutant | None
    stages: list


class Outcome(NamedTuple):
    """The tests by their ids; `stage` is that of the first failure (from 0)."""

    selected: list
    failed: list
    timed_out: list
    stage: int
    seconds: float
    cpu_s: float
    log: Path


# In the fork: pytest


class Judge:
    """A plugin for pytest: which tests run, in which order, and what counts as failed.

    The first failure stops it, unless `stop` is false. A time-out does not.
    children: the files that are tested; time_out: the exception.
    """

    def __init__(self, children, stop, time_out):
        self.children, self.stop, self.time_out = children, stop, time_out
        self.selected, self.failed, self.timed_out, self.stage = [], [], [], 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        """Leave out what has run in an earlier stage, and the tests of other rungs."""
        chosen = [
            item
            for item in items
            if item.nodeid not in self.selected and about(item.nodeid, self.children)
        ]
        chosen.sort(key=lambda item: not rungs_in(item.nodeid) & self.children)
        items[:] = chosen
        self.selected += [item.nodeid for item in chosen]

    def pytest_collectreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.failed:
            if isinstance(call.excinfo.value, self.time_out):
                self.timed_out.append(item.nodeid)
            else:
                self.failed.append(item.nodeid)
                if self.stop:
                    item.session.shouldstop = "a test has failed"
        return report


def rungs_in(test):
    """The rungs whose names stand in a test's id."""
    return {
        name
        for name in RUNGS
        if re.search(rf"(?<![a-z]){Path(name).stem}(?![a-z])", test)
    }


def about(test, children):
    """Whether a test can say anything about one of these files: rungs, or utils.py."""
    return (
        "utils.py" in children
        or not rungs_in(test) - children
        or (bool(rungs_in(test) & children))
    )


def run_tests(root, children, stages, stop, answer):
    """Run pytest in this process, on the tree at `root`, and write the `answer`."""
    os.environ["TEST_TIMEOUT_S"] = str(WAIT_S)
    os.chdir(root)
    fresh_threads = warm.FRESH_THREADS
    for name in [x for x in sys.modules if x.partition(".")[0] in OURS]:
        del sys.modules[name]
    sys.path[:] = [str(root), *(x for x in sys.path if x not in ("", str(ROOT)))]
    from proofs import processes as copied_processes
    from proofs import warm as copied_warm

    # This process has one thread already, which the copy's took for a new one's number.
    copied_warm.FRESH_THREADS = fresh_threads
    judge = Judge(children, stop, copied_processes.TimedOut)
    options = ["-q", "-m", "not text", "-p", "no:cacheprovider"]
    options.append(f"--basetemp={root}/.basetemp")
    for judge.stage, tests in enumerate(stages):
        if not tests:
            continue
        status = pytest.main([*options, *tests], plugins=[judge])
        if status in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR):
            return
        if judge.failed:
            break
    facts = judge.selected, judge.failed, judge.timed_out, judge.stage
    answer.write_text(json.dumps(facts))


# Forks


class Forks:
    """Runs tasks in forks of this process, which has imported torch already."""

    def __init__(self, root, jobs):
        self.root, self.jobs = root, jobs
        self.folder = Path(tempfile.mkdtemp(prefix="lines-"))
        self.count = 0
        self.running = {}  # {pid: (task, its folder, when it began)}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in self.running:
            kill_family(pid)
        for folder in self.folder.glob("*/"):
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # there are logs in it
            self.folder.rmdir()

    def run(self, tasks, children=None):
        """Yield (task, Outcome) as they end. children: of a control."""
        tasks = list(tasks)
        while tasks or self.running:
            while tasks and len(self.running) < self.jobs:
                task = tasks.pop(0)
                self.start(task, children or {task.child})
            yield self.wait()

    def start(self, task, children):
        self.count += 1
        folder = self.folder / f"{self.count:03}"
        copy_tree(folder, self.root)
        if task.mutant:
            (folder / task.child).write_text(task.mutant.text)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            self.running[pid] = task, folder, time.monotonic()
            return
        try:
            os.setsid()
            log = open(f"{folder}.log", "w", buffering=1)  # noqa: SIM115
            for number in (1, 2):
                os.dup2(log.fileno(), number)
            sys.stdout = sys.stderr = log
            stop = task.mutant is not None
            run_tests(folder, children, task.stages, stop, folder / ".answer")
        finally:
            log.flush()
            os._exit(0)

    def wait(self):
        """(task, Outcome) of the next that ends, or that is ended at its limit."""
        while True:
            for pid, (task, folder, began) in self.running.items():
                seconds, log = time.monotonic() - began, Path(f"{folder}.log")
                ended, _, usage = os.wait4(pid, os.WNOHANG)
                if not ended and seconds > LIMIT_S:
                    kill_family(pid)
                    _, _, usage = os.wait4(pid, 0)
                    facts = [], [], [f"all tests within {LIMIT_S} s"], 0
                elif ended and (folder / ".answer").exists():
                    facts = json.loads((folder / ".answer").read_text())
                elif ended:
                    raise RuntimeError(f"pytest did not get to run the tests: {log}")
                else:
                    continue
                del self.running[pid]
                shutil.rmtree(folder)
                cpu_s = usage.ru_utime + usage.ru_stime
                return task, Outcome(*facts, seconds, cpu_s, log)
            time.sleep(0.02)


def kill_family(pid):
    """End a process and all that come from it, in whatever sessions they are."""
    for member in [pid, *processes.descendants(pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)


# The proof


class Proof:
    """All that is to be shown about some files; `bad` is what speaks against it."""

    def __init__(self, edges, root, only="", names=None):
        self.edges, self.names = edges, names
        self.found = {}  # {edge: its mutants}
        for parent, child in edges:
            texts = [
                (root / name).read_text() if name else "" for name in (parent, child)
            ]
            self.found[parent, child] = mutants(*texts)
        self.chosen = {
            edge: [mutant for mutant in found if only in mutant.what]
            for edge, found in self.found.items()
        }
        self.files = [f"tests/{name}.py" for name in names or []] or rung_tests()
        self.bad = []
        self.justified = set()
        self.seconds = dict.fromkeys(edges, 0.0)
        self.cpu_s = dict.fromkeys(edges, 0.0)

    def named(self, edge):
        """{line of the child: the tests that its explanation names}."""
        if self.names or edge == UTILS:
            return {}
        tests = named_tests(*edge)
        return {
            hunk.new_start + i: tests[hunk.number]
            for hunk in hunks(*edge)
            for i in range(max(1, len(hunk.added)))
        }

    def control(self, forks):
        """Whether all tests pass on the tree as it is. Sorts the files by time."""
        children = {child for _, child in self.edges}
        tasks = [Task("", "", None, [[file]]) for file in self.files]
        took, selected, fine, cpu_s = {}, [], True, 0
        for task, outcome in forks.run(tasks, children):
            ((file,),) = task.stages
            took[file] = outcome.seconds
            cpu_s += outcome.cpu_s
            selected += outcome.selected
            wrong = [f"{x} fails" for x in outcome.failed]
            wrong += [f"{x} TIMED OUT" for x in outcome.timed_out]
            for what in wrong:
                print(f"control: {what}: {outcome.log}")
            if wrong:
                fine = False
            else:
                outcome.log.unlink()
        for edge in self.edges:
            for line, tests in self.named(edge).items():
                for test in tests:
                    if not any(is_of(x, test) for x in selected):
                        print(f"{edge[1]}:{line}: its chapter names {test}: no test")
                        fine = False
        self.files.sort(key=took.get)
        spent = f"{sum(took.values()) / forks.jobs:.0f} s, {cpu_s:.0f} CPU s"
        print(f"control: {len(selected)} tests, {spent}", flush=True)
        return fine

    def tasks(self):
        for edge, chosen in self.chosen.items():
            named = self.named(edge)
            for mutant in chosen:
                stages = [named[mutant.line], self.files] if named else [self.files]
                yield Task(*edge, mutant, stages)

    def judge(self, task, outcome):
        """Print what became of a mutant; note it if it speaks against the proof."""
        edge, mutant = (task.parent, task.child), task.mutant
        self.seconds[edge] += outcome.seconds
        self.cpu_s[edge] += outcome.cpu_s
        missed_by = outcome.failed[0] if outcome.failed else None
        if missed_by and outcome.stage == 0:
            verdict, bad = missed_by, False
        elif missed_by:
            verdict, bad = f"NONE THAT ITS CHAPTER NAMES, BUT {missed_by}", True
        elif outcome.timed_out:
            verdict, bad = f"TIMED OUT: {', '.join(outcome.timed_out)}", True
        else:
            verdict, bad = "NO TEST MISSES IT", True
            reason = survivors().get((task.child, mutant.what))
            if reason:
                self.justified.add((task.child, mutant.what))
                verdict, bad = f"survives: {reason}", False
        line = f"{task.child}:{mutant.line}"
        line = f"{line:18} {mutant.kind:9} {mutant.what[:70]:70} {verdict}"
        took = f"({outcome.seconds:.0f} s, {outcome.cpu_s:.1f} CPU s)"
        print(line, took, flush=True)
        if bad:
            self.bad.append(f"{line}\n    {outcome.log}")
        else:
            outcome.log.unlink()

    def not_needed(self):
        """The lines of survivors.txt whose mutants do not exist or do not survive."""
        wrong = []
        for (file, what), reason in survivors().items():
            for edge in self.edges:
                if edge[1] != file:
                    continue
                found = what in [mutant.what for mutant in self.found[edge]]
                chosen = what in [mutant.what for mutant in self.chosen[edge]]
                survives = (file, what) in self.justified
                if not found or (chosen and not survives):
                    why = "does not survive" if found else "is not there"
                    wrong.append(f"survivors.txt: {file}: {what} — {reason}: it {why}")
        return wrong


def is_of(test, named):
    """Whether the id `test` is of what a chapter names: a file or a function."""
    return test == named or test.startswith((f"{named}::", f"{named}["))


def rung_tests():
    """The files of the rungs' tests: those that the explanations of diffs name."""
    named = [
        x for edge in EDGES for tests in named_tests(*edge).values() for x in tests
    ]
    return sorted({test.partition("::")[0] for test in named})


def survivors():
    """{(file, what is taken out): why no test can miss it}, from survivors.txt."""
    found = {}
    path = Path(__file__).with_name("survivors.txt")
    for line in path.read_text().splitlines() if path.exists() else []:
        if line and not line.startswith("#"):
            file, _, rest = line.partition(": ")
            what, _, reason = rest.partition(" — ")
            assert reason, f"{path.name}: {line!r} gives no reason"
            found[file, what] = reason
    return found


def prove(edges, root=ROOT, jobs=2, only="", names=None):
    """Run all mutants of `edges`; print what is found. Returns the exit status."""
    proof = Proof(edges, root, only, names)
    for (_, child), chosen in proof.chosen.items():
        kinds = [mutant.kind for mutant in chosen]
        counts = [f"{kinds.count(kind)} of a {kind}" for kind in sorted({*kinds})]
        print(f"{child}: {len(chosen)} mutants: {', '.join(counts)}")
    with Forks(root, jobs) as forks:
        if not proof.control(forks):
            print("The control fails: the rungs as they are. No line was taken out.")
            return 1
        for task, outcome in forks.run(proof.tasks()):
            proof.judge(task, outcome)
    for edge, seconds in proof.seconds.items():
        spent = (
            f"{seconds / jobs:.0f} s with {jobs} jobs, {proof.cpu_s[edge]:.0f} CPU s"
        )
        print(f"{edge[1]}: {spent}")
    bad = proof.bad + proof.not_needed()
    print("\n".join(bad))
    print(f"{len(bad)} of them speak against the proof")
    return 1 if bad else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="PARENT CHILD", help="or utils.py")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tested at once")
    parser.add_argument("--only", default="", help="only what has this text in it")
    parser.add_argument("--tests", nargs="*", help="only these, such as test_diff")
    parser.add_argument("--root", type=Path, default=ROOT)
    args = parser.parse_args()
    if args.names == ["utils.py"]:
        edges = [UTILS]
    elif args.names and tuple(args.names) not in EDGES:
        parser.error(f"the edges are {', '.join(map(' '.join, EDGES))}, or utils.py")
    else:
        edges = [tuple(args.names)] if args.names else EDGES
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    sys.exit(prove(edges, args.root, args.jobs, args.only, args.tests))
