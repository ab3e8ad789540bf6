"""Draw docs/pictures/samples.svg: which device takes which sample, in three epochs.

python -m tools.site.pictures

The samplers are PyTorch's, over 16 samples. The losses are those of chapter 2.
"""

import re

import torch
from torch.utils.data import DistributedSampler, RandomSampler

from tools.scripts import ROOT
from tools.site.pages import parse, right_output

SAMPLES = range(16)
DEVICES = range(2)
EPOCHS = range(3)
STEPS = 8  # shown of an epoch
SIDE = 22  # of a square, in pixels
STYLE = """
text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif}
.b{font-weight:700}.h{font-size:16px;font-weight:700}
.n{font-size:11px;text-anchor:middle}
.card{fill:#ffffff}.ok{fill:#d3e5fb}.bad{fill:#ffd7d5}.ink{fill:#1f2328}
@media (prefers-color-scheme:dark){
.card{fill:#15191f}.ok{fill:#173a63}.bad{fill:#5d1f24}.ink{fill:#e6edf3}}
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
    wrong = [block for block in page.blocks if "set_epoch" in str(block.faults)]
    wrong.sort(key=lambda block: len(block.faults))  # RandomSampler has no set_epoch
    found = []
    for block in (right_output(page, wrong[0]), *wrong):
        *_, loss = re.findall(r"held-out loss (\S+)", page.output_of(block))
        found.append(f"{float(loss):.3f}")
    return found


def write(x, y, text, kind="ink"):
    return f'<text x="{x}" y="{y}" class="{kind}">{text}</text>'


def left_of(epoch):
    return 200 + 185 * epoch


def square(x, y, sample, kind):
    place = f'x="{x}" y="{y}" width="{SIDE}" height="{SIDE}"'
    box = f'<rect {place} class="{kind}" stroke="#68727d"/>'
    return box + write(x + SIDE // 2, y + 15, sample, "ink n")


def draw(losses):
    """The picture as SVG. losses: a text for each of CASES."""
    title = "Two devices share 16 samples: who takes which, step by step?"
    lines = [write(20, 30, title, "ink h"), write(752, 58, "loss")]
    lines += [write(left_of(epoch), 58, f"epoch {epoch + 1}") for epoch in EPOCHS]
    words = []
    for number, (name, what, order, is_wrong) in enumerate(CASES):
        top = 72 + 72 * number
        lines.append(write(20, top + 18, name, "ink b"))
        lines.append(write(20, top + 38, what))
        lines.append(write(752, top + 27, losses[number], "ink b"))
        words.append(f"{name}: {what}, loss {losses[number]}")
        for epoch in EPOCHS:
            for device in DEVICES:
                kind = "bad" if is_wrong(epoch, device) else "ok"
                for step, sample in enumerate(order(epoch, device)[:STEPS]):
                    place = (left_of(epoch) + SIDE * step, top + SIDE * device)
                    lines.append(square(*place, sample, kind))
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 280" width="820"'
            ' height="280" role="img" aria-labelledby="title desc">',
            f'<title id="title">{title}</title>',
            f'<desc id="desc">{". ".join(words)}.</desc>',
            f"<style>{STYLE}</style>",
            '<rect width="820" height="280" rx="8" class="card"/>',
            *lines,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    picture = ROOT / "docs/pictures/samples.svg"
    picture.write_text(draw(held_out_losses()))
