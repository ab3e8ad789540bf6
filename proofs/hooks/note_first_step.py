"""Each rank writes when it had done its first step to the file step.PROCESS_ID."""

import os
import time


class Trainer:
    noted = False

    def _run_batch(self, source, targets):
        loss = super()._run_batch(source, targets)
        if not self.noted:
            self.noted = True
            with open(f"step.{os.getpid()}.new", "w") as file:
                file.write(str(time.monotonic()))
            os.rename(file.name, f"step.{os.getpid()}")
        return loss
