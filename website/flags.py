"""Let the real programs parse the flags of a command that cannot be run here.

    python -m website.flags 'torchrun --nnodes=2 --nproc-per-node=4 multinode.py 50 10'

Exit status 2, and one line or the program's own message, if one of them refuses.
"""

import argparse
import contextlib
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile

from ladder.rungs import ROOT, InputError, docstring

# Each parser is a function of the words after the program's name. It returns if they
# can be parsed. Otherwise it raises InputError, or exits with the program's message.


def torchrun(words):
    from torch.distributed.run import get_args_parser

    args = get_args_parser().parse_args(words)
    words = [args.training_script, *args.training_script_args]
    if args.module:
        module(words)
    elif args.training_script.endswith(".py"):
        script(words)


def script(words):
    """A rung's command line; what its idea adds to it is not looked at."""
    import utils

    utils.make_parser(docstring(ROOT / words[0])).parse_args(words[1:])


def module(words):
    """Run a module of ours until its own parser has parsed the words."""
    parse_args = argparse.ArgumentParser.parse_args

    class Parsed(Exception):
        pass

    def parse_and_end(*args, **how):
        parse_args(*args, **how)
        raise Parsed

    argparse.ArgumentParser.parse_args = parse_and_end
    sys.argv[1:] = words[1:]
    with contextlib.suppress(Parsed):
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        raise InputError(f"{words[0]} does not parse its arguments")


def on_each_machine(words):
    """The command line of the rung that is typed on each machine."""
    import utils

    sys.argv[1:] = words
    text = docstring(ROOT / "variants/multinode_spawn.py")
    utils.parse_nodes(utils.make_parser(text))


def pip(words):
    from pip._internal.commands import create_command

    create_command(words[0]).parse_args(words[1:])


def pytest(words):
    """Collect the tests in this process, which may have imported torch already."""
    import pytest

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        status = pytest.main(["--collect-only", "-q", *words])
    if status:
        raise InputError(f"pytest ends with exit status {status}")


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
    # Flags that it does not know are said before it looks for its cluster.
    if not re.search("Unable to contact slurm|submission failed: Conn", done.stderr):
        raise InputError(done.stderr.strip())


def server(words):
    """Start it on a free port, and end it when it has said that it serves."""
    command = [sys.executable, "-u", "-m", "http.server", *words, "0"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        said = process.stdout.readline()
        process.terminate()
    if not said.startswith("Serving"):
        raise InputError(f"http.server does not serve: {said}")


def sh(words):
    """A script has no flags: that it is there, and can be read."""
    done = subprocess.run(["sh", "-n", words[0]], cwd=ROOT, stderr=subprocess.PIPE)
    if done.returncode:
        raise InputError(done.stderr.decode().strip())


PROGRAMS = {
    "torchrun": torchrun,
    "pip": pip,
    "pytest": pytest,
    "sbatch": sbatch,
    "sh": sh,
    "python -m http.server": server,
    "python -m variants.multinode_spawn": on_each_machine,
    "python -m": module,
    "python": script,
}


def is_assignment(word):
    return re.fullmatch(r"\w+=\S*", word)


def parse(command):
    """Let each program of a command line parse its own words."""
    for part in re.split(r"&&|;", command):
        words = shlex.split(part, comments=True)
        if words[:1] == ["export"] and all(map(is_assignment, words[1:])):
            continue
        while words and is_assignment(words[0]):
            words.pop(0)
        for name, parser in PROGRAMS.items():
            length = len(name.split())
            if words[:length] == name.split():
                parser(words[length:])
                break
        else:
            what = words[0] if words else repr(part)
            raise InputError(f"nothing here can parse the flags of {what}")


if __name__ == "__main__":
    try:
        parse(sys.argv[1])
    except InputError as error:
        print(f"website.flags: error: {error}", file=sys.stderr)
        sys.exit(2)
