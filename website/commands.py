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
from pathlib import Path

from ladder.rungs import ROOT, RUNGS, docstring

TIMEOUT_S = int(os.environ.get("DOCS_TIMEOUT_S", 120))  # the longest takes about 20 s
NOT_INHERITED = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"}
NOT_INHERITED |= {"MASTER_PORT", "OMP_NUM_THREADS", "PYTHONDONTWRITEBYTECODE"}
COMPARE = r"(git (--\S+ )*diff|diff|sdiff) "  # exit status 1: the files differ

VARIES = [
    r"[\d,]+(?= samples/s)",
    r"\d+\.\d+ ?m?s\b",
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


def copy_repository(to):
    ignore = shutil.ignore_patterns(".*", "__pycache__", "_site", "*.pt", "*.pt.tmp")
    shutil.copytree(ROOT, to, ignore=ignore)


def marked(mark):
    """The processes that a command has left: torchrun's leave their group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if f"DOCS_MARK={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def run(page, command, faults=(), script=""):
    """(exit status, output) of a shell command in a fresh copy of the repository.

    Of a pipe, the last exit status that is not 0 counts. Status 124: it did not end, or
    left processes behind; they are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        copy_repository(copy)
        for name, text in page.files.items():
            (copy / name).write_text(text)
        for old, new in faults:
            text = (copy / script).read_text()
            (copy / script).write_text(text.replace(old, new))
        env = {k: v for k, v in os.environ.items() if k not in NOT_INHERITED} | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONWARNINGS": "ignore:Failed to initialize NumPy",
            "DOCS_MARK": folder,
        }
        with open(Path(folder, "output"), "wb") as out:
            process = subprocess.Popen(
                ["bash", "-o", "pipefail", "-c", command],
                cwd=copy,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                status = 124
        time.sleep(0.2 if marked(folder) else 0)  # they may be about to end
        for pid in marked(folder):
            status = 124
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        output = Path(folder, "output").read_bytes().decode(errors="replace")
        return status, output.replace(str(copy), "~")


def parse_flags(command):
    """(exit status, message) of the programs of a command, asked about its flags."""
    check = [sys.executable, "-m", "website.flags", command]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def console(block, output):
    """The console fence of a `run` marker."""
    said = [
        f"`{new}` instead of `{old}`" if new else f"without `{old}`"
        for old, new in block.faults
    ]
    above = [f"With {block.script} changed: {', and '.join(said)}.", ""] if said else []
    lines = [f"$ {block.text}", *(x.rstrip() for x in output.splitlines())]
    return [*above, "```console", *lines, "```"]


def what_is_wrong(block, status, output):
    """Why this is no output to show, or "" if it is."""
    if status != (block.status if block else 0):
        return f"exit status {status}"
    if block and not output.strip():
        return "prints nothing"
    if block and re.search(r"^(```|<!--)", output, re.M):
        return "prints a fence or a marker"
    return ""


def run_all(pages):
    """Run every command, two at a time: ({(page, line): fence}, [what went wrong])."""
    jobs, outputs, problems = {}, {}, []
    tested = "\n".join(docstring(ROOT / name) for name in RUNGS).splitlines()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for page in pages:
            for block in page.blocks:
                if block.kind == "run":
                    what = block.text, block.faults, block.script
                    job = pool.submit(run, page, *what)
                    jobs[job] = page.name, block.line, block.text, block
            for line, command, why in page.commands:
                if command in tested:  # tests/test_training.py::test_learns runs it
                    continue
                job = pool.submit(*([parse_flags] if why else [run, page]), command)
                jobs[job] = page.name, line, command, None
        for job in concurrent.futures.as_completed(jobs):
            page, line, command, block = jobs[job]
            status, output = job.result()
            print(f"{page}:{line}: {command}: exit status {status}", flush=True)
            if not block and re.match(COMPARE, command) and status == 1:
                status = 0
            wrong = what_is_wrong(block, status, output)
            if wrong:
                problems.append(f"{page}:{line}: {command}: {wrong}\n{output}".rstrip())
            elif block:
                outputs[page, line] = console(block, output)
    return outputs, problems
