"""What all benchmarks share: options, turns, and one way to print what was found."""

import gc
import importlib.metadata
import importlib.util
import math
import os
import platform
import random
import re
import shlex
import statistics
import sys
from pathlib import Path

import utils
from tools.cli import Parser


def make_parser(doc, **counts):
    """The parser of a benchmark. counts: {option: (default, what it counts)}."""
    parser = Parser(doc)
    for name, (default, text) in counts.items():
        kind = {"type": utils.positive_int, "default": default}
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, **kind, help=f"{text} ({default})")
    return parser


def is_installed(*packages):
    return all(map(importlib.util.find_spec, packages))


def setting(*packages):
    """Two lines: the machine, and the versions of Python and of `packages`."""
    info = Path("/proc/cpuinfo")
    names = re.findall("model name.*: (.+)", info.read_text() if info.exists() else "")
    processor = [*names, platform.processor() or platform.machine()][0]
    found = [f"{x} {importlib.metadata.version(x)}" for x in packages]
    return [
        f"machine   {processor}, {os.cpu_count()} cores, {platform.system()}",
        f"versions  python {platform.python_version()}, {', '.join(found)}",
    ]


def print_setting(plan, *packages):
    """Print the command, the machine, the versions, and `plan`, a line in words."""
    module = os.path.splitext(os.path.basename(sys.argv[0]))[0]
    command = ["python", "-m", f"benchmarks.{module}", *sys.argv[1:]]
    lines = f"command   {shlex.join(command)}", *setting(*packages), f"plan      {plan}"
    print("\n".join(lines), flush=True)


def take_turns(contestants, rounds, warm_up=1):
    """{name: [what its function returned in each round]}; contestants: {name: function}

    The order is new in each round, so that a machine which slows down or speeds up
    meanwhile does so for all of them alike. The first `warm_up` rounds do not count.
    """
    found = {name: [] for name in contestants}
    shuffle = random.Random(0).shuffle
    for number in range(rounds + warm_up):
        order = list(contestants)
        shuffle(order)
        for name in order:
            gc.collect()  # nobody pays for the garbage of the one before
            result = contestants[name]()
            if number >= warm_up:
                found[name].append(result)
    return found


def print_table(title, turns, **columns):
    """Print what `take_turns` found: the median (min .. max) of the rounds.

    columns: {heading: (format, function that makes a number of a result)}. After the
    first one stands its ratio to that of the first row, which is made in each round.
    """
    base, (_, number) = next(iter(turns)), next(iter(columns.values()))
    rows = [[title, *columns]]
    rows[0].insert(2, f"/ {base}")
    for name, results in turns.items():
        cells = [spread(map(f, results), form) for form, f in columns.values()]
        pairs = zip(map(number, results), map(number, turns[base]), strict=False)
        cells.insert(1, spread([x / y if y else math.nan for x, y in pairs], ".2f"))
        rows.append([name, *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for first, *cells in rows:
        pairs = zip(cells, widths[1:], strict=True)
        print(f"{first:{widths[0]}}" + "".join(f"  {x:>{n}}" for x, n in pairs))
    sys.stdout.flush()


def spread(values, form):
    """The median (min .. max) of `values`; "-" if one of them is not known."""
    values = list(values)
    if not all(map(math.isfinite, values)):
        return "-"
    middle = statistics.median(values)
    return f"{middle:{form}} ({min(values):{form}} .. {max(values):{form}})"
