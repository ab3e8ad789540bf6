"""The Markdown pages: their headings, markers and commands; see tools/site/build.py."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from tools.diffs import hunks
from tools.scripts import ROOT, InputError, read_lines

# Every page of docs/ in the order of reading, by what a reader wants from it.
GROUPS = {
    "Learn": "0_intro 1_single_gpu 2_multigpu 3_fault_tolerance 4_multinode 5_minGPT"
    " modern_gpt 7_sharding 8_slower theory glossary",
    "Do": "which_one convert_your_script adapt_your_script make_it_real slurm preflight"
    " predict",
    "When it breaks": "it_hangs troubleshooting when_machines_fail",
    "Variants": "ddp_by_hand profiled data_parallel gradient_accumulation"
    " mixed_precision multinode_spawn diloco real_job preemptible ddp2 tensor_parallel"
    " train_loop",
    "Evidence": "what_is_proven",
}
GROUPS = {group: names.split() for group, names in GROUPS.items()}
END = "<!-- end -->"
DIFF = r"diff (?P<old>\S+) (?P<new>[^\s:]+):(?P<texts>(?: `[^`]+`)+)"
SHOW = r" \(show(?P<show>(?: `[^`]+`)+)\)"
SHOWN = rf"diff{SHOW} (?P<old>\S+) (?P<new>[^\s:]+)"
RUN = (
    rf"run(?: \(exit status (?P<status>\d+)\))?(?:{SHOW})?"
    r"(?P<faults>(?: with `[^`]+` as `[^`]*`)+:)?"
    r" (?P<command>(?!with |\(show |\(exit ).*\S)"
)
TYPED = {  # what a `text` fence may not hold: it would be a diff or output typed
    "a diff": r"[-+@]",
    "a command or its output": r"[$] |epoch \d",
}


@dataclass
class Block:
    """A marker at `line` (from 1), and the index of the end marker's line."""

    page: str
    line: int
    kind: str
    text: str
    end: int = 0
    heading: str = ""
    anchor: str = ""
    old: str = ""
    new: str = ""
    hunks: list = field(default_factory=list)
    status: int = 0
    show: list = field(default_factory=list)  # regular expressions; all, if empty
    faults: list = field(default_factory=list)  # (old, new) to replace in `script`
    script: str = ""

    def wrong(self, message):
        return InputError(f"{self.page}:{self.line}: {message}")


@dataclass
class Page:
    name: str
    lines: list
    blocks: list = field(default_factory=list)
    headings: list = field(default_factory=list)  # (line, text, anchor)
    files: dict = field(default_factory=dict)  # for the commands of this page
    commands: list = field(default_factory=list)  # (line, command, why not run or "")

    def section(self, block):
        """The text from the block's heading to the next, without what is generated."""
        starts = [line for line, *_ in self.headings]
        first = max(line for line in starts if line <= block.line)
        last = min([x for x in starts if x > block.line], default=len(self.lines) + 1)
        text = "\n".join(self.lines[first - 1 : last - 1])
        return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def slug(heading, taken):
    """The anchor that code hosts and MyST give to a heading."""
    text = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
    number = taken[text] = taken.get(text, -1) + 1
    return f"{text}-{number}" if number else text


def title(name):
    """A page's one name everywhere: its first heading."""
    return parse(f"docs/{name}.md").headings[0][1]


def page_names():
    pages = sorted(str(x.relative_to(ROOT)) for x in ROOT.glob("docs/**/*.md"))
    return ["README.md", "CONTRIBUTING.md", *pages]


def parse(name, lines=None):
    """Find the headings, markers and commands of a page, or raise InputError."""
    page = Page(name, read_lines(name) if lines is None else lines)
    lines, taken, i = page.lines, {}, 0
    pending = None  # a `file` or `not run here` marker that waits for its fence
    while i < len(lines):
        line = lines[i]
        if pending and not line.startswith("```"):
            raise pending.wrong("no fence stands directly below this marker")
        if heading := re.match(r"#+ (.*)", line):
            page.headings.append((i + 1, heading[1], slug(heading[1], taken)))
        elif line.startswith("```"):
            i = read_fence(page, i, pending)
            pending = None
        elif line.startswith("<!--"):
            block = read_marker(page, i + 1, line)
            if block.kind in ("file", "not run here"):
                pending = block
            else:
                i = block.end = find_end(block, lines)
                page.blocks.append(block)
        elif re.match(r" {4}(?!- )|\t|<pre|.*(~~~|```)|(=+|---+) *$", line):
            what = "code that is not in a fence of its own (```sh), or an underline"
            raise InputError(f"{name}:{i + 1}: {what}")
        i += 1
    return page


def read_fence(page, first, marker):
    """Note what the fence at index `first` holds; return the index of its end."""
    lines, at = page.lines, f"{page.name}:{first + 1}"
    ticks, kind = re.match(r"(`+)(.*)", lines[first]).groups()
    if ticks not in lines[first + 1 :]:
        raise InputError(f"{at}: a fence without end")
    last = lines.index(ticks, first + 1)
    body = lines[first + 1 : last]
    if kind not in ("sh", "python", "text"):
        kinds = "sh, python or text (diffs and output stand between markers)"
        raise InputError(f"{at}: a fence is one of {kinds}")
    if marker and marker.kind == "file":
        page.files[marker.text] = "\n".join(body) + "\n"
    elif kind == "sh":
        text = "\n".join(body).replace("\\\n", " ")
        commands = [" ".join(x.split()) for x in text.splitlines() if x.strip()]
        if not commands or "<<" in text:
            raise InputError(f"{at}: a fence of sh holds one command a line")
        page.commands += [
            (first + 1, x, marker.text if marker else "") for x in commands
        ]
    elif kind == "text":
        for what, pattern in TYPED.items():
            if any(re.match(pattern, x) for x in body):
                raise InputError(f"{at}: {what}, typed: those are generated")
    return last


def read_marker(page, number, line):
    """The Block of a marker's line, checked against the files that it names."""
    found = re.fullmatch(r"<!-- (.*?) -->", line)
    if not found:
        raise InputError(f"{page.name}:{number}: a marker is a comment of one line")
    block = Block(page.name, number, "", found[1])
    if page.headings:
        _, block.heading, block.anchor = page.headings[-1]
    if found := re.fullmatch("not run here: (.+)", block.text):
        block.kind, block.text = "not run here", found[1]
    elif found := re.fullmatch(r"file ([\w-]+\.\w+)", block.text):
        block.kind, block.text = "file", found[1]
    elif block.text in ("scripts", "contents"):
        block.kind = block.text
    elif found := re.fullmatch(RUN, block.text):
        block.kind, block.status = "run", int(found["status"] or 0)
        block.text = found["command"]
        block.faults = re.findall(r"`([^`]+)` as `([^`]*)`", found["faults"] or "")
        block.show = re.findall(r"`([^`]+)`", found["show"] or "")
        if block.faults:
            block.script = script_of(block.text)
            check_faults(page, block)
    elif found := re.fullmatch(SHOWN, block.text) or re.fullmatch(DIFF, block.text):
        found = found.groupdict()
        block.kind, block.old, block.new = "diff", found["old"], found["new"]
        block.show = re.findall(r"`([^`]+)`", found.get("show") or "")
        find_hunks(block, re.findall(r"`([^`]+)`", found.get("texts") or ""))
    else:
        raise block.wrong(f"no such marker: {line}")
    return block


def script_of(command):
    """The path of the script that a command runs, or ""."""
    if module := re.search(r"-m ((?:variants|mingpt)\.\w+)", command):
        return f"{module[1].replace('.', '/')}.py"
    script = re.search(r"\S+\.py", command)
    return script[0] if script else ""


def check_faults(page, block):
    """The block's script has each text that is to be replaced just once."""
    text = page.files.get(block.script) or "\n".join(read_lines(block.script))
    for old, _ in block.faults:
        if (count := text.count(old)) != 1:
            raise block.wrong(f"{block.script} has {old!r} {count} times, not once")


def find_hunks(block, texts):
    """Note the hunks of the block's diff that have these texts in them."""
    there = hunks(block.old, block.new)
    for text in texts:
        # `Block.forward: text` is in that function alone.
        have = [
            x
            for x in there
            if any(text.removeprefix(f"{x.scope}: ") in line[1:] for line in x.lines)
        ]
        if len(have) != 1:
            where = f"the diff from {block.old} to {block.new}"
            raise block.wrong(f"{text!r} is in {len(have)} hunks of {where}, not 1")
        block.hunks += have


def find_end(block, lines):
    markers = [i for i in range(block.line, len(lines)) if lines[i].startswith("<!--")]
    if not markers or lines[markers[0]] != END:
        raise block.wrong(f"this marker has no {END}")
    return markers[0]


def right_output(page, block):
    """The `run` block of a page with the same command and fewer of its faults, or None.

    Fewer, and not none: some faults only set the scene, in the right output as well.
    """
    runs = [x for x in page.blocks if (x.kind, x.text) == ("run", block.text)]
    others = [x for x in runs if set(x.faults) < set(block.faults)]
    return max(others, key=lambda x: len(x.faults), default=None)


# Explanations

# A link to a test: its text is the test's name, its target the file.
TEST = re.compile(r"\[(test_\w+)\]\((?:\.\./)*(tests/[\w/]+\.py)\)")
TESTS = re.compile(rf"Tests: {TEST.pattern}(, {TEST.pattern})*")


def linked_tests(text):
    """The tests that a text links to, as `tests/test_x.py::test_y`."""
    return [f"{path}::{name}" for name, path in TEST.findall(text)]


def explanations(pages=None):
    """{(old, new): {hunk number: (page, heading, anchor)}}, as the chapters have it.

    Pages go by their name in docs/ without `.md`. Raises InputError if a hunk has two.
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
    return {
        hunk.number: linked_tests(page.section(block))
        for page in map(parse, page_names())
        for block in page.blocks
        if (block.old, block.new) == (old, new)
        for hunk in block.hunks
    }
