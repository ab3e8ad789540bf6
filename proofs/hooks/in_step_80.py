"""In step 80, in the third epoch of five, something befalls the last rank.

IN_STEP_80 says what: `kill` (SIGKILL to itself), `raise` (an exception), `sigterm` (to
itself), `sigterm_to_launcher`. The last one waits until the launcher has passed the
signal on, as preemptible.py notes it.
"""

import os
import signal
import time

import torch.distributed as dist


class Trainer:
    steps = 0

    def _run_batch(self, source, targets):
        self.steps += 1
        last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        if self.steps == 80 and last:
            self._befall(os.environ["IN_STEP_80"])
        return super()._run_batch(source, targets)

    def _befall(self, what):
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "raise":
            raise ValueError("planted")
        elif what == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        elif what == "sigterm_to_launcher":
            os.kill(os.getppid(), signal.SIGTERM)
            while not self.sigterm:
                time.sleep(0.01)
