"""A plugin of pytest: a waiting test that has passed runs again only if it may fail.

    python -m pytest --all -m waits -p tools.prove.skip_proven

It may fail if its file has changed, a file that this one names, a file that all tests
share, or a script. If a parameter of the test is a script, then only this script, those
that it comes from and those of the root count.
"""

import functools

import pytest

from tools.files import file_names
from tools.prove import record
from tools.prove.inputs import PLACE, all_named, digest_of_files
from tools.prove.record import Proof
from tools.scripts import ROOT, SCRIPTS, ancestry, trunk

proofs = {}  # {test: its proof}, of those that have not failed


def is_shared(name):
    """Whether all waiting tests depend on a file."""
    folder, _, file = name.rpartition("/")
    if folder in ("tools", "tools/run"):
        return file.endswith(".py") and file != "size.py"  # which only measures
    if folder.startswith("tests"):  # but tests, what some of them use, and prose
        is_test = file.startswith("test_") or folder == "tests/helpers"
        return not is_test and not file.endswith(".md")
    return name in ("utils.py", "pyproject.toml")


@functools.cache
def depends_on(file, about):
    """A hash of all that a test of `file` about some scripts depends on.

    A test that is about none may read them all.
    """
    files = all_named([file])
    tests = (ROOT / name for name in files if name.startswith("tests/"))
    if any("copy_tree" in test.read_text() for test in tests):
        files.update(name for name in file_names() if not name.endswith(".md"))
    files.update(*map(ancestry, about or SCRIPTS))
    shared = filter(is_shared, file_names())
    return digest_of_files(files.union(shared, trunk()))


def proof_of(item):
    file, _, test = item.nodeid.partition("::")
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    about = tuple(value for value in parameters if value in [*SCRIPTS])
    return Proof(file, test, PLACE, depends_on(file, about))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    known = record.read()
    for item in items:
        if item.get_closest_marker("waits"):
            proofs[item] = proof_of(item)
    same = [item for item in proofs if proofs[item] in known]
    config.hook.pytest_deselected(items=same)
    items[:] = [item for item in items if item not in same]
    print(f"\n{len(same)} tests have passed before, with all that they depend on")


def pytest_sessionfinish(session, exitstatus):
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and proofs:
        session.exitstatus = pytest.ExitCode.OK


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if not report.passed:
        proofs.pop(item, None)
    elif report.when == "teardown" and item in proofs:
        # It has passed with what its files held at the start.
        proof = proofs[item]
        old = [known for known in record.read() if known[:3] == proof[:3]]
        record.change([proof], old)
    return report
