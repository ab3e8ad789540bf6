"""What the tests of the site share beside their fixtures (site_fixtures.py).

Skipped where website/requirements.txt or tests/requirements.txt is not installed.
"""

import itertools
from html.parser import HTMLParser

import pytest

for module in ("sphinx", "furo", "myst_parser", "playwright.sync_api"):
    pytest.importorskip(module)
axe = pytest.importorskip("axe_playwright_python.base")

from ladder.pages import page_names, parse  # noqa: E402
from ladder.rungs import EDGES, ROOT, RUNGS  # noqa: E402
from tests.site_fixtures import PHONE, WIDE  # noqa: E402

CHAPTERS = [parse(x) for x in page_names() if x.startswith("docs/")]
DIFFS = {(x.old, x.new) for page in CHAPTERS for x in page.blocks if x.kind == "diff"}
RUNG_PAIRS = list(itertools.permutations(RUNGS, 2))
PAIRS = sorted(DIFFS.union(RUNG_PAIRS))
OLD, NEW = EDGES[0]
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
BUDGET = 300_000  # bytes of a page with all that it loads


def url_of(old, new):
    names = [x.removesuffix(".py").replace("/", "-") for x in (old, new)]
    return f"side_by_side/{'--'.join(names)}.html"


PAIR = url_of(OLD, NEW)


class Page(HTMLParser):
    """What the tests want to know of a page, read without a browser."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.id_list, self.links, self.loads = set(), [], [], []
        self.text = {"old": "", "new": "", "source": ""}
        self.hunks, self.options = {}, []
        self.pre = self.line = self.hunk = self.paragraph = self.why = None
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if "id" in attributes:
            self.ids.add(attributes["id"])
            self.id_list.append(attributes["id"])
            if attributes["id"].startswith("hunk-"):
                self.hunk = int(attributes["id"].removeprefix("hunk-"))
                kinds = "del", "ins", "chapters", "whys", "see"
                self.hunks[self.hunk] = {kind: [] for kind in kinds}
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
            if self.paragraph in ("chapter", "see"):
                kind = "chapters" if self.paragraph == "chapter" else "see"
                self.hunks[self.hunk][kind].append(attributes["href"])
        elif tag in ("script", "img") and "src" in attributes:
            self.loads.append(attributes["src"])
        elif tag == "link" and attributes["rel"] in ("stylesheet", "icon"):
            self.loads.append(attributes["href"])
        elif tag == "option":
            self.options.append((attributes["value"], "selected" in attributes))
        elif tag == "p":
            self.paragraph = attributes.get("class")
        elif tag == "details" and attributes.get("class") == "why":
            self.why = True
            self.hunks[self.hunk]["whys"].append("")
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
        elif tag == "p":
            self.paragraph = None
        elif tag == "details":
            self.why = None

    def handle_data(self, data):
        if self.pre in self.text:
            self.text[self.pre] += data
        if self.why:
            self.hunks[self.hunk]["whys"][-1] += data
        if self.line:
            self.hunks[self.hunk][self.line][-1] += data


def content(name):
    return (ROOT / name).read_bytes()


# site.js looks at what scrolls sideways once a new width has been drawn.
TWO_FRAMES = """() => new Promise((done) =>
    requestAnimationFrame(() => requestAnimationFrame(done)))"""


def check_barriers(tab, seen=((WIDE, "light"), (PHONE, "dark"))):
    """By axe-core, unfolded. The colours are the same on a desktop and on a phone."""
    tab.evaluate("for (const x of document.querySelectorAll('details')) x.open = true")
    tab.add_script_tag(path=axe.AXE_FILE_PATH)
    for viewport, scheme in seen:
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
