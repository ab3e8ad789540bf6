"""The repository is small, and what measures it counts what it says."""

import pytest

from tools import size


@pytest.mark.text
def test_nothing_is_too_large():
    assert size.too_large(size.sizes()) == []


def test_what_counts(tmp_path):
    """In Python, no comment, and no line of the parent's; on a page, the prose."""
    parent, child, page = (tmp_path / name for name in ("a.py", "b.py", "c.md"))
    parent.write_text("one = f(1)  # why\n\ntwo = 2\n")
    child.write_text(f"# Parent: {parent}\n{parent.read_text()}three = (\n    3\n)\n")
    page.write_text("Two words.\n\n```sh\nls\n```\n<!-- end -->\nTests: [a](b)\n")
    assert sum(size.tokens_of(child).values()) == 14
    assert sum(size.own_tokens(child).values()) == 5
    assert size.words_of(page) == 2


def test_a_size_above_its_ceiling_is_named():
    found = [("words", 10, {"a": 10, "b": 11})]
    assert size.too_large(found) == ["b: 11 words, at most 10"]
