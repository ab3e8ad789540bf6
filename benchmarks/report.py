"""What all benchmarks print: first what ran, and where; then spreads."""

import importlib.metadata
import os
import platform
import shlex
import statistics
import sys


def print_setting(*packages):
    print("\n".join(setting(*packages)))


def setting(*packages):
    """Lines: the command, the machine, the versions of Python and of `packages`."""
    module = os.path.splitext(os.path.basename(sys.argv[0]))[0]
    command = ["python", "-m", f"benchmarks.{module}", *sys.argv[1:]]
    found = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    return [
        f"command   {shlex.join(command)}",
        f"machine   {cpu_model()}, {os.cpu_count()} cores, {platform.system()}",
        f"versions  python {platform.python_version()}, {', '.join(found)}",
    ]


def cpu_model():
    """The name of the processor, as far as this system tells it."""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def spread(values, form):
    """The median and the quartiles of `values`, each number formatted with `form`.

    Not the extremes: among many short turns, some are always hit by something else.
    """
    if len(values) == 1:
        values = values * 2  # quantiles() wants two values at least
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:{form}} ({low:{form}} .. {high:{form}})"
