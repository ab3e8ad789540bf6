"""The repository is small, and what measures it counts what it says."""

import pytest

from tools import size


@pytest.mark.text
def test_nothing_is_too_large():
    assert size.too_large(size.sizes()) == []


def test_what_counts(tmp_path):
    """In Python, no comment, and no line of the parent's; on a page, the prose.

    An f-string is one token, although Python 3.12 and later make several of it.
    """
    parent = tmp_path / "a.py"
    code = "one = f(1)  # why\n\ntwo = 2\n"
    parent.write_text(code)
    child = tmp_path / "b.py"
    string = """f"{one:{two}} {f'{1}'}"\n"""
    child.write_text(f"# Parent: {parent}\n{code}three = (\n    {string})\n")
    page = tmp_path / "c.md"
    page.write_text("Two words.\n\n```sh\nls\n```\n<!-- end -->\nTests: [a](b)\n")
    assert size.tokens_of(child).total() == 14
    assert size.own_tokens(child).total() == 5
    assert size.words_of(page) == 2


def test_a_size_above_its_ceiling_is_named():
    found = [("words", 10, {"a": 10, "b": 11})]
    assert size.too_large(found) == ["b: 11 words, at most 10"]
