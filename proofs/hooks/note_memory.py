"""Each rank writes how much memory it takes to check and to load a snapshot, in bytes.

To memory.RANK.json: `check` and `load` are the peak of resident memory less what was
resident before (proc_pid_status(5)).
"""

import json
import os
import re
from pathlib import Path

import torch.distributed as dist
from hooks import replace

import utils

facts = {}


def memory(key):
    return int(
        re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]
    )


def measured(name, function, *arguments, **options):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    result = function(*arguments, **options)
    facts[name] = (memory("VmHWM") - before) * 1024
    return result


def check(check_run, *arguments, **options):
    measured("check", check_run, *arguments, **options)


class Trainer:
    def _load_snapshot(self):
        measured("load", super()._load_snapshot)
        rank = os.environ.get("RANK", dist.is_initialized() and dist.get_rank())
        with open(f"memory.{int(rank)}.json", "w") as file:
            json.dump(facts, file)


replace(utils, "check_run", check)
