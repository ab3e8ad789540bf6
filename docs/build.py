"""Fill the documents in from the code: diffs, the table of rungs, printed output.

    python -m docs.build            fill in what is between markers; run the commands
    python -m docs.build --check    change nothing, and fail if anything is stale
    ... --diffs                     the diffs and the table alone, without running
    ... --only troubleshooting      one page

The markers are comments, so that the pages read well wherever Markdown is shown:

    <!-- diff OLD NEW -->                   the whole of diff -u OLD NEW
    <!-- diff -U0 OLD NEW -->               ... without lines of context
    <!-- diff OLD NEW: `text` `text` -->    the hunks that have these texts in them
    <!-- rungs -->                          the table of the rungs
    <!-- run COMMAND -->                    what COMMAND prints in a fresh copy of this
                                            repository, on the CPU
    <!-- run with `old` as `new`: COMMAND -->   ... with a fault put into its script
                                            (more faults: and `old` as `new`)
    <!-- end -->                            below each of these
    <!-- file NAME -->                      the fence below is this file for commands
    <!-- not run here: REASON -->           nor are those of the fence below

A heading over hunks is their explanation: it says what they do, why, and what breaks
without them, and names a test. Every hunk of every rung's diff has exactly one. Each
command of an `sh` fence is run, too, and must end with exit status 0.

Bad input ends with one line that names the file and the line, exit status 2, and no
file changed. Exit status 1: something is stale, or a command failed.
"""

import argparse
import concurrent.futures
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from docs.diffs import (
    EDGES,
    ROOT,
    RUNGS,
    Wrong,
    changed_lines,
    docstring,
    hunks,
    read_lines,
    unified,
)

TIMEOUT_S = 120  # the longest command takes about 15 s
MARKER = re.compile(r"<!-- (.*?) ?-->$")
END = "<!-- end -->"
PROGRAMS = "python|pip|pytest|torchrun|git|sdiff|diff"
DIFF = r"diff (?:-U(?P<context>\d+) )?(?P<old>\S+) (?P<new>[^\s:]+)"
DIFF += r"(?::(?P<texts>(?: `[^`]+`)+))?"
FAULTS = re.compile(r"with ((?:`.+?` as `.+?`(?: and )?)+): ")
PARTS = ("**What.**", "**Why.**", "**Without it.**")
TEST = re.compile(r"`(tests/\w+\.py(?:::\w+)?)`")


@dataclass
class Block:
    """A marker at `line` (from 1), and the index of the end marker's line, if any."""

    page: str
    line: int
    kind: str
    text: str
    end: int = 0
    heading: str = ""
    anchor: str = ""
    old: str = ""
    new: str = ""
    context: int = 3
    hunks: list = field(default_factory=list)

    def wrong(self, message):
        return Wrong(f"{self.page}:{self.line}: {message}")


@dataclass
class Page:
    name: str
    lines: list
    blocks: list = field(default_factory=list)
    headings: list = field(default_factory=list)  # (line, level, text, anchor)
    files: dict = field(default_factory=dict)  # for the commands of this page
    commands: list = field(default_factory=list)  # (line, command, why not run or "")

    def section(self, block):
        """The text from the block's heading to the next heading of any level."""
        starts = [line for line, *_ in self.headings]
        first = max(line for line in starts if line <= block.line)
        last = min([x for x in starts if x > block.line], default=len(self.lines) + 1)
        return "\n".join(self.lines[first - 1 : last - 1])


def slug(heading, taken):
    """The anchor that code hosts and MyST give to a heading."""
    text = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
    number = taken[text] = taken.get(text, -1) + 1
    return f"{text}-{number}" if number else text


def page_names():
    pages = sorted(str(x.relative_to(ROOT)) for x in ROOT.glob("docs/*.md"))
    return ["README.md", *pages]


def parse(name, text=None):
    """Find the headings, markers and commands of a page, or raise Wrong."""
    page = Page(name, (ROOT / name).read_text().splitlines() if text is None else text)
    lines, taken, i = page.lines, {}, 0
    pending = None  # a `file` or `not run here` marker that waits for its fence
    while i < len(lines):
        line = lines[i]
        heading = re.match(r"(#+) (.*)", line)
        fence = re.match(r"(`{3,})(\S*)", line)
        if pending and not fence:
            raise pending.wrong("no fence stands directly below this marker")
        if heading:
            anchor = slug(heading[2], taken)
            page.headings.append((i + 1, len(heading[1]), heading[2], anchor))
        elif fence:
            last = i + 1
            while last < len(lines) and lines[last].strip() != fence[1]:
                last += 1
            if last == len(lines):
                raise Wrong(f"{name}:{i + 1}: a fence without end")
            body = lines[i + 1 : last]
            if fence[2] not in ("sh", "python", "text"):
                kinds = "sh, python or text (diffs and output stand between markers)"
                raise Wrong(f"{name}:{i + 1}: a fence is one of {kinds}")
            if pending and pending.kind == "file":
                page.files[pending.text] = "\n".join(body) + "\n"
            elif fence[2] == "sh":
                why = pending.text if pending else ""
                text = "\n".join(body).replace("\\\n", " ")
                commands = [" ".join(x.split()) for x in text.splitlines() if x.strip()]
                page.commands += [(i + 1, x, why) for x in commands]
            elif pending:
                raise pending.wrong("the fence below is not one of sh")
            pending, i = None, last
        elif re.match(rf"    +(\$ )?({PROGRAMS})\b", line):
            raise Wrong(f"{name}:{i + 1}: a command outside of a fence")
        elif line.startswith("<!--"):
            block = read_marker(name, i + 1, line)
            if block.kind in ("file", "not run here"):
                pending = block
            else:
                i = block.end = find_end(block, lines)
                if page.headings:
                    _, _, block.heading, block.anchor = page.headings[-1]
                page.blocks.append(block)
        i += 1
    return page


def read_marker(page, number, line):
    """The Block of a marker's line, checked against the files that it names."""
    match = MARKER.match(line)
    if not match:
        raise Wrong(f"{page}:{number}: a comment that does not end on its line")
    block = Block(page, number, "", match[1])
    for kind in ("not run here", "file"):
        found = re.match(f"{kind}:? (.+)", block.text)
        if found:
            block.kind, block.text = kind, found[1]
            return block
    if block.text == "rungs":
        block.kind = "rungs"
    elif re.match(r"run (?!with )\S", block.text) or FAULTS.match(block.text[4:]):
        block.kind, block.text = "run", block.text.removeprefix("run ")
    elif found := re.fullmatch(DIFF, block.text):
        block.kind, block.old, block.new = "diff", found["old"], found["new"]
        block.context = int(found["context"] or 3)
        try:
            there = hunks(block.old, block.new)
        except Wrong as error:
            raise block.wrong(error) from None
        for text in re.findall(r"`([^`]+)`", found["texts"] or ""):
            have = [x for x in there if any(text in line[1:] for line in x.lines)]
            if len(have) != 1:
                where = f"the diff from {block.old} to {block.new}"
                raise block.wrong(f"{text!r} is in {len(have)} hunks of {where}, not 1")
            block.hunks += have
    elif block.text == "end":
        raise block.wrong("an end without its marker")
    else:
        raise block.wrong(f"no such marker: {line}")
    return block


def find_end(block, lines):
    for i in range(block.line, len(lines)):
        if lines[i] == END:
            return i
        if lines[i].startswith("<!--"):
            break
    raise block.wrong(f"this marker has no {END}")


# What stands between the markers


def whole_diff(block):
    return ["```diff", *unified(block.old, block.new, block.context), "```"]


CONTEXT = 2  # unchanged lines around a hunk


def hunk_diff(block):
    """The block's hunks, each under a line that numbers and places it."""
    there, new = hunks(block.old, block.new), read_lines(block.new)
    changed = {i for x in there for i in range(x.new_start, x.new_start + len(x.come))}

    def unchanged(numbers):
        near = itertools.takewhile(lambda i: i not in changed, numbers)
        lines = [f" {new[i - 1]}" for i in near if 0 < i <= len(new)]
        while lines and not lines[-1].strip():
            lines.pop()
        return lines

    lines = []
    for hunk in block.hunks:
        start, end = hunk.new_start, hunk.new_start + len(hunk.come)
        before = unchanged(range(start - 1, start - 1 - CONTEXT, -1))[::-1]
        after = unchanged(range(end, end + CONTEXT))
        where = f" in {hunk.scope}" if hunk.scope else ""
        where = f"{block.new} line {start}{where}"
        lines += [f"@@ change {hunk.number} of {len(there)}: {where} @@"]
        lines += [*before, *hunk.lines, *after]
    return ["```diff", *lines, "```"]


def rungs_table(block, explained):
    """The map: every rung, what it does, what it changes, where that is explained."""

    def link(text, target):
        path = os.path.relpath(ROOT / target, (ROOT / block.page).parent)
        return f"[{text}]({path})"

    lines = [
        "| script | what it does | changed lines | explained in |",
        "|---|---|---|---|",
    ]
    for name in sorted(RUNGS, key=depth):
        parent, what = RUNGS[name], docstring(ROOT / name).split(". ")[0]
        size = "(start here)"
        if parent:
            size = f"{len(changed_lines(parent, name))}, compared with {parent}"
        found = {place[0]: None for place in explained.get((parent, name), {}).values()}
        chapters = ", ".join(link(x, f"docs/{x}.md") for x in found)
        lines.append(f"| {link(name, name)} | {what} | {size} | {chapters} |")
    return lines


def depth(name):
    """Where a rung stands in the tree: its ancestors' names, then its own."""
    path = []
    while name:
        path, name = [name, *path], RUNGS[name]
    return path


# Explanations


def explanations(pages=None):
    """{(old, new): {hunk number: (page, heading, anchor)}}, as the chapters have it.

    Pages go by their name in docs/ without `.md`. Raises Wrong if a hunk has two.
    """
    found = {}
    for page in pages or [parse(x) for x in page_names()]:
        for block in page.blocks:
            for hunk in block.hunks:
                places = found.setdefault((block.old, block.new), {})
                place = Path(page.name).stem, block.heading, block.anchor
                if hunk.number in places:
                    other = places[hunk.number]
                    raise block.wrong(f"{other[0]} explains it already: {hunk.lines}")
                places[hunk.number] = place
    return found


def named_tests(old, new):
    """{hunk number: the tests that its explanation says will miss it}."""
    tests = {}
    for page in [parse(x) for x in page_names()]:
        for block in page.blocks:
            if (block.old, block.new) == (old, new):
                names = TEST.findall(page.section(block))
                tests |= {hunk.number: names for hunk in block.hunks}
    return tests


def check_explanations(pages):
    """Every hunk of every rung has one heading, and it says what it must."""
    problems, found = [], explanations(pages)
    for old, new in {**dict.fromkeys(EDGES), **found}:
        for hunk in hunks(old, new):
            if hunk.number not in found.get((old, new), {}):
                at = (
                    f"{new}:{hunk.new_start}"
                    if hunk.come
                    else f"{old}:{hunk.old_start}"
                )
                problems.append(f"{at}: no chapter explains {hunk.lines}")
    for page in pages:
        seen = {}
        for block in page.blocks:
            if not block.hunks or (block.old, block.new) not in EDGES:
                continue
            at = f"{page.name}:{block.line}"
            if block.anchor in seen:
                problems.append(f"{at}: a second diff under one heading")
            seen[block.anchor] = block
            section = page.section(block)
            missing = [x for x in PARTS if x not in section]
            if missing:
                problems.append(f"{at}: the explanation lacks {' '.join(missing)}")
            if not TEST.search(section):
                problems.append(f"{at}: the explanation names no test")
    return problems


# Commands


def copy_repository(to):
    ignore = shutil.ignore_patterns(".*", "__pycache__", "_site", "*.pt", "*.pt.tmp")
    shutil.copytree(ROOT, to, ignore=ignore)


def run(page, command, block=None):
    """(exit status, output) of a shell command in a fresh copy of the repository."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        copy_repository(copy)
        for name, text in page.files.items():
            (copy / name).write_text(text)
        for old, new in faults(block) if block else []:
            script = copy / script_of(command)
            text = script.read_text()
            if text.count(old) != 1:
                count = text.count(old)
                raise block.wrong(f"{script.name} has {old!r} {count} times, not once")
            script.write_text(text.replace(old, new))
        env = {k: v for k, v in os.environ.items() if k not in NOT_INHERITED} | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONWARNINGS": "ignore:Failed to initialize NumPy",
        }
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=copy,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            output += f"\n(hung for {TIMEOUT_S} s)"
            return 124, output
        return process.returncode, output.replace(str(copy), "~")


NOT_INHERITED = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"}
NOT_INHERITED |= {"MASTER_PORT", "OMP_NUM_THREADS", "PYTHONDONTWRITEBYTECODE"}


def faults(block):
    """[(old, new)] that a `run with` marker puts into its command's script."""
    match = FAULTS.match(block.text)
    return re.findall(r"`(.+?)` as `(.+?)`", match[1]) if match else []


def command_of(block):
    return FAULTS.sub("", block.text, count=1)


def script_of(command):
    return re.search(r"\S+\.py", command)[0]


def console(block, output):
    """The console fence of a `run` marker."""
    command = command_of(block)
    lines = [f"# {script_of(command)}: {new} for {old}" for old, new in faults(block)]
    lines.append(f"$ {command}")
    return ["```console", *lines, *(x.rstrip() for x in output.splitlines()), "```"]


VARIES = [
    r"[\d,]+(?= samples/s)",
    r"\d+\.\d+ ?m?s\b",
    r"(?<=pid: )\d+",
    r"(?<=Process )\d+",
    r"(?<=process )\d+",
    r"(?<=port )\d+",
    r"(?<=:)\d{4,5}\b",
    r"0x[0-9a-f]+",
    r"(?<=line )\d+",
    r"\b\w*\d[\w-]*(?=\]:)",
    r"\d{4}-\d\d-\d\d.\d\d:\d\d:\d\d\S*",
    r"\b[IWE]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+",
    r"/\S*/(?=\S)",
]


def same(one, other):
    """Whether two outputs agree: words exactly, numbers to 0.1 %, what varies not."""

    def parts(lines):
        text = "\n".join(lines)
        for pattern in VARIES:
            text = re.sub(pattern, "~", text)
        number = r"\d+\.\d+"
        return re.sub(number, "#", text), [float(x) for x in re.findall(number, text)]

    (words, numbers), (other_words, others) = parts(one), parts(other)
    return words == other_words and all(
        abs(a - b) <= 1e-3 * max(abs(a), abs(b))
        for a, b in zip(numbers, others, strict=True)
    )


def parse_flags(command):
    """(exit status, message) of the programs of a command, asked about its flags."""
    check = [sys.executable, "-m", "docs.flags", command]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


# The whole


def fill(page, outputs, explained):
    """The page's lines with all blocks filled in; outputs {line: lines of a fence}."""
    lines = list(page.lines)
    for block in reversed(page.blocks):
        between = lines[block.line : block.end]
        if block.kind == "run":
            made = outputs.get(block.line, between)
            made = between if same(between, made) else made
        elif block.kind == "rungs":
            made = rungs_table(block, explained)
        else:
            made = hunk_diff(block) if block.hunks else whole_diff(block)
        lines[block.line : block.end] = made
    return lines


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--diffs", action="store_true", help="run no command")
    parser.add_argument("--only", help="the page's name, with or without folder")
    args = parser.parse_args(argv)
    try:
        return build(args)
    except Wrong as error:
        print(f"docs.build: error: {error}", file=sys.stderr)
        return 2


def build(args):
    pages = [parse(x) for x in page_names()]
    explained = explanations(pages)
    problems = check_explanations(pages)
    if args.only:
        pages = [x for x in pages if args.only in (x.name, Path(x.name).stem)]
        if not pages:
            raise Wrong(f"there is no page {args.only}")
    outputs = {page.name: {} for page in pages}
    if not args.diffs:
        problems += run_all(pages, outputs)
    filled = [fill(page, outputs[page.name], explained) for page in pages]
    for page, lines in zip(pages, filled, strict=True):
        if lines == page.lines:
            continue
        if args.check:
            pairs = zip(page.lines, lines, strict=False)
            line = next((i for i, (a, b) in enumerate(pairs, 1) if a != b), len(lines))
            problems.append(f"{page.name}:{line}: stale")
            problems += [f"  now: {x}" for x in lines[line - 1 : line + 2]]
        else:
            (ROOT / page.name).write_text("\n".join(lines) + "\n")
            print(f"{page.name}: filled in")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def run_all(pages, outputs):
    """Run every command of the pages, two at a time; return what went wrong."""
    jobs, problems = {}, []
    tested = "\n".join(docstring(ROOT / name) for name in RUNGS).splitlines()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for page in pages:
            for block in page.blocks:
                if block.kind == "run":
                    command = command_of(block)
                    job = pool.submit(run, page, command, block)
                    jobs[job] = page, block.line, command, block
            for line, command, why in page.commands:
                if command in tested:  # tests/test_training.py::test_learns runs it
                    continue
                job = pool.submit(*([parse_flags] if why else [run, page]), command)
                jobs[job] = page, line, command, None
        for job in concurrent.futures.as_completed(jobs):
            page, line, command, block = jobs[job]
            status, output = job.result()
            at = f"{page.name}:{line}"
            print(f"{at}: {command}: exit status {status}", flush=True)
            if block:
                outputs[page.name][line] = console(block, output)
            if status in (124, 126, 127) or (status and not block):
                problems.append(f"{at}: {command}: exit status {status}\n{output}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
