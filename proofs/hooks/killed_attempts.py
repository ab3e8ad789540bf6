"""The last of two ranks ends itself inside its second epoch.

It does so in the first KILLS attempts. In each attempt it prints the port of the store
that the attempt uses.
"""

import os
import signal

import torch.distributed as dist


class Trainer:
    steps = 0

    def _run_batch(self, source, targets):
        self.steps += 1
        if self.steps == 40 and dist.get_rank() == 1:
            attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            print(f"attempt {attempt} has port {os.environ['MASTER_PORT']}", flush=True)
            if attempt < int(os.environ["KILLS"]):
                os.kill(os.getpid(), signal.SIGKILL)
        return super()._run_batch(source, targets)
