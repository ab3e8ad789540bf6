"""What the site's start page shows, from README.md and the scripts."""

import re

from tools.scripts import read_lines, root_of, summary, trunk, variants

# The start page shows multigpu.py with each of these lines, and with the wrong one.
SWITCHES = [
    ("output = self.ddp_model(source)", "output = self.model(source)"),
    ("self.train_data.sampler.set_epoch(epoch)", "pass  # without set_epoch"),
    (
        "torch.utils.data.DistributedSampler(train_set, drop_last=True)",
        "torch.utils.data.RandomSampler(train_set, generator=torch.Generator())",
    ),
]


def readme():
    """The title, the first paragraph as plain text and the first commands."""
    text = "\n".join(read_lines("README.md"))
    heading, _, body = text.partition("\n")
    first = re.search(r"(?ms)^\w.*?\n\n", body)
    promise = " ".join(first[0].split())
    promise = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", promise)
    fence = re.search(r"(?ms)^```sh\n(.*?)\n```", body)
    title = heading.removeprefix("# ")
    return {"title": title, "promise": promise, "commands": fence[1]}


def home():
    """The context of home.html."""
    return readme() | {
        "steps": trunk(),
        "variants": variants(),
        "summary": summary,
        "root_of": root_of,
        "switches": SWITCHES,
    }
