"""How large the repository is, and how large it may be.

    python -m tools.size

Of Python, tokens count: names, numbers, strings and operators, without comments and
layout. So it costs nothing to split a line into clearer ones. "Own" tokens stand on
lines that the file does not have from its parent. Of a page, words count, but not its
code, its markers and its lists of tests. Of a diff, changed lines count, but not blank
ones. Of many files of a kind it shows the largest.

The ceilings are limits of the design.

Exit status 1: something is too large.
"""

import functools
import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

from tools.diffs import changed_lines, matcher
from tools.files import file_names
from tools.scripts import PARENTS, read_lines, variants

READ_FIRST = {
    "single_gpu.py": 1_050,
    "multigpu.py": 1_330,
    "multinode.py": 1_340,
    "utils.py": 2_450,  # the design says 2,250: it may not grow
    "cluster/audit": 12_000,
    "mingpt/": 12_700,
}
OWN = {"": 152_000, "tests/": 66_000, "tools/": 26_000}
DIFFS = {
    "single_gpu.py multigpu.py": 50,
    "multigpu.py multinode.py": 38,
    "single_gpu.py multinode.py": 54,
    "mingpt/model.py mingpt/modern.py": 100,
}
VARIANT = 60
LONG = {  # ideas that take more lines, and why
    "variants/ddp_by_hand.py": 90,  # what DDP does, written out
    "variants/ddp2.py": 111,  # a model and data whose loss compares all samples
    "variants/diloco.py": 80,  # a second optimizer, and its state
    "variants/multinode_spawn.py": 69,  # an address, a number and a wait of its own
    "variants/profiled.py": 106,  # a table of all ranks
    "variants/real_job.py": 112,  # images, their classes and a log
    "variants/sharded_snapshot.py": 72,  # when parts are complete, and whose
    "variants/tensor_parallel.py": 81,  # a plan, and replicas of several ranks
}
WORDS = 52_000
WORDS_OF_A_VARIANT = 1_600
WORDS_OF_A_CHAPTER = 3_000
README_LINES = 170
FOLDERS = 7
LAYOUT = ["COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"]


def text_of(name):
    return "\n".join(read_lines(name)) + "\n"


@functools.cache
def tokens_of(name):
    """{line: its tokens}. An f-string is one, as before Python 3.12."""
    counts = Counter()
    open_strings = 0
    for token in tokenize.generate_tokens(io.StringIO(text_of(name)).readline):
        kind = tokenize.tok_name[token.type]
        if open_strings == 0 and kind not in LAYOUT:
            counts[token.start[0]] += 1
        open_strings += kind.endswith("STRING_START")
        open_strings -= kind.endswith("STRING_END")
    return counts


def parent_of(name):
    """The file that this one is a changed copy of, or None."""
    head = "\n".join(read_lines(name)[:3])
    named = re.search(r"Parent: ([\w/-]+\.py)", head)
    return named[1] if named else PARENTS.get(name)


@functools.cache
def own_tokens(name):
    """`tokens_of` the lines that are no verbatim copy of the parent's."""
    tokens = tokens_of(name).copy()
    parent = parent_of(name)
    if parent:
        same = matcher(read_lines(parent), read_lines(name)).get_matching_blocks()
        for _, start, length in same:
            for line in range(start + 1, start + 1 + length):
                tokens.pop(line, None)
    return tokens


def words_of(name):
    text = re.sub(r"(?s)```.*?```|<!--.*?-->", "", text_of(name))
    prose = re.sub(r"(?m)^Tests:.*$", "", text)
    return len(prose.split())


def sizes():
    """Yield (what is counted, the ceiling, {name: size})."""
    names = file_names()

    def under(prefix, count):
        python = [name for name in names if name.endswith(".py")]
        return sum(count(name).total() for name in python if name.startswith(prefix))

    for prefix, most in READ_FIRST.items():
        yield "tokens", most, {prefix: under(prefix, tokens_of)}
    for prefix, most in OWN.items():
        yield "own tokens", most, {prefix or "all Python": under(prefix, own_tokens)}

    for pair, most in DIFFS.items():
        yield "changed lines", most, {pair: len(changed_lines(*pair.split()))}
    changed = {name: len(changed_lines(PARENTS[name], name)) for name in variants()}
    for name, most in LONG.items():
        yield "changed lines", most, {name: changed.pop(name)}
    yield "changed lines", VARIANT, changed

    pages = [name for name in names if re.fullmatch(r"docs/.*\.md", name)]
    words = {name: words_of(name) for name in pages}
    yield "words", WORDS, {"docs/": sum(words.values())}
    stems = {Path(name).stem for name in variants()}
    theirs = [name for name in pages if Path(name).stem in stems]
    yield "words", WORDS_OF_A_VARIANT, {name: words.pop(name) for name in theirs}
    yield "words", WORDS_OF_A_CHAPTER, words

    yield "lines", README_LINES, {"README.md": len(read_lines("README.md"))}
    folders = {name.partition("/")[0] for name in names if re.match("[^.].*/", name)}
    yield "folders", FOLDERS, {"the root": len(folders)}


def too_large(found):
    """A line for each of `sizes` that is above its ceiling."""
    lines = []
    for what, most, counts in found:
        for name, size in counts.items():
            if size > most:
                lines.append(f"{name}: {size:,} {what}, at most {most:,}")
    return lines


if __name__ == "__main__":
    found = list(sizes())
    for what, most, counts in found:
        largest = max(counts, key=counts.get)
        print(f"{counts[largest]:8,} of {most:7,} {what}: {largest}")
    wrong = too_large(found)
    print(*wrong, sep="\n")
    sys.exit(bool(wrong))
