"""Whether the ranks fit together, and the snapshot fits the run."""

import dataclasses

import torch.distributed as dist

import utils

# What each rank may have of its own. All else must be the same.
OF_ONE_RANK = {"data", "tokenizer", "cache", "init_from", "snapshot_path"}


def check_ranks(args, corpus):
    """End with one line if the ranks do not train the same, on the same text."""
    mine = {x: y for x, y in vars(args).items() if x not in OF_ONE_RANK}
    mine["text"] = f"{len(corpus.train)} tokens, {corpus.checksum}"
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    for name in mine:
        if len({str(x[name]) for x in found}) > 1:
            utils.error(f"ranks differ in {name}: {[x[name] for x in found]}")


def configuration(args, corpus, config):
    """What a snapshot must have been saved with, so that a run can resume from it."""
    names = {"model": args.model, "seed": args.seed}
    names |= {"tokenizer": corpus.tokenizer.state(), "text": corpus.checksum}
    config = dataclasses.asdict(config) | {"checkpoint": False}  # it changes no result
    # A function is no part of a snapshot: another device may choose another attention.
    return names | {"config": {k: x for k, x in config.items() if not callable(x)}}


def check_snapshot(snapshot, now, path):
    """End with one line if a snapshot does not fit. Another text is only printed.

    now: the `configuration` of this run.
    """
    saved = snapshot.get("CONFIGURATION", {})
    for name, value in now.items():
        if name == "text" and saved.get(name) != value:
            if dist.get_rank() == 0:  # one rank prints
                print(f"{path} was trained on another text, or another split")
        elif saved.get(name) != value:
            other = "is another one" if name == "tokenizer" else saved.get(name)
            utils.error(f"{path}: its {name} {other}: choose another --snapshot-path")
