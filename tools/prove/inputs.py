"""What a command or a test depends on: the files that its code names, and theirs.

A file is named if it is imported, or if its path, its own name, a folder that it is in
or its module stands in a text of the code. In tools/, which starts all programs, only
imports count.
"""

import ast
import collections
import functools
import glob
import re
import sys
from importlib.metadata import version
from pathlib import Path

from tools.files import file_names
from tools.prove import record
from tools.scripts import ROOT

MAKES_THE_SITE = r"tools/site/(?!pages|commands|__init__)"  # from all pages there are
# The versions and the machine with which something has passed
PLACE = f"Python {sys.version_info[0]}.{sys.version_info[1]}, torch {version('torch')}"
PLACE += f", {sys.platform}{' with a GPU' if glob.glob('/dev/nvidia?') else ''}"


@functools.cache
def files_by_name():
    """{key: files}.

    A file's keys: its path, its name, its module, and each folder above it but the
    topmost.
    """
    found = collections.defaultdict(set)
    for name in file_names():
        path = Path(name)
        module = ".".join(path.with_suffix("").parts)
        names = {name, module, *(str(folder) for folder in path.parents[:-2])}
        if path.suffix and path.stem != "__init__":
            names.add(path.name)
        for key in names:
            found[key].add(name)
    return found


def named_in(text):
    """The files that the words of a text name. It may be a program."""
    text = re.sub(r"\bfrom ([\w.]+) import (\w+)", r"\1.\2 \1", text)
    words = re.findall(r"[\w./#-]+", text)  # a link to a section is no file
    names = {word.strip("/").removeprefix("./").rstrip(".") for word in words}
    return set().union(*(files_by_name().get(name, ()) for name in names))


def imports_and_texts(code):
    """(the names of what a Python program imports, its texts but docstrings)."""
    imports = []
    texts = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports += [f"{node.module}.{alias.name}" for alias in node.names]
            imports.append(f"{node.module}")
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
        imports, texts = imports_and_texts(text)
        text = " ".join(imports if name.startswith("tools/") else imports + texts)
    return named_in(f"{text} {Path(name).parent}/__init__.py")


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


def digest_of_files(files, *texts):
    """A hash of texts and of what is in files."""
    files = sorted({*files} - {str(record.GREEN.relative_to(ROOT))})
    return record.digest([*texts, *map(digest_of_file, files)])
