"""What a person sees of a run: what it is, and its metrics in a CSV file."""

import csv
import os

import torch.distributed as dist


def describe_run(run, corpus, model, replica_size):
    """What is about to run, in three or four lines.

    run: the Configuration. model: before it is split. replica_size: the strategy's.
    """
    config = model.config
    world_size = dist.get_world_size()
    parameters = sum(weight.numel() for weight in model.parameters())
    tokens = world_size // replica_size * run.batch_size * config.block_size
    passes = run.steps * tokens / len(corpus.train)
    compiled = "not compiled"
    wait = ""
    if run.compile:
        compiled = "compiled"
        wait = "\ncompiling: the first step takes a minute, and more on a busy machine"
    if run.shard:
        compiled += ", sharded"
    if run.split > 1:
        compiled += f", split over {run.split} ranks"
    return (
        f"text: {corpus.description}\n"
        f"model: {run.module}, {parameters / 1e6:.2f} M parameters,"
        f" {config.n_layer} layers, {config.n_head} heads, {config.n_embd} wide,"
        f" blocks of {config.block_size} tokens, vocabulary {config.vocab_size}\n"
        f"run: {world_size} x {run.device.type}, {run.precision}, {compiled}, batch"
        f" {run.batch_size} blocks each in {run.accumulate} micro-batches:"
        f" {tokens:,} tokens a step, {run.steps} steps, {passes:.2g} passes over the"
        f" text{wait}"
    )


def log(snapshot_path, step, metrics):
    """Write the metrics of a step as the last line of a CSV file beside the snapshot.

    Lines of this step and of later ones go: a run that was killed may have logged more
    than it saved. The file is renamed into place, so that a kill tears no line.
    """
    path = f"{snapshot_path.removesuffix('.pt')}.metrics.csv"
    rows = []
    if os.path.exists(path):
        with open(path, newline="") as file:
            rows = [row for row in csv.DictReader(file) if int(row["step"]) < step]
    rows.append({"step": step, **metrics})
    with open(f"{path}.tmp", "w", newline="") as file:
        writer = csv.DictWriter(file, ["step", *metrics], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(f"{path}.tmp", path)
