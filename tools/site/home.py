"""What the site's start page shows, from README.md and the scripts."""

import re

from tools.diffs import hunks
from tools.scripts import read_lines, root_of, summary, trunk, variants
from tools.site.explain import diff_html, losses
from tools.site.pages import has, parse, right_output

# Whose diffs come first: each of these texts is in one of them, with what goes wrong.
MISTAKES = {
    "RandomSampler": "With RandomSampler, all devices take the same samples: a lower"
    " loss in twice as many steps, but your second device does nothing new.",
    "set_epoch": "Without set_epoch, every epoch has the order of the first: a lower"
    " loss by luck, of another training.",
    "ddp_model(source)": "With self.model, each device trains a model of its own.",
}


def readme():
    """The title, the first paragraph as plain text and the first commands."""
    text = "\n".join(read_lines("README.md"))
    heading, _, body = text.partition("\n")
    paragraphs = re.split(r"\n\n+", body.strip())
    first = next(text for text in paragraphs if re.match(r"\w", text))
    promise = " ".join(first.split())
    promise = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", promise)
    fence = re.search(r"(?ms)^```sh\n(.*?)\n```", body)
    title = heading.removeprefix("# ")
    return {"title": title, "promise": promise, "commands": fence[1]}


def mistake(text, old, new, explained):
    """A diff, and the losses that are printed with it and without it."""
    (hunk,) = [hunk for hunk in hunks(old, new) if has(hunk, text)]
    name, heading, anchor = explained[old, new][hunk.number]
    page = parse(f"docs/{name}.md")
    blocks = [block for block in page.blocks if block.faults and block.anchor == anchor]
    right = page.output_of(right_output(page, blocks[0]))
    wrong = page.output_of(blocks[0])
    others = "\n".join(map(page.output_of, blocks[1:]))
    epoch, *held_out = losses(right, wrong)[-1]
    return {
        "heading": heading,
        "id": f"why-{name}-{anchor}",
        "diff": re.sub("(>[-+]) +", r"\1 ", diff_html(old, new, hunk.lines)),
        "epoch": epoch,
        "losses": [f"{float(loss):.3f}" for loss in held_out],
        "what": MISTAKES[text],
        "stops": "error:" in wrong,
        "audit": re.findall(r"(?m)^\S+: MISTAKE.*", others),
    }


def home(explained):
    """The context of home.html."""
    old, new = trunk()[:2]
    return readme() | {
        "steps": trunk(),
        "variants": variants(),
        "summary": summary,
        "root_of": root_of,
        "old": old,
        "new": new,
        "mistakes": [mistake(text, old, new, explained) for text in MISTAKES],
    }
