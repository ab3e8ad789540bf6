"""Watch what a Trainer's DDP sends, and how good its gradient is.

In a script that wraps its model in DDP, put this line into `__init__`:

    from docs.gradient_accumulation import watch; watch.attach(self)

In each epoch, rank 0 prints the all-reduces of gradients in a step and their bytes; how
far the gradient that the optimizer used is from that of the whole batch of all ranks;
the largest difference of a weight between two ranks; and the most bytes that autograd
has kept for `backward`. The model must have no dropout and no batch normalization.
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
    run_batch = trainer._run_batch
    evaluate = trainer._evaluate
    parameters = list(trainer.model.parameters())
    sent = []  # bytes of each all-reduce
    errors = []  # of the gradient of each step

    def count(_, bucket):
        sent.append(bucket.buffer().nbytes)
        return allreduce_hook(None, bucket)

    def watched_run_batch(source, targets):
        whole = trainer.loss_fn(trainer.model(source), targets)
        expected = flat(torch.autograd.grad(whole, parameters))
        dist.all_reduce(expected)
        expected /= dist.get_world_size()
        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
            loss = run_batch(source, targets)
        error = flat(parameter.grad for parameter in parameters) - expected
        errors.append(error.norm() / expected.norm())
        return loss

    def watched_evaluate():
        ranks = [flat(parameters) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, ranks[0].clone())
        apart = max((weights - ranks[0]).abs().max() for weights in ranks)
        steps = len(errors)
        trainer._print(
            f"per step: all-reduces {len(sent) / steps:g}, bytes {sum(sent) / steps:g}"
            f" | gradient error {100 * sum(errors) / steps:.3f} %"
            f" | ranks apart {apart:.6f} | bytes kept for backward {Kept.most}"
        )
        sent.clear()
        errors.clear()
        return evaluate()

    trainer.ddp_model.register_comm_hook(None, count)
    trainer._run_batch = watched_run_batch
    trainer._evaluate = watched_evaluate


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])
