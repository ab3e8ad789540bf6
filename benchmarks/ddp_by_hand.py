"""DDP by hand beside DDP: steps per second on two hosts, and which message left when.

    python -m benchmarks.ddp_by_hand
    python -m benchmarks.ddp_by_hand --picture docs/pictures/ddp_by_hand.svg

Two ranks have a host of their own each, joined by a link of 100 Mbit/s and then of
1 Gbit/s each way. All ways train the same model, and take turns. In a turn a script
starts anew and trains two epochs, of which the second is measured. --picture draws one
step of two ways instead, as the profiler has seen it. It needs Linux and root.
"""

import functools
import json
import tempfile
from pathlib import Path

from benchmarks import report, variants
from tools.cli import error
from tools.proofs.hosts import Hosts
from tools.proofs.launch import plant
from tools.site.pictures import FONT, box, style, text

NAME, PARENT = "variants/ddp_by_hand.py", "multigpu.py"
WIDTH, MB, BATCH = 1024, 4, 1024  # hidden layers of 4 MiB each, and a bucket for each
CAP = ("Parallel(self.model)", f"Parallel(self.model, bucket_cap_mb={MB})")
WAYS = {  # (script, options, changes)
    "DDP": (PARENT, (), ()),
    f"DDP, bucket_cap_mb={MB}": (PARENT, (), (CAP,)),
    f"--bucket-mb {MB}": (NAME, ("--bucket-mb", MB), ()),
    "plain": (NAME, (), ()),
}
TITLE = "One step: a message for each gradient, and buckets"


def run(way, hosts, folder, steps, batch, *more_hooks):
    """The figures of variants.Edge.run, of one way on two hosts."""
    script, options, changes = WAYS[way]
    networks = [f"/proc/{host.pid}/ns/net" for host in hosts]
    edge = variants.Edge(NAME, folder / "edge", networks, "cpu", len(hosts))
    edge.env["WIDTH"] = WIDTH
    hooks = ["measured_epoch", *more_hooks]
    edge.scripts[script] = plant(script, folder / way / "copy", *changes, hooks=hooks)
    return edge.run(script, steps * batch * len(hosts), batch, *options)


def rows_of(path):
    """[(name, kind, [(start, end, label)])]: a rank's events, in ms since backward."""
    events = sorted(json.loads(path.read_text()), key=lambda event: event[1])
    begin = next(x[1] for x in events if x[0].endswith(": AddmmBackward0"))

    def spans(part):
        chosen = [x for x in events if part in x[0] and x[1] >= begin]
        sizes = [x[3][0][0] * 4 / 2**20 if "gloo" in part else 0 for x in chosen]
        labels = [f"{x:.1f} MiB" if x else "" for x in sizes]
        times = [((x[1] - begin) / 1e3, (x[2] - begin) / 1e3) for x in chosen]
        return [(*x, y) for x, y in zip(times, labels, strict=True)]

    lanes = []  # messages that overlap stand in different ones
    for span in spans("gloo:all_reduce"):
        free = [lane for lane in lanes if lane[-1][1] <= span[0]]
        free[0].append(span) if free else lanes.append([span])
    rows = [("messages, as they leave", "step2", lane) for lane in lanes]
    backward = "backward, layer by layer", "step1", spans(": AddmmBackward0")
    return [backward, *rows, ("optimizer.step()", "step0", spans("Optimizer.step#"))]


def draw(drawn, what):
    """The picture. drawn: {title: what `rows_of` returns}."""
    last = max(x[1] for rows in drawn.values() for *_, spans in rows for x in spans)
    parts, y = [text(20, 30, TITLE, "h"), text(20, 50, what)], 50
    for title, rows in drawn.items():
        parts.append(text(20, y + 34, title, "b"))
        y += 44
        for name, kind, spans in rows:
            parts.append(text(20, y + 16, name, "s"))
            for begin, end, label in spans:
                x, width = 190 + begin * 580 / last, (end - begin) * 580 / last
                parts.append(box(round(x, 1), y, round(max(width, 1), 1), 22, kind))
                parts.append(text(round(x + 4, 1), y + 16, label * (width > 46), "s"))
            y += 28
    for ms in range(0, int(last), 100):
        parts.append(text(round(190 + ms * 580 / last, 1), y + 22, f"{ms} ms", "s"))
    sheet = f"text{{font:13px {FONT}}}.b,.h{{font-weight:700}}.h{{font-size:16px}}"
    sheet += f".s{{font-size:12px}}{style(0)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {y + 40}" role="img"'
        f' width="800" height="{y + 40}" aria-labelledby="title desc">\n'
        f'<title id="title">{TITLE}</title>\n<desc id="desc">{what}</desc>\n<style>'
        f"{sheet}@media(prefers-color-scheme:dark){{{style(1)}}}</style>\n"
        + "\n".join([box(0.5, 0.5, 799, y + 39, "card"), *parts, "</svg>\n"])
    )


def main(args):
    if reason := variants.why_no_networks("cpu"):
        error(reason)
    with tempfile.TemporaryDirectory() as folder, Hosts(2, folder) as hosts:
        job = hosts, Path(folder), args.steps, BATCH
        if args.picture:
            for host in hosts:
                host.slow("1gbit")
            drawn = {}
            for way in ("plain", f"--bucket-mb {MB}"):
                run(way, *job, "ddp_by_hand")
                drawn[way] = rows_of(Path(folder) / way / "copy/events.0.json")
            what = "Rank 0 of two hosts, 1 Gbit/s between them, as the profiler saw a"
            args.picture.write_text(draw(drawn, f"{what} step of ddp_by_hand.py."))
            return
        steps = (
            f"{args.steps} steps after {args.steps} to warm up, {BATCH} samples each"
        )
        report.print_setting(f"{args.rounds} rounds of {steps} on two hosts", "torch")
        ways = {way: functools.partial(run, way, *job) for way in WAYS}
        columns = {
            "steps/s": (",.2f", lambda x: args.steps / x["seconds"]),
            "MB sent in a step": (",.2f", lambda x: x["sent_bytes"] / args.steps / 1e6),
        }
        for rate in ("100mbit", "1gbit"):
            for host in hosts:
                host.slow(rate)
            turns = report.take_turns(ways, args.rounds, warm_up=0)
            report.print_table(rate, turns, **columns)


if __name__ == "__main__":
    counts = {"rounds": (5, "turns of each way"), "steps": (4, "steps in an epoch")}
    parser = report.make_parser(__doc__, **counts)
    parser.add_argument("--picture", type=Path, help="where to draw a step")
    main(parser.parse_args())
