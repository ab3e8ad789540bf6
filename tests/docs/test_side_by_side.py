"""The pages of two scripts side by side."""

import itertools
import re
from html import unescape

import pytest

pytest.importorskip("docutils", reason="tools/site/requirements.txt has it")

from tests.helpers.site_fixtures import BOTH, NEW, OLD, PAIR, check_barriers, url_of  # noqa: E402
from tools.diffs import hunks  # noqa: E402
from tools.scripts import ALL_EDGES, ROOT, SCRIPTS  # noqa: E402
from tools.site.pages import GROUPS, explanations, parse  # noqa: E402

pytestmark = pytest.mark.waits  # for a browser


def side(html, name):
    """The text of one side: of all its lines, as a copy of them would be."""
    found = re.findall(rf'<pre class="{name}"[^>]*>(.*?)</pre>', html, re.S)
    return unescape(re.sub("<[^>]*>", "", "".join(found)))


def test_every_pair_shows_both_files_and_marks_each_change(site):
    for old, new in {*itertools.permutations(SCRIPTS, 2), *ALL_EDGES}:
        html = (site / url_of(old, new)).read_text()
        assert side(html, "old").encode() == (ROOT / old).read_bytes(), (old, new)
        assert side(html, "new").encode() == (ROOT / new).read_bytes(), (old, new)
        changes = re.split(r'<section class="hunk" id="hunk-', html)[1:]
        assert len(changes) == len(hunks(old, new))
        for hunk, change in zip(hunks(old, new), changes, strict=True):
            change = change.split("</section>")[0]
            assert change.startswith(f'{hunk.number}"')
            for tag, lines in {"del": hunk.removed, "ins": hunk.added}.items():
                found = re.findall(rf"<{tag} [^>]*>(.*?)</{tag}>", change, re.S)
                found = [unescape(re.sub("<[^>]*>", "", x)) for x in found]
                assert [x.removesuffix("\n") for x in found] == lines
            why = 'class="why"' in change or 'class="see"' in change
            assert why or (old, new) not in ALL_EDGES, (old, new, hunk.number)
        assert len(html) < 300_000


def letters(text):
    return "".join(x for x in text if x.isalpha())


def test_every_change_is_explained_in_place_word_for_word(pages):
    """A text stands at the largest of its changes, and the others lead there."""
    for (old, new), places in explanations().items():
        page = pages(url_of(old, new))
        shown = {}
        for why in page.select(".why"):
            title = letters(why.summary.span.get_text())
            assert title not in shown
            shown[title] = letters(why.select_one(".text").get_text())
        for number, (name, heading, anchor) in places.items():
            title = letters(heading)
            change = page.find(id=f"hunk-{number}")
            titles = change.select(".see a, .why > summary > span")
            assert title in [letters(x.get_text()) for x in titles], (old, new, number)
            for link in change.select(".see a"):
                assert page.select_one(f".why {link['href']}")
            parsed = parse(f"docs/{name}.md")
            block = next(x for x in parsed.blocks if x.anchor == anchor and x.hunks)
            text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", parsed.section(block))
            text = re.sub(r"(?m)^(<!--.*|#+ .*|With \S+ changed:.*)$", "", text)
            for paragraph in text.split("\n\n"):
                assert letters(paragraph) in shown[title], (name, heading)


# In a browser


@pytest.mark.parametrize("script", [True, False], ids=["script", "no script"])
def test_the_output_flips_beside_the_line(visit, script):
    tab = visit(PAIR, java_script_enabled=script)
    name = "Call the wrapper in the training step"
    tab.locator(".ideas summary").click()
    tab.locator(".ideas a", has_text=name).get_by_text("wrong output").click()
    switch = tab.locator(".why", has_text=name).get_by_role("group")
    loss, other = re.findall(r"\d\.\d+", switch.locator(".verdict").inner_text())
    right, wrong = switch.locator(".right"), switch.locator(".wrong")
    assert loss in wrong.locator("mark").all_inner_texts(), "what differs is marked"
    assert other in right.locator("mark").all_text_contents()
    assert wrong.is_visible() and not right.is_visible()
    switch.get_by_role("radio", name="wrong").press("ArrowLeft")
    assert right.is_visible() and not wrong.is_visible()
    if script:
        check_barriers(tab)


def test_a_diff_of_a_chapter_is_the_printed_one(pages):
    for name in sum(GROUPS.values(), []):
        page = parse(f"docs/{name}.md")
        blocks = [x for x in page.blocks if x.kind == "diff"]
        shown = pages(f"{name}.html").select("article .highlight-diff.highlight")
        printed = [page.lines[x.line + 1 : x.end - 1] for x in blocks]
        assert [x.get_text().splitlines() for x in shown] == printed


@BOTH
def test_the_first_change_is_in_sight(visit, address, viewport):
    tab = visit(PAIR, viewport=viewport)
    for pair in ALL_EDGES:
        tab.goto(address + url_of(*pair))
        line = tab.locator(".hunk :is(del, ins):visible").first.bounding_box()
        assert line["y"] + line["height"] < viewport["height"], pair


def test_keys_lead_to_the_changes_in_sight(visit):
    """From what is in sight; those that are folded away are left out."""
    tab = visit(PAIR)
    first = int(tab.locator(".hunk:visible").first.get_attribute("id")[5:])
    last, seen = len(hunks(OLD, NEW)), []
    for key in ["n"] * (last + 2 - first) + ["p"]:
        tab.keyboard.press(key)
        seen.append(int(tab.evaluate("location.hash").removeprefix("#hunk-")))
    assert seen == [*range(first, last + 1), last, last - 1] and first > 1
