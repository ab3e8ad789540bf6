"""The site: built with warnings as errors, and looked at in a browser.

Skipped where tools/site/requirements.txt or tests/requirements.txt is not installed, or
where there is no chromium. test_side_by_side.py tests the pages of two scripts.
"""

import html
import os
import posixpath
import re
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest

from tests.site_fixtures import NEW, PAIR, PHONE, build_site, check_barriers, url_of
from tools.diffs import changed_lines
from tools.files import copy_tree
from tools.pages import GROUPS, explanations, parse, right_output, title
from tools.scripts import EDGES, SCRIPTS, read_lines, summary

pytestmark = pytest.mark.waits  # for a browser

NAMES = sum(GROUPS.values(), [])


# Read without a browser


def test_a_wrong_marker_ends_the_build_with_one_line(tmp_path):
    copy_tree(tmp_path / "copy")
    with (tmp_path / "copy/docs/2_multigpu.md").open("a") as page:
        page.write("\n<!-- end -->\n")
    _, done = build_site(tmp_path, tmp_path / "copy")
    assert done.returncode == 2
    assert re.fullmatch(r"\S+ error: docs/2_multigpu.md:\d+: .*\n", done.stderr)


def attributes(text, name):
    return [html.unescape(x) for x in re.findall(rf'<[^>]* {name}="([^"]*)"', text)]


def loads_of(text):
    tags = re.findall(r"<(?:script|img|link rel=.(?:stylesheet|icon))\b[^>]*>", text)
    return attributes("".join(tags), "src") + attributes("".join(tags), "href")


def test_every_link_leads_somewhere(site):
    """And nothing is loaded from elsewhere, and no id stands twice on a page."""
    texts = {str(x.relative_to(site)): x.read_text() for x in site.rglob("*.html")}
    ids = {name: attributes(text, "id") for name, text in texts.items()}
    known = {name: set(found) for name, found in ids.items()}
    for name, text in texts.items():
        assert len(ids[name]) == len(known[name]), name
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
        loads = loads_of(text)
        assert loads
        for load in loads:
            assert not urlsplit(load).netloc, f"{name}: {load}"
            assert (site / Path(name).parent / urlsplit(load).path).is_file(), load
    for path in site.rglob("*.css"):
        assert not re.search(r"url\((http|//)", path.read_text()), path


def test_the_sidebar_has_every_page_in_its_group_by_its_own_name(pages):
    tree = pages("0_intro.html").find(class_="sidebar-tree")
    first, *lists = tree.find_all("ul")
    top = [x["href"] for x in first.find_all("a")]
    assert top == ["index.html", "side_by_side/index.html"]
    assert [x.get_text() for x in tree.find_all(class_="caption")] == list(GROUPS)
    shown = [[x.get_text() for x in y.find_all("a")] for y in lists]
    assert shown == [[title(x) for x in names] for names in GROUPS.values()]


def test_the_start_page_shows_what_the_repository_has(pages):
    page = pages("index.html").find("article")
    assert page.h1.get_text() == read_lines("README.md")[0].removeprefix("# ")
    assert "python multigpu.py 50 10" in page.find(class_="highlight-sh").get_text()
    links = [(x["href"], x.get_text()) for x in page.find_all("a")]
    for (parent, child), places in explanations().items():
        if child in SCRIPTS:
            size = len(changed_lines(parent, child))
            assert (url_of(parent, child), f"{size} changed lines") in links
            for chapter in {name for name, _, _ in places.values()}:
                assert (f"{chapter}.html", title(chapter)) in links
    texts = [" ".join(x.get_text().split()) for x in page.find_all("li")]
    for name in SCRIPTS:
        short, what = name.removeprefix("variants/"), summary(name)
        assert any(short in x and what in x for x in texts), name
    assert page.find(class_="primary")["href"] == PAIR
    diff = [x.get_text() for x in page.find_all(class_="highlight-diff")]
    lines = [x.replace(" ", "") for x in changed_lines(*EDGES[0])]
    shown = [x.replace(" ", "") for text in diff for x in text.strip().split("\n")]
    assert len(shown) > 4 and set(shown) <= set(lines)


def test_a_link_to_a_test_leads_to_its_lines(pages):
    found = 0
    for name in NAMES:
        for link in pages(f"{name}.html").select('article a[href^="source/tests/"]'):
            text = link.get_text()
            if text.startswith("test_"):
                page, _, number = link["href"].partition("#L")
                file = page.removeprefix("source/").removesuffix(".html")
                assert f"def {text}(" in read_lines(file)[int(number) - 1], text
                found += 1
    assert found > 50


def printed(name, block):
    """What the Markdown shows in the block's fence."""
    lines = read_lines(f"docs/{name}.md")[block.line : block.end]
    start = lines.index("```console")
    return lines[start + 1 : lines.index("```", start)]


def test_a_wrong_output_flips_to_the_right_one_that_the_chapter_has(pages):
    found = 0
    for name in NAMES:
        page = parse(f"docs/{name}.md")
        explaining = {x.anchor for x in page.blocks if x.hunks}
        pairs = [(x, right_output(page, x)) for x in page.blocks if x.faults]
        rights = [y for _, y in pairs]
        pairs = [
            (x, y) for x, y in pairs if y and x.anchor in explaining and x not in rights
        ]
        flips = pages(f"{name}.html").select("article .flip")
        assert len(flips) == len(pairs), name
        for flip, (wrong, right) in zip(flips, pairs, strict=True):
            assert flip.find_parent("section")["id"] == wrong.anchor
            for kind, block in {".wrong": wrong, ".right": right}.items():
                shown = flip.select_one(f"pre{kind}").get_text()
                assert shown.strip("\n").split("\n") == printed(name, block)
            assert flip.select(".wrong mark"), wrong.text
            found += 1
    assert found > 5


def test_a_published_site_names_its_addresses(tmp_path):
    """Built as the workflow builds it."""
    bs4 = pytest.importorskip("bs4")
    address = "https://example.org/some/where"
    known = {"SITE_URL": address, "REPOSITORY_URL": "https://example.org/one/name"}
    folder, done = build_site(tmp_path, env=os.environ | known)
    assert done.returncode == 0, done.stderr
    for name in ("index.html", "2_multigpu.html"):
        page = bs4.BeautifulSoup((folder / name).read_text(), "html.parser")
        tags = {x.get("property"): x.get("content") for x in page.find_all("meta")}
        assert len(tags["og:title"]) > 10 and len(tags["og:description"]) > 40
        assert tags["og:url"].startswith(address)
        assert tags["og:image"] == f"{address}/_static/preview.png"
        links = [x["href"] for x in page.select(".repository a")]
        assert links[0] == known["REPOSITORY_URL"] and links[1].startswith(links[0])
    sitemap = (folder / "sitemap.txt").read_text().split()
    assert f"{address}/2_multigpu.html" in sitemap and f"{address}/{PAIR}" in sitemap
    start = (folder / "index.html").read_text()
    start = re.sub("<[^>]*>", "", start)
    assert "git clone https://example.org/one/name\ncd name\n" in start
    text = (folder / "404.html").read_text()
    links = attributes(text, "href") + loads_of(text)
    own = [urlsplit(x).path for x in links if x.startswith("/some/where/")]
    assert len(own) > 20
    for path in own:
        assert (folder / path.removeprefix("/some/where/")).is_file(), path


# In a browser

KINDS = ["index.html", "2_multigpu.html", PAIR, "side_by_side/index.html"]
KINDS += [f"source/{NEW}.html", "search.html?q=set_epoch"]


def test_no_page_has_an_error_a_barrier_or_scrolls_a_phone_sideways(visit, address):
    tab = visit("index.html")
    widest = """() => Math.max(...["article", ".content", "html"].map((x) =>
        document.querySelector(x).scrollWidth))"""
    for name in [*KINDS, *(f"{x}.html" for x in NAMES)]:
        assert tab.goto(address + name).ok
        tab.set_viewport_size(PHONE)
        assert tab.evaluate(widest) <= PHONE["width"], name
        if name in KINDS:
            check_barriers(tab)


def test_no_output_and_no_diff_is_cut(visit, address):
    for width in (1280, PHONE["width"]):
        tab = visit("index.html", viewport={"width": width, "height": 900})
        for name in NAMES:
            tab.goto(f"{address}{name}.html")
            boxes = tab.locator("article :is(.highlight-console, .highlight-diff) pre")
            cut = boxes.evaluate_all(
                "all => all.filter((x) => x.scrollWidth > x.clientWidth)"
                ".map((x) => x.innerText.slice(0, 60))"
            )
            assert not cut, name


def test_the_drawer_opens_by_key(visit):
    tab = visit("2_multigpu.html", viewport=PHONE)
    link = tab.locator(".sidebar-tree a").first
    assert not link.is_visible()
    tab.locator(".nav-overlay-icon").press("Enter")
    assert link.is_visible()
    tab.keyboard.press("Escape")
    tab.wait_for_function("!document.getElementById('__navigation').checked")


def test_a_wrong_address_is_answered_from_any_depth(browser, address):
    tab = browser.new_page()
    failed = []
    tab.on("response", lambda x: x.status == 404 and failed.append(x.url))
    wrong = f"{address}one/two/three.html"
    tab.goto(wrong, wait_until="networkidle")
    assert failed == [wrong]
    tab.get_by_role("link", name="The start page").click()
    assert tab.url == f"{address}index.html"
    tab.close()


def test_a_button_copies_the_commands_alone(visit):
    tab = visit("2_multigpu.html")
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    box = tab.locator(".highlight-console", has_text="epoch 1/3").first
    box.locator(".copybtn").press("Enter")
    copied = tab.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("python ") and "epoch" not in copied


def test_search_finds_what_chapters_say_and_show(visit):
    """From the field of any page, by words and by names in code."""
    for start in (f"source/{NEW}.html", PAIR):
        tab = visit(start)
        field = tab.locator("[name=q]:visible")
        field.fill("set_epoch")
        field.press("Enter")
        tab.locator("#search-results a", has_text=title("2_multigpu")).first.wait_for()


@pytest.mark.parametrize("query", ["OOM", "out of memory", "memory cuda"])
def test_the_heading_with_all_words_is_found_first(browser, site, query):
    """Also by keys, and on pages that are opened from a file."""
    tab = browser.new_page()
    tab.goto(f"{(site / 'search.html').as_uri()}?q={query}")
    tab.locator("#search-results a").first.wait_for()
    tab.keyboard.press("ArrowDown")
    assert tab.evaluate("document.activeElement.hash") == "#cuda-out-of-memory"
    tab.close()


def test_each_page_has_a_description_of_its_own(site):
    found = {}
    for path in site.rglob("*.html"):
        (text,) = re.findall(
            r'<meta name="description" content="([^"]+)"', path.read_text()
        )
        assert len(text) > 20 and found.setdefault(text, path) == path
    assert any(x.startswith("single_gpu.py trains on one device") for x in found)
