"""What the site's start page shows, from README.md and the scripts."""

import re

from tools.diffs import hunks
from tools.scripts import read_lines, root_of, summary, trunk, variants
from tools.site.explain import diff_html, losses
from tools.site.pages import has, parse, right_outputs

# What comes first: each of these texts is in one change, with what goes wrong.
MISTAKES = {
    "RandomSampler": "With both red lines, both devices take the same samples. The loss"
    " is lower only because an epoch has twice as many steps. One device alone prints"
    " the same losses, so the second does no useful work.",
    "set_epoch": "Without the green line, every epoch has the order of the first. From"
    " the second epoch on, the losses are those of a different training. This one is"
    " lower by chance.",
    "ddp_model(source)": "With the red line, each device trains a model of its own.",
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


def correction(script, faults):
    """The lines of a diff from a script with faults to the script as it is."""
    lines = []
    for right, wrong in faults:
        (line,) = [line for line in read_lines(script) if right in line]
        if wrong != "pass":
            lines.append(f"-{line.replace(right, wrong)}")
        lines.append(f"+{line}")
    return lines


def mistake(text, old, new, explained):
    """A run's faults as a diff, and the losses that it prints with and without them."""
    (hunk,) = [hunk for hunk in hunks(old, new) if has(hunk, text)]
    name, heading, anchor = explained[old, new][hunk.number]
    page = parse(f"docs/{name}.md")
    blocks = [block for block in page.blocks if block.faults and block.anchor == anchor]
    right = page.output_of(right_outputs(page)[blocks[0].line])
    wrong = page.output_of(blocks[0])
    others = "\n".join(map(page.output_of, blocks[1:]))
    lines = correction(new, blocks[0].faults)
    epoch, *held_out = losses(right, wrong)[-1]
    return {
        "heading": heading,
        "id": f"why-{name}-{anchor}",
        "diff": re.sub("(>[-+]) +", r"\1 ", diff_html(old, new, lines)),
        "epoch": epoch,
        "losses": [f"{float(loss):.3f}" for loss in held_out],
        "what": MISTAKES[text],
        "stops": "error:" in wrong,
        "audit": re.findall(r"(?m)^\S+: (MISTAKE.*)", others),
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
