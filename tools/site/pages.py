"""The Markdown pages: their headings, markers and commands; see tools/site/build.py."""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tools.diffs import hunks
from tools.scripts import ROOT, InputError, read_lines

# Every page of docs/ in the order of reading, by what a reader wants from it.
GROUPS = {
    "Learn": "0_intro 1_single_gpu 2_multigpu 3_fault_tolerance 4_multinode 5_minGPT"
    " modern_gpt 7_sharding 8_slower theory glossary",
    "Do": "which_one convert_your_script audit adapt_your_script make_it_real"
    " first_hour preflight slurm fine_tune shard_your_model split_your_model predict",
    "When it breaks": "it_hangs nccl troubleshooting messages when_machines_fail",
    "Variants": "ddp_by_hand profiled data_parallel gradient_accumulation"
    " mixed_precision multinode_spawn diloco real_job preemptible ddp2 tensor_parallel"
    " sharded_snapshot train_loop",
    "Evidence": "what_is_proven",
}
GROUPS = {group: names.split() for group, names in GROUPS.items()}
READING_ORDER = sum(GROUPS.values(), [])
END = "<!-- end -->"
DIFF = r"diff (?P<old>\S+) (?P<new>[^\s:]+):(?P<texts>(?: `[^`]+`)+)"
SHOW = r" \(show(?P<show>(?: `[^`]+`)+)\)"
SHOWN = rf"diff{SHOW} (?P<old>\S+) (?P<new>[^\s:]+)"
RUN = (
    rf"run(?: \(exit status (?P<status>\d+)\))?(?:{SHOW})?"
    r"(?P<faults>(?: with `[^`]+` as `[^`]*`)+:)?"
    r" (?P<text>(?!with |\(show |\(exit ).*\S)"
)
MARKERS = {  # what stands in the comment, and its kind
    "not run here: (?P<text>.+)": "not run here",
    r"file (?P<text>[\w/-]+\.\w+)": "file",
    "scripts": "scripts",
    RUN: "run",
    r"code (?P<new>[^\s:]+):(?P<texts>(?: `[^`]+`)+)": "code",
    SHOWN: "diff",
    DIFF: "diff",
}
# How no line of a `text` fence may begin: it would be a diff or output that was typed
TYPED = r"[-+@]|[$] |epoch \d"


@dataclass
class Page:
    name: str
    lines: list
    blocks: list = field(default_factory=list)
    headings: list = field(default_factory=list)  # (line, text, anchor)
    files: dict = field(default_factory=dict)  # for the commands of this page
    commands: list = field(default_factory=list)  # Blocks, of the fences

    def section(self, block):
        """The text from the block's heading to the next, without what is generated."""
        starts = [line for line, _, _ in self.headings if line <= block.line]
        below = [line for line, _, _ in self.headings if line > block.line]
        end = (below or [len(self.lines) + 1])[0]
        text = "\n".join(self.lines[starts[-1] - 1 : end - 1])
        return re.sub(r"(?ms)^```.*?^```", "", text)


@dataclass(eq=False)
class Block:
    """A marker at `line` (from 1), and the index of the end marker's line.

    Or a command of a fence at `line`: its kind is "sh" or "not run here".
    """

    page: Page
    line: int
    kind: str
    text: str
    end: int = 0
    heading: str = ""
    anchor: str = ""
    old: str = ""
    new: str = ""
    texts: list = field(default_factory=list)
    hunks: list = field(default_factory=list)
    status: int = 0
    show: list = field(default_factory=list)  # regular expressions; all, if empty
    faults: list = field(default_factory=list)  # (old, new) to replace in `script`
    script: str = ""

    def wrong(self, message):
        return InputError(f"{self.page.name}:{self.line}: {message}")

    @property
    def lines(self):
        """Those between the markers."""
        return self.page.lines[self.line : self.end]

    @property
    def console(self):
        """The command of a `run` block, and what it prints."""
        first = self.lines.index("```console") + 1
        return "\n".join([*self.lines[first:-1], ""])


def slug(heading, taken):
    """The anchor that code hosts and MyST give to a heading."""
    text = re.sub(r"[^\w\- ]", "", heading.lower())
    text = text.strip().replace(" ", "-")
    number = taken[text]  # how often it is taken already
    taken[text] += 1
    return f"{text}-{number}" if number else text


def title(name):
    """A page's one name everywhere: its first heading."""
    return parse(f"docs/{name}.md").headings[0][1]


def page_names():
    paths = ROOT.glob("docs/**/*.md")
    pages = sorted(str(path.relative_to(ROOT)) for path in paths)
    return ["README.md", "CONTRIBUTING.md", *pages]


def parse(name, lines=None):
    """Find the headings, markers and commands of a page, or raise InputError."""
    if lines is None:
        lines = read_lines(name)
    page = Page(name, lines)
    taken = Counter()
    pending = None  # a `file` or `not run here` marker that waits for its fence
    i = 0
    while i < len(lines):
        line = lines[i]
        if pending and not line.startswith("```"):
            raise pending.wrong("no fence stands directly below this marker")
        heading = re.match(r"#+ (.*)", line)
        if heading:
            text = heading[1]
            page.headings.append((i + 1, text, slug(text, taken)))
        elif line.startswith("```"):
            i = read_fence(page, i, pending)
            pending = None
        elif line.startswith("<!--"):
            block = read_marker(page, i + 1, line)
            if block.kind in ("file", "not run here"):
                pending = block
            else:
                block.end = find_end(block, lines)
                page.blocks.append(block)
                i = block.end
        elif re.match(r" {4}(?!- )|\t|<pre|.*(~~~|```)|(=+|---+) *$", line):
            what = "code that is not in a fence of its own (```sh), or an underline"
            raise InputError(f"{name}:{i + 1}: {what}")
        i += 1
    return page


def read_fence(page, first, marker):
    """Note what the fence at index `first` holds; return the index of its end."""
    lines = page.lines
    number = first + 1
    at = f"{page.name}:{number}"
    ticks, kind = re.match(r"(`+)(.*)", lines[first]).groups()
    if ticks not in lines[first + 1 :]:
        raise InputError(f"{at}: a fence without end")
    last = lines.index(ticks, first + 1)
    body = "\n".join(lines[first + 1 : last])
    if kind not in ("sh", "python", "text"):
        kinds = "sh, python or text (diffs and output stand between markers)"
        raise InputError(f"{at}: a fence is one of {kinds}")
    if marker and marker.kind == "file":
        page.files[marker.text] = f"{body}\n"
    elif kind == "sh":
        lines = body.replace("\\\n", " ").splitlines()
        commands = [" ".join(line.split()) for line in lines if line.strip()]
        if not commands or "<<" in body:
            raise InputError(f"{at}: a fence of sh holds one command a line")
        kind = marker.kind if marker else "sh"
        page.commands += [Block(page, number, kind, text) for text in commands]
    elif kind == "text" and re.search(f"(?m)^({TYPED})", body):
        raise InputError(f"{at}: a diff or output, typed: those are generated")
    return last


def read_marker(page, number, line):
    """The Block of a marker's line, checked against the files that it names."""
    for pattern, kind in MARKERS.items():
        found = re.fullmatch(f"<!-- {pattern} -->", line)
        if found:
            parts = defaultdict(str, found.groupdict(default=""))
            block = Block(page, number, kind, parts["text"])
            break
    else:
        raise InputError(f"{page.name}:{number}: no marker of one line: {line}")
    if page.headings:
        _, block.heading, block.anchor = page.headings[-1]
    block.old = parts["old"]
    block.new = parts["new"]
    block.texts = quoted(parts["texts"])
    block.status = int(parts["status"] or 0)
    block.show = quoted(parts["show"])
    block.faults = re.findall(r"`([^`]+)` as `([^`]*)`", parts["faults"])
    if block.faults:
        block.script = script_of(block.text)
    if kind == "diff":
        find_hunks(block)
    return block


def quoted(text):
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", text)


def script_of(command):
    """The path of the script that a command runs, or ""."""
    module = re.search(r"-m ((?:variants|mingpt)\.\w+)", command)
    if module:
        return f"{module[1].replace('.', '/')}.py"
    script = re.search(r"\S+\.py", command)
    return script[0] if script else ""


def find_hunks(block):
    """Note the hunks of the block's diff that have these texts in them."""
    there = hunks(block.old, block.new)
    for text in block.texts:
        found = [hunk for hunk in there if has(hunk, text)]
        if len(found) != 1:
            raise block.wrong(
                f"{text!r} is in {len(found)} hunks of the diff from {block.old}"
                f" to {block.new}, not 1"
            )
        block.hunks += found


def has(hunk, text):
    """Whether a changed line has this text; `Block.forward: text` only stands there."""
    text = text.removeprefix(f"{hunk.scope}: ")
    return any(text in line for line in hunk.removed + hunk.added)


def find_end(block, lines):
    """The index of the end marker: the first marker below."""
    for index, line in enumerate(lines[block.line :], block.line):
        if line == END:
            return index
        if line.startswith("<!--"):
            break
    raise block.wrong(f"this marker has no {END}")


def right_outputs(page):
    """{a `run` block: the one of its command that has fewer of its faults}

    Fewer, and not none: some faults only set the scene, in the right output as well.
    """
    runs = [block for block in page.blocks if block.kind == "run"]
    runs.sort(key=lambda block: len(block.faults))
    found = {}
    for block in runs:
        for other in runs:
            if other.text == block.text and set(other.faults) < set(block.faults):
                found[block] = other
    return found


# Explanations

# A link to a test: its text is the test's name, its target the file.
TEST = re.compile(r"\[(test_\w+)\]\((?:\.\./)*(tests/[\w/]+\.py)\)")
TESTS = re.compile(rf"\nTests: {TEST.pattern}(, {TEST.pattern})*\s*$")


def explanations(pages=None):
    """{(old, new): {hunk number: (page, heading, anchor)}}, as the chapters have it.

    Pages go by their name in docs/ without `.md`. Raises InputError if a hunk has two.
    """
    found = {}
    for page in pages or map(parse, page_names()):
        name = Path(page.name).stem
        for block in page.blocks:
            for hunk in block.hunks:
                places = found.setdefault((block.old, block.new), {})
                if hunk.number in places:
                    other, _, _ = places[hunk.number]
                    raise block.wrong(f"{other} explains it already: {hunk.lines}")
                places[hunk.number] = (name, block.heading, block.anchor)
    return found
