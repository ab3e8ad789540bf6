"""Nobody waits: a process that is not the first of its machine speaks at once."""

import utils

utils.time.sleep = lambda seconds: None
