"""Checks of the site's pages and pictures."""

import pytest

from tools.scripts import ROOT

WIDE = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
PAIR = "side_by_side/single_gpu--multigpu.html"


def check_picture(name, svg, folder):
    """docs/pictures/NAME.svg is what a script of the site draws, with its style."""
    css = ROOT / f"tools/site/static/{name.removesuffix('_narrow')}.css"
    style, _, _ = css.read_text().partition("\n\n")
    svg = svg.replace(">", f"><style>\n{style}\n</style>", 1) + "\n"
    kept = ROOT / f"docs/pictures/{name}.svg"
    drawn = folder / kept.name
    drawn.write_text(svg)
    assert kept.read_text() == svg, f"stale: cp {drawn} {kept}"


# What axe-core finds on a page with nothing folded. After two frames, site.js has
# looked at what scrolls sideways in the new width.
BARRIERS = """async () => {
    for (const fold of document.querySelectorAll("details")) fold.open = true;
    await new Promise((done) =>
        requestAnimationFrame(() => requestAnimationFrame(done)));
    const tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa",
        "best-practice"];
    const found = await axe.run({ runOnly: tags, resultTypes: ["violations"] });
    if (!found.passes.length) return ["nothing was looked at"];
    return found.violations.map((x) => `${x.id}: ${x.nodes[0].target}`);
}"""


def check_barriers(tab):
    axe = pytest.importorskip("axe_playwright_python.base")
    tab.add_script_tag(path=axe.AXE_FILE_PATH)
    for viewport, scheme in ((WIDE, "light"), (PHONE, "dark")):
        tab.set_viewport_size(viewport)
        tab.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        assert tab.evaluate(BARRIERS) == [], scheme
