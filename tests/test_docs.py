"""What the README and the documents say is so, and the tool that sees to it."""

import ast
import os
import re
import shutil
import sys

import pytest

from ladder.diffs import changed_lines, hunks
from ladder.files import copy_tree, replace_once
from ladder.pages import GROUPS, TEST, Block, Page, linked_tests, page_names, parse
from ladder.rungs import ALL_EDGES, PARENTS, ROOT, commands, docstring, own_tests
from proofs.processes import run
from proofs.warm import Fork
from website.commands import Command, same
from website.commands import run as run_command
from website.forks import Forks

PAGES = page_names()
DIFFS = "<!-- diff single_gpu.py multigpu.py: `self.ddp_model =` -->"


def text_of(page):
    return (ROOT / page).read_text()


def test_the_readme_gives_two_commands():
    """CI takes them from here and runs them in a fresh environment."""
    lines = re.findall(
        r"^pip install -r requirements.txt && (.*)$", text_of("README.md"), re.M
    )
    assert lines == ["python multigpu.py 50 10", "pytest"]


@pytest.mark.text
@pytest.mark.parametrize("name", PARENTS)
def test_the_readme_lists_every_rung_with_its_command(name):
    assert f"[{name}]({name})" in text_of("README.md")
    listed = [command for _, command, _ in parse("README.md").commands]
    for words in commands(name):
        command = " ".join(words)
        assert command in listed, f'README.md: add under "Run it": {command}'


@pytest.mark.text
@pytest.mark.parametrize(
    "name", [str(x.relative_to(ROOT)) for x in sorted(ROOT.glob("mingpt/**/*.py"))]
)
def test_a_page_has_each_command_of_mingpt(name):
    """So that website.build runs it, or parses its flags if it is not run."""
    pages = [parse(page) for page in PAGES]
    listed = [text for page in pages for _, text, _ in page.commands]
    listed += [x.text for page in pages for x in page.blocks if x.kind == "run"]
    listed = [re.sub("[\"']", "", text) for text in listed]
    for words in commands(name):
        assert " ".join(words) in listed, f"no page has the command {' '.join(words)}"


@pytest.mark.text
@pytest.mark.parametrize("name", [x for x in PARENTS if "/" in x])
def test_a_variant_has_tests_of_its_own_that_what_is_proven_names(name):
    tests = own_tests(name)
    assert (ROOT / tests).exists(), f"there is no {tests}: CONTRIBUTING.md, step 2"
    page = "docs/what_is_proven.md"
    named = {test.partition("::")[0] for test in linked_tests(text_of(page))}
    assert tests in named, f"{page} links to no test of {tests}"


@pytest.mark.text
@pytest.mark.parametrize(("parent", "child"), ALL_EDGES)
def test_the_readme_counts_changed_lines_right(parent, child):
    count = f"| {len(changed_lines(parent, child))}, compared with {parent} |"
    (row,) = [x for x in text_of("README.md").splitlines() if f"| [{child}](" in x]
    assert count in row


@pytest.mark.parametrize("page", [x for x in PAGES if x.startswith("docs/")])
def test_the_readme_links_to_every_page(page):
    assert f"({page})" in text_of("README.md"), f"README.md has no link to {page}"


@pytest.mark.text
def test_chapter_1_quotes_the_script():
    """Each of its fences of python is a stretch of the script, or a file to run."""
    text = text_of("docs/1_single_gpu.md")
    quotes = re.findall(r"(?<!-->\n)```python\n(.*?)```", text, re.S)
    assert len(quotes) > 5
    for quote in quotes:
        assert quote in text_of("single_gpu.py"), f"single_gpu.py has no:\n{quote}"


@pytest.mark.parametrize("page", PAGES)
def test_what_is_folded_away_can_be_opened(page):
    """GitHub shows Markdown in a fold only if a blank line is above it."""
    text = text_of(page)
    opened = re.findall(r"^<details>\n<summary>[^<\n]+</summary>\n\n", text, re.M)
    closed = re.findall(r"\n\n</details>\n", text)
    assert len(opened) == len(closed) == text.count("<details")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", text_of(page), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("https://"):
            continue
        if workflow := re.fullmatch(r"../../actions/workflows/(\w+\.yml).*", target):
            assert (ROOT / ".github/workflows" / workflow[1]).exists()  # a code host's
            continue
        path, _, anchor = target.partition("#")
        path = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert path.exists(), target
        if anchor:
            anchors = [x[2] for x in parse(str(path.relative_to(ROOT))).headings]
            assert anchor in anchors, target


@pytest.mark.parametrize("page", PAGES)
def test_pictures_have_alternative_texts_of_one_line(page):
    """Of several, the site would join the words at the line ends."""
    text = text_of(page)
    assert text.count("![") == len(re.findall(r"!\[[^\]\n]{20,}\]\(", text))


@pytest.mark.parametrize("page", PAGES)
def test_the_tests_that_are_named_exist(page):
    for name, path in TEST.findall(text_of(page)):
        tree = ast.parse((ROOT / path).read_text())
        assert name in [getattr(x, "name", "") for x in tree.body], (name, path)


def test_every_page_is_in_one_group():
    """The contents, in README.md and on the site, are made from these."""
    listed = [f"docs/{name}.md" for names in GROUPS.values() for name in names]
    assert sorted(listed) == [x for x in PAGES if x.startswith("docs/")]


# The tool. What must fail is put into a copy of the repository.


def build(root, *options):
    """(exit status, messages) of the tool in the folder `root`, in a fork."""
    done = Fork(["python", "-m", "website.build", *options], root).finish()
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the repository that stays as it is."""
    folder = tmp_path_factory.mktemp("tree")
    copy_tree(folder)
    return folder


@pytest.fixture
def copy(tree, tmp_path):
    """A copy to put faults into, of links: take a file away before writing it."""
    return shutil.copytree(tree, tmp_path / "copy", copy_function=os.link)


def plant(root, name, old, new):
    path = root / name
    text = replace_once(path.read_text(), old, new, name)
    path.unlink()
    path.write_text(text)


def files(root):
    return {x: x.read_bytes() for x in root.rglob("*.md")}


@pytest.mark.text
def test_nothing_is_stale_and_every_changed_line_is_explained():
    assert build(ROOT, "--check", "--diffs") == (0, "")


CHAPTER = "docs/2_multigpu.md"
NOT_FRESH = {
    "a line changed": ("multigpu.py", "SGD, lr=0.001", "SGD, lr=0.002"),
    "a line added": ("multigpu.py", "import time\n", "import time\nimport json\n"),
    "a line removed": ("multigpu.py", "    dist.destroy_process_group()\n", ""),
    "a diff typed": (CHAPTER, "\n+        dist.all_reduce(total)", "\n+    typed"),
    "a hunk left out": (CHAPTER, "`import gc` `gc.collect()`", "`gc.collect()`"),
    "no why": (CHAPTER, "**Why.** All processes", "All processes"),
    "no test": (
        CHAPTER,
        "\nTests: [test_one_rank_writes]",
        "\nSee [test_one_rank_writes]",
    ),
    "no such test": (CHAPTER, "[test_bad_nprocs](", "[test_nosuch]("),
    "an empty what": (CHAPTER, "**What.** The training step", "**What.** **Why.** The"),
    "two diffs, one heading": (
        CHAPTER,
        "## Call the wrapper in the training step\n",
        "",
    ),
    "no right output": (
        CHAPTER,
        "as `output = self.model(source)`: python",
        "as `output = self.model(source)`: cd .; python",
    ),
    "a table typed": ("README.md", "| 48, compared with single_gpu.py |", "| 9 |"),
}


@pytest.mark.text
@pytest.mark.parametrize("fault", NOT_FRESH)
def test_it_finds(copy, fault):
    plant(copy, *NOT_FRESH[fault])
    before = files(copy)
    status, said = build(copy, "--check", "--diffs")
    assert status == 1
    assert re.match(r"[\w./]+:\d+: ", said)
    assert files(copy) == before


@pytest.mark.text
@pytest.mark.parametrize("name", ["variants/new.py", "mingpt/new.py"])
def test_a_rung_without_a_chapter_is_found(copy, name):
    """As is one with a chapter that leaves a line out; see above."""
    parent = "multinode.py"
    (copy / name).parent.mkdir(exist_ok=True)
    shutil.copy(copy / parent, copy / name)
    plant(copy, name, docstring(ROOT / parent), f"New. Parent: {parent}\n")
    status, said = build(copy, "--check", "--diffs")
    assert status == 1
    assert f"{name}:1: no chapter explains" in said


@pytest.mark.text
def test_it_mends_what_is_stale(copy):
    before = files(copy)
    plant(copy, *NOT_FRESH["a diff typed"])
    plant(copy, *NOT_FRESH["a table typed"])
    assert build(copy, "--diffs") == (0, "")
    assert files(copy) == before


WRONG = {
    "no such file": (DIFFS, DIFFS.replace("single_gpu", "nosuch")),
    "no such hunk": (DIFFS, DIFFS.replace("self.ddp_model =", "nosuch")),
    "several hunks": (DIFFS, DIFFS.replace("self.ddp_model =", "rank")),
    "explained twice": (DIFFS, DIFFS.replace("self.ddp_model =", "import gc")),
    "no such marker": (DIFFS, DIFFS.replace("diff", "dif", 1)),
    "not closed": (DIFFS, DIFFS.removesuffix(" -->")),
    "a marker too many": (DIFFS, f"{DIFFS}\n{DIFFS}"),
    "an end too many": (DIFFS, f"<!-- end -->\n\n{DIFFS}"),
    "typed output": (DIFFS, f"```console\n$ python\n```\n\n{DIFFS}"),
    "a typed diff": (DIFFS, f"```diff\n+x\n```\n\n{DIFFS}"),
    "a fence without end": (DIFFS, f"````sh\n{DIFFS}"),
    "a command without fence": (DIFFS, f"    pip install torch\n\n{DIFFS}"),
    "a reason without commands": (DIFFS, f"<!-- not run here: why -->\n\n{DIFFS}"),
    "a file without text": (DIFFS, f"<!-- file x.py -->\n\n{DIFFS}"),
    "a file elsewhere": (DIFFS, f"<!-- file ../x.py -->\n```python\n```\n{DIFFS}"),
    "a file that is there": (DIFFS, f"<!-- file utils.py -->\n```sh\n```\n{DIFFS}"),
    "another fence": (DIFFS, f"~~~diff\n+x\n~~~\n\n{DIFFS}"),
    "an indented fence": (DIFFS, f"  ```diff\n  +x\n  ```\n\n{DIFFS}"),
    "a fence in a list": (DIFFS, f"- ```diff\n  +x\n  ```\n\n{DIFFS}"),
    "a fence in a quote": (DIFFS, f"> ```diff\n> +x\n> ```\n\n{DIFFS}"),
    "HTML": (DIFFS, f"<pre>\n+x\n</pre>\n\n{DIFFS}"),
    "a tab": (DIFFS, f"\t+x\n\n{DIFFS}"),
    "a diff as text": (DIFFS, f"```text\n+x\n```\n\n{DIFFS}"),
    "output as text": (DIFFS, f"```text\n$ python x.py\n```\n\n{DIFFS}"),
    "no command": (DIFFS, f"```sh\n```\n\n{DIFFS}"),
    "a heredoc": (DIFFS, f"```sh\ncat <<E\nE\n```\n\n{DIFFS}"),
    "context around hunks": (DIFFS, DIFFS.replace("diff", "diff -U0", 1)),
    "carriage return": (DIFFS, f"x\r\n{DIFFS}"),
    "a fault in no script": (
        DIFFS,
        f"<!-- run with `a` as `b`: ls -->\n<!-- end -->\n\n{DIFFS}",
    ),
    "a fault in no place": (
        DIFFS,
        f"<!-- run with `x y z` as ``: grep x utils.py -->\n<!-- end -->\n\n{DIFFS}",
    ),
    "a fault in many places": (
        DIFFS,
        f"<!-- run with `rank` as `x`: ls multigpu.py -->\n<!-- end -->\n\n{DIFFS}",
    ),
    "a pattern that is none": (
        DIFFS,
        f"<!-- run (show `(`) ls -->\n<!-- end -->\n\n{DIFFS}",
    ),
    "a pattern that no changed line has": (
        DIFFS,
        "<!-- diff (show `nosuch`) single_gpu.py multigpu.py -->\n<!-- end -->\n\n"
        + DIFFS,
    ),
    "a fault in no file": (
        DIFFS,
        "<!-- run with `a` as `b` in nosuch.py: ls multigpu.py -->\n<!-- end -->\n\n"
        + DIFFS,
    ),
    "half a fault": (
        DIFFS,
        "<!-- run with `import gc` as `` with `x`: ls multigpu.py -->\n<!-- end -->\n\n"
        + DIFFS,
    ),
}


@pytest.mark.text
@pytest.mark.parametrize("fault", WRONG)
def test_bad_input(copy, fault):
    """One line that names file and line, exit status 2, and nothing written."""
    plant(copy, "docs/2_multigpu.md", *WRONG[fault])
    plant(copy, *NOT_FRESH["a table typed"])  # it would mend this
    before = files(copy)
    status, said = build(copy, "--diffs")
    assert status == 2
    assert re.fullmatch(r"website\.build: error: docs/2_multigpu\.md:\d+: .+\n", said)
    assert files(copy) == before


@pytest.mark.text
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("docs/page.md", b"\xff\xfe\x00"),
        ("docs/sub/page.md", b"```diff\n+x\n```\n"),
        ("docs/page.md", DIFFS.encode() + b"\n<!-- end -->\n"),  # no heading above
        ("variants/x.py", b"print()\n"),
        ("variants/x.py", b'"""X. Parent: nosuch.py"""\n'),
        ("variants/x.py", b'"""X. Parent: variants/x.py"""\n'),
        ("variants/x.py", b'"""X. Parent: none"""\n'),
        ("variants/x.py", b'"""X. Parent: mingpt/x.py"""\n'),
        ("mingpt/x.py", b'"""X. Parent: nosuch.py"""\n'),
        ("mingpt/x.py", b'"""X. Parent: mingpt/x.py"""\n'),
        ("mingpt/x.py", b'"""X. Parent: utils.py"""\n'),
        ("variants/x.py", b'"""X.\n\nMade of: multigpu.py,\nutils.py\n"""\n'),
        ("variants/x.py", b'"""X. Parent: multigpu.py\n\nMade of: utils.py\n"""'),
        ("variants/x.py", b'"""X.\n\nParent: multinode.py\n"""\n\xff'),
        ("README.md", None),
    ],
)
def test_bad_files(copy, name, content):
    (copy / name).parent.mkdir(parents=True, exist_ok=True)
    (copy / name).unlink(missing_ok=True)
    if content:
        (copy / name).write_bytes(content)
    before = files(copy)
    status, said = build(copy, "--diffs")
    assert status == 2
    assert re.fullmatch(r"website\.build: error: [\w./]+:\d+: .+\n", said)
    assert files(copy) == before


@pytest.mark.text
def test_a_diff_may_show_only_lines_that_match(copy):
    """The function's name is above them. They are shown, and not explained."""
    marker = "<!-- diff (show `output =` `set_epoch`) single_gpu.py multigpu.py -->"
    (copy / "docs/page.md").write_text(f"# Page\n\n{marker}\n<!-- end -->\n")
    assert build(copy, "--diffs") == (0, "")
    assert (copy / "docs/page.md").read_text().splitlines()[3:-1] == [
        "```diff",
        "@@ in Trainer._run_epoch @@",
        "+        self.train_data.sampler.set_epoch(epoch)",
        "@@ in Trainer._run_batch @@",
        "-        output = self.model(source)",
        "+        output = self.ddp_model(source)",
        "```",
    ]


@pytest.mark.text
def test_a_text_may_say_in_which_function_it_stands(copy):
    """Where lines of several functions have changed in the same way."""
    (copy / "docs/old.py").write_text("def f(x):\n    a\n\n\ndef g(x):\n    a\n")
    (copy / "docs/new.py").write_text("def f(x):\n    b\n\n\ndef g(x):\n    b\n")
    marker = "# Page\n\n<!-- diff docs/old.py docs/new.py: {} -->\n<!-- end -->\n"
    (copy / "docs/page.md").write_text(marker.format("`f: b` `g: b`"))
    assert build(copy, "--diffs") == (0, "")
    assert (copy / "docs/page.md").read_text().count("@@ change ") == 2
    (copy / "docs/page.md").write_text(marker.format("`b`"))
    status, said = build(copy, "--diffs")
    assert (status, "'b' is in 2 hunks" in said) == (2, True)


@pytest.mark.text
@pytest.mark.parametrize("start", ["'" * 3, "#!/usr/bin/env python\n" + "'" * 3])
def test_a_rung_is_found_however_it_begins(copy, start):
    (copy / "variants").mkdir(exist_ok=True)
    text = f"{start}New.\n\nParent: multinode.py\n{start[-3:]}\n"
    (copy / "variants/new.py").write_text(text)
    status, said = build(copy, "--check", "--diffs")
    assert status == 1
    assert "variants/new.py:1: no chapter explains" in said


@pytest.mark.text
def test_a_script_that_does_not_parse(copy):
    plant(copy, "multigpu.py", "            utils.say(text)\n", "")
    status, said = build(copy, "--diffs")
    assert status == 2
    assert re.fullmatch(r"website\.build: error: .+:\d+: multigpu.py:\d+: .+\n", said)


def test_no_such_page(copy):
    status, said = build(copy, "--only", "nosuch")
    assert (status, said) == (2, "website.build: error: there is no page nosuch\n")


SLEEP = "sleep 60"
RUN = "<!-- run echo 0.5 -->\n```console\n$ echo 0.5\n0.5\n```\n<!-- end -->\n"
OUTPUT = {  # what a page holds, and what is said of it
    "as it is": (RUN, (0, "")),
    "to 0.1 percent": (RUN.replace("\n0.5", "\n0.5001"), (0, "")),
    "another number": (RUN.replace("\n0.5", "\n0.502"), (1, ": stale")),
    "another word": (RUN.replace("\n0.5", "\nhalf"), (1, ": stale")),
    "no such program": (RUN.replace("echo", "nosuch"), (1, "exit status 127")),
    "it fails": (RUN.replace("run echo", "run ! echo"), (1, "exit status 1")),
    "it fails in a pipe": (RUN.replace("run", "run false |"), (1, "exit status 1")),
    "it fails otherwise": (
        RUN.replace("run", "run (exit status 2)"),
        (1, "echo 0.5: exit status 0"),
    ),
    "as it should": (
        RUN.replace("run echo 0.5", "run (exit status 1) echo 0.5; false").replace(
            "$ echo 0.5", "$ echo 0.5; false"
        ),
        (0, ""),
    ),
    "it prints nothing": (
        RUN.replace("run echo 0.5", "run true"),
        (1, "prints nothing"),
    ),
    "it prints a marker": (
        RUN.replace("run echo 0.5", "run echo '<!-- x'"),
        (1, "prints a fence or a marker"),
    ),
    "a part of it": (
        "<!-- run (show `b` `^d`) printf 'a\\nb\\nc\\nd\\n' -->\n```console\n"
        "$ printf 'a\\nb\\nc\\nd\\n'\n[...]\nb\n[...]\nd\n```\n<!-- end -->\n",
        (0, ""),
    ),
    "a part that is not there": (
        RUN.replace("run echo", "run (show `x`) echo"),
        (1, "no line of what it prints is to be shown"),
    ),
    "it does not end": (RUN.replace("run", f"run {SLEEP};"), (1, "exit status 124")),
    "it leaves a process": (
        RUN.replace("run", "run setsid sleep 60 &"),
        (1, "exit status 124"),
    ),
    "a fault": (
        "<!-- run with `lr=0.001` as `lr=0.0`: grep -o lr=0.0, multigpu.py -->\n"
        "With multigpu.py changed: `lr=0.0` instead of `lr=0.001`.\n\n```console\n"
        "$ grep -o lr=0.0, multigpu.py\nlr=0.0,\n```\n<!-- end -->\n",
        (0, ""),
    ),
    "a fault in a module": (
        "<!-- run with `num_workers=2` as `num_workers=0`: "
        "grep -o num_workers=0 variants/real_*  # python -m variants.real_job -->\n"
        "With variants/real_job.py changed: `num_workers=0` instead of `num_workers=2`."
        "\n\n```console\n"
        "$ grep -o num_workers=0 variants/real_*  # python -m variants.real_job\n"
        "num_workers=0\n```\n<!-- end -->\n",
        (0, ""),
    ),
    "a fault in another file": (
        "<!-- run with `lr=0.001` as `lr=0.0` in multigpu.py: cat multigpu.py utils.py"
        " | grep -o lr=0.0, -->\nWith multigpu.py changed: `lr=0.0` instead of "
        "`lr=0.001`.\n\n```console\n$ cat multigpu.py utils.py | grep -o lr=0.0,\n"
        "lr=0.0,\n```\n<!-- end -->\n",
        (0, ""),
    ),
    "its file": (
        "<!-- file x.txt -->\n```text\n7.5\n```\n<!-- run cat x.txt -->\n"
        "```console\n$ cat x.txt\n7.5\n```\n<!-- end -->\n",
        (0, ""),
    ),
    "a command": ("```sh\ntrue\n```\n", (0, "")),
    "a command that fails": ("```sh\ntrue\nfalse\n```\n", (1, "false: exit status 1")),
    "flags": (
        "<!-- not run here: why -->\n```sh\nA=b torchrun --nnodes=2 multinode.py \\\n"
        "  5 1 && pip install -r x && python single_gpu.py 5 1\n```\n",
        (0, ""),
    ),
    "no such flag": (
        "<!-- not run here: why -->\n```sh\ntorchrun --nosuch multinode.py 5 1\n```\n",
        (1, "exit status 2"),
    ),
    "no such flag of the script": (
        "<!-- not run here: why -->\n```sh\ntorchrun multinode.py 5 1 --nosuch\n```\n",
        (1, "unrecognized arguments: --nosuch"),
    ),
    "no such flag of the module": (
        "<!-- not run here: why -->\n```sh\ntorchrun --nproc-per-node=8 "
        "-m variants.preemptible 5 1 --nosuch\n```\n",
        (1, "unrecognized arguments: --nosuch"),
    ),
    "no way to parse": (
        "<!-- not run here: why -->\n```sh\nnosuch -x\n```\n",
        (1, "nothing here can parse"),
    ),
}


@pytest.mark.text
@pytest.mark.parametrize("case", OUTPUT)
def test_output_and_commands(copy, case, monkeypatch):
    """Output is compared; that of a command that fails is not taken for output."""
    text, (expected, words) = OUTPUT[case]
    (copy / "docs/page.md").write_text(f"# Page\n\n{text}")
    if SLEEP in text:
        monkeypatch.setenv("DOCS_TIMEOUT_S", "1")
    options = ["--only", "page"]
    if "stale" in words:  # without --check it would be mended
        options.append("--check")
    before = files(copy)
    status, said = build(copy, *options)
    assert files(copy) == before
    assert (status, words in said) == (expected, True), said


PRINTS = """import argparse
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int, default=1)
args = parser.parse_args()
print("right", args.size, "torch" in sys.modules)
"""


@pytest.mark.text
def test_a_module_of_mingpt_runs_in_a_fork_with_a_fault(copy):
    """It is there as a fork that has imported torch, which the module has not."""
    (copy / "mingpt").mkdir(exist_ok=True)
    (copy / "mingpt/prints.py").write_text(PRINTS)
    command = "python -m mingpt.prints --size 2"
    marker = f"<!-- run with `right` as `wrong`: {command} -->"
    (copy / "docs/page.md").write_text(f"# Page\n\n{marker}\n<!-- end -->\n")
    assert build(copy, "--only", "page") == (0, "")
    assert (copy / "docs/page.md").read_text().splitlines()[3:-1] == [
        "With mingpt/prints.py changed: `wrong` instead of `right`.",
        "",
        "```console",
        f"$ {command}",
        "wrong 2 True",
        "```",
    ]


@pytest.mark.text
@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--size 2", ""),
        ("--size x", "invalid int value"),
        ("--shape 1", "unrecognized"),
    ],
)
@pytest.mark.parametrize("program", ["python", "torchrun --nproc-per-node=8"])
def test_a_command_of_mingpt_that_is_not_run_has_its_flags_parsed(
    copy, program, option, words
):
    (copy / "mingpt").mkdir(exist_ok=True)
    (copy / "mingpt/prints.py").write_text(PRINTS)
    fence = f"```sh\n{program} -m mingpt.prints {option}\n```"
    (copy / "docs/page.md").write_text(
        f"# Page\n\n<!-- not run here: why -->\n{fence}\n"
    )
    status, said = build(copy, "--only", "page")
    assert (status, words in said) == (int(bool(words)), True), said


def test_what_hangs_is_run_once_more_and_said(copy, tmp_path, monkeypatch):
    """A hang is no verdict about an output. The second run decides."""
    once = f"if mkdir {tmp_path}/begun 2> /dev/null; then {SLEEP}; fi; echo ended"
    (copy / "docs/page.md").write_text(f"# Page\n\n<!-- run {once} -->\n<!-- end -->\n")
    monkeypatch.setenv("DOCS_TIMEOUT_S", "1")
    status, said = build(copy, "--only", "page")
    assert (status, said.count("no end within 1 s")) == (0, 1)
    assert "\nended\n" in (copy / "docs/page.md").read_text()


@pytest.mark.text
@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (None, 0),
        (NOT_FRESH["a table typed"], 1),
        ((CHAPTER, *WRONG["not closed"]), 2),
    ],
)
def test_the_command_line(copy, fault, status):
    """As a person types it: the tests above call the tool in forks."""
    if fault:
        plant(copy, *fault)
    command = [sys.executable, "-m", "website.build", "--check", "--diffs"]
    done = run(command, copy)
    assert done.returncode == status
    assert bool(done.stderr) == bool(fault)


# The forks that commands are run by


@pytest.fixture(scope="module")
def shims():
    with Forks() as forks:
        yield forks.bin


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    return tmp_path_factory.mktemp("empty")


LINGER = "(python x.py < /dev/null &) ; until [ -e ready ]; do sleep 0.01; done"
NOTE_AND_WAIT = "import time\nopen('ready', 'w').close()\ntime.sleep(60)\n"
ENDS = {  # a script, and the command that runs it
    "well": ("print(0.5)", "python x.py"),
    "a status": ("import sys\nsys.exit(3)", "python x.py"),
    "a message": ("import sys\nsys.exit('no')", "python x.py"),
    "an exception": ("raise ValueError('no')", "python x.py 2>&1 | tail -n 1"),
    "bad arguments": ("", "python nosuch.py 2> /dev/null"),
    "words": ("import sys\nprint(sys.argv)", "python x.py 'a  b' '' --c=d"),
    "input": ("print(input())", "echo a | python x.py"),
    "no buffer": ("import os\nprint(1)\nos._exit(0)", "python -u x.py"),
    "the environment": ("import os\nprint(os.environ['A'])", "A=b python x.py"),
    "the folder": ("import os\nprint(os.listdir())", "mkdir d; cd d; python ../x.py"),
    "no script": ("", "python -c 'print(1)'"),
    "killed": (
        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
        "{ python x.py; } 2> /dev/null; echo $?",
    ),
    "told to end": (
        NOTE_AND_WAIT,
        "{ python x.py & until [ -e ready ]; do sleep 0.01; done; kill $!; wait $!; }"
        " 2> /dev/null; echo $?",
    ),
    "left behind": (NOTE_AND_WAIT, LINGER),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_forked_command_ends_as_a_real_one(shims, empty, how):
    script, text = ENDS[how]
    command = Command(Page("page", [], files={"x.py": script}), 1, text)
    status, output = run_command(command, empty, shims)
    assert (status, output) == run_command(command, empty)
    if how == "left behind":
        assert status == 124


def test_a_command_that_hangs_shows_where(shims, empty, monkeypatch):
    """In its own interpreters, in forks, and in the processes that these have made."""
    if not shutil.which("py-spy"):
        pytest.skip("py-spy shows the stacks: pip install -r tests/requirements.txt")
    monkeypatch.setattr("website.commands.TIMEOUT_S", 3)
    script = "import os, time\ndef waits_here():\n    time.sleep(60)\n"
    script += "os.fork()\nwaits_here()\n"
    command = Command(Page("page", [], files={"x.py": script}), 1, "python x.py")
    for way in (shims, None):
        status, output = run_command(command, empty, way)
        assert status == 124
        assert output.count("waits_here (") == 2, output


@pytest.mark.parametrize(
    ("text", "fault", "is_real"),
    [
        ("torchrun --standalone multinode.py 5 1", "rank", False),
        ("torchrun multinode.py 5 1 & kill $!", "rank", True),
        ("torchrun multinode.py 5 1", "os.kill(os.getpid(), 9)", True),
        ("python -m proofs.hosts 2 -- torchrun multinode.py 5 1", "rank", True),
    ],
)
def test_what_sends_signals_or_needs_hosts_is_not_forked(text, fault, is_real):
    block = Block("page", 1, "run", text, faults=[("x", fault)])
    assert Command(Page("page", []), 1, text, block).is_real() == is_real


def test_what_varies_is_masked_and_nothing_else():
    line = "[rank 1]: {} | loss {} | {} samples/s, pid: {}, x.py line {}"
    one = line.format("at", 1.0000, "20,000", 311, 80)
    assert same([one], [line.format("at", 1.0005, "9", 4711, 81)])
    assert not same([one], [line.format("at", 1.01, "20,000", 311, 80)])
    assert not same([one], [line.format("in", 1.0, "20,000", 311, 80)])
    assert not same([one], [one, one])
    assert same(
        ["0.51 ms, or 1.3 small all-reduces"], ["9.1 ms, or 7.0 small all-reduces"]
    )
    assert not same(["rank 0"], ["rank 1"])
    line = "loss {} | {} min {} s left | {} tokens/s | MFU {}% of {} TFLOP/s (measured)"
    one = line.format(4.5446, 0, "04", "4,057", 12, 0.169)
    assert same([one], [line.format(4.5447, 12, "59", 9, 3, 1)])
    assert not same([one], [line.format(4.6, 0, "04", "4,057", 12, 0.169)])
    assert same(["a", "[...]", "b"], ["[...]", "a", "b"])
    assert not same(["a", "[...]", "b"], ["b", "[...]", "a"])
    assert not same(["a", "[...]", "b"], ["a", "b"])


@pytest.mark.parametrize(("parent", "child"), ALL_EDGES)
def test_hunks_make_the_child_of_the_parent(parent, child):
    """Put into the parent's text, they give the child's: so no changed line is lost."""
    old = (ROOT / parent).read_text().splitlines()
    new = (ROOT / child).read_text().splitlines()
    for hunk in reversed(hunks(parent, child)):
        start = hunk.old_start - 1
        assert old[start : start + len(hunk.removed)] == hunk.removed
        old[start : start + len(hunk.removed)] = hunk.added
    assert old == new
