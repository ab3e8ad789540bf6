"""What a person sees of a run: what it is, and its metrics in a CSV file."""

import csv
import os

import torch.distributed as dist


def describe_run(trainer):
    """What is about to run, in four lines."""
    args, config = trainer.args, trainer.model.config
    world_size, device = dist.get_world_size(), trainer.device.type
    tokens = world_size * args.batch_size * config.block_size
    passes = args.steps * tokens / len(trainer.corpus.train)
    parameters = sum(x.numel() for x in trainer.model.parameters())
    compiled = "compiled" if args.compile == "on" else "not compiled"
    return (
        f"text: {trainer.corpus.description}\n"
        f"model: {args.model}, {parameters / 1e6:.2f} M parameters, {config.n_layer}"
        f" layers, {config.n_head} heads, {config.n_embd} wide, blocks of"
        f" {config.block_size} tokens, vocabulary {config.vocab_size}\n"
        f"run: {world_size} x {device}, {args.precision}, {compiled}, batch"
        f" {args.batch_size} blocks each in {args.accumulate} micro-batches:"
        f" {tokens:,} tokens a step, {args.steps} steps, {passes:.2g} passes over the"
        f" text\n{trainer.steps_run} of {args.steps} steps are finished in"
        f" {args.snapshot_path}"
    )


def log(trainer, metrics):
    """Write the metrics of a step as the last line of a CSV file.

    Lines of this step and of later ones go: a run that was killed may have logged more
    than it saved. The file is renamed into place, so that a kill tears no line.
    """
    step, rows = trainer.steps_run, []
    path = f"{trainer.args.snapshot_path.removesuffix('.pt')}.metrics.csv"
    if os.path.exists(path):
        with open(path, newline="", encoding="utf-8") as file:
            rows = [x for x in csv.DictReader(file) if int(x["step"]) < step]
    with open(f"{path}.tmp", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["step", *metrics], lineterminator="\n")
        writer.writeheader()
        writer.writerows([*rows, {"step": step, **metrics}])
    os.replace(f"{path}.tmp", path)
