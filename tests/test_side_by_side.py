"""The pages of two scripts side by side."""

import itertools
import re
from html import unescape

import pytest

pytest.importorskip("docutils", reason="tools/site/requirements.txt has it")

from tests.site_fixtures import NEW, OLD, PAIR, check_barriers, url_of  # noqa: E402
from tools.diffs import hunks  # noqa: E402
from tools.pages import GROUPS, explanations, parse  # noqa: E402
from tools.scripts import ALL_EDGES, ROOT, SCRIPTS, read_lines  # noqa: E402

pytestmark = pytest.mark.waits  # for a browser

PAIRS = [*itertools.permutations(SCRIPTS, 2)]


def side(html, name):
    """The text of one side: of all its lines, as a copy of them would be."""
    found = re.findall(rf'<pre class="{name}"[^>]*>(.*?)</pre>', html, re.S)
    return unescape(re.sub("<[^>]*>", "", "".join(found)))


def test_every_pair_shows_both_files_and_marks_each_change(site):
    for old, new in {*PAIRS, *ALL_EDGES}:
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
                assert page.select_one(f"{link['href']} .why")
            parsed = parse(f"docs/{name}.md")
            block = next(x for x in parsed.blocks if x.anchor == anchor and x.hunks)
            text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", parsed.section(block))
            text = re.sub(
                r"^(<!--.*|#+ .*|With \S+ changed: .*)$", "", text, flags=re.M
            )
            for paragraph in text.split("\n\n"):
                assert letters(paragraph) in shown[title], (name, heading)


# In a browser


@pytest.mark.parametrize("script", [True, False], ids=["script", "no script"])
def test_the_output_flips_beside_the_line(visit, script):
    tab = visit(PAIR, java_script_enabled=script)
    why = tab.locator(".why", has_text="Call the wrapper in the training step")
    assert "wrong output" in why.locator("summary").inner_text()
    why.locator("summary").click()
    switch = why.get_by_role("group", name="What it prints")
    lines = switch.locator(".two").text_content()
    assert lines == "+ output = self.ddp_model(source)\n- output = self.model(source)\n"
    verdict = switch.locator(".verdict").inner_text()
    loss, other = re.findall(r"\d\.\d+", verdict)
    last = switch.locator("tr").last.inner_text().split()
    assert last == ["epoch", "3", other, loss] and loss != other
    right, wrong = switch.locator(".right"), switch.locator(".wrong")
    assert loss in wrong.locator("mark").all_inner_texts(), "what differs is marked"
    assert other in right.locator("mark").all_text_contents()
    assert wrong.is_visible() and not right.is_visible()
    before = switch.bounding_box()
    switch.get_by_role("radio", name="Run without this line").press("ArrowLeft")
    assert switch.get_by_role("radio", name="Correct run").is_checked()
    assert right.is_visible() and not wrong.is_visible()
    assert switch.bounding_box() == before  # nothing moves
    if script:
        check_barriers(tab)


def test_ideas_are_listed_and_imports_folded(pages):
    """On top the headings; below, one group, and the first idea open."""
    for edge in ALL_EDGES:
        page = pages(url_of(*edge))
        links = page.select(".ideas a")
        there = [(x["href"], next(x.stripped_strings)) for x in links]
        whys = page.select(".head ~ .hunk .why")
        assert there == [
            (f"#{x.find_parent('section')['id']}", x.summary.span.get_text())
            for x in whys
        ]
        assert [x for x in page.select(".why") if x.has_attr("open")] == whys[:1]
        lines = page.select(".head :is(del, ins)")
        assert lines and not re.search(
            r"(?m)^(def|class) ", page.select_one(".head").text
        )


def test_a_diff_of_a_chapter_is_the_printed_one_with_marks(pages):
    for name in sum(GROUPS.values(), []):
        blocks = [x for x in parse(f"docs/{name}.md").blocks if x.kind == "diff"]
        shown = pages(f"{name}.html").select("article .highlight-diff")
        printed = [
            read_lines(f"docs/{name}.md")[x.line + 1 : x.end - 1] for x in blocks
        ]
        assert [x.get_text().splitlines() for x in shown] == printed
        links = [x["href"] for x in pages(f"{name}.html").select(".beside a")]
        for block in blocks:  # and each explanation leads to its changes
            for hunk in block.hunks:
                assert f"{url_of(block.old, block.new)}#hunk-{hunk.number}" in links
    diff = pages("2_multigpu.html").find(id="call-the-wrapper-in-the-training-step").pre
    assert [x.get_text() for x in diff.select("mark")] == ["model", "ddp_model"]
    assert diff.select_one(".k").get_text() == "def"


def test_print_breaks_inside_a_diff(visit):
    """Or the first sheet would be blank: nothing around the lines keeps together."""
    tab = visit(PAIR)
    tab.emulate_media(media="print")
    around = """x => { const found = []; while ((x = x.parentElement)) found.push(x);
        return found.map((x) => getComputedStyle(x).breakInside) }"""
    assert set(tab.locator(".hunk .new").nth(4).evaluate(around)) == {"auto"}


def test_without_a_script_all_can_be_read_and_another_pair_chosen(visit):
    tab = visit(PAIR, java_script_enabled=False)
    assert not tab.locator("select, button[data-open]").first.is_visible()
    fold = tab.locator(".fold").first
    fold.locator("summary").click()
    assert fold.locator(".new").is_visible()
    tab.locator("noscript a").click()
    cell = f"a[href='{PAIR.removeprefix('side_by_side/')}']"
    assert tab.locator(cell).first.is_visible()


def test_two_scripts_are_chosen_and_swapped(visit):
    """Without a button: the page follows the choice."""
    other = next(x for x in SCRIPTS if x not in (OLD, NEW))
    tab = visit(PAIR)
    tab.locator("select[name=new]").select_option(label=other)
    tab.wait_for_url(f"**/{url_of(OLD, other)}")
    tab.get_by_role("link", name="Swap the sides").click()
    tab.wait_for_url(f"**/{url_of(other, OLD)}")
    tab.locator("select[name=old]").select_option(label=OLD)  # the other one: a swap
    tab.wait_for_url(f"**/{url_of(OLD, other)}")
    tab.go_back()
    shown = tab.locator("select[name=old]").input_value()
    assert url_of(other, OLD).startswith(f"side_by_side/{shown}--")


def test_all_is_folded_unfolded_and_explained(visit):
    tab = visit(PAIR)
    for what, name in {".fold": "Unfold all", ".why": "Explain all"}.items():
        closed = tab.locator(f"{what}:not([open])")
        assert closed.count()
        tab.get_by_role("button", name=name).click()
        assert closed.count() == 0
        tab.locator(f"button[data-open='{what}']").click()
        assert closed.count() == tab.locator(what).count()
    texts = tab.locator(".fold summary").all_text_contents()
    assert any(re.search(r"\d+ unchanged lines · .*Trainer", x) for x in texts)


def test_keys_lead_to_the_changes_and_open_them(visit):
    tab = visit(PAIR)
    last = len(hunks(OLD, NEW))
    seen = []
    for key in ["n"] * (last + 1) + ["p"] * 2:
        tab.keyboard.press(key)
        seen.append(int(tab.evaluate("location.hash").removeprefix("#hunk-")))
    assert seen[0] == 1, "folded, and below the top"
    assert seen[-4:] == [last, last, last - 1, last - 2]
    tab.locator("[data-keys]").uncheck()
    tab.keyboard.press("p")
    assert tab.url.endswith(f"#hunk-{last - 2}")
    why = tab.locator(".why").first
    why.locator("summary").press("Enter")
    assert why.evaluate("x => x.open")


def test_copy_takes_the_added_lines_of_a_change(visit):
    tab = visit(PAIR)
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    for hunk in hunks(OLD, NEW)[4:7]:  # below the imports, which are folded
        change = tab.locator(f"#hunk-{hunk.number}")
        change.get_by_role("button", name="Copy the added lines").click()
        change.get_by_text("Copied.").wait_for()
        copied = tab.evaluate("navigator.clipboard.readText()")
        assert copied == "".join(f"{x}\n" for x in hunk.added)


def test_a_line_has_an_address_also_in_a_fold(visit):
    number = next(
        i for i, x in enumerate(read_lines(NEW), 1) if "def _load_snapshot" in x
    )
    tab = visit(f"{PAIR}#L{number}")
    line = tab.locator(f"#L{number}")
    assert line.is_visible()
    names = tab.locator(".names").bounding_box()
    assert line.bounding_box()["y"] >= names["y"] + names["height"]


@pytest.mark.parametrize(("width", "columns"), [(1023, 1), (1024, 2)])
def test_a_narrow_screen_has_one_column(visit, width, columns):
    """And a wide one, where the reader has chosen so; the choice is kept."""
    tab = visit(PAIR, viewport={"width": width, "height": 900})
    for count in range(columns, 0, -1):
        change = tab.locator(".hunk:has(del):has(ins) > .change > .lines").nth(4)
        old, new = [change.locator(x).bounding_box() for x in (".old", ".new")]
        assert (old["y"] == new["y"]) == (count == 2)
        assert (old["x"] == new["x"]) == (count == 1)
        if count == 2:
            tab.get_by_label("One column").check()
            tab.reload()
