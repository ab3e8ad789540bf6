"""What the README and the documents say is so, and the tool that sees to it."""

import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler

from tools.diffs import changed_lines
from tools.files import copy_tree
from tools.run.processes import Program
from tools.scripts import PARENTS, ROOT, SCRIPTS, commands
from tools.site.pages import READING_ORDER, TEST, page_names, parse

PAGES = page_names()
ALL_PAGES = [*PAGES, "tests/README.md", "benchmarks/README.md"]


def text_of(page):
    return (ROOT / page).read_text()


@pytest.mark.text
def test_a_page_has_each_command_of_a_docstring():
    """Tests run a script's, tools.site.build mingpt's, unless the page says why not."""
    listed = []
    for page in map(parse, PAGES):
        listed += [block.text for block in [*page.commands, *page.blocks]]
    # Without quotes and comments: so are a docstring's words.
    listed = [re.sub("[\"']|#.*", "", text).split() for text in listed]
    mingpt = [f"mingpt/{path.name}" for path in ROOT.glob("mingpt/*.py")]
    for name in [*PARENTS, *mingpt]:
        for words in commands(name):
            assert " ".join(words).split() in listed, words


@pytest.mark.parametrize("page", ALL_PAGES)
def test_links_lead_somewhere(page):
    text = re.sub(r"(?ms)^```.*?^```", "", text_of(page))
    if page == "docs/audit.md":  # the report's links
        for link in re.findall("(?m)^help = (.*)", text_of("cluster/audit.py")):
            text += f"]({link})"
    for name, anchor in re.findall(r"\]\((?!https:)([^)#]*)#?([^)]*)\)", text):
        # An address of a code host
        name = re.sub(r"^../../actions/(\S+\.yml).*", r".github/\1", name)
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), name
        if anchor:
            headings = parse(str(path.resolve().relative_to(ROOT))).headings
            assert anchor in [its_anchor for _, _, its_anchor in headings], name


@pytest.mark.parametrize("page", ALL_PAGES)
def test_the_tests_that_are_named_exist(page):
    for name, path in TEST.findall(text_of(page)):
        assert f"\ndef {name}(" in text_of(path), (name, path)


WAY = """
0_intro 1_single_gpu 2_multigpu 3_fault_tolerance 4_multinode convert_your_script audit
adapt_your_script make_it_real
"""


@pytest.mark.text
def test_each_page_says_where_to_go_on():
    next_page = r"\n\nNext: \[.*?\]\((.*?)(?:\.md)?[#)].*\n$"
    following = {}
    for name in READING_ORDER:
        found = re.search(next_page, text_of(f"docs/{name}.md"))
        assert found, name
        following[name] = found[1]
    for name, target in itertools.pairwise(WAY.split()):
        assert following[name] == target


@pytest.mark.text
def test_chapter_2_counts_the_lines_that_a_script_needs():
    section = text_of("docs/2_multigpu.md").partition("## Know which lines")[2]
    numbers = re.findall(r"(?m)^\| .* \| (\d+) \|", section)
    count = len(changed_lines("single_gpu.py", "multigpu.py"))
    assert sum(map(int, numbers)) == count
    assert f"{count} lines change" in section


def test_which_one_names_every_script():
    """In its picture, in its questions, and below them with a command."""
    questions, below = text_of("docs/which_one.md").split("\n## Run it\n")
    picture = text_of("docs/pictures/which_one.svg")
    asked = {*re.findall(r"\]\(\.\./([\w/]+\.py)\)", questions)}
    shown = {*re.findall(r"(?<=>)\w+\.py(?=</text>)", picture)}
    assert asked == {*SCRIPTS, "variants/train_loop.py"}
    assert shown == {Path(name).name for name in asked}
    for name in asked:
        stem = Path(name).stem
        if "/" in name:
            assert re.search(rf"variants.{stem} |\[{stem}.py", below), name


@pytest.mark.parametrize("name", ["samples", "samples_narrow"])
def test_samples_and_losses_are_those_of_the_picture(name):
    """A row is what a device takes: of a sampler, an epoch and a rank.

    Each rank of two takes 8 of 16 samples, in the first epoch's order if nobody calls
    set_epoch. Without a DistributedSampler, both take all 16.
    """
    rows = []
    for epoch in (0, 1, 0, 0):  # the last two: without set_epoch
        for rank in (0, 1):
            sampler = DistributedSampler(range(16), 2, rank)
            sampler.set_epoch(epoch)
            rows += sampler
    for epoch in (0, 1):
        generator = torch.Generator().manual_seed(epoch)
        rows += 2 * [*RandomSampler(range(16), generator=generator)]
    picture = text_of(f"docs/pictures/{name}.svg")
    shown = re.findall(r'class="ink n">(\d+)<', picture)
    assert [*map(int, shown)] == rows

    _, right, random, without_set_epoch, *_ = losses_of("docs/2_multigpu.md", "3/3")
    shown = re.findall(r">loss ([\d.]+)<", picture)
    expected = right, without_set_epoch, random
    assert shown == [f"{loss:.3f}" for loss in expected]


@pytest.mark.parametrize("name", ["killed_run", "killed_run_narrow"])
def test_losses_are_where_the_picture_of_the_killed_run_has_them(name):
    """Of the run that was not killed, then of both attempts: one more y for each."""
    heights = re.findall(r'(?:,|cy=")(\d+\.\d)', text_of(f"docs/pictures/{name}.svg"))
    printed = losses_of("docs/3_fault_tolerance.md", r"\d/6")
    assert heights == [f"{150 - 45 * math.log10(loss):.1f}" for loss in printed]


def losses_of(page, epoch):
    """The held-out losses that a page shows of an epoch."""
    found = re.findall(rf"epoch {epoch} .* held-out loss (\S+)", text_of(page))
    return [float(loss) for loss in found]


def test_a_phone_gets_the_words_of_each_picture():
    def words_of(path):
        texts = re.findall(">([^<]+)</text", path.read_text())
        # The narrow picture of slow motion says which two of the three epochs it has.
        return {*re.findall(r"\w+", str(texts))} - {"first", "and", "current"}

    for narrow in (ROOT / "docs/pictures").glob("*_narrow.svg"):
        wide = narrow.with_name(narrow.name.replace("_narrow", ""))
        assert words_of(narrow) == words_of(wide), narrow


def test_the_code_in_a_picture_is_that_of_its_page():
    for page in PAGES:
        code = text_of(page) + text_of("single_gpu.py")  # of which there is a map
        for name in re.findall(r"\(pictures/(\w+)\.svg\)", text_of(page)):
            picture = text_of(f"docs/pictures/{name}.svg")
            for shown in re.findall(r'class="ink[^"]* c\b[^"]*">([^<]+)<', picture):
                assert shown in code, (page, shown)


# The tool. What must fail is put into a copy of the repository.


def build(root, *options, **env):
    """(exit status, messages) of the tool in the folder `root`, in a fork."""
    done = Program(["python", "-m", "tools.site.build", *options], root, **env).finish()
    return done.returncode, done.stderr


@pytest.mark.text
def test_nothing_is_stale_and_every_changed_line_is_explained():
    assert build(ROOT, "--check", "--diffs") == (0, "")


@pytest.fixture
def copy(tmp_path):
    """A copy of the repository to put faults into."""
    copy_tree(tmp_path / "copy")
    return tmp_path / "copy"


CHAPTER = "docs/2_multigpu.md"
QUOTES = "docs/1_single_gpu.md"
NOT_FRESH = {
    "a line changed": ("multigpu.py", "set_epoch(epoch)", "set_epoch(epoch + 1)"),
    "a hunk left out": (CHAPTER, "`self.ddp_model =`", "`drop_last=True`"),
    "a quote typed": (QUOTES, "loss.backward()", "loss.backward(None)"),
    "a quote of two places": (QUOTES, "`RandomSampler(`", "`sampler`"),
    "a diff in a fence": (CHAPTER, "\n## ", "\n```text\n+x\n```\n\n## "),
    "an explanation out of order": (CHAPTER, "**Why.**", "**What.**"),
}


@pytest.mark.waits
@pytest.mark.text
@pytest.mark.parametrize("fault", NOT_FRESH)
def test_it_finds(copy, fault):
    name, old, new = NOT_FRESH[fault]
    path = copy / name
    path.write_text(path.read_text().replace(old, new, 1))
    status, message = build(copy, "--check", "--diffs")
    assert status > 0
    assert re.match(r"(build.py: error: )?[\w./]+:\d+: ", message)


def shows(command, output):
    """A page that says what a command prints."""
    shown = f"```console\n$ {command}\n{output}\n```"
    return f"# Page\n\n<!-- run {command} -->\n{shown}\n<!-- end -->\n"


# A number that varies, an error of two ranks, and a command that is not run
WELL = shows("echo '0.5 | 7 samples/s | 3.1 s | pid: 8'", "0.5 | [...] | pid: [...]")
WELL += shows("echo 'a.py: error: b'; echo 'a.py: error: b'", "a.py: error: b")
WELL += "<!-- not run here: why -->\n```sh\nfalse\n```\n"
OUTPUT = {  # what a page holds, and what is said of it
    "nothing wrong": (WELL, 0, ""),
    "another number": (shows("echo 0.5", "0.504"), 1, ": stale"),
    "it fails": (shows("! echo 0.5", "0.5"), 1, "exit status 1"),
    "it does not end": (shows("sleep 60", ""), 1, "exit status 124"),
    "a command that fails": ("```sh\ntrue\nfalse\n```\n", 1, "false: exit status 1"),
}


@pytest.mark.waits
@pytest.mark.text
@pytest.mark.parametrize("case", OUTPUT)
def test_output_and_commands(copy, case):
    """Output is compared; that of a command that fails is not taken for output."""
    page, expected, words = OUTPUT[case]
    (copy / "docs/page.md").write_text(page)
    status, message = build(copy, "--check", "--only", "page", DOCS_TIMEOUT_S=2)
    assert status == expected, message
    assert words in message
