"""The pages of two scripts side by side."""

import itertools
import re
from html import unescape

import pytest

pytest.importorskip("docutils", reason="tools/site/requirements.txt has it")

from tests.helpers.site import PAIR, check_barriers  # noqa: E402
from tools.diffs import hunks  # noqa: E402
from tools.scripts import ALL_EDGES, ROOT, SCRIPTS  # noqa: E402
from tools.site.pages import READING_ORDER, explanations  # noqa: E402
from tools.site.side_by_side import page_of  # noqa: E402

pytestmark = pytest.mark.waits  # for a browser


def text_in(html, start):
    """The text of all elements that start so, as a copy of them would be."""
    element = start.partition(" ")[0]
    found = re.findall(rf"(?s)<{start}[^>]*>(.*?)</{element}>", html)
    return unescape(re.sub("<[^>]*>", "", "".join(found)))


def test_every_pair_shows_both_files_and_marks_each_change(site):
    for old, new in {*itertools.permutations(SCRIPTS, 2), *ALL_EDGES}:
        html = (site / f"{page_of(old, new)}.html").read_text()
        assert text_in(html, 'pre class="old"') == (ROOT / old).read_text(), (old, new)
        assert text_in(html, 'pre class="new"') == (ROOT / new).read_text(), (old, new)
        _, *changes = html.split('<section class="hunk"')
        for hunk, change in zip(hunks(old, new), changes, strict=True):
            change, *_ = change.split("</section>")
            assert text_in(change, "del ").splitlines() == hunk.removed
            assert text_in(change, "ins ").splitlines() == hunk.added


def letters(text):
    return "".join(filter(str.isalpha, text))


def test_every_change_is_explained_in_place(pages):
    """A text stands at the largest of its changes, and the others lead there."""
    for (old, new), places in explanations().items():
        page = pages(f"{page_of(old, new)}.html")
        shown = page.select(".why > summary > span:first-of-type")
        names = [letters(name.get_text()) for name in shown]
        assert len(names) == len({*names}), "none stands twice"
        for number, (_, heading, _) in places.items():
            change = page.find(id=f"hunk-{number}")
            found = change.select(".see a, .why > summary > span")
            titles = [letters(element.get_text()) for element in found]
            assert letters(heading) in titles, (old, new, number)
        for link in page.select(".see a"):
            assert page.select_one(f".why {link['href']}")


def test_only_what_differs_is_marked(pages):
    """Values, and whole lines that the wrong run adds, but none that it leaves out."""
    marks = 0
    for name in READING_ORDER:
        for flip in pages(f"{name}.html").select(".flip"):
            right, wrong = flip.select(".outputs pre")
            for mark in [*right.select("mark"), *wrong.select("mark")]:
                word = mark.get_text()
                is_value = re.search(r"\d|nan|inf|True|False", word)
                assert is_value or word in wrong.get_text().splitlines(), (name, word)
                marks += 1
            if "[...]" in wrong.get_text().splitlines():
                assert "[...]" in right.get_text().splitlines(), name
    assert marks > 50


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
    marked = switch.locator("mark:visible")  # what differs
    assert wrong_loss in marked.all_inner_texts()
    switch.get_by_role("radio", name="wrong").press("ArrowLeft")
    assert right_loss in marked.all_inner_texts()
    assert not switch.locator(".wrong").is_visible()
    if script:
        check_barriers(tab)


def test_keys_lead_to_the_changes_in_sight(visit):
    """From what is in sight; those that are folded away are left out."""
    tab = visit(PAIR)
    first_in_sight = tab.locator(".hunk:visible").first.get_attribute("id")
    first = int(first_in_sight.removeprefix("hunk-"))
    assert first > 1
    last = len(hunks("single_gpu.py", "multigpu.py"))
    for number in [*range(first, last + 1), last]:
        tab.keyboard.press("n")
        assert tab.evaluate("location.hash") == f"#hunk-{number}"
    tab.keyboard.press("p")
    assert tab.evaluate("location.hash") == f"#hunk-{last - 1}"
