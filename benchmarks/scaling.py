"""How the scripts scale: over the ranks of one machine, and over slow links.

    python -m benchmarks.scaling

In weak scaling each rank keeps its batch, and in strong scaling the ranks share it out.
The efficiency compares what a rank does with what one rank does alone. Each rank has
one thread. "computes" is the share of a step in which its main thread has the CPU, for
forward, backward and optimizer. It waits in the rest. Of a GPU this share says nothing.

As root on Linux, two hosts with a rank each then scale weakly over links of 1000, 300
and 100 Mbit/s each way. The layers pause there, as if a device computed, because on
a small machine computing and sending would take the CPU from each other. For these rows
cluster/predict.py predicts the step: from that of two ranks on one machine, the size of
the model and the rate of the link. Nothing is fitted.
"""

import contextlib
import functools
import statistics
import tempfile
from pathlib import Path

import torch

import utils
from benchmarks import diloco, report, variants
from cluster.predict import Cluster, Job, predict
from tools.cli import error
from tools.run import launch
from tools.run.hosts import Hosts
from tools.run.launch import DISTRIBUTED
from tools.run.processes import end_all

GPT = "mingpt"
ACCUMULATION = "variants/gradient_accumulation.py"
SCRIPTS = "multigpu.py", "multinode.py", ACCUMULATION, "variants/fsdp.py", GPT
PIECES = {ACCUMULATION: 4}  # micro-batches in a step, as its docstring types them
RATES = 1000, 300, 100  # Mbit/s
PAYLOAD = 1448 / 1514  # of an Ethernet frame, not counting the headers of IP and TCP
LATENCY = 1e-4  # seconds, from one network namespace to another
PAUSE_S = 0.01  # of each of four layers in forward, twice as long in backward
LAYERS = 8  # that fsdp.py gathers one after the other


def measure(name, args, folder, hosts, ranks=1, parts=1, pause_s=0, rate=None):
    """A step: its samples and seconds on a rank, and so on, by name.

    parts: what the batch is divided by. pause_s: the pause of a layer in forward.
    rate: of the hosts' links, with a rank on each.
    """
    steps, device = args.steps, utils.device_type("auto", distributed=True)
    if name == GPT:
        batch = args.windows // parts
        words = f"--batch-size={batch}", f"--steps={2 * steps}", f"--eval-every={steps}"
        words = *words, f"--device={device}"
        first, both = (x._asdict() for x in diloco.run([], *words, ranks=ranks))
        found = {key: both[key] - first[key] for key in ("seconds", "computes", "sent")}
        found["sent"] /= ranks  # all of them on one card
    else:
        for host in hosts if rate else []:
            host.slow(f"{rate}mbit")
        networks = [f"/proc/{host.pid}/ns/net" for host in hosts] if rate else []
        edge = variants.Edge(name, folder / "edge", networks, device, ranks)
        batch, options = args.batch_size // parts, launch.options_of(name, ranks)
        size = launch.batch_size(name, batch * ranks, ranks)
        env = {"OMP_NUM_THREADS": 1, "PAUSE_S": pause_s / PIECES.get(name, 1)}
        found = edge.run(name, batch * ranks * steps, size, *options, **env)
        found["sent"] = found["sent_bytes"]
    found |= {key: found[key] / steps for key in ("seconds", "computes", "sent")}
    return found | {"speed": batch / found["seconds"]}


def median_of(key, turns):
    return statistics.median(turn[key] for turn in turns)


def predicted(name, here, rate):
    """Seconds of a step over a link of `rate` Mbit/s. here: turns of two ranks here."""
    pieces, size = PIECES.get(name, 1), 4 * here[0]["weights"]
    compute = median_of("seconds", here) / pieces
    link = rate * 1e6 / 8 * PAYLOAD
    cluster = Cluster(1, link, link, LATENCY, 0, "ring")  # gloo has no trees
    if not name.endswith("fsdp.py"):
        job = Job(compute, 2 / 3, size, size, 1, pieces, 25 * 2**20)
        return sum(predict("ddp", job, 2, cluster))
    # gloo reduces and scatters by an all-reduce, of twice the bytes. FSDP2 waits for
    # each of gloo's messages, so that nothing hides them: a job that computes nothing.
    job = Job(0, 2 / 3, 2 * size, size, LAYERS, 1, 0)
    return compute + sum(predict("fsdp", job, 2, cluster))


def main(args):
    device = utils.device_type("auto", distributed=True)
    why = variants.why_no_networks(device)
    if unknown := {*args.scripts} - {GPT, *DISTRIBUTED}:
        error(f"{unknown.pop()} is none of {', '.join([*DISTRIBUTED, GPT])}")
    most = 4 if device == "cpu" else torch.accelerator.device_count()
    counts = [2**i for i in range(1, most.bit_length())]
    rows = {"1 rank": {}}
    rows |= {f"{n} ranks": {"ranks": n} for n in counts}
    rows |= {f"{n}, strong": {"ranks": n, "parts": n} for n in counts}
    links = {"2 devices": {"ranks": 2}}
    links |= {f"hosts, {x}M": {"ranks": 2, "rate": x} for x in RATES}
    links = {x: how | {"pause_s": PAUSE_S} for x, how in links.items()}
    steps = f"{args.steps} steps after {args.steps} to warm up"
    report.print_setting(f"{args.rounds} rounds of {steps}", "torch")
    columns = {
        "samples/s of a rank": (",.1f", lambda x: x["speed"]),
        "computes": (".0%", lambda x: x["computes"] / x["seconds"]),
        "MB sent in a step": (",.2f", lambda x: x["sent"] / 1e6),
    }
    errors = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.callback(end_all)
        hosts = [] if why else stack.enter_context(Hosts(2, folder))
        for name in args.scripts:
            job = functools.partial(measure, name, args, folder, hosts)
            for part in [rows] if why or name == GPT else [rows, links]:
                ways = {x: functools.partial(job, **how) for x, how in part.items()}
                turns = report.take_turns(ways, args.rounds, warm_up=0)
                report.print_table(name, turns, **columns)
            told = part is links and not launch.shares_a_batch(name)
            for rate in RATES if told else []:  # predict.py knows no tensor parallelism
                seen = median_of("seconds", turns[f"hosts, {rate}M"])
                said = predicted(name, turns["2 devices"], rate)
                errors.append(abs(said / seen - 1))
                line = f"{rate:4} Mbit/s: {seen * 1e3:.0f} ms, predicted"
                print(f"{line} {said * 1e3:.0f} ({said / seen - 1:+.0%})")
    if errors:
        median, worst = statistics.median(errors), max(errors)
        print(f"\nof {len(errors)} predictions: median {median:.1%}, worst {worst:.1%}")


if __name__ == "__main__":
    parser = report.make_parser(
        __doc__,
        rounds=(3, "turns of each row"),
        steps=(8, "steps in an epoch"),
        batch_size=(1024, "samples that one process takes in a step"),
        windows=(12, "windows of text that mingpt takes instead"),
    )
    parser.add_argument("scripts", nargs="*", default=[*SCRIPTS], metavar="SCRIPT")
    main(parser.parse_args())
