"""How long a process waits that is not the first of its machine, before it speaks.

PATIENCE says what happens when it wants to wait: by default it speaks at once, and with
`raise`, where nobody may want to wait, it ends with an exception.
"""

import os

import utils


def sleep(_seconds):
    if os.environ.get("PATIENCE") == "raise":
        raise RuntimeError("it waits")


utils.time.sleep = sleep
