"""Copies of files and of the whole tree, with texts replaced."""

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


IGNORED = shutil.ignore_patterns(".*", "__pycache__", "_site", "*.pt", "*.pt.*.tmp")


def copy_tree(to, root=ROOT):
    """Copy the repository at `root`: what git knows of, and new files not ignored.

    Without git (an unpacked archive, a copy made by this function) it is everything but
    hidden files and what runs leave behind.
    """
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if listed.returncode:
        shutil.copytree(root, to, ignore=IGNORED, dirs_exist_ok=True)
        return
    for name in listed.stdout.splitlines():
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, to / name)
