"""Whether the ranks fit together, and the snapshot fits the run."""

import dataclasses

import torch.distributed as dist

import utils

# What each rank may have of its own. All else must be the same.
OF_ONE_RANK = {"data", "tokenizer", "cache", "init_from", "snapshot_path", "device"}


def check_ranks(configuration, corpus):
    """End with one line if the ranks do not train the same, on the same text."""
    options = dataclasses.asdict(configuration)
    options["text"] = f"{len(corpus.train)} tokens, {corpus.checksum}"
    found = utils.gather(options)
    for name in options:
        values = [ranks_options[name] for ranks_options in found]
        different = len(set(map(str, values))) > 1
        if different and name not in OF_ONE_RANK:
            utils.error(f"ranks differ in {name}: {values}")


def must_match(configuration, corpus, model):
    """What a snapshot must have been saved with, so that a run can resume from it."""
    fields = dataclasses.asdict(model.config)
    fields["checkpoint"] = False  # it changes no result
    # A function is no part of a snapshot: another device may choose another attention.
    fields = {name: value for name, value in fields.items() if not callable(value)}
    return {
        "model": configuration.module,
        "seed": configuration.seed,
        "tokenizer": corpus.tokenizer.state(),
        "text": corpus.checksum,
        "config": fields,
    }


def check_snapshot(snapshot, now, path):
    """End with one line if a snapshot does not fit. Another text is only printed.

    now: the `must_match` of this run.
    """
    saved = snapshot.get("CONFIGURATION", {})
    for name, value in now.items():
        if saved.get(name) == value:
            continue
        if name != "text":
            other = "is another one" if name == "tokenizer" else saved.get(name)
            utils.error(f"{path}: its {name} {other}: choose another --snapshot-path")
        if dist.get_rank() == 0:  # one rank prints
            print(f"{path} was trained on another text, or another split")
