"""Three rules for the learning rate of an N times larger batch, on the same samples.

python docs/8_slower/batch_size.py
"""

from functools import partial

import torch

SEEDS = 5
SAMPLES = 2**15
BATCH = 8
OPTIMIZERS = {  # and the powers of 2 that are tried as the learning rate for BATCH
    "SGD": (partial(torch.optim.SGD, momentum=0.9, fused=True), range(-9, -4)),
    "AdamW": (partial(torch.optim.AdamW, fused=True), range(-8, -3)),
}


def draw_models(width, scale, rng):
    """SEEDS models: 10 features, `width` hidden units, 1 output."""
    weights = []
    biases = []
    for inputs, outputs in ((10, width), (width, 1)):
        drawn = torch.randn(SEEDS, inputs, outputs, generator=rng)
        weights.append(scale * (drawn / inputs**0.5))
        biases.append(torch.zeros(SEEDS, 1, outputs))
    return weights + biases


def output(models, source):
    first, second, first_bias, second_bias = models
    hidden = torch.baddbmm(first_bias, source, first).tanh()
    return torch.baddbmm(second_bias, hidden, second)


def held_out_loss(make_optimizer, lr, batch, start, source, targets, new, truth):
    """The mean of SEEDS models after one epoch; inf if a constant would do better."""
    models = [tensor.clone().requires_grad_() for tensor in start]
    optimizer = make_optimizer(models)
    steps = SAMPLES // batch
    for step in range(steps):
        warm_up = (step + 1) / (0.1 * steps)
        decay = (steps - step) / (0.9 * steps)
        optimizer.param_groups[0]["lr"] = lr * min(warm_up, decay)
        optimizer.zero_grad()
        rows = slice(step * batch, (step + 1) * batch)
        errors = output(models, source[:, rows]) - targets[:, rows]
        losses = errors.square().mean((1, 2))  # one for each model
        losses.sum().backward()
        optimizer.step()
    loss = (output(models, new) - truth).square().mean().item()
    return loss if loss < truth.var() else float("inf")


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    rng = torch.Generator().manual_seed(0)
    teachers = draw_models(8, 2, rng)
    start = draw_models(32, 1, rng)
    source = torch.randn(SEEDS, SAMPLES, 10, generator=rng)
    new = torch.randn(SEEDS, 4096, 10, generator=rng)
    noise = torch.randn(SEEDS, SAMPLES, 1, generator=rng)
    noisy = output(teachers, source) + noise
    setup = start, source, noisy, new, output(teachers, new)
    print("optimizer   N  steps    kept  x sqrt(N)     x N   best of x1 to x64")
    for name, (make, powers) in OPTIMIZERS.items():
        tuned = {}
        for power in powers:
            lr = 2.0**power
            tuned[lr] = held_out_loss(make, lr, BATCH, *setup)
        lr = min(tuned, key=tuned.get)
        print(f"{name:9}   1 {SAMPLES // BATCH:6} {tuned[lr]:#7.2g}  (lr {lr:g})")
        for n in (4, 16, 64):
            batch = n * BATCH
            row = {}  # {factor: the loss with lr times this factor}
            for power in range(7):
                factor = 2**power
                row[factor] = held_out_loss(make, lr * factor, batch, *setup)
            line = f"{SAMPLES // batch:6} {row[1]:#7.2g} {row[n**0.5]:#10.2g}"
            best = min(row, key=row.get)
            print(f"{name:9} {n:3} {line} {row[n]:#7.2g} {row[best]:#7.2g} (x{best})")
