"""What the site's start page shows, from README.md and the rungs."""

import html
import re
import textwrap

from ladder.diffs import changed_lines, hunks
from ladder.pages import parse
from ladder.rungs import PARENTS, leaves, read_lines, step_of, steps, summary

# DDP in four changes: each of these texts is in one of them.
EXCERPT = ["self.ddp_model =", "set_epoch", "output = self.ddp_model", "drop_last=True"]
DOORS = [
    {
        "name": "Learn",
        "page": "0_intro",
        "text": "Read one script, then only what changes in the next one.",
    },
    {
        "name": "Convert my script",
        "page": "convert_your_script",
        "text": "Take your own training script from one device to many.",
    },
    {
        "name": "It hangs",
        "page": "it_hangs",
        "text": "Find the rank and the line on which it waits.",
    },
]


def readme():
    """(the title, the first paragraph as HTML, the first commands) of README.md."""
    lines = read_lines("README.md")
    (title,) = re.findall("^# (.*)", lines[0])
    paragraphs = re.split(r"\n\n+", "\n".join(lines[1:]).strip())
    promise = next(x for x in paragraphs if re.match(r"\w", x))
    fence = re.search(r"^```sh\n(.*?)\n```", "\n".join(lines), re.M | re.S)
    return title, inline(" ".join(promise.split())), fence[1]


def inline(text):
    """Markdown's links as their text, its code and stress as HTML."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = html.escape(text, quote=False)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    return re.sub(r"\*\*?([^*]+)\*\*?", r"<em>\1</em>", text)


def cards(names):
    """What the ladder shows of these; `step` is the one they stand on, from 1."""
    for name in names:
        parent = PARENTS[name]
        yield {
            "name": name,
            "what": summary(name),
            "parent": parent,
            "size": len(changed_lines(parent, name)) if parent else 0,
            "step": step_of(name) + 1,
        }


def narrow(lines):
    """The lines of a diff, less to the right where all are indented."""
    code = textwrap.dedent("\n".join(x[1:] for x in lines)).split("\n")
    return "\n".join(x[0] + y for x, y in zip(lines, code, strict=True))


def home(explained, highlight, repository=""):
    """The context of home.html; `highlight(code, language)` returns HTML.

    repository: its address, where that is known.
    """
    title, promise, commands = readme()
    if repository:
        folder = repository.rstrip("/").rpartition("/")[2].removesuffix(".git")
        commands = f"git clone {repository}\ncd {folder}\n{commands}"
    old, new = steps()[:2]
    texts = " ".join(f"`{x}`" for x in EXCERPT)
    marker = f"<!-- diff {old} {new}: {texts} -->"
    lines = ["# The start page of the site", marker, "<!-- end -->"]
    (block,) = parse("website/home.py", lines).blocks
    changes = []
    for hunk in block.hunks:
        page, heading, anchor = explained[old, new][hunk.number]
        diff = highlight(narrow(hunk.lines), "diff")
        place = {"page": page, "heading": heading, "anchor": anchor}
        changes.append(place | {"diff": diff})
    return {
        "title": title,
        "name": title,
        "promise": promise,
        "cloned": bool(repository),
        "commands": highlight(commands, "sh"),
        "steps": list(cards(steps())),
        "leaves": list(cards(leaves())),
        "old": old,
        "new": new,
        "size": len(changed_lines(old, new)),
        "count": len(hunks(old, new)),
        "changes": changes,
        "doors": DOORS,
    }
