"""Writing a snapshot takes 4 s longer."""

import time

from hooks import replace

import utils


def slowly(save_atomically, *arguments):
    time.sleep(4)
    save_atomically(*arguments)


replace(utils, "save_atomically", slowly)
