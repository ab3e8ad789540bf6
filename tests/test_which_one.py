"""Every script can be chosen, and the picture and the page say the same."""

import re
import xml.etree.ElementTree as ET

import pytest

from ladder.choices import AT_LAST, CHOICES, WHAT_FOR, chosen, name_of
from ladder.rungs import ROOT, read_lines
from website import pictures

SCRIPTS = [
    str(x.relative_to(ROOT))
    for x in [*ROOT.glob("*.py"), *ROOT.glob("variants/*.py")]
    if x.name not in ("utils.py", "__init__.py")
]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_can_be_chosen(name):
    assert name in chosen()
    assert name in WHAT_FOR


def test_nothing_else_can_be():
    assert chosen() == {*WHAT_FOR} == {*SCRIPTS}


def test_the_picture_has_every_question_and_answer():
    svg = pictures.which_one()
    root = ET.fromstring(svg)
    words = " ".join(x.text for x in root.iter(f"{{{root.tag[1:-4]}}}text")).split()
    desc = root.find(f"{root.tag[:-3]}desc").text
    for question, answers, go_on in CHOICES:
        for text in (question, go_on, *(x for pair in answers for x in pair)):
            said = name_of(text) if text in SCRIPTS or "://" in text else text
            assert set(said.split()) <= {*words}
            assert said in desc
    assert name_of(AT_LAST) in words


def test_the_page_has_every_answer_in_the_same_order():
    page = "\n".join(read_lines("docs/which_one.md"))
    lines = re.findall(r"^(?:\d\. \*\*|   - )(.+?)(?:\*\*$|: )", page, re.M)
    expected = [
        said
        for question, answers, go_on in CHOICES
        for said in (question, *(answer for answer, _ in answers), go_on)
    ]
    assert lines == expected
