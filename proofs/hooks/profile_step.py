"""Rank 0 has the profiler write its step TRACED_STEP to trace.json. Saves nothing."""

import os

import torch
import torch.distributed as dist


class Trainer:
    steps = 0

    def _run_batch(self, source, targets):
        self.steps += 1
        if self.steps < int(os.environ["TRACED_STEP"]) or dist.get_rank() != 0:
            return super()._run_batch(source, targets)
        with torch.profiler.profile(record_shapes=True) as profile:
            loss = super()._run_batch(source, targets)
        profile.export_chrome_trace("trace.json")
        return loss

    def _save_snapshot(self):
        pass
