"""cluster/predict.py: cases computed by hand, bad input, and what others published."""

import json
import re

import pytest

from cluster.predict import Cluster, Job, all_reduce, ddp, fsdp, ring, slowest_rank
from tools.run.processes import Program
from tools.scripts import ROOT

ONE = Cluster(1, 1e9, 1e11, 0.001, 0, None)  # a GPU in each machine, 1 GB/s, 1 ms
JOB = "--step-ms 180 --parameters 124e6"
BAD = ["", JOB, "--link 1Gbit", f"{JOB} --link 0Gbit", f"{JOB} --link -1Gbit"]
BAD += ["--step-ms 9 --parameters 0 --link 1Gbit", f"{JOB} --link 1Gbit --nodes 0"]
BAD += ["--measure /nowhere --link 1Gbit", f"--measure {__file__} --link 1Gbit"]
PAPER = (ROOT / "docs/predict.md").read_text()
ROWS = re.findall(r"^\| (.*) \| (.*) \| (.*) \| `(.*)` \|$", PAPER, re.M)
assert len(ROWS) == 13


def run(words):
    return Program(["python", "cluster/predict.py", *words.split()], ROOT).finish()


@pytest.mark.parametrize(("name", "figure", "printed", "words"), ROWS)
def test_published_figures(name, figure, printed, words):
    rows = [float(x) for x in re.findall(r"([\d.]+)%", run(words).stdout)]
    value = rows[-1] * (100 / rows[0] if len(rows) > 1 else 1)
    error = round(value - float(figure), 1) + 0.0  # no -0.0
    print(f"{name}: published {figure}, predicted {value:.1f} ({error:+.1f})")
    assert printed == f"{value:.1f} ({error:+.1f})"


def test_all_reduce_by_hand():
    # A ring of 4 sends 2 * 3/4 of 1 GB in 6 messages; trees send 2 * 1 GB, in 4.
    assert ring(2, 1e9, 4, ONE) == all_reduce(1e9, 4, ONE) == pytest.approx(1.506)
    assert all_reduce(1e9, 4, ONE._replace(algorithm="tree")) == pytest.approx(2.004)
    assert all_reduce(1e3, 4, ONE) == pytest.approx(0.004, rel=1e-3)  # a short message
    pairs = ONE._replace(gpus=2)  # a pass is 1 message between, and 2 inside, machines
    assert ring(2, 1e9, 2, pairs) == pytest.approx(1.5 + 2 * (0.001 + 2 * 3e-6))
    assert ring(2, 1e9, 1, pairs) == pytest.approx(0.01 + 2 * 3e-6)


def test_steps_by_hand():
    wire, bucket = ONE._replace(latency=0), 1e9 - 2**20  # 1 s for 1 GB
    job = Job(3, 2 / 3, 1e9, 1e9, 1, 4, bucket)
    # Two buckets; the link is free when the last one is ready, as backward ends.
    assert ddp(job, 1, 2, wire) == pytest.approx(4 * 3 + bucket / 1e9)
    # One layer: gathered in 0.5 s, and again while it computes; reduced in 0.5 s.
    assert fsdp(job, 1, 2, wire) == pytest.approx(0.5 + 4 * 3 + 0.5)
    assert fsdp(job, 1, 2, wire, hybrid=True) == pytest.approx(4 * 3 + 1)
    for ranks, maximum in (1, 0), (10, 1.539), (1000, 3.241):  # expected, of normals
        assert slowest_rank(ranks, 1) == pytest.approx(1 + maximum, abs=0.02)


def test_latency_or_stragglers_limit_a_step():
    """That bandwidth does, the page shows."""
    fast = f"{JOB} --way ddp --nodes 64 --link 9Tbit "
    assert run(fast + "--latency-us 9000").stdout.endswith(" latency\n")
    assert run(fast + "--jitter 0.2").stdout.endswith(" stragglers\n")


def test_a_measured_job(tmp_path):
    rank, file = {"step": 200, "exposed communication": 20, "backward": 120}, "m.json"
    (tmp_path / file).write_text(json.dumps({"ms": [rank] * 2, "parameters": 124e6}))
    typed = run(f"{JOB} --link 1Gbit").stdout  # 180 ms, of which backward takes 2/3
    assert run(f"--measure {tmp_path / file} --link 1Gbit").stdout == typed != ""
    (tmp_path / "m.0.json").write_text('{"traceEvents": []}')  # a rank's, for Perfetto
    told = run(f"--measure {tmp_path / 'm.0.json'} --link 1Gbit").stderr
    assert "m.0.json: KeyError('ms'). Give TRACE.json of variants.profiled" in told


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_line(words):
    done = run(words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("predict.py: error:")
