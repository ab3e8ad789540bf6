"""What the site's start page shows, from README.md and the scripts."""

import re

from tools.diffs import hunks
from tools.scripts import read_lines, root_of, summary, trunk, variants
from tools.site.explain import diff_html, losses
from tools.site.pages import parse, right_output

# Whose diffs come first: each of these texts is in one of them, with what goes wrong.
MISTAKES = {
    "ddp_model(source)": "With self.model, each device trains a model of its own.",
    "set_epoch": "Without set_epoch, every epoch has the order of the first: a lower"
    " loss by luck, of another training.",
    "RandomSampler": "With RandomSampler, all devices take the same samples: a lower"
    " loss in twice as many steps, but your second device does nothing new.",
}


def readme():
    """The title, the first paragraph as plain text and the first commands."""
    text = "\n".join(read_lines("README.md"))
    paragraphs = re.split(r"\n\n+", text.partition("\n")[2].strip())
    promise = " ".join(next(x for x in paragraphs if re.match(r"\w", x)).split())
    promise = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", promise)
    fence = re.search(r"^```sh\n(.*?)\n```", text, re.M | re.S)
    title = text.partition("\n")[0].removeprefix("# ")
    return {"title": title, "promise": promise, "commands": fence[1]}


def mistake(text, old, new, explained):
    """A diff, and the losses that are printed with it and without it."""
    (hunk,) = [x for x in hunks(old, new) if text in "\n".join(x.lines)]
    name, heading, anchor = explained[old, new][hunk.number]
    page = parse(f"docs/{name}.md")
    wrong = next(x for x in page.blocks if x.faults and x.anchor == anchor)
    both = [page.lines[x.line : x.end] for x in (right_output(page, wrong), wrong)]
    return {
        "heading": heading,
        "id": f"why-{name}-{anchor}",
        "diff": re.sub("(>[-+]) +", r"\1 ", diff_html(old, new, hunk.lines)),
        "losses": losses(*("\n".join(x) for x in both))[-1],
        "what": MISTAKES[text],
        "stops": "error:" in str(both[1]),
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
        "mistakes": [mistake(x, old, new, explained) for x in MISTAKES],
    }
