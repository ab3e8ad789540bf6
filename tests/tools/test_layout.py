"""The layout: nothing that is read or copied imports what tests or builds it."""

import pytest

from tests.helpers.scripts import own_tests, task_of
from tools.prove.inputs import imports_and_texts
from tools.scripts import ROOT, variants

READ = ["*.py", "variants/**/*.py", "mingpt/**/*.py", "cluster/**/*.py", "docs/**/*.py"]
ABOVE = {
    **dict.fromkeys(READ, {"tools", "benchmarks", "tests"}),
    "tools/**/*.py": {"benchmarks", "tests"},
    "benchmarks/**/*.py": {"tests"},
}


@pytest.mark.parametrize("pattern", ABOVE)
def test_nothing_imports_upwards(pattern):
    files = sorted(ROOT.glob(pattern))
    assert files
    for file in files:
        modules, _ = imports_and_texts(file.read_text())
        assert not {name.partition(".")[0] for name in modules} & ABOVE[pattern], file


@pytest.mark.parametrize("name", variants())
def test_a_variant_has_tests_of_its_own(name):
    """Where test_training.py does not know what can be reached, also `test_learns`."""
    text = (ROOT / own_tests(name)).read_text()
    assert task_of(name) != name or "\ndef test_learns(typed)" in text
