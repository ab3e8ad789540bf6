"""Hooks: what tests put into a copy of a script, to watch it or to make it fail.

`tools.run.launch.plant(name, folder, hooks=["probe", "faults:die_at_once"])` copies
this folder beside the script and attaches the hooks, in every process. A hook is

- `MODULE:FUNCTION`: the function is called with the globals of the script; or
- `MODULE`, which may have a class `Trainer`, to be put in front of the script's, and
  functions `around_NAME(inner, ...)`: each is called instead of the script's function
  NAME, which it gets as `inner`.
"""

import functools
import importlib
import json
import os
import sys
from pathlib import Path

import utils


def attach(script, *names):
    """Attach hooks to a script, given as its globals."""
    for name in list(sys.modules):
        if name.startswith("hooks."):
            del sys.modules[name]
    for name in names:
        file, _, function = name.partition(":")
        hook = importlib.import_module(f"hooks.{file}")
        if function:
            getattr(hook, function)(script)
            continue
        if hasattr(hook, "Trainer"):
            bases = hook.Trainer, script["Trainer"]
            module = {"__module__": script["__name__"]}
            script["Trainer"] = type("Trainer", bases, module)
        for key, around in list(vars(hook).items()):
            if key.startswith("around_"):
                replace(script, key.removeprefix("around_"), around)


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
