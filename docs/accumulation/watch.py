"""Watch what a Trainer's DDP sends in each step, and how good its gradient is.

In a script of this repository that wraps its model in DDP, put this into `__init__`:

    from docs.accumulation import watch; watch.attach(self)

After each epoch, rank 0 prints one line with means over the steps of the epoch, but
with the largest number of bytes that autograd kept at one time:

    all-reduces, bytes      that DDP made with gradients, and the bytes in them
    gradient error          how far the gradient that the optimizer used is from the
                            gradient of the whole batch of all ranks, in percent
    ranks apart             the largest difference of a weight between two ranks
    bytes kept for backward of the tensors that autograd keeps until `backward`

It computes the gradient of the whole batch once more, and so it needs a model without
dropout and without batch normalization. Training itself stays the same.
"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook


class Kept:
    """A tensor that autograd keeps: `bytes` counts it until autograd lets it go."""

    bytes = most = 0

    def __init__(self, tensor):
        self.tensor = tensor
        Kept.bytes += tensor.nbytes
        Kept.most = max(Kept.most, Kept.bytes)

    def __del__(self):
        Kept.bytes -= self.tensor.nbytes


def attach(trainer):
    run_batch, evaluate = trainer._run_batch, trainer._evaluate
    parameters = list(trainer.model.parameters())
    seen = {"steps": 0, "all-reduces": 0, "bytes": 0, "error": 0.0}

    def count(_, bucket):
        seen["all-reduces"] += 1
        seen["bytes"] += bucket.buffer().nbytes
        return allreduce_hook(None, bucket)

    def watched_run_batch(source, targets):
        loss = trainer.loss_fn(trainer.model(source), targets)
        expected = flat(torch.autograd.grad(loss, parameters))
        dist.all_reduce(expected)
        expected /= dist.get_world_size()
        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
            loss = run_batch(source, targets)
        used = flat([x.grad for x in parameters])
        seen["error"] += float((used - expected).norm() / expected.norm())
        seen["steps"] += 1
        return loss

    def watched_evaluate():
        highest = flat([x.detach() for x in parameters])
        lowest = highest.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        steps = seen["steps"]
        trainer._print(
            f"per step: all-reduces {seen['all-reduces'] / steps:g},"
            f" bytes {seen['bytes'] / steps:g}"
            f" | gradient error {100 * seen['error'] / steps:.3f} %"
            f" | ranks apart {(highest - lowest).max():.6f}"
            f" | bytes kept for backward {Kept.most}"
        )
        seen.update(dict.fromkeys(seen, 0))
        return evaluate()

    trainer.ddp_model.register_comm_hook(None, count)
    trainer._run_batch, trainer._evaluate = watched_run_batch, watched_evaluate


def flat(tensors):
    return torch.cat([x.flatten() for x in tensors])
