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


def test_the_map_shows_every_folder():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    ignored = (ROOT / ".gitignore").read_text().split()
    folders = [x.name for x in ROOT.iterdir() if x.is_dir() and x.name[0] not in "._"]
    folders = [name for name in folders if f"{name}/" not in ignored]
    assert set(FOLDERS) <= set(folders)
    assert not [name for name in folders if f"{name}/" not in text]
