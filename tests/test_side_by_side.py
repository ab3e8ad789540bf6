"""The pages of two scripts side by side, and those that show one file."""

import itertools
import posixpath
import re
import subprocess
from urllib.parse import urljoin, urlsplit

import pytest

from ladder.diffs import changed_lines, hunks
from ladder.files import copy_tree
from ladder.pages import explanations, right_output
from ladder.rungs import ALL_EDGES, PARENTS, RUNGS, ancestry, read_lines
from tests.contrast import contrast_ratio
from tests.site_fixtures import PHONE, SPHINX, WIDE
from tests.site_pages import (
    BUDGET,
    CHAPTERS,
    NEW,
    OLD,
    PAIR,
    PAIRS,
    RUNG_PAIRS,
    Page,
    check_barriers,
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
            assert len(links) + len(hunk["see"]) == 1
            assert links in ([], [f"{page}.html#{anchor}"])


def letters(text):
    return "".join(x for x in text if x.isalpha())


def paragraphs(page, block):
    """The paragraphs of a section that are not generated, as a reader sees them."""
    made = r"^(<!--.*|#+ .*|With \S+ changed: .*)$"
    text = re.sub(made, "", page.section(block), flags=re.M)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    found = text.split("\n\n")
    rights = [right_output(page, x) for x in wrong_runs(page, block)]
    if any(x and x.anchor == block.anchor for x in rights):
        # Both outputs are in the switch, and what leads into them is left out.
        lead = r"(^|(?<=[.!?])\s)[^.!?]*:$"
        found = [re.sub(lead, "", x.strip()) for x in found]
    return [letters(x) for x in found if letters(x)]


def home_of(page, block):
    """The number of the hunk at which a section's text stands.

    It is the largest of those with a line that a fault of the section changes, or the
    largest of all.
    """
    pair = block.old, block.new
    same = [
        x
        for x in page.blocks
        if x.kind == "diff" and x.anchor == block.anchor and (x.old, x.new) == pair
    ]
    found = [hunk for x in same for hunk in x.hunks]
    runs = wrong_runs(page, block)
    struck = [
        x
        for x in found
        for run in runs
        if run.script in pair
        for fault, _ in run.faults
        if fault not in str(right_output(page, run) and right_output(page, run).faults)
        if any(
            fault.split("\n")[0].strip() in line
            for line in (x.added if run.script == block.new else x.removed)
        )
    ]
    found = struck or found
    largest = max(len(x.lines) for x in found)
    return min(x.number for x in found if len(x.lines) == largest)


def test_every_change_is_explained_in_place_word_for_word(pages):
    """All that a chapter says under a heading stands at the largest of its hunks."""
    seen = set()
    for page in CHAPTERS:
        for block in page.blocks:
            homes = {hunk.number: home_of(page, block) for hunk in block.hunks}
            for number, home in homes.items():
                shown = pages[url_of(block.old, block.new)].hunks
                see = [] if number == home else [f"#hunk-{home}"]
                assert shown[number]["see"] == see
                (why,) = shown[home]["whys"]
                title = why.strip().splitlines()[0].strip()
                assert letters(title) == letters(block.heading)
                assert "`" not in title
                for paragraph in paragraphs(page, block):
                    assert paragraph in letters(why), (page.name, block.heading)
                assert f"change {number} of" not in why  # the diff itself
                seen.add((block.old, block.new, number))
    assert {(*edge, x.number) for edge in ALL_EDGES for x in hunks(*edge)} <= seen


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_a_text_is_at_one_change_and_others_lead_there(pages, old, new):
    changes = pages[url_of(old, new)].hunks
    for hunk in changes.values():
        for link in hunk["see"]:
            assert changes[int(link.removeprefix("#hunk-"))]["chapters"], link
    links = [x for hunk in changes.values() for x in hunk["chapters"]]
    assert len(links) == len(set(links))


def test_no_id_stands_twice(pages):
    for name, page in pages.items():
        twice = {x for x in page.ids if page.id_list.count(x) > 1}
        assert not twice, name


def places(explained):
    return [place for found in explained.values() for place in found.values()]


def test_every_explanation_leads_back_to_its_hunk(pages):
    explained = explanations(CHAPTERS)
    assert set(ALL_EDGES) <= set(explained)
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
    assert {f"source/{x}.html" for x in PARENTS} <= set(shown)
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


def wrong_runs(page, block):
    """The blocks of a section that show what a fault in a script does."""
    right = [right_output(page, x) for x in page.blocks]
    found = [x for x in page.blocks if x.faults and x not in right]
    return [x for x in found if x.anchor == block.anchor]


def test_every_output_without_a_line_is_at_its_change(pages, site):
    """As a switch where the same page has the right output for the same command."""
    seen = 0
    for page in CHAPTERS:
        for block in page.blocks:
            if block.hunks:
                html = (site / url_of(block.old, block.new)).read_text()
                number = home_of(page, block)
                html = html.split(f'id="hunk-{number}"')[1].split("<section")[0]
                runs = wrong_runs(page, block)
                assert html.count('class="wrong"') == len(runs)
                flips = [x for x in runs if right_output(page, x)]
                assert html.count('class="flip"') == len(flips)
                seen += len(flips)
    assert seen


@pytest.fixture(scope="module")
def flip(tmp_path_factory):
    """(address, number of a change, two numbers) of a page with a switch.

    Of a copy in which the right output for a command that a chapter shows with a fault
    is the wrong one with another last number.
    """
    page, block, run = next(
        (page, block, run)
        for page in CHAPTERS
        for block in page.blocks
        if block.hunks and (block.old, block.new) == (OLD, NEW)
        for run in wrong_runs(page, block)
        if right_output(page, run)
    )
    fence = page.lines[run.line : run.end]
    fence = fence[fence.index("```console") :]
    number = re.findall(r"\d+\.\d+", "\n".join(fence))[-1]
    right = re.sub(r"\d", "9", number)
    text = right.join("\n".join(fence).rsplit(number, 1))
    other = right_output(page, run)
    lines = list(page.lines)
    start = lines.index("```console", other.line)
    lines[start : other.end] = text.split("\n")
    folder = tmp_path_factory.mktemp("flip")
    copy_tree(folder)
    (folder / page.name).write_text("\n".join(lines) + "\n")
    command = [*SPHINX, "-d", folder / "doctrees", "docs", folder / "html"]
    subprocess.run(command, cwd=folder, check=True)
    change = home_of(page, block)
    address = f"{(folder / 'html' / PAIR).as_uri()}#hunk-{change}"
    return address, change, right, number


@pytest.mark.parametrize("script", [True, False], ids=["script", "no script"])
def test_the_output_flips_beside_the_line(browser, flip, script):
    address, number, right, wrong = flip
    tab = browser.new_page(viewport=WIDE, java_script_enabled=script)
    tab.goto(address)
    change = tab.locator(f"#hunk-{number}")
    line = change.locator("ins .out")
    struck = "x => getComputedStyle(x).textDecorationLine"
    assert line.first.evaluate(struck) == "none"
    change.locator(".why summary").click()
    switch = change.get_by_role("group", name="What it prints")
    assert switch.locator(".right mark").all_text_contents() == [right]
    assert switch.locator(".wrong mark").all_text_contents() == [wrong]
    without = switch.get_by_role("radio", name="without it")
    assert without.is_checked()
    assert switch.locator(".wrong").is_visible()
    assert not switch.locator(".right").is_visible()
    assert line.first.evaluate(struck) == "line-through"
    before = switch.bounding_box()
    places = [switch.locator(f".{x} mark") for x in ("right", "wrong")]
    assert places[0].bounding_box()["y"] == places[1].bounding_box()["y"]
    without.press("ArrowLeft")
    assert switch.get_by_role("radio", name="with it", exact=True).is_checked()
    assert switch.locator(".right").is_visible()
    assert not switch.locator(".wrong").is_visible()
    assert line.first.evaluate(struck) == "none"
    assert switch.bounding_box() == before  # nothing moves
    if script:
        check_barriers(tab)
    tab.close()


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


def test_the_same_script_on_both_sides_swaps_them(visit):
    tab = visit(f"{PAIR}#hunk-9")
    choose(tab, "new", OLD)
    tab.wait_for_url(f"**/{url_of(NEW, OLD)}#hunk-9")


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
    old, new = [
        both.locator(f"> .change > .lines {x}").bounding_box() for x in (".old", ".new")
    ]
    assert old["x"] == new["x"]
    assert old["y"] + old["height"] <= new["y"]
    signs = "x => getComputedStyle(x, '::after').content"
    assert tab.locator("del").first.evaluate(signs) == '"-"'
    assert tab.locator("ins").first.evaluate(signs) == '"+"'


@pytest.mark.parametrize(("width", "columns"), [(1280, 80), (1440, 88)])
def test_a_desktop_shows_two_files_of_88_columns(visit, width, columns):
    """On a small one, few lines are longer than what it shows, and they wrap."""
    tab = visit(PAIR, viewport={"width": width, "height": 900})
    lines = tab.locator(".change > .lines .new [data-n]")
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
    for part in (
        ".sidebar-drawer",
        ".tools",
        ".choose",
        ".names a >> nth=0",
        ".steps >> nth=0",
    ):
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
    assert not tab.locator("select").first.is_visible()
    assert tab.locator("ins").first.is_visible()
    tab.locator(".fold summary").first.click()
    assert tab.locator(".fold").first.locator(".new").is_visible()
    assert tab.locator(".fold .old").first.is_visible()
    why = tab.locator(".why").first
    assert not why.get_by_text("Why.").is_visible()
    why.locator("summary").click()
    assert why.get_by_text("Why.").is_visible()


LARGE = {"width": 1920, "height": 1080}
LANDED = "x => Math.round(x.getBoundingClientRect().top)"


def test_a_line_stands_beside_what_it_was_changed_into(visit, address):
    """Also where it is too long for its column. Beside a line without one is a gap."""
    tab = visit(PAIR)
    for pair in ALL_EDGES:
        tab.goto(address + url_of(*pair))
        for hunk in hunks(*pair):
            rows = similar_lines(hunk.removed, hunk.added)
            for a, b in rows:
                ids = f"#old-L{hunk.old_start + a}", f"#L{hunk.new_start + b}"
                boxes = [tab.locator(x).bounding_box() for x in ids]
                assert boxes[0]["y"] == boxes[1]["y"], (pair, ids)
                assert boxes[0]["height"] == boxes[1]["height"], (pair, ids)
            change = tab.locator(f"#hunk-{hunk.number} > .change > .lines")
            gaps = change.locator("i").evaluate_all(
                "all => all.map(x => [x.parentElement.className,"
                " +x.style.getPropertyValue('--n')])"
            )
            for side, other in (("old", hunk.added), ("new", hunk.removed)):
                count = sum(n for name, n in gaps if name == side)
                assert count == len(other) - len(rows)
            heights = [change.locator(x).bounding_box() for x in (".old", ".new")]
            assert heights[0]["height"] == heights[1]["height"]
    gap = tab.locator(".change > .lines i").first
    ground = gap.evaluate("x => getComputedStyle(x).backgroundImage")
    assert "gradient" in ground  # hatched


def test_a_wide_screen_says_beside_the_code_what_each_change_does(visit):
    """As far as there is room, so that the code is not torn apart."""
    tab = visit(PAIR, viewport=LARGE)
    shown = 0
    for hunk in hunks(OLD, NEW):
        change = tab.locator(f"#hunk-{hunk.number}")
        code = change.locator(".change > .lines").bounding_box()
        title = change.locator(".whys > *").first.locator(":scope:is(p), summary")
        box = title.bounding_box()
        assert box["x"] >= code["x"] + code["width"]
        assert box["height"] < 32
        assert title.evaluate("x => x.scrollWidth <= x.clientWidth")
        parts = change.locator(":scope > h2, .lines:visible, .fold > summary")
        heights = sum(x.bounding_box()["height"] for x in parts.all())
        assert abs(change.bounding_box()["height"] - heights) < 4
        for why in change.locator(".why").all():
            assert why.get_by_text("What.").is_visible()
            assert not why.get_by_text("Why.", exact=True).is_visible()
            assert why.locator("summary").evaluate(MARKER) == "none"
            shown += 1
    assert shown
    why = tab.locator(".why").last
    why.locator("summary").click()
    assert why.get_by_text("Why.", exact=True).is_visible()
    assert why.locator("summary").evaluate(MARKER) != "none"
    check_barriers(tab, [(LARGE, "light")])


MARKER = "x => getComputedStyle(x).listStyleType"


@pytest.mark.parametrize("pair", [*ALL_EDGES, (OLD, list(RUNGS)[-1])], ids=str)
def test_a_page_is_not_longer_on_a_wide_screen(visit, pair):
    tab = visit(url_of(*pair), viewport=LARGE)
    height = "document.documentElement.scrollHeight"
    for explain in (False, True):
        if explain:
            tab.get_by_role("button", name="Explain all").press("Enter")
        found = []
        for width in (PHONE["width"], 1280, 1700, 1879, 1920, 2400):
            tab.set_viewport_size({"width": width, "height": 900})
            found.append(tab.evaluate(height))
        assert max(found[4:]) <= min(found[:4]), found


BOTH_IN_SIGHT = """change => {
    const seen = (x) => {
        const box = x.getBoundingClientRect();
        const at = document.elementFromPoint(box.left + 60, box.top + box.height / 2);
        return x.contains(at) || at?.contains(x) || String(box.top);
    };
    const flip = change.querySelector(".flip");
    flip.querySelector("legend").scrollIntoView({ block: "center" });
    const line = change.querySelector("ins .out").parentElement;
    const label = flip.querySelector("label");
    const { left, top } = label.getBoundingClientRect();
    return [seen(line), label.contains(document.elementFromPoint(left + 9, top + 9))];
}"""


@pytest.mark.parametrize(
    "viewport", [PHONE, WIDE, LARGE], ids=["phone", "desktop", "large"]
)
@pytest.mark.parametrize("pair", ALL_EDGES, ids=str)
def test_the_struck_line_and_the_switch_are_seen_together(visit, pair, viewport):
    tab = visit(url_of(*pair), viewport=viewport)
    changes = tab.locator(".hunk:has(.flip):has(ins .out)")
    if pair == (OLD, NEW):
        assert changes.count() > 3
    for change in changes.all():
        why = change.locator(".why").filter(has=tab.locator(".flip")).first
        why.locator("summary").press("Enter")
        assert change.evaluate(BOTH_IN_SIGHT) == [True, True], change.get_attribute(
            "id"
        )
        why.locator("summary").press("Enter")


def test_copy_takes_the_lines_of_a_change(visit):
    tab = visit(PAIR)
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    for hunk in hunks(OLD, NEW):
        change = tab.locator(f"#hunk-{hunk.number}")
        change.get_by_role("button", name="Copy the added lines").click()
        change.get_by_text("Copied.").wait_for()
        copied = tab.evaluate("navigator.clipboard.readText()")
        assert copied == "".join(f"{x}\n" for x in hunk.added)


@pytest.mark.parametrize(("side", "name"), [("old", OLD), ("new", NEW)])
def test_a_selection_stays_in_its_column(visit, side, name):
    """From the change before the last to the last, over a bar and folded lines."""
    tab = visit(f"{PAIR}#hunk-8")
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    first, last = (
        tab.locator(
            f"#hunk-{x} > .change > .lines .{side} > [data-n]"
        ).last.bounding_box()
        for x in (8, 9)
    )
    tab.mouse.move(first["x"] + 60, first["y"] + 3)
    tab.mouse.down()
    tab.mouse.move(last["x"] + last["width"] - 5, last["y"] + last["height"] - 3)
    tab.mouse.up()
    tab.keyboard.press("Control+c")
    copied = tab.evaluate("navigator.clipboard.readText()").splitlines()
    lines = [x.strip() for x in read_lines(name)]
    assert len(copied) > 6
    first, last = (
        getattr(hunks(OLD, NEW)[x], "old_start" if side == "old" else "new_start")
        for x in (7, 8)
    )
    blank = [x for x in read_lines(name)[first - 1 : last] if not x.strip()]
    assert len([x for x in copied if not x.strip()]) <= len(blank)
    assert not [x for x in copied[1:] if x.strip() not in lines]
    other = [x.removed if side == "new" else x.added for x in hunks(OLD, NEW)[7:9]]
    assert not set(copied) & {x for some in other for x in some}


@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("line", ["L55", "old-L50"])
def test_a_line_has_an_address_also_in_a_fold(visit, line, viewport):
    tab = visit(f"{PAIR}#{line}", viewport=viewport)
    if viewport == PHONE and line.startswith("old"):
        line = "L63"  # which is the same: of both, a phone shows this one
        assert read_lines(OLD)[49] == read_lines(NEW)[62]
    target = tab.locator(f"#{line}")
    assert target.is_visible()
    top = target.evaluate(LANDED)
    names = tab.locator(".names").bounding_box()
    assert names["y"] + names["height"] <= top < viewport["height"] / 2
    if line == "L55":
        ground = "x => getComputedStyle(x).backgroundColor"
        next_line = tab.locator("#L56")
        assert target.evaluate(ground) != next_line.evaluate(ground)


def test_a_line_of_a_file_has_an_address(visit):
    tab = visit(f"source/{NEW}.html#L41")
    line, other = tab.locator("#L41"), tab.locator("#L42")
    assert line.text_content() == read_lines(NEW)[40] + "\n"
    assert 0 <= line.evaluate(LANDED) < WIDE["height"]
    ground = "x => getComputedStyle(x).backgroundColor"
    assert line.evaluate(ground) != other.evaluate(ground)
    other.click(position={"x": 10, "y": 5})
    assert tab.url.endswith("#L42")


def test_the_choice_keeps_the_place(visit, address):
    """That of the change on the side that stays, or else of the line."""
    other = next(x for x in RUNGS if x not in (OLD, NEW))
    for number in (9, 13):
        tab = visit(f"{PAIR}#hunk-{number}")
        hunk = hunks(OLD, NEW)[number - 1]
        choose(tab, "new", other)
        tab.wait_for_url(f"**/{url_of(OLD, other)}#hunk-*")
        found = hunks(OLD, other)[int(tab.url.rpartition("-")[2]) - 1]
        last = found.old_start + len(found.removed)
        assert found.old_start <= hunk.old_start <= last
        assert 0 < tab.locator(f"#hunk-{found.number}").evaluate(LANDED) < 150
        tab.get_by_role("link", name="Swap the sides").click()
        tab.wait_for_url(f"**/{url_of(other, OLD)}#hunk-*")
        back = hunks(other, OLD)[int(tab.url.rpartition("-")[2]) - 1]
        assert back.new_start == found.old_start
    tab = visit(f"{PAIR}#L80")  # far from a change
    choose(tab, "old", other)
    tab.wait_for_url(f"**/{url_of(other, NEW)}#*")
    assert tab.evaluate("scrollY") > 300
    tab.goto(urljoin(tab.url, f"../{PAIR}"))
    choose(tab, "old", other)  # from the top, one gets to the top
    tab.wait_for_url("**/" + url_of(other, NEW))


def test_a_key_opens_the_change_that_a_key_has_led_to(visit):
    tab = visit(PAIR)
    assert tab.get_by_text("Enter opens").is_visible()
    why = tab.locator("#hunk-16 .why")
    for _ in range(16):
        tab.keyboard.press("n")
    assert not why.evaluate("x => x.open")
    tab.keyboard.press("Enter")
    assert why.evaluate("x => x.open")
    tab.keyboard.press("Enter")
    tab.locator("#hunk-16 h2 a").focus()
    tab.keyboard.press("Tab")
    assert why.locator("summary").evaluate("x => x === document.activeElement")


@pytest.mark.parametrize(("old", "new"), RUNG_PAIRS)
def test_the_page_says_which_step_is_explained_or_taken_back(site, old, new):
    html = (site / url_of(old, new)).read_text()
    assert ("backwards" in html) == (new in ancestry(old))
    steps = set(re.findall(r'<p class="step">From (\S+) to (\S+):</p>', html))
    assert (not steps) == ((old, new) in ALL_EDGES)
    assert steps <= set(ALL_EDGES) - {(old, new)}


def test_a_title_says_that_there_is_a_wrong_output(site):
    for old, new in RUNG_PAIRS:
        html = (site / url_of(old, new)).read_text()
        for why in html.split('<details class="why">')[1:]:
            summary = why.split("</summary>")[0]
            text = why.split("</details>")[0]
            assert ("wrong output" in summary) == ('class="flip"' in text)


def test_an_output_in_a_switch_is_not_shown_before_it(site):
    """Where a section has both outputs, as that of `@record`."""
    seen = 0
    for page in CHAPTERS:
        for block in page.blocks:
            if not block.hunks:
                continue
            html = (site / url_of(block.old, block.new)).read_text()
            html = html.split(f'id="hunk-{home_of(page, block)}"')[1]
            html = html.split("<section")[0]
            for run in wrong_runs(page, block):
                right = right_output(page, run)
                if right and right.anchor == run.anchor:
                    before = html.split("<fieldset")[0]
                    assert "highlight-console" not in before
                    assert not before.endswith(":</p>")
                    seen += 1
    assert seen


def test_keys_lead_to_the_next_and_the_previous_change(visit):
    tab = visit(PAIR)
    assert tab.get_by_text("next change").is_visible()
    seen = []
    for key in ["n"] * (len(hunks(OLD, NEW)) + 1) + ["p"] * 4:
        tab.keyboard.press(key)
        address = tab.evaluate("location.hash")  # tab.url may lag behind a key
        seen.append(int(address.removeprefix("#hunk-")))
    last = len(hunks(OLD, NEW))
    assert seen == [*range(1, last + 1), last, *range(last - 1, last - 5, -1)]
    assert tab.locator(f"#hunk-{last - 4} h2").is_visible()
    tab.locator("select[name=old]").focus()
    tab.keyboard.press("p")
    tab.locator("h1").click()
    tab.keyboard.press("Control+p")
    tab.locator("[data-keys]").uncheck()
    tab.keyboard.press("p")
    assert tab.url.endswith(f"#hunk-{last - 4}")
    tab.reload()
    assert not tab.locator("[data-keys]").is_checked()


def test_the_strip_shows_and_leads_to_the_changes(visit):
    tab = visit(PAIR)
    marks = tab.locator(".strip a")
    assert marks.count() == len(hunks(OLD, NEW))
    boxes = [x.bounding_box() for x in marks.all()]
    tops = [x["y"] for x in boxes]
    assert tops == sorted(set(tops))
    assert tops[0] >= 0
    assert boxes[-1]["y"] + boxes[-1]["height"] <= WIDE["height"]
    shares = [(x.new_start, y) for x, y in zip(hunks(OLD, NEW), tops, strict=True)]
    half = [y for line, y in shares if line > len(read_lines(NEW)) / 2]
    assert all(y > WIDE["height"] * 0.4 for y in half)
    marks.nth(12).click()
    assert tab.url.endswith("#hunk-13")
    tab.wait_for_selector(".strip a.here[href='#hunk-13']")
    tab.set_viewport_size(PHONE)
    assert not marks.first.is_visible()


def test_a_fold_says_which_functions_are_in_it(visit):
    tab = visit(PAIR)
    texts = tab.locator(".fold summary").all_text_contents()
    assert any(
        re.search(r"^\s*\d+ unchanged lines · .*Trainer\.train\b", x) for x in texts
    )
    assert not [x for x in texts if "·" not in x]


@pytest.mark.parametrize("width", [390, 1000, 1200, 1280, 1700, 1920])
def test_code_is_large_enough_everywhere(visit, width):
    tab = visit(PAIR, viewport={"width": width, "height": 900})
    tab.get_by_role("button", name="Explain all").click()
    sizes = "all => all.map(x => parseFloat(getComputedStyle(x).fontSize))"
    found = tab.locator(".sbs pre, .sbs pre *, .sbs code").evaluate_all(sizes)
    assert min(found) >= 12


@pytest.mark.parametrize(("width", "columns"), [(1199, 1), (1200, 2), (1920, 2)])
def test_a_narrow_screen_has_one_column(visit, width, columns):
    tab = visit(PAIR, viewport={"width": width, "height": 900})
    change = tab.locator("#hunk-8 > .change > .lines")
    old, new = [change.locator(x).bounding_box() for x in (".old", ".new")]
    assert (old["y"] == new["y"]) == (columns == 2)
    assert (old["x"] == new["x"]) == (columns == 1)


def test_a_bar_on_a_phone_has_one_line(visit):
    tab = visit(PAIR, viewport=PHONE)
    for hunk in hunks(OLD, NEW):
        change = tab.locator(f"#hunk-{hunk.number}")
        boxes = [change.locator(x).first.bounding_box() for x in ("h2", ".steps")]
        assert boxes[0]["height"] < 32
        assert boxes[1]["height"] < 32
        assert abs(boxes[0]["y"] - boxes[1]["y"]) < 4
        padding = change.locator("h2").evaluate(
            "x => parseFloat(getComputedStyle(x).paddingRight)"
        )
        assert boxes[0]["x"] + boxes[0]["width"] - padding <= boxes[1]["x"]


WRAPPED = """() => [...document.querySelectorAll(".new > [data-n]")]
    .filter((x) => x.checkVisibility()).flatMap((line) => {
        const range = document.createRange();
        const walk = document.createTreeWalker(line, NodeFilter.SHOW_TEXT);
        const found = [];
        for (let node; (node = walk.nextNode()); )
            for (const word of node.data.matchAll(/\\w+|\\S/g)) {
                range.setStart(node, word.index);
                range.setEnd(node, word.index + word[0].length);
                const rects = [...range.getClientRects()];
                found.push([word[0], rects.length, rects[0].left, rects[0].top]);
            }
        return [found];
    })"""


def test_a_long_line_on_a_phone_goes_on_below_its_own_beginning(visit):
    """It goes on further to the right, and no name is broken."""
    tab = visit(PAIR, viewport=PHONE)
    tab.get_by_role("button", name="Unfold all").click()
    wrapped = 0
    for words in tab.evaluate(WRAPPED):
        assert not [word for word, parts, *_ in words if parts > 1]
        rows = {}
        for _, _, left, top in words:
            rows.setdefault(round(top), left)
        rows = [left for _, left in sorted(rows.items())]
        assert all(left > rows[0] + 5 for left in rows[1:]), words
        wrapped += len(rows) > 1
    assert wrapped > 20


def test_print_is_landscape_and_explained(visit):
    tab = visit(PAIR, viewport={"width": 1032, "height": 700})  # of the paper
    tab.emulate_media(media="print")
    assert tab.locator(".same .old").first.is_visible()
    for part in (".flip .right", ".flip .wrong"):
        assert tab.locator(part).first.is_visible()
    for why in tab.locator(".why .reason").all():
        assert why.bounding_box()["height"] > 0
    kept = "x => getComputedStyle(x).breakInside"
    assert tab.locator(".fold").first.evaluate(kept) == "avoid"
    change = tab.locator("#hunk-8 > .change > .lines")
    old, new = [change.locator(x).bounding_box() for x in (".old", ".new")]
    assert old["y"] == new["y"]
    paper = re.search(
        rb"/MediaBox *\[0 0 ([\d.]+) ([\d.]+)", tab.pdf(prefer_css_page_size=True)
    )
    assert [round(float(x)) for x in paper.groups()] == [842, 595]


def test_a_link_lands_at_once_and_back_keeps_the_place(visit):
    """Where the theme would scroll for a second, and Back would find another place."""
    tab = visit(f"{PAIR}#hunk-8")
    place = tab.evaluate("scrollY")
    assert place > 0
    jump = "document.querySelector('.strip a:nth-child(16)').click()"
    there = tab.evaluate(f"() => {{ {jump}; return scrollY }}")
    assert there > place
    tab.wait_for_timeout(300)
    assert tab.evaluate("scrollY") == there
    tab.locator("#hunk-16 .why summary").click()
    tab.locator("#hunk-16 .chapter a").click()
    tab.wait_for_url("**/2_multigpu.html*")
    tab.go_back()
    tab.wait_for_url("**/*#hunk-16")
    tab.wait_for_function("y => Math.abs(scrollY - y) < 50", arg=there)


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_every_pair_weighs_little(site, old, new):
    """The page with all it loads, by their sizes on the disk."""
    url = url_of(old, new)
    loads = [urlsplit(x).path for x in Page(site / url).loads]
    files = {url, *(posixpath.normpath(f"side_by_side/{x}") for x in loads)}
    assert len(files) > 3
    assert sum((site / x).stat().st_size for x in files) < BUDGET
