"""Copies of files and of the whole tree, with texts replaced."""

import re
import shutil
import subprocess

from tools.scripts import ROOT


def edit(path, *changes):
    """Replace texts in a file: pairs (old, new), each `old` being there once."""
    text = path.read_text()
    for old, new in changes:
        count = text.count(old)
        assert count == 1, f"{path} has {old!r} {count} times, not once"
        text = text.replace(old, new)
    path.write_text(text)


IGNORED = r"(^|/)(\.|__pycache__|_site)|\.pt(\..*\.tmp)?$"


def file_names():
    """The files of the repository: what git knows of, and new ones.

    Without git (an unpacked archive, a copy made by `copy_tree`) they are all but
    hidden files and what runs leave behind.
    """
    command = "git ls-files --cached --others --exclude-standard"
    listed = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        names = listed.stdout.splitlines()
        return sorted(name for name in names if (ROOT / name).is_file())
    paths = [path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file()]
    return sorted(str(path) for path in paths if not re.search(IGNORED, str(path)))


def copy_tree(to):
    """Copy the files of the repository to a folder."""
    for name in file_names():
        copy = to / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy)
