"""The pictures are what the script draws, can be read, and show what really happens."""

import itertools
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from ladder.diffs import changed_lines
from ladder.rungs import ALL_EDGES, PARENTS, RUNGS, steps, summary, trunk
from tests.contrast import contrast_ratio
from website import pictures

NAMES = list(pictures.PICTURES)
SVG = "{http://www.w3.org/2000/svg}"
MIB = 2**20
OLD_PROFILER = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="the profiler of torch 2.11 notes no sizes"
)


def test_every_picture_is_what_the_script_draws():
    drawn = {x.name for x in pictures.FOLDER.glob("*.svg")}
    assert drawn == set(NAMES)
    assert pictures.main(["--check"]) == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spoil", ["edit", "remove"])
def test_check_names_a_stale_picture(name, spoil, tmp_path, monkeypatch, capsys):
    copy = tmp_path / "pictures"
    shutil.copytree(pictures.FOLDER, copy)
    monkeypatch.setattr(pictures, "FOLDER", copy)
    file = copy / name
    text = file.read_text().replace("</title>", " </title>")
    file.write_text(text) if spoil == "edit" else file.unlink()
    assert pictures.main(["--check"]) == 1
    assert capsys.readouterr().err == f"docs/pictures/{name}: stale\n"
    assert not file.exists() if spoil == "remove" else file.read_text() == text


@pytest.mark.parametrize("name", NAMES)
def test_well_formed_and_described(name):
    path = pictures.FOLDER / name
    assert path.stat().st_size < 40_000
    root = ET.parse(path).getroot()
    assert root.get("width") == "800"
    for tag in ("title", "desc"):
        (element,) = root.findall(SVG + tag)
        assert len(element.text) > 20
        assert element.get("id") in root.get("aria-labelledby")
    text = path.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "http" not in text, "something is loaded from elsewhere"


def schemes(root):
    """[{class: {property: value}}] of the style sheet, in light and in dark."""
    sheet = root.find(f"{SVG}style").text
    start = sheet.index("@media (prefers-color-scheme:dark){")
    light, dark = {}, {}
    for rules, part in ((light, sheet[:start]), (dark, sheet[start:])):
        for name, body in re.findall(r"\.(\w+)\{([^}]*)\}", part):
            pairs = [x.split(":", 1) for x in body.split(";")]
            rules.setdefault(name, {}).update(pairs)
    return [light, {k: v | dark.get(k, {}) for k, v in light.items()}]


def channels(colour):
    """The red, green and blue of #rrggbb, from 0 to 255."""
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def contrast(one, other):
    return contrast_ratio(channels(one), channels(other))


def test_contrast_is_computed_right():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read(name, scheme):
    """On the card and on every box, whichever of them it stands on."""
    root = ET.parse(pictures.FOLDER / name).getroot()
    rules = schemes(root)[scheme]

    def paint(element, key):
        found = [rules.get(x, {}).get(key) for x in element.get("class", "").split()]
        return [x for x in found if x]

    boxes = [x for x in root.iter(f"{SVG}rect") if x.get("fill") != "url(#hatch)"]
    surfaces = {colour for box in boxes for colour in paint(box, "fill")}
    card = boxes[0]
    assert float(card.get("width")) == 799 and paint(card, "fill")
    texts = list(root.iter(f"{SVG}text"))
    assert texts
    for text in texts:
        (ink,) = paint(text, "fill")
        assert min(contrast(ink, x) for x in surfaces) >= 4.5, text.text
        sizes = [x.split("px")[0] for x in paint(text, "font-size")]
        assert all(int(x) >= 11 for x in sizes)
    for path in root.iter(f"{SVG}path"):
        for colour in paint(path, "stroke"):
            assert contrast(colour, paint(card, "fill")[0]) >= 3
    # The size of text without a class of its own.
    assert int(re.search(r"text\{font:(\d+)px", ET.tostring(root, "unicode"))[1]) >= 11


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_the_ring_ends_with_all_sums_everywhere(ranks):
    states = pictures.ring_states(ranks)
    assert len(states) == 1 + 2 * (ranks - 1)
    for _, received in states[1:]:  # each link carries one chunk, each another one
        assert sorted(received) == list(range(ranks))
    everyone = set(range(ranks))
    scattered, _ = states[ranks - 1]
    assert [row.count(everyone) for row in scattered] == [1] * ranks
    assert all(chunk == everyone for row in states[-1][0] for chunk in row)


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    return pictures.trace(tmp_path_factory.mktemp("trace"))


def test_the_gradients_fill_buckets(traced):
    """1 MiB, then 25 MiB, each closed by the parameter that fills it; none is left."""
    sizes = [x["bytes"] for x in traced["all_reduce"]]
    assert len(sizes) > 2
    largest = 4 * pictures.WIDTH**2
    assert MIB <= sizes[0] < MIB + largest
    assert all(25 * MIB <= x < 25 * MIB + largest for x in sizes[1:-1])
    pairs = zip(pictures.SIZES, pictures.SIZES[1:], strict=False)
    assert sum(sizes) == sum(4 * (a * b + b) for a, b in pairs)


def test_buckets_go_in_reverse_order_of_the_layers(traced):
    """The last two layers fill the first bucket; it leaves before the next begins."""
    starts = {x["layer"]: x["start"] for x in reversed(traced["backward"])}
    assert list(starts) == sorted(starts)
    last = len(pictures.SIZES) - 1
    assert starts[last - 1] < traced["launched"][0] < starts[last - 2]
    assert traced["launched"] == sorted(traced["launched"])


def test_all_reduce_overlaps_with_backward(traced):
    """The first bucket is on its way before the last operation of backward begins."""
    first, last = traced["all_reduce"][0], traced["backward"][-1]
    assert first["start"] < last["start"]
    assert pictures.common(traced["all_reduce"], traced["backward"]) > 0


def averaged_in_backward(traced):
    """Copied back from the buckets after an all-reduce and before the optimizer steps.

    The end of gloo's span says less: it is noted down after the waiting thread goes on.
    """
    copied = [x["start"] for x in traced["copied"]]
    ends = [x["end"] for x in traced["copied"]]
    first = min(x["start"] for x in traced["all_reduce"])
    return first < min(copied) and max(ends) <= traced["optimizer_step"]["start"]


def test_gradients_are_averaged_before_the_optimizer_steps(traced):
    assert len(traced["copied"]) == 2 * (len(pictures.SIZES) - 1)  # weights and biases
    assert averaged_in_backward(traced)


@OLD_PROFILER
def test_a_small_model_has_one_bucket(tmp_path):
    """Linear(20, 1): one all-reduce of 21 numbers in a step, and it is in backward."""
    made = pictures.trace(tmp_path, large=False)
    assert [x["bytes"] for x in made["all_reduce"]] == [4 * 21]
    assert len(made["launched"]) == 1 and len(made["copied"]) == 2
    assert averaged_in_backward(made)


# The ladder

LEAVES = [(f"variants/a_rather_long_name_{i}.py", "Word " * 20, i) for i in range(10)]


def texts(svg):
    return [x.text for x in ET.fromstring(svg).iter(f"{SVG}text")]


def test_the_ladder_shows_every_rung_and_the_size_of_its_diff():
    shown = texts(pictures.ladder())
    words = " ".join(shown).split()
    for name in PARENTS:
        assert name.removeprefix("variants/") in shown
        assert set(summary(name).split()) <= set(words)
    for parent, child in ALL_EDGES:
        size = len(changed_lines(parent, child))
        leaf = f"{size} changed lines from {Path(parent).name}"
        assert (str(size) if child in steps() else leaf) in shown


def ladder_of(count, height=3):
    """A ladder of 3 or 4 steps and `count` variants, whose names and texts are long."""
    names = [*trunk(), "mingpt/train.py"][:height]
    steps = [(name, "Train on something", RUNGS.get(name), 48) for name in names]
    leaves = [(name, what, names[i % height], i) for name, what, i in LEAVES[:count]]
    on = {name: names.index(parent) for name, _, parent, _ in leaves}
    return pictures.draw_ladder(steps, leaves, on)


@pytest.mark.parametrize("height", [3, 4])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 10])
def test_the_boxes_of_the_ladder_do_not_overlap(count, height):
    root = ET.fromstring(ladder_of(count, height))
    boxes = [
        tuple(float(x.get(key)) for key in ("x", "y", "width", "height"))
        for x in root.iter(f"{SVG}rect")
    ]
    card, *boxes = boxes
    assert len(boxes) == height + count
    for box in boxes:
        x, y, width, height = box
        assert card[0] < x and x + width < card[0] + card[2]
        assert card[1] < y and y + height < card[1] + card[3]
    for one, other in itertools.combinations(boxes, 2):
        apart = [
            one[i] + one[i + 2] <= other[i] or other[i] + other[i + 2] <= one[i]
            for i in (0, 1)
        ]
        assert any(apart), (one, other)


@pytest.mark.parametrize(
    "picture", [pictures.ladder(), ladder_of(10), ladder_of(10, height=4)]
)
def test_no_text_of_the_ladder_leaves_its_box(picture):
    """Letters are taken for wider than those of most fonts."""
    root = ET.fromstring(picture)
    boxes = list(root.iter(f"{SVG}rect"))[1:]
    for text in root.iter(f"{SVG}text"):
        kinds = text.get("class").split()
        x, y = float(text.get("x")), float(text.get("y"))
        within = [
            box
            for box in boxes
            if 0 < x - float(box.get("x")) < float(box.get("width"))
            and 0 < y - float(box.get("y")) < float(box.get("height"))
        ]
        if not within or "right" in kinds:
            continue
        size = 16 if "h" in kinds else 12 if "s" in kinds else 13
        wide = size * len(text.text) * (0.61 if {"b", "c", "h"} & set(kinds) else 0.53)
        right = float(within[0].get("x")) + float(within[0].get("width"))
        assert x + wide <= right, text.text
