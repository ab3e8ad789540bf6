"""The figure of docs/predict.md: its JavaScript says what cluster/predict.py says."""

import json
import random
import re
from itertools import accumulate

import pytest

from cluster.predict import Cluster, Job, buckets, judge, predict
from tests.helpers.site import check_barriers, check_picture
from tools.scripts import ROOT

pytestmark = pytest.mark.waits  # for a browser

# Of each slider: what it shows first (2), or all that it can show (3)
SLIDERS = """(part) =>
    Object.fromEntries(FIELDS.map(([name, x]) => [name, x[part]]))"""
LOOK = """([v, width]) => {
    const { sent, memory, ways } = predict(v), [svg, words] = draw(v, width);
    return JSON.stringify({ sent, memory, ways, svg, words });
}"""


# Texts that leave the card on a phone, with the largest values and with each preset.
CUT = """() => {
    const most = Object.fromEntries(FIELDS.map(([name, x]) => [name, x[3].at(-1)]));
    const place = document.querySelector(".draw-one-step div");
    return [most, ...Object.values(PRESETS)].flatMap((values) => {
        place.innerHTML = draw({ ...most, ...values }, 358)[0];
        return [...place.querySelectorAll("text")].filter((x) => {
            const box = x.getBBox();
            return box.x < 8 || box.x + box.width > 350;
        }).map((x) => x.textContent);
    });
}"""

# Of the picture: its height, and the width of each bar, without the legend
BARS = """([v, width]) => {
    const page = new DOMParser().parseFromString(draw(v, width)[0], "text/html");
    const bars = page.querySelectorAll(".weights, .gradients, .optimizer");
    return [page.querySelector("svg").getAttribute("height"),
        [...bars].slice(0, 12).map((x) => +x.getAttribute("width"))];
}"""


def test_bars_have_one_scale_and_the_picture_keeps_its_height(visit):
    tab = visit("predict.html")
    stops = tab.evaluate(SLIDERS, 3)
    chance = random.Random(1)
    heights = set()
    for _ in range(50):
        values = {name: chance.choice(its) for name, its in stops.items()}
        height, widths = tab.evaluate(BARS, [values, 358])
        heights.add(height)
        gb = []
        for _, parts in json.loads(tab.evaluate(LOOK, [values, 358]))["memory"]:
            gb += [*accumulate(parts)][::-1]  # the longest bar is below the others
        scale = widths[0] / gb[0]  # DDP needs the most
        assert widths == pytest.approx([max(1, scale * size) for size in gb], abs=0.2)
    assert len(heights) == 1, heights


def test_it_says_what_predict_says(visit):
    """With 200 random settings: each bucket, each way's step and limit, memory."""
    table = (ROOT / "docs/7_sharding.md").read_text()  # of bytes for a parameter
    row = r"(?m)^\| (?:DDP|ZeRO-1|HSDP|FSDP)\b.* \| ([^|]*) \| [^|]* \|$"
    formulas = re.findall(row, table)
    assert len(formulas) == 4
    tab = visit("predict.html")
    stops = tab.evaluate(SLIDERS, 3)
    del stops["parameters"][-11:]  # with 100,000 buckets each
    chance = random.Random(0)
    for _ in range(200):
        values = {name: chance.choice(its) for name, its in stops.items()}
        gpus = values["gpus"]
        nodes = values["machines"]
        size = 4 * values["parameters"]
        job = Job(
            compute=values["step-ms"] / 1e3,
            backward=2 / 3,
            gradients=size,
            weights=size,
            layers=24,
            accumulate=1,
            bucket=25 * 2**20,
        )
        cluster = Cluster(
            gpus=gpus,
            link=values["gbit"] * 1e9 / 8,
            inside=values["inside"] * 1e9,
            latency=1e-5,
        )
        names = {"W": nodes * gpus, "S": gpus}
        expected = [*buckets(job, job.compute * job.backward, nodes, cluster)]
        expected += [eval(formula, names) * size / 4e9 for formula in formulas]
        shown = json.loads(tab.evaluate(LOOK, [values, 720]))
        found = shown["sent"] + [sum(parts) for _, parts in shown["memory"]]
        for way, (seconds, efficiency, limit) in shown["ways"].items():
            step = predict(way.lower(), job, nodes, cluster)
            its_efficiency, its_limit = judge(step)
            found += [seconds, efficiency]
            expected += [sum(step), its_efficiency]
            assert limit == its_limit, values
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-9, abs=0), values


def test_the_page_holds_the_picture_of_the_usual_job(visit, tmp_path):
    """For readers without JavaScript, and for code hosts."""
    tab = visit("predict.html")
    usual = tab.evaluate(SLIDERS, 2)
    shown = json.loads(tab.evaluate(LOOK, [usual, 720]))
    check_picture("one_step", shown["svg"], tmp_path)
    assert "A step with DDP: each GPU computes" in shown["svg"]
    assert shown["words"].startswith("DDP: 60 % efficient; HSDP would reach 66 %.")
    alt = f"![{shown['words']}](pictures/one_step.svg)"
    assert alt in (ROOT / "docs/predict.md").read_text()
    tab = visit("predict.html", java_script_enabled=False)
    assert tab.locator("img[src$='one_step.svg']").is_visible()


def test_sliders_and_addresses(visit):
    may = ["clipboard-read", "clipboard-write"]
    tab = visit("predict.html#parameters=7e9&gbit=400&gpus=nonsense", permissions=may)
    heading = tab.get_by_role("heading", name="Draw one step", exact=True)
    heading = heading.bounding_box()
    assert 0 < heading["y"] < 100
    figure = tab.locator(".draw-one-step")
    headline = figure.locator("svg .h").text_content()
    assert headline.startswith("DDP does not fit: take HSDP, ")
    assert "DDP needs 112 GB of 40" in figure.text_content()
    assert "gpus=nonsense (takes 1 to 16)" in figure.text_content()
    slider = figure.get_by_role("slider", name="GPU memory")
    slider.press("End")
    assert "not predicted" in figure.text_content()  # ZeRO-1, which fits now
    assert slider.get_attribute("aria-valuetext") == "288 GB"
    status = figure.get_by_role("status").text_content()
    assert status.endswith("Memory: DDP fits; activations come on top.")
    values = "parameters=7e9&step-ms=640&memory-gb=288&machines=8&gpus=8&gbit=400"
    values += "&inside=450"
    assert tab.url.endswith(f"predict.html#{values}")
    tab.goto(tab.url)
    assert figure.get_by_role("status").text_content() == status
    figure.get_by_role("button", name="70B").click()
    assert "parameters=7e10&step-ms=8602&memory-gb=80" in tab.url
    assert "A step with FSDP: each GPU computes" in figure.text_content()
    assert "HSDP would reach 66 % on GPUs with 140 GB" in figure.text_content()
    assert "14 × too large" in figure.text_content()
    figure.get_by_role("button", name="Copy the answer").click()
    copied = tab.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("DDP does not fit: take FSDP, ")
    check_barriers(tab)
    assert not tab.evaluate(CUT)
