"""The site: `python -m sphinx -W -c tools/site docs docs/_site`.

Then open docs/_site/index.html.
"""

import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tools.site.home import readme  # noqa: E402

project = readme()["title"].partition(":")[0]
html_title = project
# Where the site and the repository are, if they are published: the workflow says it.
# A preview's picture and the links to the repository need it.
html_baseurl = os.environ.get("SITE_URL", "")
repository = os.environ.get("REPOSITORY_URL", "")
notfound_urls_prefix = urlsplit(html_baseurl).path.rstrip("/") + "/"
notfound_template = "404.html"
extensions = [
    "myst_parser",
    "sphinx_copybutton",
    "notfound.extension",
    "tools.site.extension",
]
html_context = {"site_url": html_baseurl, "repository_url": repository}
root_doc = "0_intro"
include_patterns = ["*.md"]
smartquotes_action = "qe"  # no D: it would make a dash of --nodes
myst_enable_extensions = ["tasklist"]
myst_heading_anchors = 6  # tools.site.pages.slug gives the same anchors

templates_path = ["templates"]
html_static_path = ["static", "../../docs/pictures"]  # narrow forms, for phones
html_favicon = "static/icon.svg"
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
html_use_index = False
html_copy_source = False
# Of a console, the buttons copy the commands alone: no prompt and no output.
copybutton_selector = ":is(.highlight-sh, .highlight-python, .highlight-console) pre"
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"
html_show_copyright = False
html_show_sphinx = False
# Kept up with Sphinx, light and dark, readable without JavaScript, and it loads nothing
# from elsewhere; the colours of static/site.css are what its tests asked for beyond it.
html_theme = "furo"
# Every colour of these two reaches 4.5:1 on the grounds of site.css, too.
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
