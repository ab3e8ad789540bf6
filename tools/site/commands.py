"""Run the commands of the documents, and compare what they print."""

import contextlib
import difflib
import functools
import math
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

from tools.files import copy_tree, edit, file_names
from tools.prove import record
from tools.prove.inputs import (
    PLACE,
    all_named,
    digest_of_files,
    imports_and_texts,
    named_in,
)
from tools.prove.record import Proof
from tools.run.pool import two_at_a_time
from tools.run.processes import Program, TimedOut, left_over
from tools.scripts import ROOT, SCRIPTS, docstring

CUT = "[...]"  # stands for what is not shown: lines, and HIDDEN in a line
TIMEOUT_S = int(os.environ.get("DOCS_TIMEOUT_S", 240))  # the longest takes about 30 s
PATIENCE_S = 0.2  # for processes that are about to end when their command has ended
COMPARE = r"(git (--\S+ )*diff|diff|sdiff) "  # exit status 1: the files differ

# What no reader needs and each run prints anew. With the speed goes the time that a
# script may print beside it, so that such a change makes no page stale.
HIDDEN = "|".join(
    [
        r"(?<=\| )[\d,]+ (?:samples|tokens)/s(?:(?:,| \|) [\d.,]+ m?s\b)*",
        r"(?<=pid: )\d+",
        r"\d{4}-\d\d-\d\d.\d\d:\d\d:\d\d\S*",
        r"\b[IWE]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+",
    ]
)
# What is shown, and may differ from run to run
VARIES = [
    r" *\d+\.\d+ ms +\d+%",  # in columns
    r"\d+\.\d+ ?m?s\b",
    r"(?<=:)\d{4,5}\b",  # a port
    r"(?<=line )\d+",
    r"(?m)^@@ -[\d,]+ \+[\d,]+ @@",  # a patch is found by its context, too
    r"\b\w*\d[\w-]*(?=\]:)",
    r"/\S*/(?=\S)",
]


def same(one, other):
    """Whether two outputs agree: equal words, numbers within 0.5 %.

    What matches VARIES, and where lines were cut, is not compared.
    """
    words, numbers = words_and_numbers(one)
    other_words, other_numbers = words_and_numbers(other)
    if words != other_words:
        return False
    pairs = zip(numbers, other_numbers, strict=True)
    return all(math.isclose(*pair, rel_tol=5e-3) for pair in pairs)


def words_and_numbers(lines):
    """((is it cut, the text of an output with # for each number), the numbers)."""
    text = "\n".join(line for line in lines if line != CUT)
    for pattern in VARIES:
        text = re.sub(pattern, "~", text)
    number = r"\d+\.\d+"
    words = (CUT in lines, re.sub(number, "#", text))
    return words, [*map(float, re.findall(number, text))]


# Programs with nothing that is left to a shell but their order run in forks.
PART = r"(python (-m (variants|mingpt)\.\w+|[\w/]+\.py)|torchrun)( [\w./:=,-]+)*"
PLAIN = rf"{PART}((;| &&) {PART})*"
# Those that send signals or look at processes need real ones. So do those that fail
# with 1, because a traceback of a fork shows also what has made the fork. If a fork
# calls exit(), torchrun waits for its result for ever. A command that is about threads
# says `2> /dev/null`, which is left to a shell: forks here have FRESH_THREADS.
REAL = r"\b(kill\b|getppid\b|assert\b|exit\()"


def is_plain(command):
    """Whether a Block's command runs in forks."""
    texts = [command.text, *(new for _, new in command.faults)]
    files = command.page.files
    texts += [files[name] for name in files if name in command.text]
    is_real = command.status == 1 or re.search(REAL, "\n".join(texts))
    return bool(not is_real and re.fullmatch(PLAIN, command.text))


def run(tree, command):
    """(exit status, output) of a Block's command in a fresh copy of the folder `tree`.

    Status None: its script lacks a text to replace; it was not run.
    Status 124: it did not end, or left processes behind; they are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(tree, copy)
        for name, text in command.page.files.items():
            (copy / name).write_text(text)
        if command.faults:
            try:
                edit(copy / command.script, *command.faults)
            except AssertionError as error:  # a text is not there once
                return None, str(error)
        status, output = run_words(command, copy, mark=folder)
        return status, output.replace(str(copy), "~")


def run_words(command, cwd, mark):
    """(exit status, output). The first part with a status that is not 0 is the last.

    Of a pipe, the last such status counts.
    """
    in_forks = is_plain(command)
    parts = [["bash", "-o", "pipefail", "-c", command.text]]
    if in_forks:
        parts = [part.split() for part in re.split("; | && ", command.text)]
    printed = ""
    for words in parts:
        env = {"CUDA_VISIBLE_DEVICES": "", "MARK": mark}
        program = Program(words, cwd, real=not in_forks, merged=True, **env)
        try:
            status, output, _ = program.finish(TIMEOUT_S)
        except TimedOut as error:
            status = 124
            output = str(error)
        if left_over(mark, PATIENCE_S):  # it has killed them
            status = 124
        if in_forks:  # they have their parent's environment, without a mark
            with contextlib.suppress(ProcessLookupError):  # as it should be
                os.killpg(program.pid, signal.SIGKILL)
                status = 124
        printed += output
        if status:
            break
    return status, printed


def above_output(block):
    """The lines of a `run` marker down to its command."""
    changes = []
    for old, new in block.faults:
        changes.append(f"`{new}` instead of `{old}`" if new else f"without `{old}`")
    path = ROOT / block.script
    above = []
    if len(changes) > 1 and path.exists():
        above = [f"With {block.script} changed:", "", *patch(path, block.faults), ""]
    elif changes:
        above = [f"With {block.script} changed: {', and '.join(changes)}.", ""]
    return [*above, "```console", f"$ {block.text}"]


def console(block, output):
    """What stands between a `run` marker and its end."""
    shown = without_repeated_errors([line.rstrip() for line in output.splitlines()])
    if block.show:
        shown = cut(shown, block.show)
    shown = [re.sub(HIDDEN, CUT, line) for line in shown]
    return [*above_output(block), *shown, "```"]


def without_repeated_errors(lines):
    """Without errors that repeat one above.

    On a busy machine, a rank may not be ended before it says what another has said.
    """
    kept = []
    for line in lines:
        if ": error: " not in line or line not in kept:
            kept.append(line)
    return kept


def patch(path, changes):
    """The fence of a diff that `git apply -p0` or `patch -p0` takes."""
    old = path.read_text()
    new = old
    for text, other in changes:
        new = new.replace(text, other)
    name = str(path.relative_to(ROOT))
    diff = difflib.unified_diff(
        old.splitlines(), new.splitlines(), name, name, n=1, lineterm=""
    )
    return ["```diff", *diff, "```"]


def cut(lines, patterns):
    """Only the lines that match a pattern; CUT for each stretch that is left out."""
    kept = []
    for line in lines:
        if any(re.search(pattern, line) for pattern in patterns):
            kept.append(line)
        elif kept[-1:] != [CUT]:
            kept.append(CUT)
    return kept


def commands_of(pages):
    """Every Block with a command to run, but for those in docstrings of scripts.

    tests/trunk/test_training.py::test_learns runs those, or a script's own tests do.
    """
    tested = "\n".join(docstring(ROOT / name) for name in SCRIPTS).splitlines()
    found = []
    for page in pages:
        found += [block for block in page.blocks if block.kind == "run"]
        fenced = [block for block in page.commands if block.kind == "sh"]
        found += [block for block in fenced if block.text not in tested]
    return found


RUNS_THEM = r"tools/(run/(pool|processes|warm)|site/(commands|pages)|files|scripts)\.py"


def proof_of(command, shown):
    """The proof that a command prints these lines, with all that this depends on."""
    code = [command.text, *(new for _, new in command.faults)]
    texts = [command.page.lines[command.line - 1], command.text, *shown]
    for name, text in command.page.files.items():
        texts += [name, text]
        code += sum(imports_and_texts(text), []) if name.endswith(".py") else [text]
    files = all_named(named_in(" ".join(code)))
    files.update(name for name in file_names() if re.fullmatch(RUNS_THEM, name))
    return Proof(command.page.name, command.text, PLACE, digest_of_files(files, *texts))


def run_all(pages):
    """Run the commands that are not proven: ({block: its lines}, [what went wrong])."""
    # Here, because it imports torch: the site imports this module, too, and runs no
    # command.
    from tools.run import warm

    warm.FRESH_THREADS = 1  # two commands at a time share the machine
    outputs = {}
    problems = []
    names = [page.name for page in pages]
    proven = record.read()
    known = {proof for proof in proven if proof.kind in names and proof.by == PLACE}
    commands = commands_of(pages)
    proofs = {command: proof_of(command, command.lines) for command in commands}
    record.change(drop=known.difference(proofs.values()))
    left = [command for command in proofs if proofs[command] not in known]
    print(f"{len(proofs) - len(left)} commands print what stands there, as before")
    with tempfile.TemporaryDirectory() as tree:
        copy_tree(Path(tree))
        results = two_at_a_time(functools.partial(run, tree), left)
        for command, (status, output) in zip(left, results, strict=True):
            at = f"{command.page.name}:{command.line}: {command.text}"
            print(f"{at}: exit status {status}", flush=True)
            compares = command.kind == "sh" and re.match(COMPARE, command.text)
            if status != command.status and not (compares and status == 1):
                problems.append(f"{at}: exit status {status}\n{output}".rstrip())
                continue
            shown = command.lines
            if command.kind == "run":
                made = console(command, output)
                if not same(shown, made):
                    shown = outputs[command] = made
            record.change([proof_of(command, shown)])
    return outputs, problems
