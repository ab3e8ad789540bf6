"""What the README and the documents say is so."""

import ast
import re

import pytest

from docs.diffs import EDGES, ROOT, RUNGS, changed_lines
from tests.rungs import commands

PAGES = ["README.md", *(str(x.relative_to(ROOT)) for x in ROOT.glob("docs/*.md"))]


def test_the_readme_gives_two_commands():
    """CI takes them from here and runs them in a fresh environment."""
    text = (ROOT / "README.md").read_text()
    lines = re.findall(r"^    pip install -r requirements.txt && (.*)$", text, re.M)
    assert lines == ["python multigpu.py 50 10", "pytest"]


def test_the_readme_lists_every_rung_with_its_command():
    text = (ROOT / "README.md").read_text()
    for name in RUNGS:
        assert f"[{name}]({name})" in text
        assert all("    " + " ".join(words) in text for words in commands(name))


@pytest.mark.text
@pytest.mark.parametrize(("parent", "child"), EDGES)
def test_the_readme_counts_changed_lines_right(parent, child):
    row = rf"\[{child}\].*\| {len(changed_lines(parent, child))} from {parent} \|"
    assert re.search(row, (ROOT / "README.md").read_text())


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES)
def test_the_tests_that_are_named_exist(page):
    """A claim's test is in the file that the page names, and has a name that runs."""
    text = (ROOT / page).read_text()
    for file, name in re.findall(r"(tests/\w+\.py)(?:::(\w+))?", text):
        body = ast.parse((ROOT / file).read_text()).body
        names = [x.name for x in body if isinstance(x, ast.FunctionDef)]
        assert not name or name in names, f"{file}::{name}"
