"""The site: built with warnings as errors, and looked at in a browser.

Skipped where website/requirements.txt or tests/requirements.txt is not installed; what
needs a browser is skipped where there is no chromium.
"""

import functools
import http.server
import itertools
import posixpath
import re
import shutil
import subprocess
import sys
import threading
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest

pytestmark = pytest.mark.waits  # for a browser

for module in ("sphinx", "furo", "myst_parser"):
    pytest.importorskip(module)
axe = pytest.importorskip("axe_playwright_python.base")
playwright = pytest.importorskip("playwright.sync_api")

from ladder.diffs import changed_lines, hunks  # noqa: E402
from ladder.files import copy_tree  # noqa: E402
from ladder.pages import explanations, page_names, parse  # noqa: E402
from ladder.rungs import EDGES, ROOT, RUNGS, read_lines  # noqa: E402
from tests.contrast import contrast_ratio  # noqa: E402

CHAPTERS = [parse(x) for x in page_names() if x.startswith("docs/")]
DIFFS = {(x.old, x.new) for page in CHAPTERS for x in page.blocks if x.kind == "diff"}
RUNG_PAIRS = list(itertools.permutations(RUNGS, 2))
PAIRS = sorted(DIFFS.union(RUNG_PAIRS))
OLD, NEW = EDGES[0]
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
BUDGET = 300_000  # bytes of a page with all that it loads


SPHINX = [sys.executable, "-m", "sphinx", "-W", "-q", "-c", "website"]


def url_of(old, new):
    names = [x.removesuffix(".py").replace("/", "-") for x in (old, new)]
    return f"side_by_side/{'--'.join(names)}.html"


PAIR = url_of(OLD, NEW)


class Page(HTMLParser):
    """What the tests want to know of a page, read without a browser."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []
        self.text = {"old": "", "new": "", "source": ""}
        self.hunks, self.options = {}, []
        self.pre = self.line = self.hunk = None
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if "id" in attributes:
            self.ids.add(attributes["id"])
            if attributes["id"].startswith("hunk-"):
                self.hunk = int(attributes["id"].removeprefix("hunk-"))
                self.hunks[self.hunk] = {"del": [], "ins": [], "links": []}
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
            if self.hunk and not attributes["href"].startswith("#"):
                self.hunks[self.hunk]["links"].append(attributes["href"])
        elif tag in ("script", "img") and "src" in attributes:
            self.loads.append(attributes["src"])
        elif tag == "link" and attributes["rel"] in ("stylesheet", "icon"):
            self.loads.append(attributes["href"])
        elif tag == "option":
            self.options.append((attributes["value"], "selected" in attributes))
        elif tag == "pre":
            self.pre = attributes.get("class", "source")
        elif tag in ("del", "ins") and self.pre:
            self.line = tag
            self.hunks[self.hunk][tag].append("")

    def handle_endtag(self, tag):
        if tag == "pre":
            self.pre = None
        elif tag == self.line:
            self.line = None
        elif tag == "section":
            self.hunk = None

    def handle_data(self, data):
        if self.pre in self.text:
            self.text[self.pre] += data
        if self.line:
            self.hunks[self.hunk][self.line][-1] += data


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built from clean by the command that the README gives."""
    folder = tmp_path_factory.mktemp("site")
    options = ["-d", folder / "doctrees", "docs", folder / "html"]
    start = time.perf_counter()
    done = subprocess.run([*SPHINX, *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    print(f"built in {time.perf_counter() - start:.1f} s")
    return folder / "html"


@pytest.fixture(scope="module")
def pages(site):
    """{address: Page} of every page."""
    return {str(x.relative_to(site)): Page(x) for x in site.rglob("*.html")}


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def address(site):
    handler = functools.partial(QuietHandler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    chromium = shutil.which("chromium")
    if not chromium:
        pytest.skip("there is no chromium")
    only_here = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu", only_here]
        )
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, address):
    """`visit(url)`: a tab that may print no error and ask for nothing elsewhere."""
    contexts, wrong = [], []

    def watch(request):
        if not request.url.startswith((address, "data:")):
            wrong.append(request.url)

    def tell(message):
        if message.type == "error":
            wrong.append(f"{message.location['url']}: {message.text}")

    def open_tab(url, **options):
        contexts.append(browser.new_context(**{"viewport": WIDE} | options))
        tab = contexts[-1].new_page()
        tab.on("console", tell)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", watch)
        tab.goto(address + url)
        return tab

    yield open_tab
    for context in contexts:
        context.close()
    assert not wrong


def content(name):
    return (ROOT / name).read_bytes()


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
        links = [urljoin("side_by_side/", x) for x in hunk["links"]]
        assert {urlsplit(x).path for x in links} <= set(chapters)
        assert links or (old, new) not in RUNG_PAIRS, f"change {number}"
        if number in explained.get((old, new), {}):
            page, _, anchor = explained[old, new][number]
            assert links == [f"{page}.html#{anchor}"]


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


# In a browser


def test_every_other_page_loads_without_errors(pages, visit, address):
    tab = visit("index.html")
    tab.wait_for_url("**/0_intro.html")
    for name in pages:
        if name not in ("index.html", *map(url_of, *zip(*PAIRS, strict=True))):
            assert tab.goto(address + name).ok


def test_the_choice_shows_any_two_rungs(visit):
    tab = visit(PAIR)
    for old, new in RUNG_PAIRS:
        for name, rung in (("old", old), ("new", new)):
            tab.locator(f"select[name={name}]").select_option(label=rung)
        with tab.expect_navigation():
            tab.get_by_role("button", name="Show").press("Enter")
        assert tab.url.endswith("/" + url_of(old, new))
        for side, rung in (("old", old), ("new", new)):
            texts = tab.locator(f".sbs pre.{side}").all_text_contents()
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


def test_the_start_leads_to_the_pairs(pages):
    links = pages["0_intro.html"].links
    assert {*(url_of(*x) for x in EDGES), "side_by_side/index.html"} <= set(links)


def test_the_same_file_twice_is_answered(visit):
    tab = visit(PAIR)
    tab.locator("select[name=new]").select_option(label=OLD)
    tab.get_by_role("button", name="Show").click()
    assert tab.locator(".picker [role=status]").inner_text()
    assert tab.url.endswith(PAIR)


def test_folds_open_by_key_and_all_at_once(visit):
    tab = visit(PAIR)
    folds = tab.locator("details")
    assert folds.count() > 1
    assert tab.locator("details[open]").count() == 0
    folds.first.locator("summary").focus()
    tab.keyboard.press("Enter")
    assert folds.first.locator(".new").is_visible()
    tab.get_by_role("button", name="Unfold all").press("Enter")
    assert tab.locator("details[open]").count() == folds.count()
    tab.get_by_role("button", name="Fold all").press("Enter")
    assert tab.locator("details[open]").count() == 0


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


KINDS = ["0_intro.html", "2_multigpu.html", PAIR, "side_by_side/index.html"]
KINDS += [f"source/{NEW}.html", "search.html"]

# site.js looks at what scrolls sideways once a new width has been drawn.
TWO_FRAMES = """() => new Promise((done) =>
    requestAnimationFrame(() => requestAnimationFrame(done)))"""


@pytest.mark.parametrize("url", KINDS)
def test_no_barrier_is_found(visit, url):
    """By axe-core, unfolded. The colours are the same on a desktop and on a phone."""
    tab = visit(url)
    tab.evaluate("for (const x of document.querySelectorAll('details')) x.open = true")
    tab.add_script_tag(path=axe.AXE_FILE_PATH)
    for viewport, scheme in ((WIDE, "light"), (PHONE, "dark")):
        tab.set_viewport_size(viewport)
        tab.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        tab.evaluate(TWO_FRAMES)
        result = tab.evaluate(
            "tags => axe.run({runOnly: tags, resultTypes: ['violations']})", TAGS
        )
        assert result["passes"]
        found = [
            (x["id"], node["target"], node["failureSummary"])
            for x in result["violations"]
            for node in x["nodes"]
        ]
        assert not found, f"{viewport['width']} pixels, {scheme}: {found[:3]}"


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
    old, new = [both.locator(x).bounding_box() for x in (".old", ".new")]
    assert old["x"] == new["x"]
    assert old["y"] + old["height"] <= new["y"]
    signs = "x => getComputedStyle(x, '::after').content"
    assert tab.locator("del").first.evaluate(signs) == '"-"'
    assert tab.locator("ins").first.evaluate(signs) == '"+"'


@pytest.mark.parametrize("url", KINDS)
def test_a_phone_scrolls_no_page_sideways(visit, url):
    tab = visit(url, viewport=PHONE)
    widest = """Math.max(...["article", ".content", "html"].map((x) =>
        document.querySelector(x).scrollWidth))"""
    assert tab.evaluate(widest) <= PHONE["width"]


@pytest.mark.parametrize("width", [1280, 1440])
def test_a_desktop_shows_88_columns_twice(visit, width):
    tab = visit(PAIR, viewport={"width": width, "height": 900})
    lines = tab.locator(".hunk .new [data-n]")
    one_line = lines.first.bounding_box()["height"]
    lines.first.evaluate("x => { x.textContent = 'x'.repeat(88) }")
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
    folds = tab.locator("details")
    tab.emulate_media(media="print")
    assert folds.first.locator(".new").bounding_box()["height"] > 0
    assert len(tab.evaluate(VISIBLE_LINES)) > len(read_lines(OLD))
    for part in (".sidebar-drawer", ".picker", ".tools", ".steps >> nth=0"):
        assert not tab.locator(part).is_visible()
    ink = "x => getComputedStyle(x).color"
    assert tab.locator(".names").evaluate(ink) == "rgb(0, 0, 0)"
    assert not tab.locator(".skip-to-content").is_visible()
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.locator("details[open]").count() == folds.count()
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert tab.locator("details[open]").count() == 0


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
    tab.locator("summary").first.click()
    assert tab.locator("details").first.locator(".new").is_visible()
    assert tab.locator("details .old").first.is_visible()


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
