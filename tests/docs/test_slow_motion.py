"""The start page's step in slow motion: it draws what two ranks did."""

import json

import pytest
from torch.utils._pytree import tree_map

from tests.helpers.site import check_barriers, check_picture
from tools.site.slow_motion import RECORD, record

pytestmark = pytest.mark.waits  # for a browser

KEPT = json.loads(RECORD.read_text())
# Of each picture of a run from its first gradient on: how much of the run it may show,
# and the numbers and words that it shows. It fails by itself if a difference of losses
# is not that of the record in percent.
LOOK = """(key) => frames(read(key)).map(({ phase, epoch, step }, index) => {
    const place = document.querySelector(".drawing");
    [place.innerHTML] = draw(key, index, 760);
    const all = (selector) => [...place.querySelectorAll(selector)];
    const number = (text) => parseFloat(
        text.textContent.replace(/rank .:|uses/, "").replace("−", "-"));
    const numbers = [".taken .number", ".gradient .number", ".average", ".apart",
        ".held-out"].flatMap((kind) => all(kind).map(number));
    const done = RECORD[key][0][0].length / 3 * epoch + step + 1;
    const ended = phase > 3 ? epoch + 1 : epoch;
    const far = all(".far").map(number);
    if (far.length !== (key === "000" ? 0 : ended || 0)) throw Error("differences");
    far.forEach((percent, i) => {
        const [loss, right] = [key, "000"].map((run) => RECORD[run][0][1][i]);
        const off = Math.abs(100 * (loss / right - 1) - percent);
        if (!(off < 0.51)) throw Error(percent);
    });
    return [phase, done, phase > 2 ? done : done - 1, ended, numbers,
        all(".said").map((text) => text.textContent)];
}).filter(([phase]) => phase)"""


def test_a_run_does_what_is_recorded():
    near = tree_map(lambda value: pytest.approx(value, abs=1e-3), KEPT)
    assert record() == near, "stale: python -m tools.site.slow_motion"


def test_each_picture_shows_the_record(visit):
    tab = visit("index.html")
    for key, noted in KEPT.items():
        if isinstance(noted, str):
            assert noted in tab.text_content("figcaption")
            continue
        # A step of a rank: its samples, its gradient, the one it used, how far apart
        (own, held_out), (other, _) = noted
        for phase, done, moved, ended, numbers, said in tab.evaluate(LOOK, key):
            steps = [*zip(own, other, strict=True)][:done]
            taken = [rank[0] for step in steps for rank in step]
            one, two = [rank[1:3][:phase] for rank in steps[-1]]
            cut = key[0] == "1"
            apart = [rank[3] for rank in own[:moved]]
            shown = [*one, *two, *one[1 + cut :], *apart[-1:], *held_out[:ended]]
            assert numbers == pytest.approx(sum(taken, []) + shown, abs=0.006)
            sent = "sent" if one[0] != one[-1] else "sent for nothing"
            assert said == ["not sent" if cut else sent][: phase - 1]


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
    tab.clock.run_for(5_000)
    assert "DDP sends nothing" in status.text_content()
    figure.get_by_label("Picture").fill("6")
    tab.clock.run_for(20_000)
    figure.get_by_label("ddp_model").tap()
    assert "Epoch 1, step 2" in status.text_content()
    figure.press("ArrowLeft")
    assert "both ranks by the same" in status.text_content()
    play.tap()
    tab.clock.run_for(100_000)
    figure.get_by_role("button", name="Back").tap()
    figure.press("ArrowRight")
    assert "after epoch 3" in status.text_content()
    check_barriers(tab)
    sampler = figure.get_by_label("DistributedSampler")
    sampler.tap()
    figure.get_by_label("set_epoch").tap()  # it went with the sampler
    assert sampler.is_checked()
    assert not tab.evaluate("document.getAnimations().length")
