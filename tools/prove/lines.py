"""Every line earns its place: take one out, and a test fails.

    python -m tools.prove.lines [PARENT CHILD] [--only TEXT]

This takes each statement, each block's header and each argument that a script's diff
adds back out again, one at a time. Such a text is a mutant. Tests run on it until one
fails: first the test that killed this mutant before, then all that the line's
explanation names. Without names it does all scripts.

Tests marked `text` do not count, because they compare files, nor do tests that run only
other scripts. Only a test that ran and failed kills a mutant, and as a control, it must
not fail on the script as it is. A test that times out, whose fixture fails or that
pytest cannot collect gives no verdict: the others decide.

tools/prove/record.py keeps each mutant that a test has killed. It runs again only if
what its proof depends on has changed (tools/prove/proof.py), or if the explanation no
longer names its killer. --full skips none. CI does this once a week, because nothing
else finds what a hook, conftest.py or another PyTorch changes, or a function of
utils.py that only other lines of the mutant's function name.

Exit status 1 if any mutant survives.
"""

import functools
import json
import os
import sys
import tempfile
from pathlib import Path

from tools.cli import Parser
from tools.files import copy_tree
from tools.prove import record
from tools.prove.mutants import mutants
from tools.prove.proof import function_of, label, make_proof
from tools.run.pool import two_at_a_time
from tools.run.processes import Program, TimedOut, end_all
from tools.scripts import ALL_EDGES, ROOT
from tools.site.pages import TEST, page_names, parse

WAIT_S = "100"  # for one process of a test, unless TEST_TIMEOUT_S says otherwise
LIMIT_S = 600  # for all tests of one mutant

# Read `prove` first. The verdict on a mutant is what tools/prove/verdict.py writes.


def no_verdict(reason):
    return {"killer": "", "no_verdict": [reason]}


@functools.cache
def run_tests(child, text, tests):
    """The verdict of tests, run in a copy of the tree whose `child` has this text."""
    found = no_verdict("pytest does not start")
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
        written = folder / ".verdict"
        # pytest starts in half the time if it need not say why an assertion fails.
        words = "python -m pytest --all -q -p tools.prove.verdict --assert=plain"
        words += " --continue-on-collection-errors -m"
        files = sorted({test.partition("::")[0] for test in tests})
        fork = Program(
            [*words.split(), "not text", *files],
            folder,
            merged=True,
            TMPDIR=temporary,
            CHILD=child,
            VERDICT=written,
            TESTS=json.dumps(tests),
            PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
            TEST_TIMEOUT_S=os.environ.get("TEST_TIMEOUT_S", WAIT_S),
        )
        try:
            fork.finish(LIMIT_S)
            if written.exists():
                found = json.loads(written.read_text())
        except TimedOut:
            found = no_verdict(f"the tests take more than {LIMIT_S} s")
        finally:
            end_all()  # if this is interrupted
    return found


def try_mutant(child, mutant, tests):
    """The verdict on a mutant. Its killer does not fail on the script as it is."""
    found = run_tests(child, mutant.text, tuple(tests))
    killer = found["killer"]
    if killer:
        control = run_tests(child, (ROOT / child).read_text(), (killer,))
        if control["killer"] or control["no_verdict"]:
            return no_verdict(f"{killer} fails on the script as it is, too")
    return found


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
    """Run the mutants of one edge that are not proven, and return whether all is well.

    Each verdict is recorded at once. At the end, the record forgets the mutants that no
    longer exist.
    """
    _, child = edge
    known = [proof for proof in sorted(record.read()) if proof.kind == " ".join(edge)]
    to_try, proofs = what_to_try(edge, only, known)
    left = [mutant for mutant in to_try if full or mutant not in proofs]
    print(f"{child}: {len(to_try)} mutants, {len(left)} to run", flush=True)
    bad = []
    tests = [to_try[mutant] for mutant in left]
    verdicts = two_at_a_time(functools.partial(try_mutant, child), left, tests)
    for mutant, result in zip(left, verdicts, strict=True):
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


def report(child, mutant, result):
    """The line that says which test has failed, if any."""
    verdict = result["killer"] or "NO TEST FAILS WITHOUT IT"
    if result["no_verdict"] and not result["killer"]:
        verdict = f"NO VERDICT: {', '.join(result['no_verdict'])}"
    return f"{child}:{mutant.line:<4} {mutant.kind:9} {mutant.what[:70]:70} {verdict}"


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
