"""Command lines: bad input ends with one clear line on stderr and exit status 2."""

import argparse
import os
import sys


def fail(message):
    """End the program, because its input is bad."""
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    """A parser whose --help is `text` as it was written, and that complains by `fail`.

    argparse itself would print its usage as well, which hides the one line that helps.
    """

    def __init__(self, text):
        super().__init__(
            description=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def error(self, message):
        fail(message)
