"""The rooms of the house: nothing imports upwards, and the root holds three scripts."""

import ast

import pytest

from ladder.rungs import ROOT

# What is made for those who read and copy imports nothing of what builds or tests it.
READ = ["*.py", "variants/**/*.py", "mingpt/**/*.py", "tools/**/*.py", "docs/**/*.py"]
ROOMS = ["ladder", "proofs", "benchmarks", "website", "tests"]  # each from those before


def imported(path):
    """The first parts of the names of all modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_imports_upwards(room):
    above = set(ROOMS[ROOMS.index(room) + 1 :])
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    found = {str(x.relative_to(ROOT)): imported(x) & above for x in files}
    assert not {name: names for name, names in found.items() if names}


def test_what_is_read_imports_nothing_that_builds_or_tests_it():
    files = sorted(path for pattern in READ for path in ROOT.glob(pattern))
    assert ROOT / "multigpu.py" in files
    found = {str(x.relative_to(ROOT)): imported(x) & set(ROOMS) for x in files}
    assert not {name: names for name, names in found.items() if names}


def test_the_map_shows_every_room():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    ignored = (ROOT / ".gitignore").read_text().split()
    folders = [x.name for x in ROOT.iterdir() if x.is_dir() and x.name[0] not in "._"]
    folders = [name for name in folders if f"{name}/" not in ignored]
    assert set(ROOMS) <= set(folders)
    assert not [name for name in folders if f"{name}/" not in text]
