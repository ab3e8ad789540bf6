"""The site: built with warnings as errors, and looked at in a browser.

Skipped where tools/site/requirements.txt or tests/requirements.txt is not installed, or
where there is no chromium. test_side_by_side.py tests the pages of two scripts.
"""

import html
import posixpath
import re
from urllib.parse import unquote, urljoin, urlsplit

import pytest

from tests.helpers.site_fixtures import (
    NEW,
    PAIR,
    PHONE,
    TWO_FRAMES,
    WIDE,
    check_barriers,
)
from tools.site.pages import READING_ORDER

pytestmark = pytest.mark.waits  # for a browser


def attributes(text, name):
    values = re.findall(rf'<[^>]* {name}="([^"]*)"', text)
    return [*map(html.unescape, values)]


def test_every_link_leads_somewhere(site):
    """And no id stands twice on a page."""
    texts = {}
    known = {}
    for path in site.rglob("*.html"):
        name = str(path.relative_to(site))
        texts[name] = path.read_text()
        ids = attributes(texts[name], "id")
        known[name] = {*ids}
        assert len(known[name]) == len(ids), name
    for name, text in texts.items():
        if name == "404.html":  # its links begin at the site's address
            continue
        for link in set(attributes(text, "href")):
            url = urlsplit(urljoin(name, link))
            if url.scheme:
                continue
            target = posixpath.normpath(unquote(url.path)) if url.path else name
            assert (site / target).is_file(), f"{name}: {link}"
            if url.fragment and target in known:
                assert unquote(url.fragment) in known[target], f"{name}: {link}"


# In a browser

NAMES = [f"{name}.html" for name in READING_ORDER]
KINDS = [
    "index.html",
    "2_multigpu.html",
    PAIR,
    "side_by_side/index.html",
    f"source/{NEW}.html",
    "search.html?q=set_epoch",
]


def test_no_page_has_an_error_a_barrier_or_scrolls_a_phone_sideways(visit, address):
    """Nor does it cut a diff, wrap an output or an option, scroll a table without a
    word, or move its text when a picture comes."""
    tab = visit("index.html")
    widest = """() => Math.max(...["article", ".content", "html"].map((x) =>
        document.querySelector(x).scrollWidth))"""
    cut = """all => all.filter((x) => x.scrollWidth > x.clientWidth
        && getComputedStyle(x, "::before").content === "none")
        .map((x) => x.innerText.slice(0, 60))"""
    wraps = "all => all.some((x) => getComputedStyle(x).whiteSpace !== 'pre')"
    broken = """all => all.filter((x) => /^--?\\w/.test(x.innerText)
        && x.innerText.length < 30 && x.getClientRects().length > 1)
        .map((x) => x.innerText)"""
    jumps = "all => all.some((x) => !x.getAttribute('height'))"
    # A phone would shrink its letters: it needs a narrow form.
    shrinks = """all => all.filter((x) => x.getAttribute("width") > 480
        && !x.closest("picture")).map((x) => x.src)"""
    # A row of a diff is one element; Pygments' would be pieces, each on its own line.
    pieces = ".highlight-diff pre :is(.gd, .gi, .gh, .gu)"
    for name in [*KINDS, *NAMES]:
        assert tab.goto(address + name).ok
        tab.set_viewport_size(PHONE)
        tab.evaluate(TWO_FRAMES)
        assert tab.evaluate(widest) <= PHONE["width"], name
        boxes = tab.locator("article :is(.highlight-diff pre, .table-wrapper)")
        assert not boxes.evaluate_all(cut), name
        assert not tab.locator(".highlight-console pre").evaluate_all(wraps), name
        assert not tab.locator("article code .pre").evaluate_all(broken), name
        assert not tab.locator("article img").evaluate_all(jumps), name
        assert not tab.locator("article img").evaluate_all(shrinks), name
        assert not tab.locator(pieces).count(), name
        tab.set_viewport_size(WIDE)
        wide = "all => all.some((x) => x.scrollWidth > x.clientWidth)"
        assert not tab.locator(".table-wrapper").evaluate_all(wide), name
        if name in KINDS:
            check_barriers(tab)
