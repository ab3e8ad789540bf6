"""Every line earns its place: take one out, and a test fails.

    python -m proofs.lines [--jobs N] [PARENT CHILD | utils.py] [--only TEXT]

Takes each statement, each block's header and each argument that a rung's diff adds back
out again, one at a time (proofs/mutations.py), runs the tests on what is left, and
prints which of them fails. With `utils.py`, all of it counts as added, and the tests of
all rungs count, but arguments are left in. Without names it does all rungs.

The sequels (ladder/rungs.py) run only by name, and CI leaves them out: they add many
times the lines of a rung, and each line costs a test that trains a GPT. If you change
one, type `python -m proofs.lines multinode.py mingpt/train.py`, with `--only` for a few
lines. Only the tests that its chapter names run then.

The tests that the line's explanation names run first, the quickest of them before the
others, and one of them must fail: else the chapter is wrong. If none of them fails, the
other tests of rungs run too. Tests marked `text` do not count, because they compare
files and so fail for any line. Nor do tests whose names have other rungs in them only:
they never run this one.

Before tests run on what is left, they run on the rung as it is, as a control: a test
that fails without a line says something only if it passes with it. A test that times
out is no verdict: the others decide, and if none of them fails, it is TIMED OUT.

Lines of proofs/survivors.txt justify what no test can miss: `FILE: WHAT — REASON`. Exit
status 1 if anything else survives, if a line of that file is not needed, at a time-out
and if the control fails. The logs of those cases are kept.
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

from ladder.diffs import changes, hunks
from ladder.files import copy_tree
from ladder.pages import named_tests
from ladder.rungs import ALL_EDGES, EDGES, ROOT, RUNGS, SEQUELS
from proofs import processes, warm
from proofs.mutations import Mutant, mutants

UTILS = "", "utils.py"  # has no parent: all of it is added
QUICK = ["tests/test_input.py", "tests/test_probe.py", "tests/test_snapshot.py"]
OURS = {"ladder", "proofs", "benchmarks", "website", "tests", "utils", "hooks"}
OURS |= {"variants", "mingpt"}  # what a fork imports again, from its copy
WAIT_S = "100"  # for one process of a test, unless TEST_TIMEOUT_S says otherwise
LIMIT_S = 600  # for all tests of one mutant
PYTEST = "pytest itself"  # fails where it cannot run the tests: this shows nothing


class Task(NamedTuple):
    """Tests to run on a copy of the tree, in which `mutant` is the file that it is of.

    mutant: None for a control. tests: as pytest takes them. but_not: ids to leave out.
    """

    mutant: Mutant | None
    tests: list
    but_not: list


class Outcome(NamedTuple):
    """The tests by their ids, and the seconds on the clock and of the processors.

    took_s: {id: seconds} of the tests that ran.
    """

    selected: list
    failed: list
    timed_out: list
    took_s: dict
    seconds: float
    cpu_s: float
    log: Path


# In the fork: pytest


class Judge:
    """A plugin for pytest: which tests run, in which order, and what counts as failed.

    It leaves out `but_not` and the tests of other rungs than `child`. The first failure
    stops it, but not in a control. A time-out is noted and does not stop it.
    """

    def __init__(self, child, task, time_out):
        self.child, self.task, self.time_out = child, task, time_out
        self.selected, self.failed, self.timed_out = [], [], []
        self.took_s = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        tests = {item.nodeid for item in items} - {*self.task.but_not}
        items[:] = [
            x for x in items if x.nodeid in tests and about(x.nodeid, self.child)
        ]
        items.sort(key=lambda item: self.child not in rungs_in(item.nodeid))
        self.selected = [item.nodeid for item in items]

    def pytest_collectreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        test = item.nodeid
        self.took_s[test] = self.took_s.get(test, 0) + report.duration
        if report.failed:
            if isinstance(call.excinfo.value, self.time_out):
                self.timed_out.append(test)
            else:
                self.failed.append(test)
                if self.task.mutant:
                    item.session.shouldstop = "a test has failed"
        return report


def rungs_in(test):
    """The rungs whose names stand in a test's id."""
    return {
        name
        for name in RUNGS
        if re.search(rf"(?<![a-z]){Path(name).stem}(?![a-z])", test)
    }


def about(test, child):
    """Whether a test can say anything about `child`, a rung or utils.py."""
    named = rungs_in(test)
    return child in named or not named or child not in RUNGS


def run_tests(root, child, task, answer):
    """Run pytest in this process, on the tree at `root`, and write the `answer`."""
    os.environ.setdefault("TEST_TIMEOUT_S", WAIT_S)
    os.chdir(root)
    fresh_threads = warm.FRESH_THREADS
    for name in [x for x in sys.modules if x.partition(".")[0] in OURS]:
        del sys.modules[name]
    sys.path[:] = [str(root), *(x for x in sys.path if x not in ("", str(ROOT)))]
    from proofs import processes as copied_processes
    from proofs import warm as copied_warm

    # This process has one thread already, which the copy took for a new one's number.
    copied_warm.FRESH_THREADS = fresh_threads
    judge = Judge(child, task, copied_processes.TimedOut)
    options = ["-q", "-m", "not text", "-p", "no:cacheprovider"]
    options.append(f"--basetemp={root}/.basetemp")
    if task.tests:  # without any, pytest would run all that it finds
        status = pytest.main([*options, *task.tests], plugins=[judge])
        if status == pytest.ExitCode.USAGE_ERROR:  # a test is not there, for one
            judge.failed.append(PYTEST)
    facts = judge.selected, judge.failed, judge.timed_out, judge.took_s
    answer.write_text(json.dumps(facts))


# Forks


class Forks:
    """Runs tasks in forks of this process, which has imported torch already.

    root: of the tree to copy. child: the file that the tasks are about.
    """

    def __init__(self, root, child, jobs):
        self.root, self.child, self.jobs = root, child, jobs
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

    def run(self, tasks):
        """Yield (task, Outcome) as they end."""
        tasks = list(tasks)
        while tasks or self.running:
            while tasks and len(self.running) < self.jobs:
                self.start(tasks.pop(0))
            yield self.wait()

    def start(self, task):
        self.count += 1
        folder = self.folder / f"{self.count:03}"
        copy_tree(folder, self.root)
        if task.mutant:
            (folder / self.child).write_text(task.mutant.text)
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
            run_tests(folder, self.child, task, folder / ".answer")
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
                    facts = [], [], [f"all tests within {LIMIT_S} s"], {}
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
    """What is to be shown about one file; `bad` is what speaks against it."""

    def __init__(self, edge, root, only, names):
        self.edge, self.names = edge, names
        self.child = edge[1]
        self.mutants = mutants_of(edge, root)
        if edge == UTILS:  # statement by statement: its arguments would take an hour
            self.mutants = [x for x in self.mutants if x.kind != "argument"]
        self.chosen = [mutant for mutant in self.mutants if only in mutant.what]
        edges = [edge] if self.child in SEQUELS else EDGES
        self.files = [f"tests/{name}.py" for name in names or []] or named_files(edges)
        self.named = self.named_by_line()
        self.took_s = {}  # {test's id: seconds} in the control
        self.justified = set()  # what survives, as survivors.txt says
        self.bad = []
        self.cpu_s = 0

    def named_by_line(self):
        """{line of the child: the tests that its explanation names}.

        Where no chapter is asked (utils.py, tests given by hand) any test counts.
        """
        if self.names or self.edge == UTILS:
            return {mutant.line: self.files for mutant in self.mutants}
        tests = named_tests(*self.edge)
        return {
            hunk.new_start + i: tests.get(hunk.number, [])  # website.build finds it
            for hunk in hunks(*self.edge)
            for i in range(max(1, len(hunk.added)))
        }

    def show(self, forks):
        """Run it all. Returns whether nothing speaks against it."""
        named = {test for mutant in self.chosen for test in self.named[mutant.line]}
        if not self.control(forks, named):
            return False
        tasks = [Task(x, self.quickest_first(x), []) for x in self.chosen]
        unmissed = {}
        for task, outcome in self.run(forks, tasks):
            if outcome.failed and PYTEST not in outcome.failed:
                self.say(task.mutant, outcome.failed[0], [outcome])
            else:
                unmissed[task.mutant] = [outcome]
        rest = sorted({*self.files} - named)
        if unmissed and rest:
            if not self.control(forks, rest):
                for mutant, outcomes in unmissed.items():
                    self.judge(mutant, outcomes)
                return False
            tasks = [Task(x, rest, unmissed[x][0].selected) for x in unmissed]
            for task, outcome in self.run(forks, tasks):
                unmissed[task.mutant].append(outcome)
        for mutant, outcomes in unmissed.items():
            self.judge(mutant, outcomes)
        self.bad += self.not_needed()
        return not self.bad

    def quickest_first(self, mutant):
        """The tests that the explanation of its line names, as the control took them.

        A run that several tests look at counts for the one that asked for it first.
        """

        def seconds(named):
            return sum(self.took_s[test] for test in self.took_s if is_of(test, named))

        return sorted(self.named[mutant.line], key=seconds)

    def run(self, forks, tasks):
        for task, outcome in forks.run(tasks):
            self.cpu_s += outcome.cpu_s
            yield task, outcome

    def control(self, forks, tests):
        """Whether these tests pass on the tree as it is; says so if not."""
        by_file = {}
        for test in sorted(tests):
            by_file.setdefault(test.partition("::")[0], []).append(test)
        tasks = [Task(None, of_file, []) for of_file in by_file.values()]
        selected, failures = [], []
        for _, outcome in self.run(forks, tasks):
            selected += outcome.selected
            self.took_s |= outcome.took_s
            wrong = [f"{test} fails" for test in outcome.failed]
            wrong += [f"{test} TIMED OUT" for test in outcome.timed_out]
            if wrong:
                failures.append(f"{', '.join(wrong)}: {outcome.log}")
            else:
                outcome.log.unlink()
        for test in tests:  # a whole file may be about another rung
            there = "::" not in test or any(is_of(x, test) for x in selected)
            if not failures and not there:
                failures.append(f"{test} is no test of {self.child}, or is left out")
        print(f"{self.child}: the control has {len(selected)} tests", flush=True)
        for failure in failures:
            print(f"The control fails, nothing is taken out: {failure}")
        if failures:
            self.bad.append("no verdict, because the control fails")
        return not failures

    def judge(self, mutant, outcomes):
        """Say what became of a mutant that the first tests have not missed."""
        failed = [test for outcome in outcomes for test in outcome.failed]
        timed_out = [test for outcome in outcomes for test in outcome.timed_out]
        reason = survivors().get((self.child, mutant.what))
        if failed:
            verdict = f"NONE THAT ITS CHAPTER NAMES, BUT {failed[0]}"
        elif timed_out:
            verdict = f"TIMED OUT: {', '.join(timed_out)}"
        elif reason:
            self.justified.add(mutant.what)
            self.say(mutant, f"survives: {reason}", outcomes)
            return
        else:
            verdict = "NO TEST MISSES IT"
        self.bad.append(self.say(mutant, verdict, outcomes, keep=True))

    def say(self, mutant, verdict, outcomes, keep=False):
        """Print one line, and return it with the logs' names if they are kept."""
        line = f"{self.child}:{mutant.line}"
        line = f"{line:18} {mutant.kind:9} {mutant.what[:70]:70} {verdict}"
        seconds = sum(outcome.seconds for outcome in outcomes)
        cpu_s = sum(outcome.cpu_s for outcome in outcomes)
        print(f"{line} ({seconds:.0f} s, {cpu_s:.1f} CPU s)", flush=True)
        for outcome in outcomes:
            if keep:
                line += f"\n    {outcome.log}"
            else:
                outcome.log.unlink()
        return line

    def not_needed(self):
        """The lines of survivors.txt whose mutants do not exist or do not survive."""
        wrong = []
        for (file, what), reason in survivors().items():
            if file != self.child:
                continue
            if what not in [mutant.what for mutant in self.mutants]:
                wrong.append(f"survivors.txt: {what} — {reason}: not in {file}")
            elif what in [x.what for x in self.chosen] and what not in self.justified:
                wrong.append(f"survivors.txt: {what} — {reason}: does not survive")
        return wrong


def mutants_of(edge, root=ROOT):
    """The mutants of a diff, whose hunks are those that the chapters explain."""
    texts = [(root / name).read_text() if name else "" for name in edge]
    return mutants(*texts, changes(*edge) if edge[1] in SEQUELS else None)


def is_of(test, named):
    """Whether the id `test` is of what a chapter names: a file or a function."""
    return test == named or test.startswith((f"{named}::", f"{named}["))


def named_files(edges):
    """The files of tests that the explanations of these diffs name."""
    named = [
        x for edge in edges for tests in named_tests(*edge).values() for x in tests
    ]
    files = sorted({test.partition("::")[0] for test in named})
    return sorted(files, key=lambda file: file not in QUICK)


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


def prove(edge, root=ROOT, jobs=2, only="", names=None):
    """Run all mutants of one edge, and print what is found: whether all is well."""
    began = time.monotonic()
    proof = Proof(edge, root, only, names)
    kinds = [mutant.kind for mutant in proof.chosen]
    counts = [f"{kinds.count(kind)} of {kind}" for kind in sorted({*kinds})]
    print(f"{proof.child}: {len(kinds)} mutants: {', '.join(counts)}", flush=True)
    with Forks(root, proof.child, jobs) as forks:
        fine = proof.show(forks)
    seconds = time.monotonic() - began
    print(f"{proof.child}: {seconds:.0f} s with {jobs} jobs, {proof.cpu_s:.0f} CPU s")
    for line in proof.bad:
        print(line)
    print(f"{proof.child}: {len(proof.bad)} speak against the proof", flush=True)
    return fine


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
    elif args.names and tuple(args.names) not in ALL_EDGES:
        known = ", ".join(map(" ".join, ALL_EDGES))
        parser.error(f"the edges are {known}, or utils.py")
    else:
        edges = [tuple(args.names)] if args.names else EDGES
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    fine = [prove(x, args.root, args.jobs, args.only, args.tests) for x in edges]
    sys.exit(0 if all(fine) else 1)
