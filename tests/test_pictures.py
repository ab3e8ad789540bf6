"""The pictures are up to date, described, and show what is so."""

import xml.etree.ElementTree as ET

import pytest

from tools.scripts import ROOT
from tools.site import pictures

FOLDER = ROOT / "docs" / "pictures"
SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_of_the_scripts_is_what_the_tool_draws():
    """If this fails: python -m tools.site.pictures"""
    assert pictures.FILE.read_text() == pictures.draw()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.svg")), ids=lambda x: x.stem)
def test_a_picture_is_described_and_loads_nothing(path):
    root = ET.parse(path).getroot()
    for tag in ("title", "desc"):
        (element,) = root.findall(SVG + tag)
        assert len(element.text) > 20
        assert element.get("id") in root.get("aria-labelledby")
    assert path.read_text().count("http") == 1  # the name space
    for box in root.iter(f"{SVG}rect"):
        assert float(box.get("x", 0)) + float(box.get("width")) <= 800


def texts(name):
    return [x.text for x in ET.parse(FOLDER / name).getroot().iter(f"{SVG}text")]


def test_which_one_names_scripts_that_are_there():
    shown = {x for x in texts("which_one.svg") if x.endswith(".py")}
    there = {x.name for x in [*ROOT.glob("*.py"), *ROOT.glob("variants/*.py")]}
    assert shown == there - {"utils.py", "__init__.py"}
