"""Draw the pictures of the chapters into docs/pictures.

    python -m website.pictures            draw them
    python -m website.pictures --check    change nothing, and fail if one is stale
    python -m website.pictures --trace    measure anew for overlap.svg, then draw

ladder.svg shows the rungs and how many lines change between them. which_one.svg shows
the questions of ladder/choices.py. overlap.svg shows
docs/pictures/overlap.json: one step of multigpu.py, as the profiler saw it. Exit
status 1: a picture differs from what this script draws.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import textwrap
from pathlib import Path
from xml.sax.saxutils import escape

import torch

from benchmarks.report import cpu_model
from ladder.choices import AT_LAST, CHOICES, FSDP, name_of
from ladder.diffs import changed_lines
from ladder.rungs import PARENTS, ROOT, RUNGS, leaves, step_of, steps, summary
from proofs.launch import plant, train

FOLDER = ROOT / "docs" / "pictures"

# The trace

WIDTH = 1856  # two Linear(WIDTH, WIDTH) are 26.3 MiB: they fill a bucket of 25 MiB
SIZES = [20, *[WIDTH] * 7, 160, 1]
STEPS, BATCH = 3, 128


def trace(folder, *, large=True):
    """Train a copy of multigpu.py on two CPU processes; return `read_trace` of it.

    large: with a model of SIZES, which fills several of DDP's buckets, instead of its
    own.
    """
    folder = Path(folder)
    hooks = ["large_model", "profile_step"] if large else ["profile_step"]
    script = plant("multigpu.py", folder, hooks=hooks)
    train(
        *(script, 1, 1, "--batch-size", BATCH),
        cwd=folder,
        CUDA_VISIBLE_DEVICES="",
        LAYER_SIZES=",".join(map(str, SIZES)),
        TRAIN_SAMPLES=STEPS * BATCH * 2,
        TRACED_STEP=STEPS,
    )
    return read_trace(folder / "trace.json") | {
        "torch": torch.__version__,
        "cpu": f"{cpu_model()}, {os.cpu_count()} cores, {platform.system()}",
        "batch": BATCH,
        "step": STEPS,
    }


def read_trace(path):
    """What one step holds, in microseconds from the first operation of `backward()`.

    `backward`: autograd's operations, each with the number of its Linear layer; those
    of the loss have one more than there are.
    `launched`: when DDP asked for the all-reduce of each bucket, in this order.
    `all_reduce`: when gloo ran it, and how many bytes went into it.
    `copied`: DDP moves the averages from the buckets back into the gradients.
    """
    events = json.loads(Path(path).read_text())["traceEvents"]
    events = sorted((x for x in events if x.get("ph") == "X"), key=lambda x: x["ts"])
    evaluate = "autograd::engine::evaluate_function: "
    zero = next(x["ts"] for x in events if x["name"].startswith(evaluate))

    def spans(prefix):
        for event in events:
            if event["name"].startswith(prefix):
                start = event["ts"] - zero
                span = {"start": round(start), "end": round(start + event["dur"])}
                yield event["name"].removeprefix(prefix), span, event

    backward = [{"op": name.split("::")[-1], **x} for name, x, _ in spans(evaluate)]
    layer = 1 + sum(x["op"] == "AddmmBackward0" for x in backward)
    for op in backward:
        layer -= op["op"] == "AddmmBackward0"
        op["layer"] = layer
    all_reduce = [
        {"bytes": 4 * event["args"]["Input Dims"][0][0], **x}
        for _, x, event in spans("gloo:all_reduce")
    ]
    copied = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
    (step,) = (x for _, x, _ in spans("Optimizer.step"))
    return {
        "backward": backward,
        "launched": [x["start"] for _, x, _ in spans("c10d::allreduce_")],
        "all_reduce": all_reduce,
        "copied": [x for _, x, _ in spans(copied)],
        "optimizer_step": step,
    }


def union(spans):
    """The spans' time on the clock, as [(start, end)] that do not overlap."""
    merged = []
    for start, end in sorted((x["start"], x["end"]) for x in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def common(some, others):
    """For how long something of both is under way."""
    return sum(
        max(0, min(end, other_end) - max(start, other_start))
        for start, end in union(some)
        for other_start, other_end in union(others)
    )


# Drawing

CODE = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
TEXT = {"ink": ("#1f2328", "#e6edf3"), "soft": ("#454d56", "#bcc5ce")}
FILL = {
    "card": ("#ffffff", "#15191f"),
    "plain": ("#eceff2", "#2a3039"),
    "blue": ("#d3e5fb", "#173a63"),
    "green": ("#d0eed9", "#164a2c"),
    "amber": ("#fbe5bb", "#564110"),
}
STROKE = {"edge": ("#68727d", "#8f9aa6"), "strong": ("#1f2328", "#e6edf3")}


def style():
    def rules(scheme):
        kinds = (("fill", TEXT), ("fill", FILL), ("stroke", STROKE))
        return "".join(
            f".{name}{{{key}:{colours[scheme]}}}"
            for key, kind in kinds
            for name, colours in kind.items()
        )

    return (
        f"text{{font:13px {FONT}}}.b{{font-weight:700}}.s{{font-size:12px}}"
        f".c{{font-family:{CODE}}}.n{{font-size:26px;font-weight:700}}"
        ".h{font-size:16px;font-weight:700}.mid{text-anchor:middle}"
        ".right{text-anchor:end}.line{fill:none;stroke-width:1.5}"
        ".thick{stroke-width:2.5}.dash{stroke-dasharray:4 4}"
        f"{rules(0)}@media (prefers-color-scheme:dark){{{rules(1)}}}"
    )


class Svg:
    """A picture 800 units wide on a card of its own."""

    def __init__(self, height, title, desc):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {height}"'
            f' width="800" height="{height}" role="img" aria-labelledby="title desc">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="desc">{escape(desc)}</desc>',
            f"<style>{style()}</style>",
            '<defs><pattern id="hatch" width="7" height="7"'
            ' patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            '<path class="edge" stroke-width="2.4" d="M0 0V7"/></pattern></defs>',
        ]
        self.rect(0.5, 0.5, 799, height - 1, "card edge", rx=8)
        self.text(20, 30, title, "ink h")

    def rect(self, x, y, width, height, name, rx=3):
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
            f' rx="{rx}" class="{name}"/>'
        )

    def hatched(self, x, y, width, height):
        self.rect(x, y, width, height, "amber edge")
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
            ' rx="3" fill="url(#hatch)"/>'
        )

    def text(self, x, y, text, name="ink"):
        text = escape(text)
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{name}">{text}</text>')

    def lines(self, x, y, pitch, texts, name="ink"):
        for i, text in enumerate(texts):
            self.text(x, y + pitch * i, text, name)

    def line(self, path, name="edge line"):
        self.parts.append(f'<path class="{name}" d="{path}"/>')

    def down(self, x, top, bottom):
        """An arrow."""
        self.line(f"M{x:g} {top:g}V{bottom:g}", "strong line")
        head = f"M{x - 4:g} {bottom - 5:g}L{x:g} {bottom:g}L{x + 4:g} {bottom - 5:g}"
        self.line(head, "strong line")

    def done(self):
        return "\n".join([*self.parts, "</svg>\n"])


# The ladder

LEAF, LEAST = (248, 84), 80  # the width and height of a leaf, and the least of a step
GAP, RISE, STEPS_TOP = 8, 56, 54
STEP_COLOURS = ["plain", "blue", "green", "amber"]


def ladder():
    names = leaves()
    on = {name: step_of(name) for name in names}
    return draw_ladder(cards_of(steps()), cards_of(names), on)


def cards_of(names):
    """[(name, what it does, parent, changed lines)] of these scripts."""
    return [
        (name, summary(name), parent, len(changed_lines(parent, name)) if parent else 0)
        for name, parent in ((name, PARENTS[name]) for name in names)
    ]


def draw_ladder(steps, leaves, on):
    """steps, leaves: as `cards_of` has them; on: {leaf: number of its step}."""
    said = [
        f"{name}: {what}" + (f". {size} lines differ from {parent}" if parent else "")
        for name, what, parent, size in [*steps, *leaves]
    ]
    desc = "Steps that go up, one for each script, and below them the variants. "
    floor = STEPS_TOP + RISE * (len(steps) - 1) + LEAST
    column = (3 * (LEAF[0] + GAP)) // len(steps)
    width, letters = column - GAP, (column - GAP - 28) // 7
    rows = -(-len(leaves) // 3)
    height = floor + (46 + (LEAF[1] + GAP) * rows if leaves else 0) + 12
    title = "Each script is the one before it with some lines changed"
    svg = Svg(height, title, desc + ". ".join(said) + ".")
    for i, (name, what, _, size) in enumerate(steps):
        x, y = 20 + column * i, STEPS_TOP + RISE * (len(steps) - 1 - i)
        svg.rect(x, y, width, floor - y, f"{STEP_COLOURS[i]} edge", rx=4)
        svg.text(x + 14, y + 26, name, "ink h c")
        texts = textwrap.wrap(what, letters, break_on_hyphens=False)
        svg.lines(x + 14, y + 48, 17, texts)
        if size:
            left, arrow = x - GAP - 58, y + 22
            svg.line(f"M{left} {y + RISE - 3}V{arrow}H{x - 7}", "strong line thick")
            head = f"M{x - 13} {arrow - 6}L{x - 6} {arrow}L{x - 13} {arrow + 6}"
            svg.line(head, "strong line thick")
            svg.text(left - 10, y + 28, str(size), "ink right n")
            svg.text(left - 10, y + 45, "changed lines", "ink right s")
    if leaves:
        note = "Variants: each is the script that it names with some lines changed."
        svg.text(20, floor + 28, note, "ink b")
    for i, (name, what, parent, size) in enumerate(leaves):
        x = 20 + (LEAF[0] + GAP) * (i % 3)
        y = floor + 40 + (LEAF[1] + GAP) * (i // 3)
        svg.rect(x, y, *LEAF, f"{STEP_COLOURS[on[name]]} edge", rx=4)
        svg.text(x + 12, y + 21, name.removeprefix("variants/"), "ink b c")
        svg.lines(
            x + 12,
            y + 39,
            15,
            textwrap.wrap(what, 35, break_on_hyphens=False)[:2],
            "ink s",
        )
        lines = f"{size} changed lines from {Path(parent).name}"
        svg.text(x + 12, y + 74, lines, "soft s")
    return svg.done()


# Which one do I need?


def which_one():
    said = []
    for question, answers, go_on in CHOICES:
        leads = "; ".join(f"{answer}: {name_of(x)}" for answer, x in answers)
        said.append(f"{question} {leads}; {go_on}: go on.")
    desc = f"Questions from top to bottom. {' '.join(said)} Then: {AT_LAST}."
    rows = [(question, answers, go_on) for question, answers, go_on in CHOICES]
    heights = [max(46, 32 * len(answers) + 6) for _, answers, _ in rows]
    title = "Which one do I need? The first answer that fits leads to it"
    svg = Svg(50 + sum(heights) + 26 * len(rows) + 50, title, desc)
    y = 48
    for (question, answers, go_on), height in zip(rows, heights, strict=True):
        svg.rect(20, y, 270, height, "plain edge", rx=4)
        texts = textwrap.wrap(question, 36)
        top = y + height / 2 + 5 - 8.5 * (len(texts) - 1)
        svg.lines(34, top, 17, texts)
        for i, (answer, target) in enumerate(answers):
            middle = y + height / 2 + 32 * (i - (len(answers) - 1) / 2)
            svg.text(312, middle - 5, answer, "soft s")
            svg.line(f"M291 {middle:g}H487", "strong line")
            head = f"M482 {middle - 4:g}L487 {middle:g}L482 {middle + 4:g}"
            svg.line(head, "strong line")
            kind = "green" if target in RUNGS and "/" not in target else "blue"
            kind = "amber" if target == FSDP else kind
            svg.rect(490, middle - 13, 290, 26, f"{kind} edge", rx=4)
            svg.text(502, middle + 5, name_of(target), "ink b c")
        y += height
        svg.down(60, y, y + 24)
        svg.text(74, y + 17, go_on, "soft s")
        y += 26
    svg.rect(20, y, 270, 32, "green edge", rx=4)
    svg.text(34, y + 21, name_of(AT_LAST), "ink b c")
    svg.rect(312, y + 10, 16, 12, "green edge", rx=1)
    svg.text(334, y + 20, "one of the three scripts", "ink s")
    svg.rect(500, y + 10, 16, 12, "blue edge", rx=1)
    svg.text(522, y + 20, "a variant, with one idea more", "ink s")
    return svg.done()


# The ring


def ring_states(ranks):
    """[(sums, received)] at the start and after each step of a ring all-reduce.

    sums[rank][chunk] holds the ranks whose gradients are added up in it, received[rank]
    is the chunk that this rank has just got from the rank before it.
    """
    sums = [[{rank} for _ in range(ranks)] for rank in range(ranks)]
    states = [([list(x) for x in sums], [None] * ranks)]
    for gather in (0, 1):
        for step in range(ranks - 1):
            chunks = [(rank - 1 - step + gather) % ranks for rank in range(ranks)]
            sent = [sums[rank - 1][chunk] for rank, chunk in enumerate(chunks)]
            for rank, chunk in enumerate(chunks):
                sums[rank][chunk] = sent[rank] | (set() if gather else {rank})
            states.append(([list(x) for x in sums], chunks))
    return states


def ring():
    desc = (
        "Seven grids. Each has a row for each of 4 ranks and a column for each of the "
        "4 chunks A to D into which the gradients are cut. At the start a rank holds "
        "its own gradients. Reduce-scatter: in each of 3 steps every rank sends one "
        "chunk to the next rank, the last one to the first, and the next rank adds it "
        "to its own. Then each rank holds one chunk summed over all ranks. All- "
        "gather: in 3 more steps these sums go round the ring, until every rank holds "
        "all four."
    )
    svg = Svg(606, "Ring all-reduce with 4 ranks", desc)
    states = ring_states(4)
    first = "Reduce-scatter, N − 1 = 3 steps: the next rank adds what it gets"
    second = "All-gather, N − 1 = 3 steps: the next rank keeps what it gets"
    svg.text(20, 60, first, "ink b")
    svg.text(20, 330, second, "ink b")
    for i, (sums, received) in enumerate(states):
        column, row = (i, 0) if i < 4 else (i - 3, 1)
        title = f"after step {i}" if i else "start"
        draw_ring_state(svg, 16 + 194 * column, 84 + 270 * row, title, sums, received)
    x, y = 20, 368
    svg.rect(x, y, 38, 26, "plain edge")
    svg.text(x + 19, y + 18, "0,1", "ink mid s")
    svg.text(x + 46, y + 11, "the gradients of", "ink s")
    svg.text(x + 46, y + 26, "ranks 0 and 1, added", "ink s")
    svg.rect(x, y + 44, 38, 26, "green edge")
    svg.text(x + 19, y + 62, "all", "ink mid s b")
    svg.text(x + 46, y + 62, "of all ranks, added", "ink s")
    svg.rect(x, y + 88, 38, 26, "blue strong thick")
    svg.text(x + 46, y + 106, "just received", "ink s")
    svg.down(x + 19, y + 134, y + 152)
    svg.text(x + 46, y + 141, "one chunk to the next", "ink s")
    svg.text(x + 46, y + 156, "rank; from rank 3 out", "ink s")
    svg.text(x + 46, y + 171, "below, in above rank 0", "ink s")
    note = (
        "In each of the 6 steps every rank sends a quarter of the gradients:"
        " 2 (N − 1) / N = 1.5 times their size in all."
    )
    svg.text(20, 592, note, "ink")
    return svg.done()


def draw_ring_state(svg, x, y, title, sums, received):
    left, top, size, pitch = x + 24, y + 42, 38, 44
    svg.text(left + 2 * size, y + 2, title, "ink mid b s")
    for chunk in range(4):
        middle = left + size * (chunk + 0.5)
        svg.text(middle, y + 19, "ABCD"[chunk], "soft mid s")
    for rank, (row, got) in enumerate(zip(sums, received, strict=True)):
        svg.text(left - 8, top + pitch * rank + 18, str(rank), "soft right s")
        for chunk, ranks in enumerate(row):
            full = len(ranks) == len(sums)
            name = "green" if full else "blue" if chunk == got else "plain"
            edge = "strong thick" if chunk == got else "edge"
            box = left + size * chunk, top + pitch * rank
            svg.rect(box[0] + 1, box[1], size - 2, 26, f"{name} {edge}")
            text = "all" if full else ",".join(map(str, sorted(ranks)))
            weight = " b" if full else ""
            svg.text(box[0] + size / 2, box[1] + 18, text, f"ink mid s{weight}")
            if chunk == got:
                svg.down(box[0] + size / 2, box[1] - 17, box[1] - 3)
                if rank == 0:
                    bottom = top + pitch * 3 + 26
                    middle = box[0] + size / 2
                    svg.line(f"M{middle:g} {bottom + 3:g}v13", "strong line")
    svg.text(x + 4, y + 19, "rank", "soft s")


# Who holds what

HELD = [  # name, what is said on one device, and on each rank
    ("parameters", "one copy", "a whole copy"),
    ("gradients", "one copy", "a whole copy"),
    ("optimizer state", "one copy", "a whole copy"),
    ("batch of a step", "96 samples", "32 samples"),
    ("activations", "of 96 samples", "of 32 samples"),
]


def memory():
    desc = (
        "A table of who holds what. One device holds one copy of the parameters, the "
        "gradients and the optimizer state, a batch of 96 samples and their "
        "activations, and writes the snapshot. With DDP on 3 ranks, each rank holds a "
        "whole copy of the parameters, the gradients and the optimizer state (plain "
        "boxes), but only its third of the batch, 32 samples, and their activations "
        "(hatched boxes). Rank 0 alone writes the snapshot."
    )
    svg = Svg(452, "Who holds what: one device, and DDP on 3 ranks", desc)
    columns = [(150, "one device"), *((322 + 156 * i, f"rank {i}") for i in range(3))]
    for i, (x, name) in enumerate(columns):
        svg.rect(x - 10, 48, 148, 344, "plain edge" if i else "plain strong", rx=6)
        svg.text(x + 64, 70, name, "ink mid b")
    for row, (name, one, each) in enumerate(HELD):
        y, split = 84 + 50 * row, row > 2
        svg.text(20, y + 24, name, "ink b s")
        for i, (x, _) in enumerate(columns):
            width = 128 / 3 if i and split else 128
            if not split:
                svg.rect(x, y, 128, 38, "blue edge")
                svg.text(x + 64, y + 24, each if i else one, "ink mid s")
            else:
                if i == 0:  # one device
                    svg.rect(x, y, width, 20, "amber edge")
                else:
                    svg.hatched(x, y, width, 20)
                svg.text(x, y + 34, each if i else one, "ink s")
    y = 84 + 50 * len(HELD)
    svg.text(20, y + 24, "snapshot", "ink b s")
    for i, (x, _) in enumerate(columns):
        if i < 2:
            svg.rect(x, y, 128, 38, "green strong")
            svg.text(x + 64, y + 24, "written to disk", "ink mid s b")
        else:
            svg.text(x + 64, y + 24, "writes none", "soft mid s")
    svg.rect(20, 408, 26, 16, "blue edge")
    svg.text(54, 421, "replicated: the same numbers on every rank", "ink s")
    svg.hatched(340, 408, 26, 16)
    svg.text(374, 421, "split: each rank has samples of its own", "ink s")
    note = "Gradients are each rank's own until they are averaged, in backward()."
    svg.text(20, 441, note, "ink s")
    return svg.done()


# The overlap


def overlap():
    data = json.loads((FOLDER / "overlap.json").read_text())
    backward, reduces, step = (
        data[key] for key in ("backward", "all_reduce", "optimizer_step")
    )
    both, alone = common(reduces, backward), sum(b - a for a, b in union(reduces))
    said = (
        f"An all-reduce was under way for {alone / 1e3:.0f} ms; during {both / 1e3:.0f}"
        " ms of these, backward was computing as well."
    )
    run = (
        f"Step {data['step']} of multigpu.py with a larger model, on rank 0 of 2 CPU"
        f" processes, batch {data['batch']} each."
    )
    where = f"gloo, torch {data['torch']}, {data['cpu']}."
    layers = sum(x["op"] == "AddmmBackward0" for x in backward)
    desc = (
        f"Drawn from a profiler trace. {run} {where} A model of {layers} linear "
        f"layers, whose gradients fill {len(reduces)} buckets. The backward pass goes "
        "from the last layer to the first. As soon as the gradients of a bucket are "
        "ready, its all-reduce is launched, and runs on a gloo thread while the "
        f"backward pass goes on with the layers before. {said} backward() returns when "
        "all buckets are averaged and copied back; optimizer.step() starts after "
        "that."
    )
    left, right, top = 150, 762, 142
    height = 302 + 30 * len(reduces)
    svg = Svg(height, "One training step: all-reduce overlaps with backward", desc)
    svg.text(20, 50, run, "ink s")
    svg.text(20, 67, where, "soft s")
    svg.text(20, 91, said, "ink b")

    def at(time):
        return round(left + (right - left) * time / step["end"], 1)

    def bar(span, y, tall, name):
        x = at(span["start"])
        svg.rect(x, y, max(1, at(span["end"]) - x), tall, name, rx=1)
        return x, at(span["end"]) - x

    bottom = top + 92 + 30 * len(reduces)
    ticks = next(x for x in (50, 100, 200, 500) if step["end"] / 1e3 / x < 9)
    for tick in range(0, int(step["end"] / 1e3) + 1, ticks):
        x = at(tick * 1e3)
        svg.line(f"M{x:g} {bottom:g}v6")
        svg.text(x, bottom + 20, f"{tick} ms" if tick else "0", "soft mid s")
    svg.line(f"M{left} {bottom}H{right}")

    svg.text(20, top + 14, "backward(),", "ink b s")
    svg.text(20, top + 30, "main thread", "soft s")
    for layer in range(layers, 0, -1):
        mine = [x for x in backward if x["layer"] == layer and "Relu" not in x["op"]]
        span = {"start": mine[0]["start"], "end": mine[-1]["end"]}
        x, wide = bar(span, top, 36, "blue edge")
        if wide > 14:
            text = f"layer {layer}" if wide > 52 else str(layer)
            svg.text(x + wide / 2, top + 23, text, "ink mid s")
    for span in backward:
        if "Relu" in span["op"]:
            bar(span, top, 36, "plain edge")
    for start, end in union(data["copied"]):
        bar({"start": start, "end": end}, top, 36, "amber edge")

    for i, (launched, span) in enumerate(zip(data["launched"], reduces, strict=True)):
        y = top + 56 + 30 * i
        svg.text(20, y + 16, f"bucket {i}", "ink b s")
        size = span["bytes"] / 2**20
        svg.text(left - 12, y + 16, f"{size:.1f} MiB", "soft right s")
        svg.line(f"M{at(launched):g} {top + 36}V{y + 11}H{at(span['start']):g}")
        x, wide = bar(span, y, 22, "green strong")
        text = "all-reduce"
        if wide > 70:
            svg.text(x + wide / 2, y + 16, text, "ink mid s")
        elif at(launched) < left + 90:
            svg.text(x + wide + 6, y + 16, text, "ink s")
        else:
            svg.text(at(launched) - 8, y + 16, text, "ink s right")

    y = top + 60 + 30 * len(reduces)
    svg.text(20, y + 16, "optimizer.step()", "ink b s")
    bar(step, y, 22, "amber strong")
    last = at(backward[-1]["end"])
    svg.line(f"M{last:g} {top - 14}V{bottom}", "strong line dash")
    svg.text(last - 6, top - 6, "last gradient computed", "ink s right")
    svg.line(f"M{at(step['start']):g} {top - 32}V{bottom}", "strong line dash")
    svg.text(at(step["start"]) - 6, top - 23, "backward() returns", "ink s right")
    y = height - 14
    svg.rect(20, y - 11, 16, 12, "plain edge", rx=1)
    svg.text(42, y, "ReLU", "ink s")
    svg.rect(92, y - 11, 16, 12, "amber edge", rx=1)
    svg.text(114, y, "averages copied back into the gradients", "ink s")
    svg.line(f"M400 {y - 11}v7h16")
    svg.text(424, y, "bucket full: its all-reduce is launched, then runs", "ink s")
    return svg.done()


PICTURES = {
    "ladder.svg": ladder,
    "which_one.svg": which_one,
    "ring.svg": ring,
    "memory.svg": memory,
    "overlap.svg": overlap,
}


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--trace", action="store_true", help="measure anew")
    args = parser.parse_args(argv)
    if args.trace:
        with tempfile.TemporaryDirectory() as folder:
            data = json.dumps(trace(folder), indent=1)
        (FOLDER / "overlap.json").write_text(data + "\n")
    stale = 0
    for name, draw in PICTURES.items():
        path, text = FOLDER / name, draw()
        if not args.check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            print(f"docs/pictures/{name}: stale", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
