"""Rank 1 of docs/convert/after.py kills itself in the third epoch that it trains."""

import os
import signal

import torch.distributed as dist

epochs = 0


def around_train(train, args, model, device, loader, *rest):
    global epochs
    epochs += 1
    if epochs == 3 and dist.get_rank() == 1:
        loader = Deadly(loader)
    return train(args, model, device, loader, *rest)


class Deadly:
    """A loader that kills its process after five batches."""

    def __init__(self, loader):
        self.loader = loader

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for step, batch in enumerate(self.loader):
            if step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch
