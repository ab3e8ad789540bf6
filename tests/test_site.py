"""The site: built with warnings as errors, and looked at in a browser.

Skipped where website/requirements.txt or tests/requirements.txt is not installed; what
needs a browser is skipped where there is no chromium. The pages of two scripts side by
side have tests of their own: test_side_by_side.py.
"""

import posixpath
import subprocess
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest

from ladder.files import copy_tree
from ladder.rungs import EDGES, ROOT
from tests.site_fixtures import PHONE, SPHINX
from tests.site_pages import NEW, PAIR, PAIRS, check_barriers, url_of

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
        for link in page.links:
            url = urlsplit(urljoin(name, link))
            if url.scheme:
                continue
            target = posixpath.normpath(unquote(url.path)) if url.path else name
            assert (site / target).is_file(), f"{name}: {link}"
            if url.fragment and target in pages:
                assert unquote(url.fragment) in pages[target].ids, f"{name}: {link}"


def test_nothing_is_loaded_from_elsewhere(pages, site):
    loads = [(name, x) for name, page in pages.items() for x in page.loads]
    assert loads
    for name, load in loads:
        path = urlsplit(load).path
        assert not urlsplit(load).netloc, f"{name}: {load}"
        assert (site / Path(name).parent / path).is_file(), f"{name}: {load}"
    for path in site.rglob("*.css"):
        assert "url(http" not in path.read_text(), path
        assert "url(//" not in path.read_text(), path


def test_every_chapter_is_in_the_sidebar_in_order(pages):
    names = [x.stem for x in (ROOT / "docs").glob("*.md")]
    numbered = sorted(x for x in names if x[0].isdigit())
    order = [*numbered, *sorted(set(names) - set(numbered)), "side_by_side/index"]
    links = [x for x in pages["search.html"].links if not x.startswith(("#", "http"))]
    assert links[-len(order) :] == [f"{x}.html" for x in order]


# In a browser

KINDS = ["0_intro.html", "2_multigpu.html", PAIR, "side_by_side/index.html"]
KINDS += [f"source/{NEW}.html", "search.html"]


def test_every_other_page_loads_without_errors(pages, visit, address):
    tab = visit("index.html")
    tab.wait_for_url("**/0_intro.html")
    for name in pages:
        if name not in ("index.html", *map(url_of, *zip(*PAIRS, strict=True))):
            assert tab.goto(address + name).ok


def test_the_start_leads_to_the_pairs(pages):
    links = pages["0_intro.html"].links
    assert {*(url_of(*x) for x in EDGES), "side_by_side/index.html"} <= set(links)


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
