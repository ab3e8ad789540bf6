"""How the scripts scale: over the ranks of one machine, and over slow links.

    python -m benchmarks.scaling

Each rank keeps its batch: weak scaling. The efficiency compares what a rank does with
what one rank does alone. Each rank has one thread. "computes" is the share of a step
in which its main thread has the CPU, for forward, backward and optimizer. It waits in
the rest. All of this runs on CPUs.

As root on Linux, two hosts with a rank each then scale weakly over links of 1000, 300
and 100 Mbit/s each way. The layers pause there, as if a device computed, because on
a small machine computing and sending would take the CPU from each other. For these rows
cluster/predict.py predicts the step: from that of two ranks on one machine, the size of
the model and the rate of the link. Nothing is fitted.
"""

import atexit
import functools
import json
import statistics
from pathlib import Path

from benchmarks import measured_epoch, report
from cluster.predict import Cluster, Job, predict
from tools.run import launch
from tools.run.hosts import Hosts, why_not
from tools.run.launch import DISTRIBUTED
from tools.run.processes import end_all, temporary_folder

ACCUMULATION = "variants/gradient_accumulation.py"
SCRIPTS = "multigpu.py", "multinode.py", ACCUMULATION, "variants/fsdp.py"
PIECES = {ACCUMULATION: 4}  # micro-batches in a step, as its docstring types them
RATES = 1000, 300, 100  # Mbit/s
PAYLOAD = 1448 / 1514  # of an Ethernet frame, not counting the headers of IP and TCP
LATENCY = 1e-4  # seconds, from one network namespace to another
PAUSE_S = 0.01  # of each of four layers in forward, twice as long in backward
LAYERS = 7  # that fsdp.py gathers one after the other
WIDTH = 512  # of the model's hidden layers
TIMEOUT_S = 1800  # that one run of a script may take


def run(name, folder, ranks, samples, batch, *options, hosts=(), **env):
    """The figures of the last epoch of a script, as measured_epoch.py explains them.

    They are the mean of all ranks; the seconds are those of the slowest. samples: of an
    epoch. batch: those of a step of all ranks. hosts: one for each rank, or none.
    """
    for file in folder.glob("measured.*.json"):
        file.unlink()
    networks = " ".join(f"/proc/{host.pid}/ns/net" for host in hosts)
    if hosts:
        env["GLOO_SOCKET_IFNAME"] = "eth0"
    words = [2, 2, "--device", "cpu", *options]
    launch.train(
        name,
        *words,
        cwd=folder,
        nprocs=ranks,
        batch=batch,
        hooks=[measured_epoch.measure, measured_epoch.cut_layers],
        timeout_s=TIMEOUT_S,
        changes=[("MyTrainDataset(2048)", f"MyTrainDataset({samples})")],
        **{"NETWORKS": networks, "WIDTH": WIDTH, **env},
    )
    files = folder.glob("measured.*.json")
    of_ranks = [json.loads(file.read_text()) for file in files]
    figures = {}
    for key in of_ranks[0]:
        figures[key] = statistics.fmean(rank[key] for rank in of_ranks)
    figures["seconds"] = max(rank["seconds"] for rank in of_ranks)
    return figures


def measure(name, args, folder, hosts, ranks=1, pause_s=0, rate=None):
    """A step: its samples and seconds on a rank, and so on, by name.

    pause_s: the pause of a layer in forward. rate: of the hosts' links, with a rank on
    each.
    """
    its_hosts = hosts if rate else []
    for host in its_hosts:
        host.slow(f"{rate}mbit")
    batch = args.batch_size * ranks
    samples = batch * args.steps
    env = {"OMP_NUM_THREADS": 1, "PAUSE_S": pause_s / PIECES.get(name, 1)}
    found = run(name, folder, ranks, samples, batch, hosts=its_hosts, **env)
    for key in ("seconds", "computes", "sent_bytes"):
        found[key] /= args.steps
    return found | {"speed": args.batch_size / found["seconds"]}


def median_of(turns):
    """The median of their seconds."""
    return statistics.median(turn["seconds"] for turn in turns)


def predicted(name, here, rate):
    """Seconds of a step over a link of `rate` Mbit/s. here: turns of two ranks here."""
    pieces = PIECES.get(name, 1)
    size = 4 * here[0]["weights"]
    compute = median_of(here) / pieces
    link = rate * 1e6 / 8 * PAYLOAD
    cluster = Cluster(
        gpus=1,
        link=link,
        inside=link,
        latency=LATENCY,
    )
    job = Job(
        compute=compute,
        backward=2 / 3,
        gradients=size,
        weights=size,
        layers=1,
        accumulate=pieces,
        bucket=25 * 2**20,
    )
    if not name.endswith("fsdp.py"):
        return sum(predict("ddp", job, 2, cluster))
    # gloo reduces and scatters by an all-reduce, of twice the bytes. FSDP2 waits for
    # each of gloo's messages, so that nothing hides them: a job that computes nothing.
    job = job._replace(compute=0, gradients=2 * size, layers=LAYERS)
    return compute + sum(predict("fsdp", job, 2, cluster))


def take_turns(name, job, rows, columns, rounds):
    """Measure {row: options of `job`} in turns, and print the table."""
    ways = {row: functools.partial(job, **how) for row, how in rows.items()}
    turns = report.take_turns(ways, rounds, warm_up=0)
    report.print_table(name, turns, **columns)
    return turns


def main(args):
    why = why_not()
    rows = {  # {row: options of `measure`}
        "1 rank": {},
        "2 ranks": {"ranks": 2},
        "4 ranks": {"ranks": 4},
    }
    links = {"2 devices": {"ranks": 2, "pause_s": PAUSE_S}}
    for rate in RATES:
        links[f"hosts, {rate}M"] = {"ranks": 2, "rate": rate, "pause_s": PAUSE_S}
    steps = f"{args.steps} steps after {args.steps} to warm up"
    report.print_setting(f"{args.rounds} rounds of {steps}")
    columns = {
        "samples/s of a rank": (",.1f", lambda found: found["speed"]),
        "computes": (".0%", lambda found: found["computes"] / found["seconds"]),
        "MB sent in a step": (",.2f", lambda found: found["sent_bytes"] / 1e6),
    }
    errors = []
    folder = Path(temporary_folder())
    atexit.register(end_all)  # before the folder goes
    hosts = [] if why else Hosts(2, folder)
    for name in args.scripts or SCRIPTS:
        job = functools.partial(measure, name, args, folder, hosts)
        turns = take_turns(name, job, rows, columns, args.rounds)
        if why:
            continue
        turns = take_turns(name, job, links, columns, args.rounds)
        if launch.shares_a_batch(name):
            continue  # predict.py knows no tensor parallelism
        for rate in RATES:
            seen = median_of(turns[f"hosts, {rate}M"])
            said = predicted(name, turns["2 devices"], rate)
            errors.append(abs(said / seen - 1))
            line = f"{rate:4} Mbit/s: {seen * 1e3:.0f} ms, predicted"
            print(f"{line} {said * 1e3:.0f} ({said / seen - 1:+.0%})")
    if errors:
        median = statistics.median(errors)
        worst = max(errors)
        print(f"\nof {len(errors)} predictions: median {median:.1%}, worst {worst:.1%}")


if __name__ == "__main__":
    parser = report.make_parser(
        __doc__,
        rounds=(3, "turns of each row"),
        steps=(8, "steps in an epoch"),
        batch_size=(1024, "samples that one process takes in a step"),
    )
    parser.add_argument("scripts", nargs="*", choices=DISTRIBUTED, metavar="SCRIPT")
    main(parser.parse_args())
