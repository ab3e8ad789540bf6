"""Code that readers copy from the pages."""

import re

from tools.scripts import ROOT


def fence(page, text):
    """The Python code of a page, such as docs/predict.md, that has this text in it."""
    fences = re.findall("(?s)```python\n(.*?)```", (ROOT / page).read_text())
    (code,) = [fence for fence in fences if text in fence]
    return code
