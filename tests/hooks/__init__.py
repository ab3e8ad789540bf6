"""Hooks: what tests do to a script, to watch it or to make it fail.

A hook is a function that each process of a script calls with the script's globals, a
dict, before it calls `main`: `tools.run.launch.train(script, ..., hooks=[hook])`. The
hooks of this folder serve several tests, or new interpreters: for these, `copy_script`
copies the folder beside the copy of the script.
"""

import functools
import json
import os
from pathlib import Path

import utils


def replace(owner, name, around):
    """`owner.NAME(...)` calls `around(inner, ...)`; a dict is a script's globals."""
    is_script = isinstance(owner, dict)
    inner = owner[name] if is_script else getattr(owner, name)

    # A process that is spawned has what its parent has attached: that goes.
    while getattr(inner, "attached_by", os.getpid()) != os.getpid():
        inner = inner.__wrapped__

    @functools.wraps(inner)  # spawned processes look a function up by its name
    def surrounded(*arguments, **options):
        return around(inner, *arguments, **options)

    surrounded.attached_by = os.getpid()
    if is_script:
        owner[name] = surrounded
    else:
        setattr(owner, name, surrounded)


def write(name, facts):
    """NAME.RANK.json, in the folder that the script runs in."""
    Path(f"{name}.{utils.get_rank()}.json").write_text(json.dumps(facts))


class Noted:
    """A data set that notes which samples are taken: `seen` is the list of indices."""

    def __init__(self, data):
        self.data = data
        self.seen = []

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.seen.append(index)
        return self.data[index]

    def __getattr__(self, name):  # such as set_epoch; of a Subset, its data set's
        data = getattr(self.data, "dataset", self.data)
        return getattr(data, name)
