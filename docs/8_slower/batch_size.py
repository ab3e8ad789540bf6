"""Three rules for the learning rate of an N times larger batch, on the same samples.

python docs/8_slower/batch_size.py
"""

import torch

SEEDS, SAMPLES, BATCH = 5, 2**15, 8
OPTIMIZERS = {  # and the powers of 2 that are tried as the learning rate for BATCH
    "SGD": (lambda x: torch.optim.SGD(x, momentum=0.9, fused=True), range(-9, -4)),
    "AdamW": (lambda x: torch.optim.AdamW(x, fused=True), range(-8, -3)),
}


def draw_models(width, scale, rng):
    """SEEDS models: 10 features, `width` hidden units, 1 output."""
    shapes = (SEEDS, 10, width), (SEEDS, width, 1)
    drawn = (torch.randn(x, generator=rng) / x[1] ** 0.5 for x in shapes)
    return [scale * x for x in drawn] + [torch.zeros(SEEDS, 1, x[2]) for x in shapes]


def output(models, source):
    first, second, first_bias, second_bias = models
    hidden = torch.baddbmm(first_bias, source, first).tanh()
    return torch.baddbmm(second_bias, hidden, second)


def held_out_loss(make_optimizer, lr, batch, start, train_data, new, truth):
    """The mean of SEEDS models after one epoch; inf if a constant would do better."""
    models, steps = [x.clone().requires_grad_() for x in start], SAMPLES // batch
    optimizer = make_optimizer(models)
    batches = zip(*(x.split(batch, 1) for x in train_data), strict=True)
    for i, (source, targets) in enumerate(batches):
        warm_up, decay = (i + 1) / (0.1 * steps), (steps - i) / (0.9 * steps)
        optimizer.param_groups[0]["lr"] = lr * min(warm_up, decay)
        optimizer.zero_grad()
        (output(models, source) - targets).square().mean((1, 2)).sum().backward()
        optimizer.step()
    loss = (output(models, new) - truth).square().mean().item()
    return loss if loss < truth.var() else float("inf")


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    rng = torch.Generator().manual_seed(0)
    teachers, start = draw_models(8, 2, rng), draw_models(32, 1, rng)
    source, new = (torch.randn(SEEDS, x, 10, generator=rng) for x in (SAMPLES, 4096))
    noisy = output(teachers, source) + torch.randn(SEEDS, SAMPLES, 1, generator=rng)
    setup = start, (source, noisy), new, output(teachers, new)
    print("optimizer   N  steps    kept  x sqrt(N)     x N   best of x1 to x64")
    for name, (make, powers) in OPTIMIZERS.items():
        tuned = {2.0**x: held_out_loss(make, 2.0**x, BATCH, *setup) for x in powers}
        lr = min(tuned, key=tuned.get)
        print(f"{name:9}   1 {SAMPLES // BATCH:6} {tuned[lr]:#7.2g}  (lr {lr:g})")
        for n in (4, 16, 64):
            batch, factors = n * BATCH, [2**x for x in range(7)]
            row = {x: held_out_loss(make, lr * x, batch, *setup) for x in factors}
            line = f"{SAMPLES // batch:6} {row[1]:#7.2g} {row[n**0.5]:#10.2g}"
            best = min(row, key=row.get)
            print(f"{name:9} {n:3} {line} {row[n]:#7.2g} {row[best]:#7.2g} (x{best})")
