"""The site: `python -m sphinx -W -c website docs docs/_site`.

Then open docs/_site/index.html.
"""

import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from website.home import readme  # noqa: E402

project = readme()[0].partition(":")[0]
html_title = project
# Where the site and the repository are, if they are published: the workflow says it.
# Links from elsewhere (a preview's picture, the page for wrong addresses) need it.
html_baseurl = os.environ.get("SITE_URL", "")
repository_url = os.environ.get("REPOSITORY_URL", "")
notfound_urls_prefix = urlsplit(html_baseurl).path.rstrip("/") + "/"
notfound_template = "404.html"
extensions = ["myst_parser", "sphinx_copybutton", "notfound.extension"]
extensions += ["website.extension"]
root_doc = "0_intro"
include_patterns = ["*.md"]
smartquotes_action = "qe"  # no D: it would make a dash of --nodes
myst_heading_anchors = 6  # ladder.pages.slug gives the same anchors

templates_path = ["templates"]
html_static_path = ["static"]
html_favicon = "static/icon.svg"
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
html_use_index = False
html_copy_source = False
# Of a console, the buttons copy the commands alone: no prompt and no output.
copybutton_selector = ", ".join(
    f".highlight-{kind} pre" for kind in ("sh", "python", "console:not(.output)")
)
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"
html_show_copyright = False
html_show_sphinx = False
# Kept up with Sphinx, light and dark, readable without JavaScript, and it loads nothing
# from elsewhere; the colours below are what its tests asked for beyond that.
html_theme = "furo"
# Every colour of these two reaches 4.5:1 on the grounds below, too.
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#1d4fbf",
        "color-brand-content": "#1d4fbf",
        "color-brand-visited": "#6f1fbf",
        "color-removed": "#ffebe9",
        "color-added": "#dafbe1",
        "color-removed-word": "#ffc8c4",
        "color-added-word": "#a6eeb6",
        "color-sign": "#4a4d54",
        "color-bar": "#e4e9f2",
        "color-step-1": "#eceff2",
        "color-step-2": "#d3e5fb",
        "color-step-3": "#d0eed9",
        "color-step-4": "#fbe5bb",
    },
    "dark_css_variables": {
        "color-brand-primary": "#8ab8ff",
        "color-brand-content": "#8ab8ff",
        "color-brand-visited": "#cdb0ff",
        "color-removed": "#3a1d20",
        "color-added": "#12301f",
        "color-removed-word": "#6b2a2c",
        "color-added-word": "#1b5230",
        "color-sign": "#b4b9c0",
        "color-bar": "#2a303b",
        "color-step-1": "#2a3039",
        "color-step-2": "#173a63",
        "color-step-3": "#164a2c",
        "color-step-4": "#564110",
    },
}
