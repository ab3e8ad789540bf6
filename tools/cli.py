"""Command lines: bad input ends with one clear line on stderr and exit status 2."""

import argparse
import os
import sys


def error(message):
    """End the program, because its input is bad."""
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    """A parser whose --help is `text` as it was written; its errors are one line."""

    def __init__(self, text):
        how = argparse.RawDescriptionHelpFormatter
        super().__init__(description=text, formatter_class=how)

    def error(self, message):
        error(message)
