"""Draw the train and validation curves of one or several runs.

python -m mingpt.plot mingpt.metrics.csv
python -m mingpt.plot mingpt.metrics.csv modern.metrics.csv --out both.png
"""

import argparse
import csv

import utils


def read_metrics(path):
    """{column: list of numbers} of a CSV file that mingpt.train has written."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        utils.fail(f"cannot read {path}: {error.strerror}")
    except (UnicodeDecodeError, csv.Error):
        utils.fail(f"{path} is no CSV file: mingpt.pt has mingpt.metrics.csv beside it")
    wanted = "step", "train loss", "val loss"
    try:
        return {name: [float(row[name]) for row in rows] for name in wanted}
    except (KeyError, TypeError, ValueError):
        names = ", ".join(wanted)
        utils.fail(f"{path} has no columns {names}, which mingpt.train writes")


def draw(paths, out):
    """Write a picture of all runs to `out`; its ending says in which format."""
    try:
        import matplotlib
    except ImportError:
        utils.fail("mingpt.plot needs a package: pip install matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for number, path in enumerate(paths):
        metrics, color = read_metrics(path), f"C{number}"
        for name, style in (("train loss", "--"), ("val loss", "-")):
            label = f"{name}, {path}" if len(paths) > 1 else name
            axes.plot(metrics["step"], metrics[name], style, color=color, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(out)
    except (OSError, ValueError) as error:
        utils.fail(f"cannot write {out}: {str(error).splitlines()[0]}")
    utils.say(f"wrote {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = utils.fail
    parser.add_argument("metrics", nargs="+", help="the CSV files of the runs")
    parser.add_argument(
        "--out",
        default="mingpt.svg",
        help="the picture, for example a .png or .svg (default: mingpt.svg)",
    )
    args = parser.parse_args()
    draw(args.metrics, args.out)
