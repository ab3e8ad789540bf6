"""The pages of two scripts side by side."""

import itertools
import re
from html import unescape

import pytest

pytest.importorskip("docutils", reason="tools/site/requirements.txt has it")

from tests.helpers.site_fixtures import (  # noqa: E402
    NEW,
    OLD,
    PAIR,
    check_barriers,
    url_of,
)
from tools.diffs import hunks  # noqa: E402
from tools.scripts import ALL_EDGES, ROOT, SCRIPTS  # noqa: E402
from tools.site.pages import READING_ORDER, explanations, parse  # noqa: E402

pytestmark = pytest.mark.waits  # for a browser


def texts_of(html, element, rest=""):
    """The texts of these elements, as a copy of them would be."""
    found = re.findall(rf"(?s)<{element} {rest}[^>]*>(.*?)</{element}>", html)
    return [unescape(re.sub("<[^>]*>", "", inner)) for inner in found]


def side(html, name):
    """The bytes of one side: of all its lines."""
    return "".join(texts_of(html, "pre", f'class="{name}"')).encode()


def test_every_pair_shows_both_files_and_marks_each_change(site):
    for old, new in {*itertools.permutations(SCRIPTS, 2), *ALL_EDGES}:
        html = (site / url_of(old, new)).read_text()
        assert side(html, "old") == (ROOT / old).read_bytes(), (old, new)
        assert side(html, "new") == (ROOT / new).read_bytes(), (old, new)
        changes = html.split('<section class="hunk" id="hunk-')[1:]
        for hunk, change in zip(hunks(old, new), changes, strict=True):
            change, _, _ = change.partition("</section>")
            assert change.startswith(f'{hunk.number}"')
            removed = [line.removesuffix("\n") for line in texts_of(change, "del")]
            assert removed == hunk.removed
            added = [line.removesuffix("\n") for line in texts_of(change, "ins")]
            assert added == hunk.added
            is_explained = 'class="why"' in change or 'class="see"' in change
            assert is_explained or (old, new) not in ALL_EDGES, (old, new, hunk.number)
        assert len(html) < 300_000


def letters(text):
    return "".join(filter(str.isalpha, text))


def test_every_change_is_explained_in_place(pages):
    """A text stands at the largest of its changes, and the others lead there."""
    for (old, new), places in explanations().items():
        page = pages(url_of(old, new))
        shown = page.select(".why")
        names = [letters(why.summary.span.get_text()) for why in shown]
        assert len(names) == len({*names}), "none stands twice"
        for number, (_, heading, _) in places.items():
            title = letters(heading)
            change = page.find(id=f"hunk-{number}")
            found = change.select(".see a, .why > summary > span")
            titles = [letters(element.get_text()) for element in found]
            assert title in titles, (old, new, number)
            for link in change.select(".see a"):
                assert page.select_one(f".why {link['href']}")


# In a browser


@pytest.mark.parametrize("script", [True, False], ids=["script", "no script"])
def test_the_output_flips_beside_the_line(visit, script):
    tab = visit(PAIR, java_script_enabled=script)
    name = "Call the wrapper in the training step"
    tab.locator(".ideas summary").click()
    idea = tab.locator(".ideas a", has_text=name)
    idea.get_by_text("wrong output").click()
    switch = tab.locator(".why", has_text=name).get_by_role("group")
    verdict = switch.locator(".verdict").inner_text()
    wrong_loss, right_loss = re.findall(r"\d\.\d+", verdict)
    right = switch.locator(".right")
    wrong = switch.locator(".wrong")
    # What differs is marked.
    assert wrong_loss in wrong.locator("mark").all_inner_texts()
    assert right_loss in right.locator("mark").all_text_contents()
    assert wrong.is_visible() and not right.is_visible()
    switch.get_by_role("radio", name="wrong").press("ArrowLeft")
    assert right.is_visible() and not wrong.is_visible()
    if script:
        check_barriers(tab)


def test_a_diff_of_a_chapter_is_the_printed_one(pages):
    for name in READING_ORDER:
        page = parse(f"docs/{name}.md")
        printed = []
        for block in page.blocks:
            if block.kind == "diff":
                printed.append(page.lines[block.line + 1 : block.end - 1])
        shown = pages(f"{name}.html").select("article .highlight:not(.patch > *)")
        shown = [diff for diff in shown if "highlight-diff" in diff["class"]]
        assert [diff.get_text().splitlines() for diff in shown] == printed


def test_keys_lead_to_the_changes_in_sight(visit):
    """From what is in sight; those that are folded away are left out."""
    tab = visit(PAIR)
    first_in_sight = tab.locator(".hunk:visible").first.get_attribute("id")
    first = int(first_in_sight.removeprefix("hunk-"))
    assert first > 1
    last = len(hunks(OLD, NEW))
    for number in [*range(first, last + 1), last]:
        tab.keyboard.press("n")
        assert tab.evaluate("location.hash") == f"#hunk-{number}"
    tab.keyboard.press("p")
    assert tab.evaluate("location.hash") == f"#hunk-{last - 1}"
