"""What a command or a test depends on: the files that its code names, and theirs.

A file is named if it is imported, or if its path, its own name, a folder that it is in
or its module stands in a text of the code. In tools/, which starts all programs, only
imports count.
"""

import ast
import collections
import functools
import re
import sys
from importlib import metadata
from pathlib import Path

from tools.files import file_names
from tools.prove import record
from tools.scripts import ROOT

MAKES_THE_SITE = r"tools/site/(?!pages\.py|commands\.py)."  # from all pages there are
VERSIONS = "Python {}.{}, torch {}".format(
    *sys.version_info[:2], metadata.version("torch").partition("+")[0]
)


@functools.cache
def files_by_name():
    """{a name of a file, or of a folder in a folder that it is in: files}."""
    found = collections.defaultdict(set)
    for name in file_names():
        path = Path(name)
        module = ".".join(path.with_suffix("").parts)
        folders = [str(folder) for folder in path.parents[:-2]]
        for key in {name, path.name, module, *folders}:
            found[key].add(name)
    return found


def named_in(text):
    """The files that words of a text name, if these have a dot or a slash."""
    words = [word.strip(".").rstrip("/") for word in re.findall(r"[\w./-]+", text)]
    names = {word for word in words if re.search("[./]", word)}
    return set().union(*(files_by_name().get(name, ()) for name in names))


def read(code):
    """(the names of what a Python program imports, its texts but docstrings)."""
    imports = []
    texts = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            imports += [f"{alias.name}.py {alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports += [f"{node.module}.{alias.name}" for alias in node.names]
            imports.append(node.module)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = None
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return imports, texts


@functools.cache
def named_by(name):
    """The files that a program names, but not what conftest.py has for all tests."""
    if not name.endswith((".py", ".sh", ".sbatch")) or name == "tests/conftest.py":
        return set()
    text = (ROOT / name).read_text()
    if name.endswith(".py"):
        imports, texts = read(text)
        text = " ".join(imports if name.startswith("tools/") else imports + texts)
    return named_in(text)


def all_named(files):
    """These files, all that they name, and so on; or all, if they build the site."""
    found = set()
    to_read = {*files}
    while to_read:
        name = to_read.pop()
        found.add(name)
        to_read |= named_by(name) - found
    if any(re.match(MAKES_THE_SITE, name) for name in found):
        return {*file_names()}
    return found


@functools.cache
def digest_of_file(name):
    return record.digest([name, (ROOT / name).read_bytes().hex()])


def digest(files, *texts):
    """A hash of texts and of what is in files."""
    files = sorted({*files} - {str(record.GREEN.relative_to(ROOT))})
    return record.digest([*texts, *map(digest_of_file, files)])
