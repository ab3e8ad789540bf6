"""How long a process waits that is not the first of its machine, before it speaks.

PATIENCE says what happens when it wants to wait: `none` (it speaks at once; the default)
or `raise`, where nobody may want to.
"""

import os

import utils


def sleep(_seconds):
    if os.environ.get("PATIENCE") == "raise":
        raise RuntimeError("it waits")


utils.time.sleep = sleep
