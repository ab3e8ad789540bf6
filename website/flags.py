"""Let the real programs parse the flags of a command that cannot be run here.

    python -m website.flags 'torchrun --nnodes=2 --nproc-per-node=4 multinode.py 50 10'

Exit status 2, and one line or the program's own message, if one of them refuses.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile

from ladder.rungs import ROOT, docstring


def torchrun(words):
    from torch.distributed.run import get_args_parser

    args = get_args_parser().parse_args(words)
    if args.training_script.endswith(".py"):
        script([args.training_script, *args.training_script_args])


def script(words):
    """A rung's command line; what its idea adds to it is not looked at."""
    import utils

    utils.make_parser(docstring(ROOT / words[0])).parse_args(words[1:])


def pip(words):
    from pip._internal.commands import create_command

    create_command(words[0]).parse_args(words[1:])


def pytest(words):
    subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *words],
        check=True,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )


def sbatch(words):
    """Submit to a cluster that does not answer: all flags are parsed before that."""
    with tempfile.NamedTemporaryFile("w") as conf:
        conf.write("ClusterName=none\nSlurmctldHost=localhost\nSlurmctldPort=1\n")
        conf.write("AuthType=auth/none\nGresTypes=gpu\n")
        conf.flush()
        env = os.environ | {"SLURM_CONF": conf.name}
        done = subprocess.run(
            ["sbatch", *words], cwd=ROOT, env=env, capture_output=True, text=True
        )
    if "Unable to contact slurm controller" not in done.stderr:
        fail(done.stderr.strip())


def server(words):
    """Start it on a free port, and end it when it has said that it serves."""
    command = [sys.executable, "-u", "-m", "http.server", *words, "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as it:
        said = it.stdout.readline()
        it.terminate()
    if not said.startswith("Serving"):
        fail(f"http.server does not serve: {said}")


def fail(message):
    print(f"website.flags: error: {message}", file=sys.stderr)
    sys.exit(2)


PROGRAMS = {
    "torchrun": torchrun,
    "pip": pip,
    "pytest": pytest,
    "sbatch": sbatch,
    "python -m http.server": server,
    "python": script,
}


def parse(command):
    """Let each program of a command line parse its own words."""
    for part in re.split(r"&&|;", command):
        words = shlex.split(part, comments=True)
        exports = words[:1] == ["export"]
        words = words[exports:]
        while words and re.fullmatch(r"\w+=\S*", words[0]):
            words.pop(0)
        if exports and not words:
            continue
        for name, parser in PROGRAMS.items():
            if words[: len(name.split())] == name.split():
                parser(words[len(name.split()) :])
                break
        else:
            fail(f"nothing here can parse the flags of {words[0] if words else part!r}")


if __name__ == "__main__":
    parse(sys.argv[1])
