"""The pages of two scripts side by side, and those that show one file."""

import itertools
import re
from urllib.parse import urljoin, urlsplit

import pytest

from ladder.diffs import changed_lines, hunks
from ladder.pages import explanations
from ladder.rungs import EDGES, RUNGS, read_lines
from tests.contrast import contrast_ratio
from tests.site_fixtures import PHONE, WIDE
from tests.site_pages import (
    BUDGET,
    CHAPTERS,
    NEW,
    OLD,
    PAIR,
    PAIRS,
    RUNG_PAIRS,
    content,
    url_of,
)
from website.explain import compare
from website.side_by_side import changed_places, likeness, similar_lines

pytestmark = pytest.mark.waits  # for a browser


# Read without a browser


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_both_files_stand_side_by_side_to_the_byte(pages, old, new):
    page = pages[url_of(old, new)]
    assert page.text["old"].encode() == content(old)
    assert page.text["new"].encode() == content(new)


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_the_hunks_are_marked(pages, old, new):
    shown = pages[url_of(old, new)].hunks
    assert [*shown] == [x.number for x in hunks(old, new)]
    for hunk in hunks(old, new):
        assert [x.rstrip("\n") for x in shown[hunk.number]["del"]] == hunk.removed
        assert [x.rstrip("\n") for x in shown[hunk.number]["ins"]] == hunk.added


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_every_hunk_leads_to_an_explanation(pages, old, new):
    """Of another pair, to those of its lines: the links test sees that they exist."""
    explained = explanations(CHAPTERS)
    chapters = [urljoin("side_by_side/", f"../{x}.html") for x, *_ in places(explained)]
    for number, hunk in pages[url_of(old, new)].hunks.items():
        links = [urljoin("side_by_side/", x) for x in hunk["chapters"]]
        assert {urlsplit(x).path for x in links} <= set(chapters)
        assert links or hunk["see"] or (old, new) not in RUNG_PAIRS, f"change {number}"
        if number in explained.get((old, new), {}):
            page, _, anchor = explained[old, new][number]
            assert links == [f"{page}.html#{anchor}"]
            assert not hunk["see"]


def letters(text):
    return "".join(x for x in text if x.isalnum())


def paragraphs(page, block):
    """The paragraphs of a section that are not generated, as a reader sees them."""
    text = re.sub(
        r"^(<!--.*|#+ .*|With \S+ changed: .*)$", "", page.section(block), flags=re.M
    )
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    return [letters(x) for x in text.split("\n\n") if letters(x)]


def test_every_change_is_explained_in_place_word_for_word(pages):
    """All that a chapter says under a heading stands at each of its hunks."""
    seen = set()
    for page in CHAPTERS:
        for block in page.blocks:
            for hunk in block.hunks:
                (why,) = pages[url_of(block.old, block.new)].hunks[hunk.number]["whys"]
                for paragraph in paragraphs(page, block):
                    assert paragraph in letters(why), (page.name, block.heading)
                assert f"change{hunk.number}of" not in letters(why)  # the diff itself
                seen.add((block.old, block.new, hunk.number))
    assert {(*edge, x.number) for edge in EDGES for x in hunks(*edge)} <= seen


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_a_text_is_at_one_change_and_others_lead_there(pages, old, new):
    """So that pages of two scripts that are far apart stay light."""
    changes = pages[url_of(old, new)].hunks
    for hunk in changes.values():
        for link in hunk["see"]:
            assert changes[int(link.removeprefix("#hunk-"))]["chapters"], link
    links = [x for hunk in changes.values() for x in hunk["chapters"]]
    if (old, new) not in explanations(CHAPTERS):
        assert len(links) == len(set(links))


def test_no_id_stands_twice(pages):
    for name, page in pages.items():
        twice = {x for x in page.ids if page.id_list.count(x) > 1}
        assert not twice, name


def places(explained):
    return [place for found in explained.values() for place in found.values()]


def test_every_explanation_leads_back_to_its_hunk(pages):
    explained = explanations(CHAPTERS)
    assert set(EDGES) <= set(explained)
    for pair, found in explained.items():
        for number, (page, _, _) in found.items():
            assert f"{url_of(*pair)}#hunk-{number}" in pages[f"{page}.html"].links


def test_the_choice_holds_every_rung_and_knows_its_page(pages):
    names = {x.removesuffix(".py").replace("/", "-") for x in RUNGS}
    for old, new in RUNG_PAIRS:
        options = pages[url_of(old, new)].options
        assert {name for name, _ in options} == names
        chosen = [name for name, selected in options if selected]
        assert url_of(old, new) == f"side_by_side/{'--'.join(chosen)}.html"


def test_linked_files_are_shown_to_the_byte(pages):
    shown = [x for x in pages if x.startswith("source/")]
    assert {f"source/{x}.html" for x in RUNGS} <= set(shown)
    for name in shown:
        file = name.removeprefix("source/").removesuffix(".html")
        assert pages[name].text["source"].encode() == content(file)


# Pairs of lines, and their words


def test_a_line_is_paired_by_its_names_and_not_by_its_characters():
    """By characters, `import math` would be what `import signal` was changed into."""
    removed = ["x = f(a)", "device = utils.get_device(args.device)"]
    added = ["data = utils.get_data(args.data_dir)", "setup()"]
    added.append("device = utils.get_device(args.device, local_rank)")
    assert similar_lines(removed, added) == [(1, 2)]
    call = ["    check_run(args, train_set, eval_set)", "    device = get_device()"]
    split = ["    check_run(", "        args, train_set, eval_set, world_size=n"]
    split += ["    )", "    device = get_device(rank)"]
    assert similar_lines(call, split) == [(0, 1), (1, 3)]
    assert similar_lines(["import signal", "import sys"], ["import math"]) == []
    assert similar_lines(["one"], ["other"]) == [(0, 0)]  # there is nothing else


def test_the_pairs_are_those_with_the_most_in_common():
    """The likest pair first would leave the other two lines without one."""
    removed, added = ["a b c d e f", "a b c d x y"], ["a b c d x z", "a b c d e f"]
    assert likeness(removed[0], added[1]) == 1
    assert similar_lines(removed, added) == [(0, 0), (1, 1)]


def marked(line, places):
    return re.findall(
        "\0(.*?)\1",
        "".join(
            ("\0" if i in places and i - 1 not in places else "")
            + x
            + ("\1" if i in places and i + 1 not in places else "")
            for i, x in enumerate(line)
        ),
    )


@pytest.mark.parametrize(
    ("one", "other", "in_one", "in_other"),
    [
        ("seed(e)", "seed(e * size() + rank())", [], [" * size() + rank()"]),
        ("f(a)", "f(g(a))", [], ["g(", ")"]),
        ("t = d(m=5)", "init(b, t=d(m=5))", [" ", " "], ["init(b, ", ")"]),
        ("self.model(x)", "self.ddp_model(x)", ["model"], ["ddp_model"]),
        ("lr=0.001", "lr=0.01", ["0.001"], ["0.01"]),
        ("x / n, n", "x / (n or 1), n", [], ["(", " or 1)"]),
    ],
)
def test_whole_words_are_marked(one, other, in_one, in_other):
    places = changed_places(one, other)
    assert marked(one, places[0]) == in_one
    assert marked(other, places[1]) == in_other


def halves(line):
    """[(place of a bracket, place of its other half)]; brackets in strings are none."""
    opened, found = [], []
    for place, x in enumerate(line):
        if x in "([{":
            opened.append(place)
        elif x in ")]}" and opened:
            found.append((opened.pop(), place))
    return found


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_a_bracket_is_marked_with_its_other_half(old, new):
    for hunk in hunks(old, new):
        for a, b in similar_lines(hunk.removed, hunk.added):
            lines = hunk.removed[a], hunk.added[b]
            for line, places in zip(lines, changed_places(*lines), strict=True):
                for first, last in halves(line):
                    assert (first in places) == (last in places), line


# Outputs


def test_only_what_differs_is_marked_in_an_output():
    right = ["$ run", "epoch 1/3 | loss 1.000001 | 123 samples/s", "saved to a.pt"]
    wrong = ["$ run", "epoch 1/3 | loss 1.000002 | 456 samples/s", "saved to a.pt"]
    assert compare(right, wrong) == ({}, {})
    wrong[1] = "epoch 1/3 | loss 1.25 | 456 samples/s"
    found = compare(right, wrong)
    assert [marked(right[1], found[0][1]), [*found[0]]] == [["1.000001"], [1]]
    assert [marked(wrong[1], found[1][1]), [*found[1]]] == [["1.25"], [1]]
    wrong[2] = "kept in a.pt"
    found = compare(right, wrong)
    assert marked(wrong[2], found[1][2]) == ["kept in"]
    found = compare(right, wrong[:2])
    assert marked(right[2], found[0][2]) == ["saved to a.pt"]


# In a browser


def choose(tab, side, rung):
    tab.locator(f"select[name={side}]").select_option(label=rung)


def test_the_choice_shows_any_two_rungs(visit, address):
    """Without a button: the page follows the choice."""
    tab = visit(PAIR)
    for old, new in RUNG_PAIRS:
        other = next(x for x in RUNGS if x not in (old, new))
        tab.goto(address + url_of(old, other))
        choose(tab, "new", new)
        tab.wait_for_url("**/" + url_of(old, new))
        for side, rung in (("old", old), ("new", new)):
            texts = tab.locator(f".sbs pre.{side} > *").all_text_contents()
            assert "".join(texts).encode() == content(rung)
    tab.get_by_role("link", name="Swap the sides").click()
    tab.wait_for_url("**/" + url_of(new, old))


def test_a_copy_that_fails_is_not_called_done(visit):
    tab = visit(PAIR)
    tab.evaluate(
        "() => { navigator.clipboard.writeText = undefined;"
        " document.execCommand = () => false; }"
    )
    tab.get_by_role("button", name=f"Copy {NEW}").click()
    tab.get_by_text("Not copied").wait_for()


def test_the_same_file_twice_is_answered(visit):
    tab = visit(PAIR)
    choose(tab, "new", OLD)
    tab.get_by_text("Choose two different scripts.").wait_for()
    assert tab.url.endswith(PAIR)


def test_folds_open_by_key_and_all_at_once(visit):
    tab = visit(PAIR)
    folds = tab.locator("details.fold")
    assert folds.count() > 1
    assert tab.locator("details.fold[open]").count() == 0
    folds.first.locator("summary").focus()
    tab.keyboard.press("Enter")
    assert folds.first.locator(".new").is_visible()
    tab.get_by_role("button", name="Unfold all").press("Enter")
    assert tab.locator("details.fold[open]").count() == folds.count()
    tab.get_by_role("button", name="Fold all").press("Enter")
    assert tab.locator("details.fold[open]").count() == 0


@pytest.mark.parametrize(
    ("url", "name"), [(PAIR, NEW), (f"source/{OLD}.html", OLD)], ids=["pair", "source"]
)
@pytest.mark.parametrize("clipboard", ["allowed", "missing"])
def test_copy_takes_the_file_to_the_byte(visit, url, name, clipboard):
    """Also where the page has no clipboard, as one opened from a file may have none."""
    tab = visit(url)
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.evaluate("navigator.clipboard.writeText('')")
    if clipboard == "missing":
        tab.evaluate("navigator.clipboard.writeText = undefined")
    tab.get_by_role("button", name=f"Copy {name}").press("Enter")
    tab.get_by_text("Copied.").wait_for()
    assert tab.evaluate("navigator.clipboard.readText()").encode() == content(name)


def channels(colour):
    """The red, green and blue of a computed colour such as rgb(0, 0, 0)."""
    return [int(x) for x in re.findall(r"\d+", colour)[:3]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_line_numbers_and_signs_stand_out(visit, scheme):
    """They are no text of the page, so that axe-core does not look at them."""
    tab = visit(PAIR, color_scheme=scheme)
    for line, part in itertools.product(("del", "ins"), ("::before", "::after")):
        colours = tab.locator(line).first.evaluate(
            "(x, part) => [getComputedStyle(x, part).color,"
            " getComputedStyle(x).backgroundColor]",
            part,
        )
        ink, ground = map(channels, colours)
        assert contrast_ratio(ink, ground) >= 4.5, (line, part, colours)


VISIBLE_LINES = """() => [...document.querySelectorAll(".sbs [data-n]")]
    .filter((x) => x.checkVisibility({contentVisibilityAuto: true}))
    .filter((x) => x.getBoundingClientRect().height > 0)
    .map((x) => (({DEL: "-", INS: "+"})[x.tagName] ?? " ") + x.textContent)"""


def one_below_the_other(old, new):
    """The lines of the diff with everything unchanged in it."""
    lines, i, before = [], 1, read_lines(old)
    for hunk in hunks(old, new):
        lines += [f" {x}" for x in before[i - 1 : hunk.old_start - 1]]
        lines += hunk.lines
        i = hunk.old_start + len(hunk.removed)
    return lines + [f" {x}" for x in before[i - 1 :]]


def test_a_phone_shows_each_line_once(visit):
    tab = visit(PAIR, viewport=PHONE)
    tab.get_by_role("button", name="Unfold all").click()
    lines = [x.rstrip("\n") for x in tab.evaluate(VISIBLE_LINES)]
    assert lines == one_below_the_other(OLD, NEW)
    both = tab.locator(".hunk").first
    old, new = [both.locator(f"> .lines {x}").bounding_box() for x in (".old", ".new")]
    assert old["x"] == new["x"]
    assert old["y"] + old["height"] <= new["y"]
    signs = "x => getComputedStyle(x, '::after').content"
    assert tab.locator("del").first.evaluate(signs) == '"-"'
    assert tab.locator("ins").first.evaluate(signs) == '"+"'


@pytest.mark.parametrize(("width", "columns"), [(1280, 80), (1440, 88)])
def test_a_desktop_shows_two_files_of_88_columns(visit, width, columns):
    """On a small one, few lines are longer than what it shows, and they wrap."""
    tab = visit(PAIR, viewport={"width": width, "height": 900})
    lines = tab.locator(".hunk > .lines .new [data-n]")
    one_line = lines.first.bounding_box()["height"]
    lines.first.evaluate("(x, count) => { x.textContent = 'x'.repeat(count) }", columns)
    assert lines.first.bounding_box()["height"] == one_line
    lines.first.evaluate("x => { x.textContent = 'x'.repeat(110) }")
    assert lines.first.bounding_box()["height"] > one_line
    boxes = [tab.locator(f".same .{x}").first.bounding_box() for x in ("old", "new")]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"] < width / 2 + 8


@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["desktop", "phone"])
def test_a_link_to_a_change_lands_below_the_names(visit, viewport):
    tab = visit(f"{PAIR}#hunk-5", viewport=viewport, reduced_motion="reduce")
    names = tab.locator(".names").bounding_box()
    top = tab.locator("#hunk-5").bounding_box()["y"]
    assert tab.evaluate("scrollY") > 0
    assert names["y"] >= 0  # it stays in sight
    assert names["y"] + names["height"] <= top < viewport["height"] / 2


def test_a_page_weighs_little(browser, address):
    """All that it loads, by the sizes that arrive, without compression."""
    context = browser.new_context()
    tab, sizes = context.new_page(), {}
    tab.on("response", lambda x: sizes.update({x.url: len(x.body())}))
    tab.goto(address + PAIR, wait_until="networkidle")
    print(f"{sum(sizes.values())} bytes in {len(sizes)} files")
    context.close()
    assert len(sizes) > 3
    assert sum(sizes.values()) < BUDGET


def test_print_shows_all_lines_and_no_controls(visit):
    tab = visit(PAIR, color_scheme="dark")
    folds = tab.locator("details.fold")
    tab.emulate_media(media="print")
    assert folds.first.locator(".new").bounding_box()["height"] > 0
    assert len(tab.evaluate(VISIBLE_LINES)) > len(read_lines(OLD))
    for part in (".sidebar-drawer", ".picker", ".tools", ".steps >> nth=0"):
        assert not tab.locator(part).is_visible()
    ink = "x => getComputedStyle(x).color"
    assert tab.locator(".names").evaluate(ink) == "rgb(0, 0, 0)"
    assert not tab.locator(".skip-to-content").is_visible()
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.locator("details.fold[open]").count() == folds.count()
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert tab.locator("details.fold[open]").count() == 0


def test_without_javascript_all_can_be_read(visit):
    tab = visit("side_by_side/index.html", java_script_enabled=False)
    for old, new in RUNG_PAIRS:
        label = f"{len(changed_lines(old, new))} changed lines from {old} to {new}"
        assert tab.get_by_role("link", name=label).is_visible()
    tab.get_by_role("link", name=f"changed lines from {OLD} to {NEW}").click()
    tab.wait_for_url("**/" + PAIR)
    assert not tab.get_by_role("button").first.is_visible()
    assert not tab.locator(".picker").is_visible()
    assert tab.locator("ins").first.is_visible()
    tab.locator(".fold summary").first.click()
    assert tab.locator(".fold").first.locator(".new").is_visible()
    assert tab.locator(".fold .old").first.is_visible()
    why = tab.locator(".why").first
    assert not why.get_by_text("Why.").is_visible()
    why.locator("summary").click()
    assert why.get_by_text("Why.").is_visible()
