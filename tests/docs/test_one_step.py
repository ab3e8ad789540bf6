"""The figure of docs/predict.md: its JavaScript says what cluster/predict.py says."""

import json
import math
import random
import re
from itertools import chain

import pytest

from cluster.predict import Cluster, Job, buckets, judge, predict
from tests.helpers.site_fixtures import check_barriers
from tools.scripts import ROOT

pytestmark = pytest.mark.waits  # for a browser

USUAL = {"parameters": 1.3e9, "step-ms": 640, "memory-gb": 40}
USUAL |= {"machines": 8, "gpus": 8, "gbit": 100}
ON_TOP = "activations come on top"
LOOK = """([v, width]) => {
    const [svg, words] = draw(v, width);
    return JSON.stringify({ ...predict(v), svg, words });
}"""


def inputs(count):
    chance = random.Random(0)
    for _ in range(count):
        powers = [chance.uniform(*x) for x in ((6, 11), (0, 4), (0, 3.6), (-1, 3.5))]
        parameters, ms, machines, gbit = (10**x for x in powers)
        values = round(parameters), ms, chance.randint(8, 288), int(machines)
        yield dict(zip(USUAL, (*values, chance.randint(1, 16), gbit), strict=True))


def same(some, others):
    return all(
        math.isclose(x, y, rel_tol=1e-9) for x, y in zip(some, others, strict=True)
    )


def test_it_says_what_predict_says(visit):
    """On 200 random inputs: each bucket, the step of each way, its limit, memory."""
    table = (ROOT / "docs/7_sharding.md").read_text()  # of bytes for a parameter
    row = r"^\| (DDP|ZeRO-1|HSDP|FSDP)\b.* \| ([^|]*) \| [^|]* \|$"
    formulas = re.findall(row, table, re.M)
    assert len(formulas) == 4
    tab, limits = visit("predict.html"), set()
    for v in [USUAL, *inputs(200)]:
        parameters, ms, _, nodes, gpus, gbit = v.values()
        size = 4 * parameters
        job = Job(ms / 1e3, 2 / 3, size, size, 24, 1, 25 * 2**20)
        cluster = Cluster(gpus, gbit * 1e9 / 8, 450e9, 1e-5, 0, None)
        shown = json.loads(tab.evaluate(LOOK, [v, 720]))
        sent = buckets(job, job.compute * job.backward, nodes, cluster)
        assert same(*map(chain.from_iterable, (shown["sent"], sent))), v
        for way, (*numbers, limit) in shown["ways"].items():
            step = predict(way.lower(), job, nodes, cluster)
            efficiency, expected = judge(step)
            assert same(numbers, [sum(step), efficiency]) and limit == expected, v
            limits.add(limit)
        names = {"W": nodes * gpus, "S": gpus}
        held = {x: eval(y, names.copy()) * parameters / 1e9 for x, y in formulas}
        assert [x for x, _ in shown["memory"]] == [*held]
        assert same([sum(x) for _, x in shown["memory"]], held.values()), v
    assert limits == {"compute", "latency", "bandwidth"}


def test_the_page_holds_the_picture_of_the_usual_job(visit, tmp_path):
    """For readers without JavaScript, and for code hosts."""
    shown = json.loads(visit("predict.html").evaluate(LOOK, [USUAL, 720]))
    css = (ROOT / "tools/site/static/one_step.css").read_text().split("\n\n")[0]
    svg = shown["svg"].replace(">", f"><style>\n{css}\n</style>", 1) + "\n"
    drawn, kept = tmp_path / "one_step.svg", ROOT / "docs/pictures/one_step.svg"
    drawn.write_text(svg)
    assert kept.read_text() == svg, f"stale: cp {drawn} {kept}"
    alt = f"![{shown['words']}](pictures/one_step.svg)"
    assert alt in (ROOT / "docs/predict.md").read_text()
    tab = visit("predict.html", java_script_enabled=False)
    assert tab.locator("img[src$='one_step.svg']").is_visible()


def test_sliders_and_addresses(visit):
    tab = visit("predict.html#parameters=7e9&gbit=400&gpus=nonsense")
    heading = tab.get_by_role("heading", name="Draw one step").bounding_box()
    assert 0 < heading["y"] < 100
    figure = tab.locator(".draw-one-step")
    assert "too large" in figure.locator("svg").text_content()
    assert "gpus=nonsense (takes 1 to 16)" in figure.text_content()
    slider = figure.get_by_role("slider", name="GPU memory")
    slider.press("End")
    assert slider.get_attribute("aria-valuetext") == "288 GB"
    status = figure.get_by_role("status").text_content()
    assert status.endswith(f"DDP fits; {ON_TOP}.") and "too large" not in status
    values = "parameters=7e9&step-ms=640&memory-gb=288&machines=8&gpus=8&gbit=400"
    assert tab.url.endswith(f"predict.html#{values}")
    tab.goto(tab.url)
    assert figure.get_by_role("status").text_content() == status
    check_barriers(tab)
