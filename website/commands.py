"""Run the commands of the documents, and compare what they print."""

import concurrent.futures
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from ladder.files import copy_tree, edit
from ladder.pages import Block, Page
from ladder.rungs import FRAMEWORKS, ROOT, RUNGS, docstring
from proofs.processes import clean_env, descendants, left_over
from website.forks import Forks, forked

CUT = "[...]"  # stands for lines that are not shown
TIMEOUT_S = int(os.environ.get("DOCS_TIMEOUT_S", 120))  # the longest takes about 20 s
HUNG = f"no end within {TIMEOUT_S} s"
PATIENCE_S = 0.2  # for processes that are about to end when their command has ended
SLOWEST = 12  # how many commands the table at the end has
COMPARE = r"(git (--\S+ )*diff|diff|sdiff) "  # exit status 1: the files differ

VARIES = [
    r"[\d,]+(?= (?:samples|tokens)/s)",
    r"\d+% of [\d.]+(?= TFLOP/s)",
    r"\d+ min \d+(?= s left)",
    r"\d+\.\d+ ?m?s\b",
    r"\d+\.\d+(?= small all-reduces)",
    r"(?<=pid: )\d+",
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
    """Whether two outputs agree: words exactly, numbers to 0.1 %, what varies not.

    Nor where lines were cut: of several processes, they come in any order.
    """

    def parts(lines):
        text = "\n".join(line for line in lines if line != CUT)
        for pattern in VARIES:
            text = re.sub(pattern, "~", text)
        number = r"\d+\.\d+"
        return re.sub(number, "#", text), [
            float(word) for word in re.findall(number, text)
        ]

    (words, numbers), (other_words, others) = parts(one), parts(other)
    if (CUT in one) != (CUT in other):
        return False
    return words == other_words and all(
        abs(a - b) <= 1e-3 * max(abs(a), abs(b))
        for a, b in zip(numbers, others, strict=True)
    )


# What a fork would not show, or could not do. A fork is no child of its torchrun and
# has another command line, so what sends signals or looks at processes needs real ones.
# Hosts and clusters have networks of their own, and the process that forks is not in
# them.
# (A crash may be forked: torchrun and its dealings with its ranks are real.)
REAL = r"\bkill\b|\bgetppid\b|\bstacks\.sh\b|\bproofs\."


@dataclass
class Command:
    """A command of a page; `block` is its marker if it has one."""

    page: Page
    line: int
    text: str
    block: Block | None = None
    only_flags: bool = False  # it is not run, but its flags are parsed

    def is_real(self):
        faults = [new for _, new in self.block.faults] if self.block else []
        files = [text for name, text in self.page.files.items() if name in self.text]
        return bool(re.search(REAL, "\n".join([self.text, *faults, *files])))


def run(command, tree, shims=None):
    """(exit status, output) of a Command in a fresh copy of the folder `tree`.

    shims: a folder to put first on its PATH, or None. Of a pipe, the last exit status
    that is not 0 counts. Status 124: it did not end, or left processes behind; they are
    ended. What did not end has its stacks below its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(tree, copy)
        for name, text in command.page.files.items():
            (copy / name).write_text(text)
        if command.block and command.block.faults:
            edit(copy / command.block.script, *command.block.faults)
        first = [str(shims)] if shims else []
        path = [*first, str(Path(sys.executable).parent), os.environ["PATH"]]
        with open(Path(folder, "output"), "wb") as out:
            process = subprocess.Popen(
                ["bash", "-o", "pipefail", "-c", command.text],
                cwd=copy,
                env=clean_env(
                    PATH=os.pathsep.join(path),
                    CUDA_VISIBLE_DEVICES="",
                    MARK=folder,
                ),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                status = 124
                out.write(f"{HUNG}\n{stacks(folder)}".encode())
        if end_what_is_left(folder):
            status = 124
        process.wait()
        output = Path(folder, "output").read_bytes().decode(errors="replace")
        return status, output.replace(str(copy), "~")


def stacks(mark):
    """Where the processes of a command are, if py-spy is there to look at them."""
    pids = {*left_over(mark, 0), *forked(mark)}
    pids = sorted(pids.union(*map(descendants, pids)))
    if not (spy := shutil.which("py-spy")):
        return f"processes {pids} did not end; py-spy, if installed, would say more\n"
    dumps = [
        subprocess.run(
            [spy, "dump", "--native", "--pid", str(pid)], capture_output=True
        )
        for pid in pids
    ]
    return "".join(x.stdout.decode(errors="replace") for x in dumps)


def end_what_is_left(mark):
    """End the processes that a command has left; whether there were any."""
    if not left_over(mark, PATIENCE_S) and not forked(mark):
        return False
    for pid in left_over(mark, 0):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for group in forked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    return True


def parse_flags(command, shims=None):
    """(exit status, message) of a Command's programs, asked about their flags."""
    python = Path(shims, "python") if shims else sys.executable
    done = subprocess.run(
        [python, "-m", "website.flags", command.text],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def console(block, output):
    """The console fence of a `run` marker."""
    said = [
        f"`{new}` instead of `{old}`" if new else f"without `{old}`"
        for old, new in block.faults
    ]
    above = [f"With {block.script} changed: {', and '.join(said)}.", ""] if said else []
    shown = [line.rstrip() for line in output.splitlines()]
    lines = [f"$ {block.text}", *(cut(shown, block.show) if block.show else shown)]
    return [*above, "```console", *lines, "```"]


def cut(lines, patterns):
    """Only the lines that match a pattern; CUT for each stretch that is left out."""
    kept = []
    for line in lines:
        if any(re.search(pattern, line) for pattern in patterns):
            kept.append(line)
        elif kept[-1:] != [CUT]:
            kept.append(CUT)
    return kept


def what_is_wrong(block, status, output):
    """Why this is no output to show, or "" if it is."""
    if status != (block.status if block else 0):
        return f"exit status {status}"
    if block and not output.strip():
        return "prints nothing"
    if block and block.show and cut(output.splitlines(), block.show) == [CUT]:
        return "no line of what it prints is to be shown"
    if block and re.search(r"^(```|<!--)", output, re.M):
        return "prints a fence or a marker"
    return ""


def commands_of(pages):
    """Every Command of the pages but those in docstrings of rungs.

    tests/test_training.py::test_learns runs those, and a framework's own tests.
    """
    names = *RUNGS, *FRAMEWORKS
    tested = "\n".join(docstring(ROOT / name) for name in names).splitlines()
    found = []
    for page in pages:
        for block in page.blocks:
            if block.kind == "run":
                found.append(Command(page, block.line, block.text, block))
        for line, text, why_not_run in page.commands:
            if text not in tested:
                found.append(Command(page, line, text, only_flags=bool(why_not_run)))
    return found


def run_all(pages, real=False):
    """Run every command, two at a time: ({(page, line): fence}, [what went wrong]).

    real: all by interpreters of their own, as a reader does, and none by forks. What
    hangs is printed with its stacks, and run a second time, which decides.
    """
    outputs, problems, took_s = {}, [], []
    commands = commands_of(pages)
    # Real ones take longest: they are the first, so that none is left to the end alone.
    commands.sort(key=lambda command: not command.is_real())
    with contextlib.ExitStack() as stack:
        tree = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        copy_tree(tree)
        shims = None if real else stack.enter_context(Forks()).bin

        def timed(command):
            start = time.monotonic()
            if command.only_flags:
                result = parse_flags(command, shims)
            else:
                way = None if command.is_real() else shims
                result = run(command, tree, way)
                if HUNG in result[1]:  # no verdict: once more, and all can see it
                    print(f"{command.text}\n{result[1]}", file=sys.stderr)
                    result = run(command, tree, way)
            return *result, time.monotonic() - start

        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(2))
        jobs = {pool.submit(timed, command): command for command in commands}
        for job in concurrent.futures.as_completed(jobs):
            command, (status, output, seconds) = jobs[job], job.result()
            at = f"{command.page.name}:{command.line}: {command.text}"
            took_s.append((seconds, at))
            print(f"{at}: exit status {status}", flush=True)
            block = command.block
            if not block and re.match(COMPARE, command.text) and status == 1:
                status = 0
            wrong = what_is_wrong(block, status, output)
            if wrong:
                problems.append(f"{at}: {wrong}\n{output}".rstrip())
            elif block:
                outputs[command.page.name, block.line] = console(block, output)
    print_slowest(took_s)
    return outputs, problems


def print_slowest(took_s):
    """took_s: [(seconds, where and what)] of all commands."""
    slowest = sorted(took_s, reverse=True)[:SLOWEST]
    if slowest:
        print(f"\nThe slowest of {len(took_s)} commands, in seconds:")
    for seconds, at in slowest:
        print(f"{seconds:6.1f}  {at[:80]}")
