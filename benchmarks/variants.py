"""What each variant costs and what it buys, measured beside its parent.

    python -m benchmarks.variants                         all variants
    python -m benchmarks.variants variants/real_job.py    only this one

Both do the same job: the same samples, the same model, which is larger than the
scripts' own, and the same number of processes. In a turn a script starts anew and
trains two epochs. The second one is measured: steps per second, the bytes that a rank
sends in a step, and the peak of a rank's memory.

As root on Linux, the ranks run on a network that nobody else uses, and its cards count
the bytes. Elsewhere they are not counted. benchmarks/scaling.py has slow networks.
"""

import atexit
import functools
import json
import os
import shutil
import statistics
import sys
from pathlib import Path

import utils
from benchmarks import measured_epoch, report
from tools.run import launch
from tools.run.hosts import Hosts, why_not
from tools.run.processes import end_all, temporary_folder
from tools.scripts import ROOT, SCRIPTS, variants

WIDTH = 512  # of the model's hidden layers
NPROCS = 2  # if the script runs in several
TIMEOUT_S = 1800  # that one run of a script may take


def why_no_networks(device):
    """Why the ranks cannot have a network of their own, or None."""
    if device != "cpu":
        return f"{device} devices may have other ways to send"
    if os.geteuid() != 0:
        return "a network of their own needs root"
    return why_not()


class Edge:
    """A variant and its parent, ready to be measured.

    hosts: those of tools/run/hosts.py whose networks the ranks share out, if any.
    """

    def __init__(self, name, folder, hosts, device, nprocs):
        self.name = name
        self.parent = SCRIPTS[name]
        self.folder = folder
        self.device = device
        self.nprocs = nprocs
        networks = [f"/proc/{host.pid}/ns/net" for host in hosts]
        self.env = {"NETWORKS": " ".join(networks), "WIDTH": WIDTH}
        if hosts:
            self.env["GLOO_SOCKET_IFNAME"] = "eth0" if len(hosts) > 1 else "lo"
        self.own_task = launch.task_of(name) == name  # the parent trains it as well

    def run(self, script, samples, batch_size, *options, memory=False, **env):
        """The figures of a run, as measured_epoch.py explains them.

        They are the mean of all ranks; seconds and memory are those of the worst.
        samples: of an epoch. memory: on a CPU, run again to measure its peak.
        """
        folder = self.folder / Path(script).stem
        if self.own_task and script == self.parent:
            env["TASK"] = self.name.removesuffix(".py").replace("/", ".")
        for file in folder.glob("measured.*.json"):
            file.unlink()
        words = [2, 2, "--device", self.device, "--batch-size", batch_size, *options]
        real = self.device != "cpu"  # a fork cannot use an accelerator
        if real:  # what a copy of the script imports
            copy = folder / "copy"
            ours = ROOT / "benchmarks"
            shutil.copytree(ours, copy / "benchmarks", dirs_exist_ok=True)
            launch.plant(self.name, copy)
        done = launch.launch(
            script,
            *words,
            cwd=folder,
            real=real,
            nprocs=self.nprocs,
            own_options=False,
            hooks=[measured_epoch.measure, measured_epoch.cut_layers],
            timeout_s=TIMEOUT_S,
            **{**self.env, **env, "TRAIN_SAMPLES": samples},
        )
        if done.returncode:
            sys.exit(f"{done.stdout}{done.stderr}\nerror: {script} failed: see above")
        files = folder.glob("measured.*.json")
        ranks = [json.loads(file.read_text()) for file in files]
        figures = {}
        for key in ranks[0]:
            of_ranks = max if key in ("seconds", "peak_bytes") else statistics.fmean
            figures[key] = of_ranks(rank[key] for rank in ranks)
        if memory and self.device == "cpu":
            few = min(samples, 2 * batch_size * self.nprocs)  # two steps show it
            again = self.run(script, few, batch_size, *options, GIVE_BACK=1)
            figures["peak_bytes"] = again["peak_bytes"]
        return figures


def compare(edge, args):
    """Let both take turns with steps of the same samples, and print the table."""
    options = launch.options_of(edge.name)
    ranks = NPROCS if edge.name in launch.DISTRIBUTED else 1
    together = args.batch_size * ranks

    def run(script, *its):
        size = launch.batch_size(script, together, NPROCS)
        samples = together * args.steps
        return functools.partial(edge.run, script, samples, size, *its, memory=True)

    contestants = {"parent": run(edge.parent), "variant": run(edge.name, *options)}
    turns = report.take_turns(contestants, args.rounds, warm_up=0)
    first = turns["parent"][-1]
    second = turns["variant"][-1]
    print(f"\n{' '.join([edge.name, *options])} beside {edge.parent}")
    print(
        f"{second['weights']:,.0f} weights; loss {first['loss']:.6f} of the parent,"
        f" {second['loss']:.6f} of the variant"
    )
    columns = {
        "steps/s": (",.1f", lambda found: args.steps / found["seconds"]),
        "MB sent in a step": (
            ",.3f",
            lambda found: found["sent_bytes"] / args.steps / 1e6,
        ),
        "peak MB": (",.1f", lambda found: found["peak_bytes"] / 1e6),
    }
    report.print_table("", turns, **columns)


def main(args):
    names = [args.name] if args.name else variants()
    device = utils.device_type("auto", distributed=True)
    reason = why_no_networks(device)
    sent = f"not counted: {reason}" if reason else "as the network card counts"
    report.print_setting(
        f"{args.rounds} rounds of {args.steps} steps after {args.steps} to warm up, of"
        f" {args.batch_size} samples\n          in each of {NPROCS} processes on"
        f" {device}\nsent      {sent}",
        "torch",
    )
    folder = Path(temporary_folder())
    atexit.register(end_all)  # before the folder goes
    hosts = [] if reason else Hosts(1, folder)
    for name in names:
        compare(Edge(name, folder / name, hosts, device, NPROCS), args)


if __name__ == "__main__":
    parser = report.make_parser(
        __doc__,
        rounds=(10, "turns of each side"),
        steps=(8, "steps in an epoch"),
        batch_size=(1024, "samples that one process takes in a step"),
    )
    parser.add_argument(
        "name",
        nargs="?",
        choices=[name for name, parent in SCRIPTS.items() if parent],
        metavar="SCRIPT",
        help="a script's path (default: all variants)",
    )
    main(parser.parse_args())
