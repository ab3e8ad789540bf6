"""Find the rungs by listing the folders, and run them as a person would."""

import ast
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from docs.diffs import EDGES, ROOT, RUNGS, docstring
from tests.hosts import clean_env

TIMEOUT_S = int(os.environ.get("TEST_TIMEOUT_S", 120))  # a run takes 3 to 10 s


DISTRIBUTED = [child for _, child in EDGES]


def commands(name):
    """The shell commands in the rung's docstring, as lists of words."""
    lines = docstring(ROOT / name).splitlines()
    return [shlex.split(x) for x in lines if x.startswith(("python ", "torchrun "))]


def home(script):
    """The folder of the utils.py that belongs to `script`, a path to a rung."""
    folder = Path(script).parent
    return folder.parent if folder.name == "variants" else folder


def launch(script, total, every, *options, nprocs=2):
    """The docstring's command for `script` (a path), with other arguments."""
    (name,) = (x for x in RUNGS if Path(x).name == Path(script).name)
    words = commands(name)[0]
    if words[0] == "torchrun":
        words = [f"--nproc-per-node={nprocs}" if "nproc" in w else w for w in words]
        program = [sys.executable, "-m", "torch.distributed.run", *words[1:-3]]
        if "-m" in words:  # a variant is a module, beside which utils.py is found
            program = ["env", f"PYTHONPATH={home(script)}", *program]
            script = ".".join(
                Path(script).relative_to(home(script)).with_suffix("").parts
            )
    else:
        program = [sys.executable]
        if nprocs != 2:
            options = ("--nprocs", nprocs, *options)
    return [str(x) for x in (*program, script, total, every, *options)]


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def start(command, cwd, **env):
    """Start `command` in a process group of its own."""
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=clean_env(**env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process, timeout=TIMEOUT_S):
    """Wait for it; end its whole group if it hangs, and say so."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, err = process.communicate()
        raise AssertionError(f"hung for {timeout} s:\n{out}\n{err}") from None
    return Done(process.returncode, out, err)


def run(command, cwd, **env):
    return finish(start(command, cwd, **env))


def forked(script, *argv, cwd, **env):
    """Run a script that starts no other: a real process, but torch is imported already.

    Takes 0.1 s where a new interpreter takes 2 s.
    """
    out, err = Path(cwd, ".stdout"), Path(cwd, ".stderr")
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for path, fd in ((out, 1), (err, 2)):
                os.dup2(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), fd)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            os.chdir(cwd)
            os.environ.clear()
            os.environ.update(clean_env(**env))
            sys.argv = [str(script), *map(str, argv)]
            sys.path.insert(0, str(home(script)))
            sys.modules.pop("utils", None)
            try:
                runpy.run_path(str(script), run_name="__main__")
                status = 0
            except SystemExit as end:
                status = end.code or 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(pid, 9)
        time.sleep(0.01)
    code = os.waitstatus_to_exitcode(status)
    done = Done(code, out.read_text(), err.read_text())
    out.unlink()
    err.unlink()
    return done


def train(script, *args, cwd, nprocs=2, **env):
    """Run a rung to its end and insist that it ended well."""
    if DISTRIBUTED and Path(script).name in {Path(x).name for x in DISTRIBUTED}:
        done = run(launch(script, *args, nprocs=nprocs), cwd, **env)
    else:
        done = forked(script, *args, cwd=cwd, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def plant(name, folder, *changes, before_main=""):
    """Copy a rung and utils.py, with `changes` (old, new) made and a block put in."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "utils.py", folder)
    text = (ROOT / name).read_text()
    entry = 'if __name__ == "__main__":'
    for old, new in (*changes, (entry, f"{before_main}\n\n{entry}")):
        assert text.count(old) == 1, f"{name} has {old!r} {text.count(old)} times"
        text = text.replace(old, new)
    script = folder / (name if name in RUNGS else Path(name).name)
    script.parent.mkdir(exist_ok=True)
    script.write_text(text)
    return script


def left_over(mark, patience_s=20):
    """The processes that still have MARK=`mark` in their environment after a while."""
    deadline = time.monotonic() + patience_s
    while True:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"MARK={mark}".encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:
                pass  # it has ended, or belongs to somebody else
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def function(which, name):
    """The source text of a function of a rung."""
    text = (ROOT / name).read_text()
    (node,) = (x for x in ast.parse(text).body if getattr(x, "name", "") == which)
    return ast.get_source_segment(text, node)


def losses(done):
    """[(train loss, held-out loss) of each epoch printed]."""
    pairs = re.findall(r"train loss (\S+) \| held-out loss (\S+)", done.stdout)
    return [tuple(map(float, pair)) for pair in pairs]


def load(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def weights(path):
    """All the weights in a snapshot, as one float64 tensor of shape (n,)."""
    state = load(path)["MODEL_STATE"]
    return torch.cat([x.double().flatten() for x in state.values()])


def same_bits(one, other):
    """Whether two snapshots hold the same: keys, weights, optimizer state, epochs."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        keys = list(one) == list(other)
        return keys and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        pairs = zip(one, other, strict=True)
        return len(one) == len(other) and all(same_bits(a, b) for a, b in pairs)
    return one == other


def shape_of(snapshot):
    """Keys, types and shapes of all that is in a snapshot, without the values."""
    if isinstance(snapshot, torch.Tensor):
        return snapshot.dtype, snapshot.shape
    if isinstance(snapshot, dict):
        return {key: shape_of(value) for key, value in snapshot.items()}
    if isinstance(snapshot, list):
        return [shape_of(value) for value in snapshot]
    return type(snapshot)


# Put into a copy of a rung, it does something in one step of the third epoch of five.
IN_STEP_80 = """
class Trainer(Trainer):
    steps = 0
    def _run_batch(self, source, targets):
        self.steps += 1
        dist = torch.distributed
        last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        if self.steps == 80 and last:
            {}
        return super()._run_batch(source, targets)
"""

# Put into a copy of a rung, it writes what each rank did to probe.RANK.json.
PROBE = """
import gc as collector, json, pathlib

class Indexed(torch.utils.data.Dataset):
    def __init__(self, data): self.data, self.seen = data, []
    def __len__(self): return len(self.data)
    def __getitem__(self, index):
        self.seen.append(index)
        return self.data[index]

_get_device = utils.get_device
def _noted(local_rank=0, *rest):
    global asked
    asked = local_rank
    return _get_device(local_rank, *rest)
utils.get_device = _noted

def _rank():
    dist = torch.distributed
    return dist.get_rank() if dist.is_initialized() else 0

def _timeout():
    dist = torch.distributed
    if not dist.is_initialized(): return None
    backend = dist.group.WORLD._get_backend(_get_device(_rank()))
    return backend.options._timeout.total_seconds()

class Trainer(Trainer):
    def train(self, total_epochs):
        global facts
        facts = {"rank": _rank(), "orders": [], "evaluated": [], "weights": [],
                 "threads": torch.get_num_threads(), "timeout_s": _timeout(),
                 "writes": 0, "local_rank": asked, "random": []}
        super().train(total_epochs)
    def _run_epoch(self, epoch):
        self.train_data.dataset.seen.clear()
        result = super()._run_epoch(epoch)
        facts["orders"].append(list(self.train_data.dataset.seen))
        facts["random"].append(torch.rand(1).item())
        flat = [p.detach().flatten() for p in self.model.parameters()]
        facts["weights"] = torch.cat(flat).tolist()
        return result
    def _evaluate(self):
        self.eval_data.dataset.seen.clear()
        result = super()._evaluate()
        facts["evaluated"] = list(self.eval_data.dataset.seen)
        return result

_save_atomically = utils.save_atomically
def _counted(snapshot, path):
    facts["writes"] += 1
    _save_atomically(snapshot, path)
utils.save_atomically = _counted

_load_train_objs = load_train_objs
def load_train_objs():
    _, _, *rest = _load_train_objs()
    data = utils.MyTrainDataset(197), utils.MyTrainDataset(17, seed=1)
    return *map(Indexed, data), *rest

_main = main
def main(*args):
    collector.disable()  # an automatic collection might happen to do the script's work
    _main(*args)
    tasks = pathlib.Path("/proc/self/task").glob("*/comm")
    facts["threads_left"] = [x for x in (t.read_text() for t in tasks) if "gloo" in x]
    with open(f"probe.{facts['rank']}.json", "w") as file:
        json.dump(facts, file)
"""


def probe(name, folder, nprocs):
    """Two epochs over 197 samples, 66 a step on all ranks together, 17 held out.

    197 = 2 x 66 + 65, and with 3 ranks padding would make a third step of it.
    Returns (losses, [facts of each rank], Done).
    """
    script = plant(name, folder, before_main=PROBE)
    options = ("--batch-size", 66 // nprocs)
    done = train(script, 2, 1, *options, cwd=folder, nprocs=nprocs)
    files = sorted(folder.glob("probe.*.json"))
    assert len(files) == nprocs
    return losses(done), [json.loads(file.read_text()) for file in files], done
