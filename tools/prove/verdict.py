"""A plugin of pytest: it runs tests until one fails, and writes down the verdict.

tools/prove/lines.py starts a pytest with it on each mutant. The environment says

    TESTS    which tests run, and in which order: ids, with or without parameters
    CHILD    the script that the mutant was made from
    VERDICT  the file for {"killer": the test that failed, "no_verdict": [reasons]}
"""

import json
import os
import re
from pathlib import Path

import pytest

from tools.prove.proof import function_of
from tools.run.processes import TimedOut
from tools.scripts import SCRIPTS

verdict = {"killer": "", "no_verdict": []}


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
        verdict["no_verdict"].append(f"{report.nodeid} cannot be collected")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    test = item.nodeid
    if report.failed and isinstance(call.excinfo.value, TimedOut):
        verdict["no_verdict"].append(f"{test} times out")
    elif report.failed and report.when != "call":
        verdict["no_verdict"].append(f"{test} fails in its {report.when}")
    elif report.failed:
        verdict["killer"] = test
        item.session.shouldstop = "a test has failed"
    return report


def pytest_sessionfinish():
    Path(os.environ["VERDICT"]).write_text(json.dumps(verdict))


def about(test, child):
    """Whether a test's id names the script `child`, or no script at all."""
    stems = [Path(name).stem for name in SCRIPTS]
    stems.sort(key=len, reverse=True)  # multinode_spawn is not about multinode
    named = re.findall(rf"(?<![a-z])({'|'.join(stems)})(?![a-z])", test)
    return Path(child).stem in named or not named or child not in SCRIPTS
