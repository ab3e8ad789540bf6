"""The site: built with warnings as errors, and looked at in a browser.

Skipped where website/requirements.txt or tests/requirements.txt is not installed; what
needs a browser is skipped where there is no chromium. The pages of two scripts side by
side have tests of their own: test_side_by_side.py.
"""

import itertools
import os
import posixpath
import re
import runpy
import struct
import subprocess
import textwrap
import zlib
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest

bs4 = pytest.importorskip("bs4")
pytest.importorskip("pagefind")

from bs4 import BeautifulSoup  # noqa: E402

from ladder.diffs import changed_lines, hunks  # noqa: E402
from ladder.files import copy_tree  # noqa: E402
from ladder.pages import GROUPS, parse, right_output, title  # noqa: E402
from ladder.rungs import ALL_EDGES, PARENTS, ROOT, read_lines, steps, summary  # noqa: E402
from tests.contrast import contrast_ratio  # noqa: E402
from tests.site_fixtures import PHONE, SPHINX, WIDE  # noqa: E402
from tests.site_pages import (  # noqa: E402
    NEW,
    OLD,
    PAIR,
    PAIRS,
    TWO_FRAMES,
    Page,
    check_barriers,
    url_of,
)
from website import preview  # noqa: E402
from website.preview import chunks  # noqa: E402

pytestmark = pytest.mark.waits  # for a browser


# Read without a browser


def test_a_wrong_marker_ends_the_build_with_one_line(tmp_path):
    copy_tree(tmp_path)
    with (tmp_path / "docs/2_multigpu.md").open("a") as page:
        page.write("\n<!-- end -->\n")
    command = [*SPHINX, "docs", "docs/_site"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("docs/2_multigpu.md:")


def test_every_link_leads_somewhere(pages, site):
    for name, page in pages.items():
        if name == "404.html":  # its links begin at the site's address
            continue
        for link in page.links:
            url = urlsplit(urljoin(name, link))
            if url.scheme:
                continue
            target = posixpath.normpath(unquote(url.path)) if url.path else name
            assert (site / target).is_file(), f"{name}: {link}"
            if url.fragment and target in pages:
                assert unquote(url.fragment) in pages[target].ids, f"{name}: {link}"


def test_nothing_is_loaded_from_elsewhere(pages, site):
    there = [(name, page) for name, page in pages.items() if name != "404.html"]
    loads = [(name, x) for name, page in there for x in page.loads]
    assert loads
    for name, load in loads:
        path = urlsplit(load).path
        assert not urlsplit(load).netloc, f"{name}: {load}"
        assert (site / Path(name).parent / path).is_file(), f"{name}: {load}"
    for path in site.rglob("*.css"):
        assert "url(http" not in path.read_text(), path
        assert "url(//" not in path.read_text(), path


def soup(site, name):
    return BeautifulSoup((site / name).read_text(), "html.parser")


def test_the_sidebar_has_every_page_in_its_group_by_its_own_name(site):
    """Its first heading: on the page, in its title and in the sidebar."""
    tree = soup(site, "search.html").find(class_="sidebar-tree")
    first, *lists = tree.find_all("ul")
    top = [x["href"] for x in first.find_all("a")]
    assert top == ["index.html", "side_by_side/index.html"]
    captions = [x.get_text() for x in tree.find_all(class_="caption")]
    shown = [[(x["href"], x.get_text()) for x in y.find_all("a")] for y in lists]
    named = [[(f"{x}.html", title(x)) for x in names] for names in GROUPS.values()]
    assert dict(zip(captions, shown, strict=True)) == dict(
        zip(GROUPS, named, strict=True)
    )
    assert sorted(sum(GROUPS.values(), [])) == sorted(
        x.stem for x in (ROOT / "docs").glob("*.md")
    )
    assert first.find_all("a")[1].get_text() == soup(site, top[1]).h1.get_text()
    for names in GROUPS.values():
        for name in names:
            page = soup(site, f"{name}.html")
            assert page.h1.find(string=True, recursive=False) == title(name)
            assert page.title.get_text().startswith(f"{title(name)} - ")


def test_the_start_page_shows_what_the_repository_has(site):
    page = soup(site, "index.html").find("article")
    lines = read_lines("README.md")
    assert page.h1.get_text() == lines[0].removeprefix("# ")
    plain = re.sub(r"[`*]|\]\([^)]*\)|\[", "", " ".join(lines))
    assert " ".join(page.find(class_="promise").get_text().split()) in plain
    commands = page.find(class_="highlight-sh").get_text()
    assert commands.strip() in "\n".join(lines)
    links = [(x["href"], x.get_text()) for x in page.find_all("a")]
    for parent, child in ALL_EDGES:
        size = len(changed_lines(parent, child))
        assert (url_of(parent, child), f"{size} changed lines") in links
    texts = [" ".join(x.get_text().split()) for x in page.find_all("li")]
    for name in PARENTS:
        short, what = name.removeprefix("variants/"), summary(name)
        assert any(short in x and what in x for x in texts), name
    main = page.find(class_="primary")
    assert (main["href"], main.get_text()) == (
        "side_by_side/index.html",
        "Compare any two",
    )
    assert {"0_intro.html", "convert_your_script.html", "it_hangs.html"} <= {
        x for x, _ in links
    }


def test_the_start_page_shows_changes_as_the_diff_has_them(site):
    shown = soup(site, "index.html").find_all(class_="change")
    there = {
        textwrap.dedent("\n".join(y[1:] for y in x.lines)) for x in hunks(OLD, NEW)
    }
    signs = {"".join(y[0] for y in x.lines) for x in hunks(OLD, NEW)}
    assert len(shown) > 2
    for change in shown:
        lines = change.find("pre").get_text().strip("\n").split("\n")
        assert "\n".join(x[1:] for x in lines) in there
        assert "".join(x[0] for x in lines) in signs
        page, _, anchor = change.find("a")["href"].partition("#")
        heading = soup(site, page).find(id=anchor).find(["h2", "h3"])
        assert change.find("a").get_text() == heading.find(string=True, recursive=False)


def test_a_link_to_a_test_leads_to_its_lines(site):
    found = 0
    for name in sum(GROUPS.values(), []):
        for link in soup(site, f"{name}.html").select(
            'article a[href^="source/tests/"]'
        ):
            text = link.get_text()
            if not text.startswith("test_"):
                continue
            page, _, anchor = link["href"].partition("#")
            file = page.removeprefix("source/").removesuffix(".html")
            number = int(anchor.removeprefix("L"))
            assert f"def {text}(" in read_lines(file)[number - 1], f"{name}: {text}"
            found += 1
    assert found > 50


def explained_outputs(name):
    """[(block with a fault, the block with the right output)] under explanations."""
    page = parse(f"docs/{name}.md")
    explaining = {x.anchor for x in page.blocks if x.hunks}
    pairs = [(x, right_output(page, x)) for x in page.blocks if x.faults]
    rights = [y for _, y in pairs]
    return [
        (x, y) for x, y in pairs if y and x.anchor in explaining and x not in rights
    ]


def printed(name, block):
    """What the Markdown shows in the block's fence."""
    lines = read_lines(f"docs/{name}.md")[block.line : block.end]
    start = lines.index("```console")
    return lines[start + 1 : lines.index("```", start)]


def test_a_wrong_output_flips_to_the_right_one_that_the_chapter_has(site, pages):
    found = 0
    for name in sum(GROUPS.values(), []):
        page = soup(site, f"{name}.html")
        flips = page.select("article .flip")
        pairs = explained_outputs(name)
        assert len(flips) == len(pairs), name
        for flip, (wrong, right) in zip(flips, pairs, strict=True):
            section = flip.find_parent("section")
            assert section["id"] == wrong.anchor or section.find(id=wrong.anchor)
            for kind, block in {".wrong": wrong, ".right": right}.items():
                shown = flip.select_one(f"{kind} pre").get_text()
                assert shown.removesuffix("\n").split("\n") == printed(name, block)
            assert flip.select(".wrong mark"), wrong.text
            found += 1
        ids = pages[f"{name}.html"].id_list
        assert len(ids) == len(set(ids)), name
    assert found > 5


def test_a_chapters_switch_needs_no_script(visit):
    tab = visit("2_multigpu.html", java_script_enabled=False)
    flip = tab.locator(".flip").first
    outputs = [flip.locator(x) for x in (".right", ".wrong")]
    assert [x.is_visible() for x in outputs] == [False, True]
    tab.get_by_label("with it", exact=True).first.check()
    assert [x.is_visible() for x in outputs] == [True, False]


def png_notes(data):
    return dict(x.split(b"\0", 1) for kind, x in chunks(data) if kind == b"tEXt")


def test_the_preview_is_the_picture_of_this_ladder():
    """If this fails: python -m website.preview"""
    data = preview.FILE.read_bytes()
    assert png_notes(data)[b"Source"].decode() == preview.digest()
    assert struct.unpack(">II", data[16:24]) == (1200, 630)
    assert len(data) < 150_000


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The site as the workflow builds it, which knows the addresses."""
    folder = tmp_path_factory.mktemp("published")
    options = ["-d", folder / "doctrees", "docs", folder / "html"]
    known = {"SITE_URL": SITE_URL, "REPOSITORY_URL": "https://example.org/one/name"}
    command = [*SPHINX, *options]
    subprocess.run(command, cwd=ROOT, env=os.environ | known, check=True)
    return folder / "html"


SITE_URL = "https://example.org/some/where"


def meta(page):
    tags = page.find_all("meta")
    return {x.get("property") or x.get("name"): x.get("content") for x in tags}


def test_a_published_page_says_what_a_link_to_it_shows(published):
    for name in ("index.html", "2_multigpu.html", PAIR):
        page = soup(published, name)
        tags = meta(page)
        assert tags["og:title"] == re.sub("¶", "", page.h1.get_text()) or name == PAIR
        assert tags["og:url"] == f"{SITE_URL}/{name}"
        assert 40 < len(tags["og:description"]) <= 200
        assert tags["og:description"] == tags["description"]
        address, _, picture = tags["og:image"].partition("/where/")
        assert f"{address}/where" == SITE_URL
        assert (published / picture).read_bytes() == preview.FILE.read_bytes()
    described = {
        meta(soup(published, f"{x}.html"))["description"] for x in GROUPS["Learn"]
    }
    assert len(described) > 3


def test_an_unpublished_page_names_no_address_that_it_does_not_have(site):
    tags = meta(soup(site, "index.html"))
    assert "og:image" not in tags and "og:url" not in tags
    assert tags["og:title"] and tags["description"]


def test_a_published_start_page_has_the_whole_clone_line(published):
    commands = soup(published, "index.html").find(class_="highlight-sh").get_text()
    assert commands.startswith("git clone https://example.org/one/name\ncd name\n")


def test_the_page_for_wrong_addresses_has_links_from_the_sites_own_address(published):
    page = Page(published / "404.html")
    paths = [urlsplit(x).path for x in page.links + page.loads if x[0] != "#"]
    own = [x for x in paths if x.startswith("/some/where/")]
    assert len(own) > 20
    assert {x for x in paths if x not in own} <= {"/pradyunsg/furo"}
    for path in own:
        assert (published / path.removeprefix("/some/where/")).is_file(), path


# In a browser

KINDS = [
    "index.html",
    "0_intro.html",
    "2_multigpu.html",
    PAIR,
    "side_by_side/index.html",
]
KINDS += [f"source/{NEW}.html", "search.html", "what_is_proven.html"]


def test_every_other_page_loads_without_errors(pages, visit, address):
    tab = visit("index.html")
    for name in pages:
        if name not in map(url_of, *zip(*PAIRS, strict=True)):
            assert tab.goto(address + name).ok


def test_the_start_leads_to_the_pairs(pages):
    links = pages["0_intro.html"].links
    assert {*(url_of(*x) for x in ALL_EDGES), "side_by_side/index.html"} <= set(links)


@pytest.mark.parametrize("url", KINDS)
def test_no_barrier_is_found(visit, url):
    check_barriers(visit(url))


@pytest.mark.parametrize("url", KINDS)
def test_a_phone_scrolls_no_page_sideways(visit, url):
    tab = visit(url, viewport=PHONE)
    widest = """Math.max(...["article", ".content", "html"].map((x) =>
        document.querySelector(x).scrollWidth))"""
    assert tab.evaluate(widest) <= PHONE["width"]


def test_the_chosen_theme_has_the_colours_of_the_automatic_one(visit):
    tab = visit(PAIR, color_scheme="dark")
    ground = "x => getComputedStyle(x).backgroundColor"
    dark = tab.locator("ins").first.evaluate(ground)
    tab.emulate_media(color_scheme="light")
    light = tab.locator("ins").first.evaluate(ground)
    assert dark != light
    seen = set()
    for _ in range(3):
        tab.locator(".theme-toggle-content button").click()
        seen.add(
            (
                tab.locator("body").get_attribute("data-theme"),
                tab.locator("ins").first.evaluate(ground),
            )
        )
    assert seen == {("dark", dark), ("light", light), ("auto", light)}


def test_the_drawer_opens_by_key(visit):
    tab = visit("2_multigpu.html", viewport=PHONE)
    link = tab.locator(".sidebar-tree a").first
    assert not link.is_visible()
    label = tab.locator(".nav-overlay-icon")
    label.press("Enter")
    assert link.is_visible()
    assert label.get_attribute("aria-expanded") == "true"
    tab.keyboard.press("Escape")
    tab.wait_for_function("!document.getElementById('__navigation').checked")
    assert label.get_attribute("aria-expanded") == "false"


def test_a_wrong_address_is_answered_from_any_depth(visit, address, browser):
    tab = browser.new_page()
    failed = []
    tab.on("requestfailed", lambda x: failed.append(x.url))
    tab.on("response", lambda x: x.status == 404 and failed.append(x.url))
    wrong = f"{address}one/two/three.html"
    tab.goto(wrong, wait_until="networkidle")
    assert failed == [wrong]
    tab.get_by_role("link", name="The start page").click()
    assert tab.url == f"{address}index.html"
    tab.close()


def test_the_start_page_weighs_little(browser, address):
    """All that it loads, without compression: the same as before it had a ladder."""
    tab, sizes = browser.new_page(), {}
    tab.on("response", lambda x: sizes.update({x.url: len(x.body())}))
    tab.goto(f"{address}index.html", wait_until="networkidle")
    tab.close()
    print(f"{sum(sizes.values())} bytes in {len(sizes)} files")
    assert len(sizes) > 3
    assert sum(sizes.values()) < 131_000


def test_a_phone_shows_the_ladder_as_cards(visit):
    tab = visit("index.html")

    def boxes():
        return [x.bounding_box() for x in tab.locator(".ladder div").all()]

    wide = boxes()
    tops = [x["y"] for x in wide]
    assert tops == sorted(tops, reverse=True) and len(set(tops)) == len(steps())
    assert len({round(x["y"] + x["height"]) for x in wide}) == 1
    for edge in tab.locator(".edge").all():
        assert edge.bounding_box()["height"] >= 24
    tab.set_viewport_size(PHONE)
    cards = boxes()
    assert len({x["x"] for x in cards}) == 1
    for one, other in itertools.pairwise(cards):
        assert one["y"] + one["height"] <= other["y"]


def test_on_a_phone_the_names_of_the_table_of_pairs_stay_in_sight(visit):
    tab = visit("side_by_side/index.html", viewport=PHONE)
    box = tab.locator(".table-wrapper")
    assert box.locator("thead").bounding_box()["height"] < 250
    tab.set_viewport_size({"width": 240, "height": 800})
    box.evaluate("x => (x.scrollLeft = 1000)")
    assert box.evaluate("x => x.scrollLeft") > 0
    name = box.locator("tbody th").first.bounding_box()
    assert abs(name["x"] - box.bounding_box()["x"]) < 5


@pytest.mark.parametrize("width", [1280, 1300, 1312, 1313])
def test_a_desktop_shows_the_contents_of_a_page(visit, width):
    tab = visit("2_multigpu.html", viewport={"width": width, "height": 900})
    contents = tab.locator(".toc-drawer").bounding_box()
    text = tab.locator("article h1").first.bounding_box()
    menu = tab.locator(".sidebar-container").bounding_box()
    assert tab.locator(".toc-drawer a").last.is_visible()
    assert not tab.locator(".toc-content-icon").is_visible()
    assert menu["x"] + menu["width"] < text["x"]
    assert text["x"] + text["width"] < contents["x"]
    assert contents["x"] + contents["width"] <= width
    assert menu["x"] < 2  # no gap is left of it


def test_nothing_covers_the_line_that_a_link_leads_to(visit):
    tab = visit("source/multigpu.py.html#L41", viewport=PHONE)
    tab.mouse.wheel(0, -60)  # where the theme offers the way back to the top
    tab.evaluate(TWO_FRAMES)
    assert not tab.locator(".back-to-top").is_visible()


@pytest.mark.parametrize(
    "url, name, current",
    [
        ("index.html", "Home", "page"),
        ("side_by_side/index.html", "Compare any two", "page"),
        (PAIR, "Compare any two", "true"),
    ],
)
def test_the_menu_marks_where_one_is(site, url, name, current):
    marked = soup(site, url).select(".sidebar-tree .current-page > a")
    assert [x.get_text() for x in marked] == [name]
    assert marked[0]["aria-current"] == current


def test_the_menu_shows_the_entry_of_the_page(visit):
    tab = visit(f"{GROUPS['Evidence'][-1]}.html", viewport=WIDE | {"height": 500})
    menu = tab.locator(".sidebar-scroll").bounding_box()
    entry = tab.locator(".sidebar-tree .current-page > a").bounding_box()
    assert menu["y"] < entry["y"]
    assert entry["y"] + entry["height"] < menu["y"] + menu["height"]
    assert tab.evaluate("scrollY") == 0


def test_the_button_of_the_theme_names_its_states(visit):
    tab = visit("index.html")
    button = tab.locator(".theme-toggle-content button")
    seen = {button.get_attribute("title")}
    for _ in range(2):
        button.click()
        tab.evaluate(TWO_FRAMES)
        seen.add(button.get_attribute("title"))
    states = "Colours: light, dark or as the system. Now: "
    assert seen == {f"{states}{x}" for x in ("light", "dark", "as the system")}


# Copy buttons


def typed(block):
    """What somebody types to get what the block shows."""
    lines = block.removesuffix("\n").split("\n")
    if not any(x.startswith("$ ") for x in lines):
        return "\n".join(lines)
    found, goes_on = [], False
    for line in lines:
        if goes_on or line.startswith("$ "):
            found.append(line.removeprefix("$ ") if not goes_on else line)
            goes_on = line.endswith("\\")
    return "\n".join(found)


@pytest.mark.parametrize("url", ["index.html", "2_multigpu.html", "it_hangs.html"])
def test_a_button_copies_the_commands_alone(visit, url):
    tab = visit(url)
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    kinds = [f".highlight-{x} pre" for x in ("sh", "python", "console")]
    blocks = tab.locator(", ".join(f"article {x}" for x in kinds))
    buttons = 0
    for i in range(blocks.count()):
        block = blocks.nth(i)
        button = block.locator("xpath=following-sibling::button")
        text = block.inner_text()
        console = block.locator("xpath=ancestor::*[contains(@class,'console')]")
        if console.count() and not re.search("^[$] ", text, re.M):
            assert not button.count()
            continue
        button.press("Enter")
        assert tab.evaluate("navigator.clipboard.readText()") == typed(text)
        buttons += 1
    assert buttons
    assert tab.locator(".copybtn").count() == buttons


def test_a_button_that_copies_is_seen_when_it_has_the_focus(visit):
    tab = visit("2_multigpu.html")
    button = tab.locator(".copybtn").first
    button.focus()
    tab.keyboard.press("Shift+Tab")
    tab.keyboard.press("Tab")
    tab.wait_for_function("getComputedStyle(document.activeElement).opacity == 1")
    assert button.evaluate("x => x === document.activeElement")
    assert outline(button) >= 2


def outline(element):
    """The width of the line around it, in pixels."""
    return element.evaluate(
        "x => getComputedStyle(x).outlineStyle === 'none' ? 0 :"
        " parseFloat(getComputedStyle(x).outlineWidth)"
    )


# Search


def look_for(tab, text):
    """Type it into the sidebar's field; the results' (title, kind, [address])."""
    tab.locator(".sidebar-search").fill(text)
    tab.locator(".found [role=status]", has_text=re.compile("ound")).wait_for()
    tab.wait_for_timeout(400)
    items = tab.locator(".found ol > li").all()
    return [
        (
            item.locator("a").first.inner_text(),
            item.locator(".kind").inner_text(),
            [x.get_attribute("href") for x in item.locator("a").all()],
        )
        for item in items
    ]


def test_search_finds_sections_files_and_diffs(visit, pages):
    tab = visit("source/multigpu.py.html")  # from any depth
    found = look_for(tab, "set_epoch")
    kinds = [kind for _, kind, _ in found]
    assert [x for x, _ in itertools.groupby(kinds)] == ["Page", "File", "Diff", "Test"]
    assert found[0][1] == "Page"
    assert title("2_multigpu") in [name for name, *_ in found]
    links = [urlsplit(x) for *_, hrefs in found for x in hrefs]
    for link in links:
        page = link.path.removeprefix("/")
        assert page in pages
        assert not link.fragment or link.fragment in pages[page].ids, link.geturl()
    by_kind = {kind: urls for _, kind, urls in reversed(found)}
    assert all("#" in urls[1] for urls in by_kind.values())
    tab.locator(".found a[href*='#hunk-']").first.click()
    tab.wait_for_url("**/side_by_side/*#hunk-*")


def test_search_shows_all_that_it_found(visit):
    tab = visit("index.html")
    some = look_for(tab, "set_epoch")
    said = tab.locator(".found [role=status]")
    count = int(re.search(r"on (\d+) pages", said.inner_text())[1])
    assert len(some) < count
    tab.locator(".found button").press("Enter")
    tab.locator(f".found ol > li:nth-child({count})").wait_for()
    titles = tab.locator(".found ol > li > a").all_inner_texts()
    assert len(titles) == count and {x for x, *_ in some} < set(titles)
    order = ["Page", "File", "Diff", "Test"]
    kinds = tab.locator(".found ol > li > .kind").all_inner_texts()
    assert kinds == sorted(kinds, key=order.index)
    assert not tab.locator(".found button").is_visible()
    assert tab.locator(":focus").inner_text() not in {x for x, *_ in some}
    assert said.inner_text() == f"Found on {count} pages."


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_word_that_was_found_can_be_read(visit, scheme):
    tab = visit("index.html", color_scheme=scheme)
    look_for(tab, "set_epoch")
    colours = tab.locator(".found mark").first.evaluate(
        "x => [getComputedStyle(x).color, getComputedStyle(x).backgroundColor]"
    )
    ink, ground = ([int(y) for y in re.findall(r"\d+", x)[:3]] for x in colours)
    assert contrast_ratio(ink, ground) >= 4.5


def test_search_names_the_beginning_of_a_file(visit):
    """By what its docstring says, where a line's number would say nothing."""
    tab = visit("index.html")
    look_for(tab, "multigpu.py 50 10")
    first = read_lines("multigpu.py")[0].removeprefix('"""')
    assert tab.locator(".found a", has_text=first).count() == 1
    for text in ("multigpu.py 50 10", "import", "argparse", "import dist"):
        look_for(tab, text)
        assert not tab.locator(".found a", has_text=re.compile("^Line ")).count()


def test_search_finds_names_inside_code(visit):
    """What stands only behind a dot: `dist.get_default_backend_for_device(device)`."""
    tab = visit("index.html")
    for text in ("get_default_backend_for_device", "get_default_backend"):
        assert "multigpu.py" in [name for name, *_ in look_for(tab, text)], text
    shown = tab.locator(".found").inner_text()
    assert "dist.get_default_backend_for_device(device)" in shown
    assert "\u2063" not in shown


def test_search_loads_nothing_before_it_is_used(browser, address):
    tab, asked = browser.new_page(), []
    tab.on("request", lambda x: asked.append(x.url))
    tab.goto(f"{address}index.html", wait_until="networkidle")
    assert not [x for x in asked if "search" in x or "pagefind" in x]
    tab.keyboard.press("/")
    tab.keyboard.type("hang")
    tab.locator(".found a").first.wait_for()
    assert [x for x in asked if "pagefind" in x]
    tab.close()


def test_search_goes_by_keys_and_its_focus_is_seen(visit):
    tab = visit("index.html")
    tab.keyboard.press("/")
    field = tab.locator(".sidebar-search")
    assert field.evaluate("x => x === document.activeElement")
    assert outline(field) >= 2
    tab.keyboard.type("hang")
    first = tab.locator(".found a").first
    first.wait_for()
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.closest('.found') !== null")
    assert outline(tab.locator(":focus")) >= 2
    check_barriers(tab)


def test_escape_closes_what_was_found(visit):
    tab = visit("index.html")
    assert look_for(tab, "hang")
    tab.locator(".found a").first.focus()
    tab.keyboard.press("Escape")
    assert not tab.locator(".found").is_visible()
    assert tab.locator(".sidebar-search").evaluate("x => x === document.activeElement")


def test_the_search_page_shows_what_its_address_asks_for(visit):
    tab = visit("search.html?q=set_epoch")
    tab.locator("#search-results a", has_text=title("2_multigpu")).first.wait_for()
    tab.locator(".search input").fill("")
    tab.locator("#search-results ol:empty").wait_for(state="attached")


def test_a_page_opened_from_a_file_searches_the_chapters(browser, site):
    tab = browser.new_page()
    tab.goto(f"{(site / 'search.html').as_uri()}?q=hangs")
    tab.locator("#search-results a", has_text=title("it_hangs")).first.wait_for()
    tab.close()


def test_without_javascript_the_search_says_so(visit):
    tab = visit("search.html", java_script_enabled=False)
    assert tab.get_by_text("The search needs JavaScript").is_visible()
    assert not tab.locator(".search form").is_visible()


# The theme


def pixel(tab, element, x=20, y=4):
    """The colour of a point of an element, as it is on the screen."""
    box = element.bounding_box()
    clip = {"x": box["x"] + x, "y": box["y"] + y, "width": 1, "height": 1}
    png = tab.screenshot(clip=clip)
    data = b"".join(x for kind, x in chunks(png) if kind == b"IDAT")
    return tuple(zlib.decompress(data)[1:4])


@pytest.mark.parametrize("system", ["light", "dark"])
def test_pictures_follow_the_switch(visit, system):
    """And not the system's colours, where somebody has chosen others."""
    tab = visit("theory.html", color_scheme=system)
    picture = tab.locator("article p > img").first
    picture.scroll_into_view_if_needed()
    seen = {}
    for _ in range(3):
        tab.locator(".theme-toggle-content button").evaluate("x => x.click()")
        theme = tab.locator("body").get_attribute("data-theme")
        tab.evaluate(TWO_FRAMES)
        seen[theme] = sum(pixel(tab, picture)) > 3 * 128
    assert seen == {"light": True, "dark": False, "auto": system == "light"}


def test_a_link_within_a_page_jumps_and_back_finds_the_place(visit):
    tab = visit("2_multigpu.html")
    assert (
        tab.evaluate("getComputedStyle(document.documentElement).scrollBehavior")
        == "auto"
    )
    tab.evaluate("scrollTo(0, 700)")
    tab.evaluate(TWO_FRAMES)
    link = tab.locator(".toc-drawer a").last
    link.evaluate("x => x.click()")
    assert tab.evaluate("scrollY") > 2000
    tab.go_back()
    assert tab.evaluate("scrollY") == 700


def test_tables_fit_on_a_desktop(visit, address):
    tab = visit("index.html")
    for name in sum(GROUPS.values(), []):
        tab.goto(f"{address}{name}.html")
        too_wide = tab.evaluate(
            "[...document.querySelectorAll('.table-wrapper')].filter((x) =>"
            " x.scrollWidth > x.clientWidth).map((x) => x.innerText.slice(0, 60))"
        )
        assert not too_wide, name


@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["desktop", "phone"])
def test_code_is_large_enough_to_read(visit, address, viewport):
    tab = visit("index.html", viewport=viewport)
    for name in sum(GROUPS.values(), ["index"]):
        tab.goto(f"{address}{name}.html")
        sizes = tab.evaluate(
            "[...document.querySelectorAll('article :is(pre, pre *, code)')]"
            ".map((x) => parseFloat(getComputedStyle(x).fontSize))"
        )
        assert min(sizes, default=12) >= 12, name


GROUNDS = ["#ffffff", "#f8f9fb", "#efeff4"], ["#131416", "#1a1c1e", "#1e2124"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_brand_can_be_read_on_every_ground(scheme):
    conf = runpy.run_path(str(ROOT / "website" / "conf.py"))
    colours = conf["html_theme_options"][f"{scheme}_css_variables"]
    own = [colours[f"color-step-{i}"] for i in (1, 2, 3)] + [colours["color-bar"]]
    for kind in ("primary", "content", "visited"):
        ink = channels(colours[f"color-brand-{kind}"])
        for ground in GROUNDS[scheme == "dark"] + own:
            assert contrast_ratio(ink, channels(ground)) >= 4.5, (kind, ground)


def channels(colour):
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def test_a_phone_says_that_a_picture_scrolls(visit):
    tab = visit("theory.html", viewport=PHONE)
    box = tab.locator("article p:has(> img)").first
    said = "x => getComputedStyle(x, '::before').content"
    assert "scrolls" in box.evaluate(said)
    assert box.evaluate("x => x.scrollWidth > x.clientWidth")
    tab.set_viewport_size(WIDE)
    assert box.evaluate(said) == "none"
    assert box.evaluate("x => x.scrollWidth <= x.clientWidth")


def test_print_is_for_a4_and_keeps_blocks_together(visit, site):
    tab = visit("2_multigpu.html", color_scheme="dark")
    tab.emulate_media(media="print")
    for part in (".sidebar-drawer", ".copybtn", ".theme-toggle", ".related-pages"):
        assert not tab.locator(f"{part} >> nth=0").is_visible(), part
    assert tab.evaluate("getComputedStyle(document.body).colorScheme") == "light"
    inside = "x => getComputedStyle(x).breakInside"
    assert tab.locator("article pre").first.evaluate(inside) == "avoid"
    data = tab.pdf(prefer_css_page_size=True)
    (width, height), *_ = re.findall(rb"/MediaBox ?\[0 0 ([\d.]+) ([\d.]+)\]", data)
    assert (round(float(width)), round(float(height))) == (595, 842)  # A4 in points


BROKEN_WORDS = """() => {
    const broken = [], range = document.createRange();
    for (const pre of document.querySelectorAll(".highlight-diff pre")) {
        const walker = document.createTreeWalker(pre, NodeFilter.SHOW_TEXT);
        for (let text; (text = walker.nextNode()); )
            for (const word of text.data.matchAll(/\\w+/g)) {
                range.setStart(text, word.index);
                range.setEnd(text, word.index + word[0].length);
                const tops = [...range.getClientRects()].map((x) => x.top);
                if (new Set(tops).size > 1) broken.push(word[0]);
            }
    }
    return broken;
}"""


@pytest.mark.parametrize("width", [1920, 1280, 390])
def test_no_output_and_no_diff_is_cut(visit, address, width):
    """A line goes on below its beginning, indented, and is copied as one line."""
    tab = visit("index.html", viewport={"width": width, "height": 900})
    for name in sum(GROUPS.values(), ["index"]):
        tab.goto(f"{address}{name}.html")
        boxes = tab.locator("article :is(.highlight-console, .highlight-diff) pre")
        cut = boxes.evaluate_all(
            "all => all.filter((x) => x.scrollWidth > x.clientWidth)"
            ".map((x) => x.innerText.slice(0, 60))"
        )
        assert not cut, name
    tab.goto(f"{address}2_multigpu.html")
    row = tab.locator(".highlight-console pre > span", has_text="held-out loss").first
    lefts = row.evaluate(
        """(x) => {
            const range = document.createRange();
            range.selectNodeContents(x);
            return [...range.getClientRects()].map((y) => y.left);
        }"""
    )
    assert min(lefts) == lefts[0]
    if width == PHONE["width"]:
        assert row.bounding_box()["height"] > 30
        assert any(lefts[0] + 10 < x < lefts[0] + 30 for x in lefts)
    box = tab.locator(".highlight-console pre").first
    assert box.inner_text() == box.text_content()


@pytest.mark.parametrize("url", ["index.html", "2_multigpu.html"])
@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["desktop", "phone"])
def test_a_changed_line_has_its_colour_across_the_box(visit, url, viewport):
    tab = visit(url, viewport=viewport)
    grounds = {}
    for kind in ("gd", "gi"):
        ends = tab.locator(f".highlight-diff pre > span:has(> .{kind})").evaluate_all(
            """all => all.map((row) => {
                const box = row.parentElement.getBoundingClientRect();
                const own = row.getBoundingClientRect();
                return [own.left - box.left, box.right - own.right,
                        getComputedStyle(row).backgroundColor];
            })"""
        )
        assert ends
        assert all(abs(x) < 1 and abs(y) < 1 for x, y, _ in ends)
        grounds[kind] = {ground for *_, ground in ends}
    assert [len(x) for x in grounds.values()] == [1, 1]
    assert grounds["gd"] != grounds["gi"]


@pytest.mark.parametrize("url", ["index.html", "2_multigpu.html"])
def test_a_phone_wraps_diffs_but_not_inside_words(visit, url):
    tab = visit(url, viewport=PHONE)
    lines = tab.locator(".highlight-diff pre").evaluate_all(
        "all => all.filter((x) => x.scrollWidth > x.clientWidth).length"
    )
    assert lines == 0
    assert tab.evaluate(BROKEN_WORDS) == []
