"""Draw docs/pictures/scripts.svg: the scripts, and the lines that change between them.

    python -m tools.site.pictures

The other pictures of the folder hold nothing that changes with the code: edit them.
"""

import textwrap
from html import escape

from tools.diffs import changed_lines
from tools.scripts import ROOT, SCRIPTS, root_of, summary, trunk, variants

FILE = ROOT / "docs/pictures/scripts.svg"
TITLE = "Each script is the one before it with some lines changed"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
CODE = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
COLOURS = {  # light, dark
    "card": ("#ffffff", "#15191f"),
    "step0": ("#eceff2", "#2a3039"),
    "step1": ("#d3e5fb", "#173a63"),
    "step2": ("#d0eed9", "#164a2c"),
    "ink": ("#1f2328", "#e6edf3"),
}


def style(scheme):
    fills = "".join(f".{key}{{fill:{pair[scheme]}}}" for key, pair in COLOURS.items())
    return f"{fills}.line{{fill:none;stroke:{COLOURS['ink'][scheme]}}}"


def size_of(name):
    return len(changed_lines(SCRIPTS[name], name))


def box(x, y, width, height, kind):
    at = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    return f'<rect {at} rx="4" class="{kind}" stroke="#68727d"/>'


def text(x, y, lines, kind=""):
    return "".join(
        f'<text x="{x}" y="{y + 16 * i}" class="ink {kind}">{escape(line)}</text>'
        for i, line in enumerate([lines] if isinstance(lines, str) else lines)
    )


def draw():
    """Steps that go up, one for each script of the root; the variants below them."""
    steps, others = trunk(), variants()
    rows = -(-len(others) // 3)
    height = 302 + 78 * rows
    parts = [box(0.5, 0.5, 799, height - 1, "card"), text(20, 30, TITLE, "h")]
    for i, name in enumerate(steps):
        x, y = 20 + 256 * i, 166 - 56 * i
        parts.append(box(x, y, 248, 246 - y, f"step{i}"))
        parts.append(text(x + 14, y + 26, name, "h c"))
        parts.append(text(x + 14, y + 48, textwrap.wrap(summary(name), 32)[:3]))
        if i:
            parts.append(f'<path class="line" d="M{x - 60} {y + 52}v-30h52"/>')
            parts.append(f'<path class="line" d="M{x - 14} {y + 16}l6 6l-6 6"/>')
            parts.append(text(x - 70, y + 28, str(size_of(name)), "n end"))
            parts.append(text(x - 70, y + 45, "changed lines", "end"))
    parts.append(text(20, 278, "Variants: a script with one idea more", "b"))
    for i, name in enumerate(others):
        x, y = 20 + 256 * (i % 3), 292 + 78 * (i // 3)
        parts.append(box(x, y, 248, 70, f"step{steps.index(root_of(name))}"))
        parts.append(text(x + 12, y + 20, name.removeprefix("variants/"), "b c"))
        what = textwrap.shorten(summary(name), 38, placeholder=" ...")
        parts.append(text(x + 12, y + 39, what, "s"))
        lines = f"{size_of(name)} changed lines from {SCRIPTS[name]}"
        parts.append(text(x + 12, y + 58, lines, "s"))
    sizes = [f"{x}: {summary(x)}" for x in [*steps, *others]]
    head = f'viewBox="0 0 800 {height}" width="800" height="{height}" role="img"'
    sheet = (
        f"text{{font:13px {FONT}}}.b,.h,.n{{font-weight:700}}.h{{font-size:16px}}"
        ".s{font-size:12px}"
        f".n{{font-size:26px}}.c{{font-family:{CODE}}}.end{{text-anchor:end}}"
        f"{style(0)}@media (prefers-color-scheme:dark){{{style(1)}}}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {head}',
            f' aria-labelledby="title desc"><title id="title">{TITLE}</title>',
            f'<desc id="desc">{escape(". ".join(sizes))}.</desc>',
            f"<style>{sheet}</style>",
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    FILE.write_text(draw())
