"""`@record` writes a worker's error file in one piece.

As torch has it, torchrun can end instead of restarting: a worker that raises writes
error.json, torchrun's SIGTERM comes before it has finished, and torchrun cannot parse
what it finds there (torch 2.10 to 2.13, `ProcessFailure.__post_init__`).
"""

import os

from hooks import replace
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler


def in_one_piece(record_exception, handler, error):
    file = os.environ["TORCHELASTIC_ERROR_FILE"]
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{file}.tmp"
    record_exception(handler, error)
    os.replace(f"{file}.tmp", file)


replace(ErrorHandler, "record_exception", in_one_piece)
