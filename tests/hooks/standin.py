"""On tests/standin: what costs time on a GPU, or fails there.

seen.RANK.json: {what: how often it was seen in `_run_batch`}, of all steps together.
"""

import collections

import torch
from hooks import write

seen = collections.Counter()


class Trainer:
    def _run_batch(self, *batch):
        before = collections.Counter(torch.standin.seen())
        result = super()._run_batch(*batch)
        seen.update(collections.Counter(torch.standin.seen()) - before)
        return result

    def train(self, *arguments):
        super().train(*arguments)
        write("seen", seen)
