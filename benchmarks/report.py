"""What all benchmarks share: options, turns, and one way to print what was found."""

import gc
import importlib.metadata
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
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=utils.positive_int,
            default=default,
            help=f"{text} ({default})",
        )
    return parser


def print_setting(plan):
    """Print the command, the machine, the versions, and `plan`, a line in words."""
    module = Path(sys.argv[0]).stem
    command = ["python", "-m", f"benchmarks.{module}", *sys.argv[1:]]
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = re.findall("model name.*: (.+)", info.read_text())
        processor = [*names, processor][0]
    torch = importlib.metadata.version("torch")
    print(f"command   {shlex.join(command)}")
    print(f"machine   {processor}, {os.cpu_count()} cores, {platform.system()}")
    print(f"versions  python {platform.python_version()}, torch {torch}")
    print(f"plan      {plan}", flush=True)


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
    base = next(iter(turns))
    first, *others = columns
    _, number = columns[first]
    rows = [[title, first, f"/ {base}", *others]]
    for name, results in turns.items():
        ratios = []
        for result, other in zip(results, turns[base], strict=False):
            below = number(other)
            ratios.append(number(result) / below if below else math.nan)
        cells = [spread(map(of, results), form) for form, of in columns.values()]
        cells.insert(1, spread(ratios, ".2f"))
        rows.append([name, *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        line = row[0].ljust(widths[0])
        for cell, width in zip(row[1:], widths[1:], strict=True):
            line += "  " + cell.rjust(width)
        print(line)
    sys.stdout.flush()


def spread(values, form):
    """The median (min .. max) of `values`; "-" if one of them is not known."""
    values = list(values)
    if not all(map(math.isfinite, values)):
        return "-"
    middle = statistics.median(values)
    return f"{middle:{form}} ({min(values):{form}} .. {max(values):{form}})"
