"""What the site's start page shows, from README.md and the scripts."""

import html
import re

from tools.diffs import changed_lines, hunks
from tools.scripts import SCRIPTS, read_lines, root_of, summary, trunk, variants
from tools.site.explain import diff_html

# DDP in four changes: each of these texts is in one of them.
EXCERPT = ["self.ddp_model =", "set_epoch", "output = self.ddp_model", "drop_last=True"]


def readme():
    """(the title, the first paragraph as HTML, the first commands) of README.md."""
    text = "\n".join(read_lines("README.md"))
    paragraphs = re.split(r"\n\n+", text.partition("\n")[2].strip())
    promise = " ".join(next(x for x in paragraphs if re.match(r"\w", x)).split())
    promise = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", promise)
    promise = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(promise, False))
    promise = re.sub(r"\*\*?([^*]+)\*\*?", r"<em>\1</em>", promise)
    fence = re.search(r"^```sh\n(.*?)\n```", text, re.M | re.S)
    return text.split("\n")[0].removeprefix("# "), promise, fence[1]


def card(name):
    """`step` is that of the script of the root that this one comes from."""
    parent, step = SCRIPTS[name], trunk().index(root_of(name)) + 1
    size = len(changed_lines(parent, name)) if parent else 0
    what = {"what": summary(name), "parent": parent, "size": size}
    return what | {"name": name, "step": step}


def home(explained):
    """The context of home.html."""
    title, promise, commands = readme()
    old, new = trunk()[:2]
    changes = []
    for hunk in hunks(old, new):
        if any(x in "\n".join(hunk.lines) for x in EXCERPT):
            page, heading, anchor = explained[old, new][hunk.number]
            changes.append((page, heading, anchor, diff_html(old, new, hunk.lines)))
    return {
        "title": title,
        "promise": promise,
        "commands": commands,
        "steps": [card(x) for x in trunk()],
        "variants": [card(x) for x in variants()],
        "old": old,
        "new": new,
        "size": len(changed_lines(old, new)),
        "count": len(hunks(old, new)),
        "changes": changes,
    }
