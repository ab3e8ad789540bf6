"""The layout: nothing that is read or copied imports what tests or builds it."""

import ast

import pytest

from tools.scripts import ROOT

# What is made for those who read and copy imports nothing of what builds or tests it.
READ = [f"{x}**/*.py" for x in ("variants/", "mingpt/", "cluster/", "docs/")] + ["*.py"]
FOLDERS = ["tools", "benchmarks", "tests"]  # each from those before


def imported(path):
    """The first parts of the names of all modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("pattern", [*READ, *(f"{x}/**/*.py" for x in FOLDERS)])
def test_nothing_imports_upwards(pattern):
    folder = pattern.partition("/")[0]
    above = {*FOLDERS[FOLDERS.index(folder) + 1 :]} if folder in FOLDERS else {*FOLDERS}
    files = sorted(ROOT.glob(pattern))
    assert files
    found = {str(x.relative_to(ROOT)): imported(x) & above for x in files}
    assert not {name: names for name, names in found.items() if names}
