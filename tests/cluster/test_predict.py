"""cluster/predict.py: cases computed by hand, bad input, and what others published."""

import json
import re

import pytest

from cluster.predict import Cluster, Job, all_reduce, ddp, fsdp, ring
from tools.run.processes import Program
from tools.scripts import ROOT

# A GPU in each machine, 1 GB/s and 1 ms between machines
ONE = Cluster(gpus=1, link=1e9, inside=1e11, latency=0.001)
JOB = "--step-ms 180 --parameters 124e6"
BAD = [
    JOB,
    "--link 1Gbit",
    f"{JOB} --link 0Gbit",
    f"{JOB} --link -1Gbit",
    "--step-ms 9 --parameters 0 --link 1Gbit",
    f"{JOB} --link 1Gbit --nodes 0",
    "--measure /nowhere --link 1Gbit",
    f"--measure {__file__} --link 1Gbit",
]


def predict(words):
    return Program(["python", "cluster/predict.py", *words.split()], ROOT).finish()


def test_published_figures():
    page = (ROOT / "benchmarks/README.md").read_text()
    rows = re.findall(r"(?m)^\| .* \| (.*) \| (.*) \| `(.*)` \|$", page)
    assert len(rows) == 13
    for figure, printed, words in rows:
        percents = re.findall(r"([\d.]+)%", predict(words).stdout)
        value = float(percents[-1])
        if len(percents) > 1:  # of the efficiency in the first row
            value *= 100 / float(percents[0])
        error = round(value - float(figure), 1) + 0.0  # no -0.0
        assert printed == f"{value:.1f} ({error:+.1f})", words


def test_all_reduce_by_hand():
    # A ring of 4 sends 2 * 3/4 of 1 GB in 6 messages.
    seconds = ring(2, 1e9, 4, ONE)
    assert seconds == pytest.approx(1.506)
    assert all_reduce(1e9, 4, ONE) == seconds
    # Trees send 2 * 1 GB, in 4 messages: they are faster if a message is short.
    assert all_reduce(1e3, 4, ONE) == pytest.approx(0.004, rel=1e-3)
    # With two GPUs in each of two machines, a pass is 1 message between the machines
    # and 2 inside them.
    pairs = ONE._replace(gpus=2)
    assert ring(2, 1e9, 2, pairs) == pytest.approx(1.5 + 2 * (0.001 + 2 * 3e-6))
    assert ring(2, 1e9, 1, pairs) == pytest.approx(0.01 + 2 * 3e-6)


def test_steps_by_hand():
    wire = ONE._replace(latency=0)  # 1 s for 1 GB
    bucket = 1e9 - 2**20
    job = Job(
        compute=3,
        backward=2 / 3,
        gradients=1e9,
        weights=1e9,
        layers=1,
        accumulate=4,
        bucket=bucket,
    )
    # Two buckets; the link is free when the last one is ready, as backward ends.
    assert ddp(job, 2, wire) == pytest.approx(4 * 3 + bucket / 1e9)
    # One layer: gathered in 0.5 s, and again while it computes; reduced in 0.5 s.
    assert fsdp(job, 2, wire) == pytest.approx(0.5 + 4 * 3 + 0.5)
    assert fsdp(job, 2, wire, hybrid=True) == pytest.approx(4 * 3 + 1)


def test_latency_limits_a_step():
    """That bandwidth does, the page shows."""
    slow = f"{JOB} --way ddp --nodes 64 --link 9Tbit --latency-us 9000"
    assert predict(slow).stdout.endswith(" latency\n")


def test_a_measured_job(tmp_path):
    # 180 ms are no communication, and backward takes 2/3 of them.
    rank = {"step": 200, "exposed communication": 20, "backward": 120}
    file = tmp_path / "m.json"
    file.write_text(json.dumps({"ms": [rank] * 2, "parameters": 124e6}))
    typed = predict(f"{JOB} --link 1Gbit").stdout
    assert typed
    assert predict(f"--measure {file} --link 1Gbit").stdout == typed
    # The file of a rank is for Perfetto.
    file = tmp_path / "m.0.json"
    file.write_text('{"traceEvents": []}')
    told = predict(f"--measure {file} --link 1Gbit").stderr
    assert "m.0.json: KeyError('ms'). Give TRACE.json of variants.profiled" in told


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_line(words):
    done = predict(words)
    assert done.returncode == 2
    assert not done.stdout
    assert re.fullmatch(r"predict.py: error:.*\n", done.stderr)
