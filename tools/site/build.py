"""Fill the documents in from the code: diffs, quotes, tables, printed output.

    python -m tools.site.build           fill in what is between markers; run commands
    python -m tools.site.build --check   change nothing, and fail if anything is stale
    ... --diffs                          all but printed output, without running
    ... --only troubleshooting           one page

The markers are comments, so that the pages read well wherever Markdown is shown:

    <!-- diff (show `x` `y`) OLD NEW -->    the changed lines that match x or y (regular
                                            expressions)
    <!-- diff OLD NEW: `text` `text` -->    the hunks that have these texts in them; of
                                            several, `Class.method: text` is one
    <!-- code FILE: `text` `text` -->       FILE from the statement whose first line has
                                            the first text to the end of the one with
                                            the last; one text: that statement alone
    <!-- scripts -->                        the table of the scripts, in README.md
    <!-- run COMMAND -->                    what COMMAND prints in a fresh copy of this
                                            repository, on the CPU; it must end well;
                                            speeds and pids are shown as [...]
    <!-- run (exit status 1) COMMAND -->    ... or with this exit status
    <!-- run (show `x` `y`) COMMAND -->     ... only lines that match x or y (regular
                                            expressions); what is cut is marked [...]
    <!-- run with `old` as `new`: COMMAND -->   ... with a fault put into its script,
                                            X.py, -m variants.X or -m mingpt.X
                                            (several faults: several `with`)
    <!-- end -->                            below each of these
    <!-- file NAME -->                      the fence below is this file for commands
    <!-- not run here: REASON -->           the commands of the fence below are not run

A heading over hunks is their explanation: it says in prose what they do, and its last
line links to tests that fail without them. Where a change carries an idea, the prose is
**What.** ... **Why.** ... **Without it.** ..., in this order. Every hunk of every diff
from a script to its child has exactly one heading. Each command of an `sh` fence is run
and must end with exit status 0 (1 for diff). The pages are README.md, CONTRIBUTING.md
and all under docs/. Run it from the root of the repository.

Bad input ends with one line that names the file and the line, exit status 2, and no
file changed. Exit status 1: something is stale, or a command failed.
"""

import ast
import itertools
import re
import sys
from pathlib import Path

from tools import cli, scripts
from tools.diffs import changed_lines, changed_ranges, hunks
from tools.scripts import ROOT, InputError
from tools.site.commands import run_all
from tools.site.pages import TESTS, explanations, page_names, parse, title

PARTS = ["What", "Why", "Without it"]  # of an explanation, as far as it has them
FIRST_CHAPTER = "1_single_gpu"  # it reads the script that has no parent

# What stands between the markers


def shown_lines(block):
    """The changed lines that match. Those of a function have no indent."""
    lines = []
    for hunk in hunks(block.old, block.new):
        for line in hunk.lines:
            if re.search("|".join(block.show), line):
                # A phone has no room for the indent.
                lines.append(re.sub("(?<=^.) +", "", line) if hunk.scope else line)
    return ["```diff", *lines, "```"]


CONTEXT = 2  # unchanged lines around a hunk


def hunk_diff(block):
    """The block's hunks, with some lines around each."""
    # {number of a line that the diff has not changed: the line}
    unchanged = dict(enumerate(scripts.read_lines(block.new), 1))
    for hunk in hunks(block.old, block.new):
        for number in range(hunk.new_start, hunk.new_end):
            del unchanged[number]

    def nearest(numbers):
        """The unchanged lines of these numbers, up to the first that is changed."""
        near = itertools.takewhile(lambda number: number in unchanged, numbers)
        lines = [f" {unchanged[number]}" for number in near]
        while lines and not lines[-1].strip():
            lines.pop()
        return lines

    lines = []
    for hunk in block.hunks:
        last_before = hunk.new_start - 1
        before = nearest(range(last_before, last_before - CONTEXT, -1))
        after = nearest(range(hunk.new_end, hunk.new_end + CONTEXT))
        # No line number: any change above would make it stale.
        where = f"{block.new} in {hunk.scope}" if hunk.scope else block.new
        lines += [f"@@ {where} @@", *reversed(before), *hunk.lines, *after]
    return ["```diff", *lines, "```"]


def code(block):
    """The lines of a file from one statement to another, or those of one."""
    lines = scripts.read_lines(block.new)
    statements = [
        node for node in ast.walk(scripts.tree(block.new)) if isinstance(node, ast.stmt)
    ]
    shown = []
    for text in block.texts:
        found = [node for node in statements if text in lines[node.lineno - 1]]
        if len(found) != 1:
            where = f"the first line of {len(found)} statements of {block.new}"
            raise block.wrong(f"{text!r} is in {where}, not of 1")
        shown += found
    return ["```python", *lines[shown[0].lineno - 1 : shown[-1].end_lineno], "```"]


def chapters(name, explained):
    """The names of the pages that explain a script."""
    if name == scripts.trunk()[0]:
        return [FIRST_CHAPTER]
    edge = (scripts.PARENTS.get(name), name)
    pages = [page for page, _, _ in explained.get(edge, {}).values()]
    return [*dict.fromkeys(pages)]


def scripts_table(_):
    """The map: every script, what it does, what it changes, where that is explained."""
    explained = explanations()
    lines = [
        "| script | what it does | changed lines | explained in |",
        "|---|---|---|---|",
    ]
    names = sorted(scripts.SCRIPTS, key=scripts.ancestry)
    names += scripts.PARENTS.keys() - scripts.SCRIPTS.keys()
    for name in names:
        parent = scripts.PARENTS[name]
        size = "(start here)"
        if parent:
            size = f"{len(changed_lines(parent, name))}, compared with {parent}"
        pages = [f"[{title(x)}](docs/{x}.md)" for x in chapters(name, explained)]
        cells = [f"[{name}]({name})", scripts.summary(name), size, ", ".join(pages)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


MAKERS = {  # {kind of a block: what makes its lines}
    "scripts": scripts_table,
    "code": code,
    "diff": lambda block: hunk_diff(block) if block.hunks else shown_lines(block),
}

# Explanations


def check_explanations(pages):
    """Every hunk of every edge has one heading, which says what it must."""
    problems = []
    found = explanations(pages)
    for edge in dict.fromkeys([*scripts.ALL_EDGES, *found]):
        old, new = edge
        for hunk in hunks(old, new):
            if hunk.number not in found.get(edge, {}):
                at = f"{new}:{hunk.new_start}"
                problems.append(f"{at}: no chapter explains {hunk.lines}")
    for page in pages:
        for block in page.blocks:
            if not block.hunks or (block.old, block.new) not in scripts.ALL_EDGES:
                continue
            at = f"{page.name}:{block.line}"
            section = page.section(block)
            if not is_explained(section):
                parts = "prose, or **What.** ... **Why.** ... **Without it.** ..."
                problems.append(f"{at}: the explanation must be {parts}")
            if not TESTS.search(section):
                line = "Tests: [test_name](../tests/test_file.py), ..."
                problems.append(f"{at}: the last line of the section must be {line}")
    return problems


def is_explained(section):
    """Whether it has prose, and of PARTS each at most once, in order."""
    generated = r"(?m)^(#|<!--|Tests: |With \S+ changed:).*$"
    prose = re.sub(generated, "", section).strip()
    parts = re.findall(rf"\*\*({'|'.join(PARTS)})\.\*\*", prose)
    return prose and parts == [part for part in PARTS if part in parts]


# The whole


def fill(page, outputs):
    """The page's lines with all blocks filled in; outputs: {block: its new lines}."""
    lines = list(page.lines)
    for block in reversed(page.blocks):
        if block.kind == "run":
            made = outputs.get(block, block.lines)
        else:
            made = MAKERS[block.kind](block)
        lines[block.line : block.end] = made
    return lines


def build(args):
    """Fill the pages in, or only compare: what is wrong."""
    scripts.check_scripts()
    pages = [parse(name) for name in page_names()]
    problems = check_explanations(pages)
    if args.only:
        pages = [page for page in pages if Path(page.name).stem == args.only]
        if not pages:
            raise InputError(f"there is no page {args.only}")
    outputs = {}
    if not args.diffs:
        outputs, wrong = run_all(pages)
        problems += wrong
    # All pages are made before one is written: if one has bad input, no file changes.
    filled = [fill(page, outputs) for page in pages]
    for page, lines in zip(pages, filled, strict=True):
        if lines == page.lines:
            continue
        if args.check:
            place, _, start, end = next(changed_ranges(page.lines, lines))
            problems.append(f"{page.name}:{place + 1}: stale")
            problems += [f"  now: {line}" for line in lines[start:end]]
        else:
            (ROOT / page.name).write_text("\n".join(lines) + "\n")
            print(f"{page.name}: filled in")
    return problems


if __name__ == "__main__":
    parser = cli.Parser(__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--diffs", action="store_true", help="run no command")
    parser.add_argument("--only", help="the page's name, without folder and .md")
    try:
        problems = build(parser.parse_args())
    except InputError as error:
        cli.error(error)
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(bool(problems))
