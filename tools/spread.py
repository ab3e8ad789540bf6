"""Carry a change of a script into the scripts that come from it.

    python -m tools.spread

Edit a script, such as multigpu.py, and type this before you commit. Each script below
it gets what has changed in its parent since the last commit, as `git merge` would do
it: a script's own changes stay. Where both have changed the same lines, the script is
left as it was, and it is listed: edit it by hand, and type the command again for those
below it. It stays in the list until you commit. Exit status 1: the list is not empty.

Not reached are mingpt/train.py and variants/train_loop.py, which have no parent.
"""

import subprocess
import sys
import tempfile

from tools.scripts import ALL_EDGES, ROOT, ancestry


def merge(parent, child):
    """`child` with what has changed in `parent` since the last commit, or None."""
    show = f"git show HEAD:{parent}"
    with tempfile.NamedTemporaryFile() as committed:
        subprocess.run(show.split(), cwd=ROOT, check=True, stdout=committed)
        merge = f"git merge-file -p -q {child} {committed.name} {parent}"
        done = subprocess.run(merge.split(), cwd=ROOT, stdout=subprocess.PIPE)
    return done.stdout if done.returncode == 0 else None


if __name__ == "__main__":
    conflicts = False
    for parent, child in sorted(ALL_EDGES, key=lambda edge: len(ancestry(edge[1]))):
        path = ROOT / child
        text = merge(parent, child)
        if text is None:
            conflicts = True
            print(f"{child}: edit it by hand, it has changed the same lines itself")
        elif text != path.read_bytes():
            path.write_bytes(text)
            print(f"{child}: changed")
    sys.exit(conflicts)
