"""Draw two pictures of docs/pictures, each in a wide and in a narrow form.

python -m tools.site.pictures

samples.svg: which device takes which of 16 samples in three epochs, and chapter 2's
losses. killed_run.svg: chapter 3's run, killed and resumed, on the one that was not.
The samplers are PyTorch's. A phone gets the narrow form, NAME_narrow.svg.
"""

import math
import re

import torch
from torch.utils.data import DistributedSampler, RandomSampler

from tools.scripts import ROOT
from tools.site.pages import parse, right_output

SAMPLES = range(16)
DEVICES = range(2)
STEPS = 8  # shown of an epoch
SIDE = 22  # of a square, in pixels
STYLE = """
text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif}
.b{font-weight:700}.h{font-size:16px;font-weight:700}
.n{font-size:11px;text-anchor:middle}.m{text-anchor:middle}
.card{fill:#ffffff}.ok{fill:#d3e5fb}.bad{fill:#ffd7d5}.ink{fill:#1f2328}
.whole{fill:none;stroke:#9aa4af;stroke-width:6}.ring{fill:none;stroke:#b35900;stroke-width:3}
.dot{fill:#1f6feb}.back{fill:none;stroke:#b35900;stroke-width:2}
@media (prefers-color-scheme:dark){
.card{fill:#15191f}.ok{fill:#173a63}.bad{fill:#5d1f24}.ink{fill:#e6edf3}
.ring,.back{stroke:#f0a35e}.dot{fill:#6ea8fe}}
"""


def distributed(epoch, device):
    sampler = DistributedSampler(SAMPLES, num_replicas=len(DEVICES), rank=device)
    sampler.set_epoch(epoch)
    return list(sampler)


def random(epoch, device):
    generator = torch.Generator().manual_seed(epoch)
    return list(RandomSampler(SAMPLES, generator=generator))


def same(epoch, device):
    return distributed(0, device)


# (name, what happens, the order of a device in an epoch, whether that is wrong)
CASES = [
    ("DistributedSampler", "each sample once", distributed, lambda *_: False),
    ("without set_epoch", "epoch 1 again", same, lambda epoch, _: epoch > 0),
    ("RandomSampler", "both take the same", random, lambda _, device: device > 0),
]


def held_out_losses():
    """The last held-out loss that chapter 2 prints in each of CASES."""
    page = parse("docs/2_multigpu.md")
    runs = [block for block in page.blocks if block.text == "python multigpu.py 3 3"]
    wrong = [block for block in runs if "set_epoch" in str(block.faults)]
    wrong.sort(key=lambda block: len(block.faults))  # RandomSampler has no set_epoch
    found = []
    for block in (right_output(page, wrong[0]), *wrong):
        *_, loss = re.findall(r"held-out loss (\S+)", page.output_of(block))
        found.append(f"{float(loss):.3f}")
    return found


def write(x, y, text, kind="ink"):
    return f'<text x="{x}" y="{y}" class="{kind}">{text}</text>'


def square(x, y, sample, kind):
    place = f'x="{x}" y="{y}" width="{SIDE}" height="{SIDE}"'
    box = f'<rect {place} class="{kind}" stroke="#68727d"/>'
    return box + write(x + SIDE // 2, y + 15, sample, "ink n")


def picture(title, words, width, height, lines):
    """An SVG. words: what it shows, for those who do not see it."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"'
            ' aria-labelledby="title desc">',
            f'<title id="title">{title}</title>',
            f'<desc id="desc">{words}</desc>',
            f"<style>{STYLE}</style>",
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"'
            ' class="card" stroke="#68727d"/>',
            write(12, 30, title, "ink h"),
            *lines,
            "</svg>\n",
        ]
    )


def draw_samples(losses, narrow):
    """losses: a text for each of CASES."""
    left, row, epochs = (12, 100, range(2)) if narrow else (200, 72, range(3))
    lines = []
    for epoch in epochs:
        text = f"epoch {epoch + 1}" if epoch else "epoch 1, a row per device"
        lines.append(write(left + 185 * epoch, 58, text))
    words = []
    for number, (name, what, order, is_wrong) in enumerate(CASES):
        top = 72 + row * number
        loss = f"loss {losses[number]}"
        words.append(f"{name}: {what}, {loss}.")
        if narrow:
            lines.append(write(12, top + 12, f"{name}: {what}"))
            lines.append(write(298, top + 12, loss, "ink b"))
            top += 22
        else:
            lines.append(write(12, top + 18, name, "ink b"))
            lines.append(write(12, top + 38, what))
            lines.append(write(756, top + 27, loss, "ink b"))
        for epoch in epochs:
            for device in DEVICES:
                kind = "bad" if is_wrong(epoch, device) else "ok"
                for step, sample in enumerate(order(epoch, device)[:STEPS]):
                    x = left + 185 * epoch + SIDE * step
                    lines.append(square(x, top + SIDE * device, sample, kind))
    title = "Who takes which of 16 samples?"
    width, height = (384, 370) if narrow else (840, 280)
    return picture(title, " ".join(words), width, height, lines)


def killed_and_whole():
    """Chapter 3's [(epoch, held-out loss)] of the killed run's two attempts and of the
    run that was not killed."""
    page = parse("docs/3_fault_tolerance.md")
    [killed] = [block for block in page.blocks if "os.kill" in str(block.faults)]
    runs = page.output_of(killed).split("2 of 6 epochs are finished")
    runs.append(page.output_of(right_output(page, killed)))
    found = [re.findall(r"epoch (\d)/6 .* held-out loss (\S+)", run) for run in runs]
    return [[(int(epoch), float(loss)) for epoch, loss in run] for run in found]


def draw_killed_run(first, second, whole, narrow):
    left, step, width = (16, 54, 384) if narrow else (16, 115, 820)

    def x(epoch):
        return left + step * epoch

    def y(loss):
        return 150 - 45 * math.log10(loss)

    points = " ".join(f"{x(epoch)},{y(loss):.1f}" for epoch, loss in whole)
    lines = [f'<polyline points="{points}" class="whole"/>']
    for epoch, loss in second:
        place = f'cx="{x(epoch)}" cy="{y(loss):.1f}"'
        lines.append(f'<circle {place} r="9" class="ring"/>')
    for epoch, loss in first:
        place = f'cx="{x(epoch)}" cy="{y(loss):.1f}"'
        lines.append(f'<circle {place} r="5" class="dot"/>')
    lines.append(write(12, 56, "held-out loss"))
    legend = ["grey: never killed", "blue: attempt 1", "orange: attempt 2"]
    for row, text in enumerate(legend):
        lines.append(write(x(4), 70 + 22 * row, text))
    at = x(4) - 16
    lines += [
        f'<path d="M{at - 8} 66h16" class="whole"/>',
        f'<circle cx="{at}" cy="88" r="5" class="dot"/>',
        f'<circle cx="{at}" cy="110" r="6" class="ring"/>',
    ]
    for top, name, epochs in ((290, "attempt 1", first), (360, "attempt 2", second)):
        lines.append(write(12, top - 8, name, "ink b"))
        for epoch, _ in epochs:
            box = f'x="{x(epoch) - step // 2}" y="{top}" width="{step - 3}" height="34"'
            lines.append(f'<rect {box} class="ok" stroke="#68727d"/>')
            lines.append(write(x(epoch) - 3, top + 15, f"epoch {epoch}", "ink n"))
            if epoch % 2 == 0:
                lines.append(write(x(epoch) - 3, top + 28, "saved", "ink n"))
    start = x(4) - step // 2
    lines.append(f'<rect x="{start}" y="290" width="24" height="34" class="bad"/>')
    lines.append(write(start + 30, 312, "SIGKILL", "ink b"))
    path = f"M{start + 12} 324V340H{x(3) - 3}V358"
    lines.append(f'<path d="{path}" class="back"/>')
    words = "Attempt 1 trains epochs 1 to 3 and is killed in epoch 4. Attempt 2 begins"
    words += " behind the snapshot of epoch 2, and its losses are the same."
    return picture("Killed in epoch 4: no number changes", words, width, 412, lines)


def drawn():
    """{name of a file: its text}"""
    losses = held_out_losses()
    runs = killed_and_whole()
    return {
        "samples.svg": draw_samples(losses, narrow=False),
        "samples_narrow.svg": draw_samples(losses, narrow=True),
        "killed_run.svg": draw_killed_run(*runs, narrow=False),
        "killed_run_narrow.svg": draw_killed_run(*runs, narrow=True),
    }


if __name__ == "__main__":
    for name, text in drawn().items():
        (ROOT / "docs/pictures" / name).write_text(text)
