"""Writing a snapshot takes 4 s longer."""

import time

import utils
from hooks import replace


def slowly(save_atomically, *arguments):
    time.sleep(4)
    save_atomically(*arguments)


replace(utils, "save_atomically", slowly)
