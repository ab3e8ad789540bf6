"""Each rank notes at its exit which of gloo's threads are still there.

Python imports this module by itself in every interpreter that has its folder on
PYTHONPATH, so that a command is observed as a user types it. Each rank writes its list
of thread names to THREADS_LOG/PID.json.
"""

import atexit
import gc
import json
import multiprocessing
import os
import pathlib
import sys

gc.disable()  # an automatic collection might happen to do the script's work


def note_threads():
    spawned = multiprocessing.parent_process() is not None
    if not spawned and ("RANK" not in os.environ or sys.argv[0] == "-c"):
        return  # a launcher, or a server of Python's multiprocessing
    found = []
    for task in pathlib.Path("/proc/self/task").glob("*/comm"):
        name = task.read_text().strip()
        if "gloo" in name:
            found.append(name)
    file = pathlib.Path(os.environ["THREADS_LOG"], f"{os.getpid()}.json")
    file.write_text(json.dumps(found))


atexit.register(note_threads)
