"""The first time that Slurm runs the job, all ranks wait in step 80 to be told to stop.

For preemptible.py, which notes SIGTERM in `self.sigterm`.
"""

import os
import time


class Trainer:
    steps = 0

    def _run_batch(self, source, targets):
        self.steps += 1
        if self.steps == 80 and "SLURM_RESTART_COUNT" not in os.environ:
            print("in step 80", flush=True)
            while not self.sigterm:
                time.sleep(0.01)
        return super()._run_batch(source, targets)
