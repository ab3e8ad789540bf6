"""What a person sees of a run: what it is, and its metrics in a CSV file."""

import csv
import os

import torch.distributed as dist


def describe_run(args, corpus, model, device, steps_run):
    """What is about to run, in four lines."""
    config, world_size = model.config, dist.get_world_size()
    tokens = world_size // args.split * args.batch_size * config.block_size
    passes = args.steps * tokens / len(corpus.train)
    sizes = [(x.numel(), hasattr(x, "cut")) for x in model.parameters()]
    parameters = sum(size * (args.split if cut else 1) for size, cut in sizes)
    compiled = "compiled" if args.compile == "on" else "not compiled"
    compiled += f", split over {args.split} ranks" if args.split > 1 else ""
    return (
        f"text: {corpus.description}\n"
        f"model: {args.model}, {parameters / 1e6:.2f} M parameters, {config.n_layer}"
        f" layers, {config.n_head} heads, {config.n_embd} wide, blocks of"
        f" {config.block_size} tokens, vocabulary {config.vocab_size}\n"
        f"run: {world_size} x {device.type}, {args.precision}, {compiled}, batch"
        f" {args.batch_size} blocks each in {args.accumulate} micro-batches:"
        f" {tokens:,} tokens a step, {args.steps} steps, {passes:.2g} passes over the"
        f" text\n{steps_run} of {args.steps} steps are finished in"
        f" {args.snapshot_path}"
    )


def log(snapshot_path, step, metrics):
    """Write the metrics of a step as the last line of a CSV file beside the snapshot.

    Lines of this step and of later ones go: a run that was killed may have logged more
    than it saved. The file is renamed into place, so that a kill tears no line.
    """
    path = f"{snapshot_path.removesuffix('.pt')}.metrics.csv"
    rows = []
    if os.path.exists(path):
        with open(path, newline="", encoding="utf-8") as file:
            rows = [x for x in csv.DictReader(file) if int(x["step"]) < step]
    with open(f"{path}.tmp", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["step", *metrics], lineterminator="\n")
        writer.writeheader()
        writer.writerows([*rows, {"step": step, **metrics}])
    os.replace(f"{path}.tmp", path)
