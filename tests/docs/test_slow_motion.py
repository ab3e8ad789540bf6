"""The start page's step in slow motion: it draws what two ranks did."""

import json
from statistics import correlation, mean

import pytest
from torch.utils._pytree import tree_map

from tests.helpers.site_fixtures import check_barriers, check_picture
from tools.site.slow_motion import RECORD, record

pytestmark = pytest.mark.waits  # for a browser

KEPT = json.loads(RECORD.read_text())
TAKEN, LOSS, OWN, USED, WEIGHT = range(5)  # what a rank notes in a step
# Of each picture of a run from its first gradient on
LOOK = """(key) => frames(read(key)).map((frame, index) => {
    const place = document.querySelector(".drawing");
    [place.innerHTML] = draw(key, index, 760);
    const all = (selector) => [...place.querySelectorAll(selector)];
    const number = (text) => Number(text.textContent);
    const x = (circle) => circle.cx.baseVal.value;
    frame.samples = all(".taken .number").map(number);
    frame.gradients = all(".gradient circle").map(x);
    const [one, other = one] = all(".weight polyline:not(.gap)");
    frame.weights = one ? Array.from(one.points, (point, i) =>
        point.y - other.points[i].y).slice(1) : [];
    frame.losses = Array.from(all(".loss")[0].points, (point) => point.y);
    frame.heldOut = all(".held-out").map(number);
    return frame;
}).filter((frame) => frame.phase)"""


def test_a_run_does_what_is_recorded():
    near = tree_map(lambda value: pytest.approx(value, abs=1e-3), KEPT)
    assert record() == near, "stale: python -m tools.site.slow_motion"


def test_each_picture_shows_the_record(visit):
    """Samples as numbers; gradients, gaps of weights and losses as places, to scale."""
    tab = visit("index.html")
    drawn = {"gradients": [], "weights": [], "losses": []}
    for key, noted in KEPT.items():
        if isinstance(noted, str):
            assert noted in tab.text_content("figcaption")
            continue
        (own, held_out), (other, _) = noted
        for frame in tab.evaluate(LOOK, key):
            phase = frame["phase"]
            done = len(own) // 3 * frame["epoch"] + frame["step"] + 1
            steps = [*zip(own, other, strict=True)][:done]
            moved = steps if phase > 1 else steps[:-1]
            samples = [rank[TAKEN] for step in steps for rank in step]
            assert frame["samples"] == sum(samples, [])
            ended = held_out[: frame["epoch"] + (phase == 3)]
            assert frame["heldOut"] == pytest.approx(ended, abs=0.006)
            gradient = OWN if phase == 1 else USED
            expected = {
                "gradients": [rank[gradient] for rank in steps[-1]],
                "weights": [one[WEIGHT] - two[WEIGHT] for one, two in moved],
                "losses": [mean(rank[LOSS] for rank in step) for step in steps],
            }
            for name, values in expected.items():
                drawn[name] += zip(values, frame[name], strict=True)
    for name, pairs in drawn.items():
        assert abs(correlation(*zip(*pairs, strict=True))) > 0.99999, name


def test_the_page_holds_the_pictures_of_the_right_run(visit, tmp_path):
    """For readers without JavaScript."""
    tab = visit("index.html")
    for name, width in [("slow_motion", 760), ("slow_motion_narrow", 358)]:
        svg, words = tab.evaluate("(width) => draw(RIGHT, -1, width)", width)
        check_picture(name, svg, tmp_path)
    tab = visit("index.html", java_script_enabled=False)
    assert tab.get_by_role("img", name=words).is_visible()
    assert not tab.get_by_role("button", name="Play").is_visible()


def test_keys_and_taps(visit):
    tab = visit("index.html", has_touch=True)
    tab.clock.install()
    figure = tab.get_by_role("figure", name="A step in slow motion")
    status = figure.get_by_role("status")
    assert "each rank trains a model of its own" in status.text_content()
    play = figure.get_by_role("button", name="Play")
    play.tap()
    tab.clock.run_for(11_000)
    assert "DDP sends no gradient" in status.text_content()
    figure.press("ArrowRight")
    tab.clock.run_for(20_000)
    figure.get_by_label("ddp_model").tap()
    assert "Epoch 1, step 2" in status.text_content()
    figure.press("ArrowLeft")
    assert "both ranks go on with" in status.text_content()
    play.tap()
    tab.clock.run_for(100_000)
    figure.get_by_role("button", name="Back").tap()
    figure.press("ArrowRight")
    assert "Epoch 3 ends" in status.text_content()
    check_barriers(tab)
    sampler = figure.get_by_label("DistributedSampler")
    sampler.tap()
    figure.get_by_label("set_epoch").tap()  # it went with the sampler
    assert sampler.is_checked()
    assert not tab.evaluate("document.getAnimations().length")
