"""A worker that raises takes 3 s to write its error file, after it has opened it."""

import time

from hooks import replace
from torch.distributed.elastic.multiprocessing.errors import error_handler


def slowly(dump, *arguments):
    time.sleep(3)
    dump(*arguments)


replace(error_handler.json, "dump", slowly)
