"""Every line earns its place: take one out, and a test fails.

    python -m tools.prove.lines [PARENT CHILD] [--only TEXT]

Takes each statement, each block's header and each argument that a script's diff adds
back out again, one at a time, and runs tests until one fails: first the one that killed
this mutant before, then all that the line's explanation names. Without names it does
all scripts.

Tests marked `text` do not count, because they compare files, nor do tests that run only
other scripts. Only a test that ran and failed kills a mutant, and as a control, it must
not fail on the script as it is. A test that times out, whose fixture fails or that
pytest cannot collect is no verdict: the others decide.

tools/prove/record.py keeps each mutant that a test has killed. It runs again only if
its function has changed, a function of utils.py that its own lines or their replacement
name, its killer, or what this test uses of its file; and if the explanation no longer
names the killer. Comments and imports may change. So
.ci/run proves what has changed. --full skips nothing, and CI does it once a week: it
alone finds what a hook, conftest.py or another PyTorch changes, or a function of
utils.py that only other lines of the mutant's function name.

Exit status 1 if any mutant survives.
"""

import ast
import difflib
import functools
import itertools
import json
import multiprocessing
import os
import re
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tools.cli import Parser
from tools.files import copy_tree
from tools.prove import record
from tools.prove.mutants import mutants
from tools.prove.record import Proof
from tools.run.processes import Program, TimedOut, end_all
from tools.scripts import ALL_EDGES, ROOT, SCRIPTS
from tools.site.pages import TEST, page_names, parse

WAIT_S = "100"  # for one process of a test, unless TEST_TIMEOUT_S says otherwise
LIMIT_S = 600  # for all tests of one mutant
JOBS = 2  # mutants tested at once


# Read `prove` first. In the fork of `run_tests`, this module is a plugin of pytest: it
# chooses the tests, stops when one has failed, and writes down `facts`.

facts = {"killer": "", "no_verdict": []}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Keep the tests that the environment names, in its order.

    They are no arguments of pytest: if one file cannot be imported, it would run none.
    """
    order = json.loads(os.environ["TESTS"])
    places = {}
    for item in items:
        for test in (item.nodeid, function_of(item.nodeid)):
            if test in order and about(item.nodeid, os.environ["CHILD"]):
                places.setdefault(item, order.index(test))
    items[:] = sorted(places, key=places.get)


def pytest_collectreport(report):
    if report.failed:
        facts["no_verdict"].append(f"{report.nodeid} cannot be collected")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    test = item.nodeid
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
    stems = [Path(name).stem for name in SCRIPTS]
    stems.sort(key=len, reverse=True)  # multinode_spawn is not about multinode
    named = re.findall(rf"(?<![a-z])({'|'.join(stems)})(?![a-z])", test)
    return Path(child).stem in named or not named or child not in SCRIPTS


# Each mutant is tested in a copy of the tree.


@functools.cache
def run_tests(child, text, tests):
    """`facts` of tests in a fork, on a copy of the tree whose `child` has this text."""
    found = facts | {"no_verdict": ["pytest does not start"]}
    with tempfile.TemporaryDirectory(prefix="lines-") as name:
        folder = Path(name)
        copy_tree(folder)
        (folder / child).write_text(text)
        # The stand-in's source is one file for all copies: it is compiled once.
        standin = folder / "tests/standin/standin.cpp"
        standin.unlink()
        standin.symlink_to(ROOT / "tests/standin/standin.cpp")
        temporary = folder / ".tmp"
        temporary.mkdir()
        written = folder / ".facts"
        # pytest starts in half the time if it need not say why an assertion fails.
        words = "python -m pytest --full -q -p tools.prove.lines --assert=plain"
        words += " --continue-on-collection-errors -m"
        files = sorted({test.partition("::")[0] for test in tests})
        fork = Program(
            [*words.split(), "not text", *files],
            folder,
            merged=True,
            TMPDIR=temporary,
            CHILD=child,
            FACTS=written,
            TESTS=json.dumps(tests),
            PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
            TEST_TIMEOUT_S=os.environ.get("TEST_TIMEOUT_S", WAIT_S),
        )
        try:
            fork.finish(LIMIT_S)
            if written.exists():
                found = json.loads(written.read_text())
        except TimedOut:
            found["no_verdict"] = [f"the tests take more than {LIMIT_S} s"]
        finally:
            end_all()  # if this is interrupted
    return found


def try_mutant(child, mutant, tests):
    """`facts` of a mutant: what kills it, and does not fail without it."""
    found = run_tests(child, mutant.text, tuple(tests))
    killer = found["killer"]
    if killer:
        control = run_tests(child, (ROOT / child).read_text(), (killer,))
        if control["killer"] or control["no_verdict"]:
            reason = f"{killer} fails on the script as it is, too"
            found = {"killer": "", "no_verdict": [reason]}
    return found


# The proof of a script runs its mutants and reports each.


def named_by_line(edge):
    """{line of the child: the tests that its explanation names}."""
    found = {}
    for page in map(parse, page_names()):
        for block in page.blocks:
            if (block.old, block.new) == edge:
                links = TEST.findall(page.section(block))
                tests = [f"{path}::{name}" for name, path in links]
                for hunk in block.hunks:
                    # A hunk that only removes lines is put back at one line.
                    for i in range(max(1, len(hunk.added))):
                        found[hunk.new_start + i] = tests
    return found


def prove(edge, only, full):
    """Run the mutants of one edge that are not proven: whether all is well.

    Each verdict is written down at once. Last, the proofs of mutants that are gone go.
    """
    _, child = edge
    known = [proof for proof in sorted(record.read()) if proof.kind == " ".join(edge)]
    to_try, proofs = what_to_try(edge, only, known)
    left = [mutant for mutant in to_try if full or mutant not in proofs]
    print(f"{child}: {len(to_try)} mutants, {len(left)} to run", flush=True)
    bad = []
    for mutant, result in try_all(child, left, to_try):
        line = report(child, mutant, result)
        print(line, flush=True)
        old = proofs.pop(mutant, None)
        killer = result["killer"]
        if killer:
            proofs[mutant] = make_proof(edge, mutant, killer)
            record.change(add=[proofs[mutant]])
        else:
            bad.append(line)
            record.change(drop=[old])
    tried = {proof for proof in known if only in proof.what}
    record.change(drop=tried.difference(proofs.values()))
    print(*bad, f"{child}: {len(bad)} bad", sep="\n", flush=True)
    return not bad


def what_to_try(edge, only, known):
    """({mutant: its tests}, {mutant: a known proof that still holds}).

    First come the tests that have killed such a mutant before.
    """
    by_line = named_by_line(edge)
    all_named = sorted(set().union(*by_line.values()))
    to_try = {}
    proofs = {}
    for mutant in mutants(*((ROOT / name).read_text() for name in edge)):
        if only not in mutant.what:
            continue
        named = by_line.get(mutant.line, all_named)
        to_try[mutant] = []
        for proof in known:
            if proof.what == label(mutant) and function_of(proof.by) in named:
                to_try[mutant].append(proof.by)
                if proof == make_proof(edge, mutant, proof.by):
                    proofs[mutant] = proof
        to_try[mutant] += named
    return to_try, proofs


def try_all(child, left, to_try):
    """Yield (mutant, facts) of those that are left, two at a time."""
    if left:
        from tools.run import warm  # noqa: F401  once here, not in each worker
    # Each worker is a process without threads, so that it may fork.
    forked = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(JOBS, mp_context=forked) as pool:
        tests = [to_try[mutant] for mutant in left]
        results = pool.map(try_mutant, itertools.repeat(child), left, tests)
        yield from zip(left, results, strict=True)


def report(child, mutant, result):
    """The line that says which test has failed, if any."""
    verdict = result["killer"] or "NO TEST FAILS WITHOUT IT"
    if result["no_verdict"] and not result["killer"]:
        verdict = f"NO VERDICT: {', '.join(result['no_verdict'])}"
    return f"{child}:{mutant.line:<4} {mutant.kind:9} {mutant.what[:70]:70} {verdict}"


# A proof names what it depends on.


def make_proof(edge, mutant, killer):
    """The proof by a killer, with a hash of all that it depends on.

    That is the function that the mutant stands in, before and after; what the lines
    that differ use of utils.py; and the killer. Outside of functions it is the
    statement alone.
    """
    before = statements_of((ROOT / edge[1]).read_text())
    after = statements_of(mutant.text)
    old = "\n".join(sorted(before - after))
    new = "\n".join(sorted(after - before))
    lines = difflib.ndiff(old.splitlines(), new.splitlines())
    differ = [line for line in lines if line.startswith(("-", "+"))]
    parts = [mutant.kind, old, "becomes", new]
    parts += used_of(code_of("utils.py"), differ)
    parts.append(code_of_test(function_of(killer)))
    return Proof(" ".join(edge), label(mutant), killer, record.digest(parts))


def label(mutant):
    return mutant.what.partition(" # ")[0][:50]


@functools.cache
def statements_of(text):
    """The code of each statement at the top level, and of each method of a class."""
    return {*codes_in(ast.parse(text))}


def codes_in(tree, scope=""):
    """Yield each statement as code, with its class in front."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from codes_in(node, node.name)
            node.body = []
        yield f"{scope}: {ast.unparse(node)}"


def used_of(codes, texts):
    """What of `codes`, {name: code}, these texts name, and what that names."""
    used = set()
    to_read = [*texts]
    while to_read:
        names = set(re.findall(r"\w+", to_read.pop())) & set(codes) - used
        used |= names
        to_read += [codes[name] for name in names]
    return [codes[name] for name in sorted(used)]


@functools.cache
def code_of(path):
    """{name: the code that defines it} of what stands at the top level of a file.

    Not the bytes: a comment or an import costs no proof.
    """
    codes = {}
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Expr)):
            continue
        code = ast.unparse(node)
        # What a statement sets, and what a loop fills
        defined = {*re.findall(r"\w+", code.partition("=")[0])}
        if hasattr(node, "name"):
            defined = {node.name}
        for name in defined:
            codes[name] = codes.get(name, "") + code
    return codes


@functools.cache
def code_of_test(test):
    """The code of a test, and of what it uses of its file."""
    path, _, name = test.partition("::")
    return "\n".join([test, *used_of(code_of(path), [name])])


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="PARENT CHILD")
    parser.add_argument("--only", default="", help="only what has this text in it")
    parser.add_argument("--full", action="store_true", help="skip none")
    args = parser.parse_args()
    edges = [tuple(args.names)] if args.names else ALL_EDGES
    if edges[0] not in ALL_EDGES:
        parser.error(f"the edges are {', '.join(map(' '.join, ALL_EDGES))}")
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    fine = [prove(edge, args.only, args.full) for edge in edges]
    sys.exit(not all(fine))
