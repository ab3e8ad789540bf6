"""Predict how fast your job trains on more machines, and what limits it.

Type the time of a step on one GPU, the size of the model and the link of a machine:

    python cluster/predict.py --step-ms 180 --parameters 124e6 --link 100Gbit \\
        --gpus 8 --nodes 1 2 4 8 16

or what variants/profiled.py has measured: --measure TRACE.json --link 100Gbit. Each
GPU keeps its batch (weak scaling), so the efficiency is the time of a step on one GPU
divided by its time on all.

--link is what ONE machine sends in one direction, all its cards together. Type what you
have measured, because a link seldom carries what its name says. The prediction leaves
out slow disks, the traffic of others and what sending takes from computing, so a real
job is slower. Exit status 2: the input is bad. It needs Python and nothing else.
"""

import argparse
import functools
import itertools
import json
import re
import statistics
from collections import namedtuple
from math import ceil, inf, log2

WAYS = ("ddp", "fsdp", "hsdp")
HOP_S = 3e-6  # latency from GPU to GPU in a machine, about what NCCL assumes of NVLink
# compute: seconds of a micro-batch; backward: its share of them; sizes in bytes.
Job = namedtuple("Job", "compute backward gradients weights layers accumulate bucket")
# link: bytes/s of a machine; inside: of a GPU in it; latency: seconds of a message from
# machine to machine.
Cluster = namedtuple("Cluster", "gpus link inside latency")
Step = namedtuple("Step", "compute bandwidth latency")  # seconds
PREFIXES = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def send(size, hops, nodes, cluster):
    """Seconds of `size` bytes over the slowest link that these nodes need.

    hops: how many messages come one after the other, (between machines, inside them).
    """
    rates = []
    if nodes > 1:
        rates.append(cluster.link)
    if cluster.gpus > 1:
        rates.append(cluster.inside)
    between, inside = hops
    latency = between * cluster.latency + inside * min(HOP_S, cluster.latency)
    return size / min(rates, default=inf) + latency


def ring(passes, size, nodes, cluster):
    """Seconds in which `size` bytes go round all GPUs of the nodes.

    One pass is an all-gather or a reduce-scatter, and two are an all-reduce. In a pass,
    each of W ranks sends (W - 1)/W of the bytes in W - 1 messages: Patarasuk and Yuan
    2009, doi.org/10.1016/j.jpdc.2008.09.002. The ring enters each machine once.
    """
    ranks = nodes * cluster.gpus
    share = size * (ranks - 1) / ranks
    hops = (nodes - 1, ranks - nodes)
    return passes * send(share, hops, nodes, cluster)


def all_reduce(size, nodes, cluster):
    """Seconds of an all-reduce by ring or tree. Like NCCL, it takes the faster one.

    In two trees, of half the bytes each, a rank sends all bytes up and down once, by
    log2(nodes) machines, in each of which the GPUs are a chain: Sanders, Speck, Träff
    2009, doi.org/10.1016/j.parco.2009.09.001.
    """
    hops = (ceil(log2(nodes)), cluster.gpus - 1)
    trees = 2 * send(size, hops, nodes, cluster)
    return min(trees, ring(2, size, nodes, cluster))


def buckets(job, backward, nodes, cluster):
    """(bytes that are ready, when it leaves, when it is sent) of each of DDP's buckets.

    In seconds since backward began, which takes `backward`. The first has 1 MiB. A
    bucket is ready when backward has computed its share of the gradients, and the link
    sends one after the other.
    """
    ready = 0
    sent = 0
    while ready < job.gradients:
        size = min(job.bucket if ready else 2**20, job.gradients - ready)
        ready += size
        begun = max(sent, backward * ready / job.gradients)
        sent = begun + all_reduce(size, nodes, cluster)
        yield ready, begun, sent


def ddp(job, nodes, cluster):
    """Seconds of a step with DDP, whose buckets leave while backward computes.

    Nothing hides the last bucket, which is ready when backward ends. An accumulation
    sends with its last micro-batch. Li et al. 2020, arxiv.org/abs/2006.15704, section
    3.2.
    """
    backward = job.compute * job.backward
    *_, last = buckets(job, backward, nodes, cluster)
    _, _, sent = last
    return job.accumulate * job.compute + sent - backward


def fsdp(job, nodes, cluster, hybrid=False):
    """Seconds of a step with FSDP2, or with HSDP if `hybrid`.

    A layer is gathered for forward and for backward, then its gradients are reduced and
    scattered: 1.5 times DDP's bytes (ZeRO, arxiv.org/abs/1910.02054, section 7), in
    rings. A layer is gathered while the one before computes (Zhao et al. 2023,
    arxiv.org/abs/2304.11277, section 3.3). HSDP does so in each machine, and then the
    machines all-reduce: each GPU its part, together a layer's gradients (3.2.2). An
    accumulation gathers for every micro-batch, and reduces with the last.
    """
    group = 1 if hybrid else nodes  # machines that share the model
    gradients = job.gradients / job.layers
    gather = ring(1, job.weights / job.layers, group, cluster)
    reduce = ring(1, gradients, group, cluster)
    between = all_reduce(gradients, nodes // group, cluster._replace(gpus=1))
    layer = job.compute / job.layers
    forward = [(1 - job.backward) * layer] * job.layers  # the optimizer's time, too
    backward = [job.backward * layer] * job.layers
    todo = (forward + backward) * job.accumulate
    # When the next layer is gathered, when a layer is computed, when links are free.
    gathered = gather  # nothing hides the first one
    computed = 0
    group_free = gather
    between_free = 0
    for number, seconds in enumerate(todo, start=1):
        left = len(todo) - number
        begun = max(computed, gathered)
        computed = begun + seconds
        group_free = max(group_free, begun)
        if left > 0:
            group_free += gather
        gathered = group_free
        if left < job.layers:  # the last backward
            group_free = max(group_free, computed) + reduce
            between_free = max(between_free, group_free) + between
    return max(computed, group_free, between_free)


def predict(way, job, nodes, cluster):
    """The parts of a Step.

    Each is what a step takes longer when links are no longer infinitely fast, then when
    messages have a latency.
    """
    step = ddp if way == "ddp" else functools.partial(fsdp, hybrid=way == "hsdp")
    at_once = step(job, nodes, cluster._replace(latency=0))
    real = step(job, nodes, cluster)
    compute = job.accumulate * job.compute
    return Step(compute, at_once - compute, real - at_once)


def judge(step):
    """(efficiency, what limits it).

    The efficiency is the share of a step that computes (weak scaling). What limits it
    is the part that costs most, or "compute" if the others cost 10 % or less.
    """
    efficiency = step.compute / sum(step)
    if efficiency >= 0.9:
        return efficiency, "compute"
    return efficiency, max(Step._fields[1:], key=lambda name: getattr(step, name))


def print_rows(nodes, ways, job, cluster):
    heads = "".join(f"+{name}".rjust(12) for name in Step._fields[1:])
    print(f"nodes    GPUs  way  efficiency     step ms{heads}  limited by")
    for way, count in itertools.product(ways, nodes):
        step = predict(way, job, count, cluster)
        seconds = [sum(step), *step[1:]]
        parts = " ".join(f"{1e3 * part:11.1f}" for part in seconds)
        efficiency, limit = judge(step)
        row = f"{count:5} {count * cluster.gpus:7}  {way:4} {efficiency:10.1%}"
        print(f"{row} {parts}  {limit}")


def rate(text):
    """Bytes/s of a text such as 100Gbit, 10 Gbit/s or 25GB/s."""
    found = re.fullmatch(r"([\d.]+) ?([kMGT]?)(bit|B)(/s)?", text)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text}: not a rate such as 100Gbit or 25GB")
    size = float(found[1]) * PREFIXES[found[2]]
    return size / 8 if found[3] == "bit" else size


def within(least, most, kind=float):
    def number(text):
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text}: not from {least:g} to {most:g}")
        return value

    return number


def read_profile(path):
    """(ms of computing, backward's share, parameters) from variants/profiled.py."""
    with open(path) as file:
        profile = json.load(file)
    ranks = profile["ms"]  # of each rank a dict, with the milliseconds of each part
    parameters = profile["parameters"]
    computes = [ms["step"] - ms["exposed communication"] for ms in ranks]
    compute = statistics.fmean(computes)
    backward = statistics.fmean(ms["backward"] for ms in ranks)
    if not 0 < backward < compute < inf or not 1 <= parameters <= 1e13:
        raise ValueError("a job without backward or without parameters")
    return compute, backward / compute, parameters


def main():
    parser = argparse.ArgumentParser(
        prog="predict.py",
        usage=argparse.SUPPRESS,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    count = within(1, 1e6, int)
    for name, kind, default, what in (
        ("--step-ms", within(1e-3, 1e9), None, "of one GPU, without communication"),
        ("--parameters", within(1, 1e13), None, "that have a gradient, such as 124e6"),
        ("--measure", str, None, "TRACE.json of variants.profiled, which has both"),
        ("--link", rate, None, "of a machine, such as 100Gbit or 12.5GB/s"),
        ("--inside", rate, "450GB/s", "of a GPU to the others of its machine"),
        ("--gpus", count, 8, "in a machine"),
        ("--accumulate", count, 1, "micro-batches in a step"),
        ("--gradient-bytes", within(1, 8), 4, "2 sends gradients of 16 bits"),
        ("--weight-bytes", within(1, 8), 4, "2 lets FSDP gather weights of 16 bits"),
        ("--layers", count, 24, "that FSDP gathers one after the other"),
        ("--bucket-mb", count, 25, "MiB in each of DDP's buckets but the first"),
        ("--latency-us", within(0, 1e9), 10, "of a message between machines"),
    ):
        if default is not None:
            what += f" ({default})"
        parser.add_argument(name, type=kind, default=default, help=what)
    parser.add_argument("--nodes", type=count, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--way", choices=[*WAYS, "all"], default="all")
    args = parser.parse_args()
    if args.measure:
        is_clear = not args.step_ms and not args.parameters
    else:
        is_clear = args.step_ms and args.parameters
    if not is_clear or not args.link:
        parser.error("give --link, and --step-ms with --parameters or else --measure")
    step_ms = args.step_ms
    parameters = args.parameters
    backward = 2 / 3
    try:
        if args.measure:
            step_ms, backward, parameters = read_profile(args.measure)
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as why:
        hint = "Give TRACE.json of variants.profiled --trace TRACE"
        parser.error(f"{args.measure}: {why!r}. {hint}")
    job = Job(
        compute=step_ms / 1e3,
        backward=backward,
        gradients=parameters * args.gradient_bytes,
        weights=parameters * args.weight_bytes,
        layers=args.layers,
        accumulate=args.accumulate,
        bucket=args.bucket_mb * 2**20,
    )
    cluster = Cluster(
        gpus=args.gpus,
        link=args.link,
        inside=args.inside,
        latency=args.latency_us / 1e6,
    )
    ways = WAYS if args.way == "all" else [args.way]
    print_rows(args.nodes, ways, job, cluster)


if __name__ == "__main__":
    main()
