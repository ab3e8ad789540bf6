"""The site: built with warnings as errors, and looked at in a browser.

Skipped where tools/site/requirements.txt or tests/requirements.txt is not installed, or
where there is no chromium. test_side_by_side.py tests the pages of two scripts.
"""

import html
import re
from urllib.parse import quote, unquote, urljoin, urlsplit

import pytest

from tests.helpers.site import PAIR, PHONE, WIDE, check_barriers
from tools.site.pages import READING_ORDER

pytestmark = pytest.mark.waits  # for a browser


def attributes(text, name):
    values = re.findall(rf'<[^>]* {name}="([^"]*)"', text)
    return [*map(html.unescape, values)]


def test_every_link_leads_somewhere(site):
    """And no id stands twice on a page."""
    texts = {}
    for path in site.rglob("*.html"):
        texts[str(path.relative_to(site))] = path.read_text()
    ids = {name: attributes(text, "id") for name, text in texts.items()}
    for name, its_ids in ids.items():
        assert len(its_ids) == len({*its_ids}), name
    del texts["404.html"]  # its links begin at the site's address
    for name, text in texts.items():
        for link in {*attributes(text, "href")}:
            url = urlsplit(urljoin(name, link))
            target = unquote(url.path)
            if not url.scheme:
                assert (site / target).is_file(), f"{name}: {link}"
                if url.fragment and target in ids:
                    assert unquote(url.fragment) in ids[target], f"{name}: {link}"


def test_every_page_names_the_one_before_and_the_next(pages):
    before = {}
    for name in READING_ORDER:
        boxes = pages(f"{name}.html").select(".ends > p")
        before[name], following = [box.a["href"] for box in boxes]
        assert before[name] != following, name
        assert not boxes[1].get_text().rstrip().endswith("."), name
    assert before["0_intro"] == "index.html"
    assert before["5_minGPT"] == "4_multinode.html"
    assert before["fine_tune"] == "slurm.html"


# In a browser

NAMES = [f"{name}.html" for name in READING_ORDER]
KINDS = [
    "index.html",
    "2_multigpu.html",
    PAIR,
    "side_by_side/index.html",
    "source/multigpu.py.html",
    "search.html?q=set_epoch",
]


# What is wrong on a phone, once site.js has looked at what scrolls sideways there.
ON_A_PHONE = """async () => {
    await new Promise((done) =>
        requestAnimationFrame(() => requestAnimationFrame(done)));
    const all = (selector) => [...document.querySelectorAll(selector)];
    const style = (x, part) => getComputedStyle(x, part);
    const wrong = {
        "scrolls sideways": all("article, .content, html")
            .filter((x) => x.scrollWidth > innerWidth),
        "is cut without a word":
            all("article :is(.highlight-diff pre, .table-wrapper)")
            .filter((x) => x.scrollWidth > x.clientWidth
                && style(x, "::before").content === "none"),
        "is cut": all(".highlight-console pre:not(.columns)")
            .filter((x) => x.scrollWidth > x.clientWidth),
        "is an option that wraps": all("article code .pre")
            .filter((x) => /^--?\\w/.test(x.innerText) && x.innerText.length < 30
                && x.getClientRects().length > 1),
        "moves the text when it comes": all("article img")
            .filter((x) => !x.getAttribute("height")),
        // It needs a narrow form.
        "has letters that a phone shrinks": all("article img")
            .filter((x) => x.getAttribute("width") > 480 && !x.closest("picture")),
        // A row of a diff is one element; Pygments' pieces stand on lines of their own.
        "is a piece": all(".highlight-diff pre :is(.gd, .gi, .gh, .gu)"),
    };
    return Object.entries(wrong).flatMap(([what, found]) =>
        found.map((x) => `${x.src || x.innerText.slice(0, 60)} ${what}`));
}"""
SCROLLS = "all => all.some((x) => x.scrollWidth > x.clientWidth)"


def test_no_page_has_an_error_a_barrier_or_scrolls_a_phone_sideways(visit, address):
    """Nor does it cut a diff or an output, wrap an option, scroll a table without a
    word, or move its text when a picture comes."""
    tab = visit("index.html")
    for name in [*KINDS, *NAMES]:
        assert tab.goto(address + name).ok
        tab.set_viewport_size(PHONE)
        assert tab.evaluate(ON_A_PHONE) == [], name
        tab.set_viewport_size(WIDE)
        assert not tab.locator(".table-wrapper").evaluate_all(SCROLLS), name
        if name in KINDS:
            check_barriers(tab)


def test_a_heading_says_what_happens_without_its_change(visit, address):
    tab = visit("2_multigpu.html")
    assert tab.locator(".mistakes li").count() == 3
    tag = tab.locator("#shuffle-anew-in-every-epoch > h2 + p")
    assert tag.inner_text() == "no error, wrong result"
    tab.goto(f"{address}3_fault_tolerance.html")
    assert tab.locator(".mistakes .stops").inner_text() == "stops with an error"


def test_a_whole_program_is_folded(visit):
    tab = visit("shard_your_model.html")
    box = tab.locator(".highlight-python", has_text="class Transformer")
    height = box.bounding_box()["height"]
    tab.locator(".unfold").click()
    assert box.bounding_box()["height"] > 5 * height
    assert not tab.locator(".unfold").count()


SEARCHES = """
batchnorm | convert_your_script.html#train-with-batch-normalization
class weights | make_it_real.html#use-class-weights
Colab | make_it_real.html#try-two-gpus
dataloader workers | real_job.html#load-the-data-in-workers
find_unused_parameters | troubleshooting.html#expected-to-have-finished
flash attention | 8_slower.html
gradient clipping | real_job.html#clip-the-gradients
gradient clipping FSDP | shard_your_model.html#avoid-what-goes-wrong
IterableDataset | 8_slower.html#share-out-an-iterabledataset
Kaggle | make_it_real.html#try-two-gpus
loss spikes | troubleshooting.html#the-loss-spikes
memory leak | troubleshooting.html#cuda-out-of-memory
multigpu.py | 2_multigpu.html
NCCL_P2P_DISABLE | nccl.html
NCCL timeout | nccl.html
ready only once | troubleshooting.html#expected-to-mark
record_memory_history | make_it_real.html
resume dataloader | preemptible.html#leave-out
slurm container | slurm.html
sparse gradients | adapt_your_script.html
warmup | real_job.html#change-the-learning-rate
"""


def test_a_search_finds_the_right_place_first(visit, address):
    tab = visit("index.html")
    for row in SEARCHES.strip().splitlines():
        query, place = row.split(" | ")
        tab.goto(f"{address}search.html?q={quote(query)}")
        first = f"#search-results li:first-child:has(> a[href^='{place}'])"
        tab.wait_for_selector(first, timeout=10_000)  # results move as pages are read
    tab.goto(f"{address}search.html")
    tab.get_by_role("link", name="gradient clipping").click()  # an example
    results = tab.locator("#search-results li:has(.context)")
    results.nth(4).wait_for()
    for result in results.all()[:4]:
        marks = "".join(result.locator(".highlighted").all_inner_texts()).lower()
        assert "clip" in marks, result.inner_text()
        assert "gradient" in marks, result.inner_text()
