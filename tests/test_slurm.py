"""slurm/multinode.sbatch on a real Slurm: two nodes, which are hosts of their own."""

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from ladder.files import replace_once
from ladder.rungs import ROOT
from proofs import slurm_cluster
from proofs.launch import plant
from proofs.processes import TimedOut
from proofs.results import load, same_bits

reason = slurm_cluster.why_not()
pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(reason is not None, reason=f"no Slurm: {reason}"),
]
SCRIPT = "slurm/multinode.sbatch"
VARIANT = "variants/preemptible.py"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

LOW_AND_HIGH = [
    "PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE"
    " GraceTime=60",
    "PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF",
]


class Job:
    """A job of the script, in a folder of its own, with the variant that it trains.

    words: what stands after `sbatch`. hooks: what is attached to the variant. stand_in:
    whether tests/faults/torchrun.sh is started instead of torchrun. changes: texts of
    the job script that are replaced. env: variables that sbatch hands on.
    """

    def __init__(
        self, slurm, folder, *words, hooks=(), stand_in=False, changes=(), **env
    ):
        self.slurm, self.folder = slurm, folder
        plant(VARIANT, folder, hooks=hooks)
        text = (ROOT / SCRIPT).read_text()
        for old, new in changes:
            text = replace_once(text, old, new, SCRIPT)
        script = folder / "multinode.sbatch"
        script.write_text(text)
        path = Path(sys.executable).parent
        if stand_in:
            path = folder / "bin"
            path.mkdir()
            shutil.copy(ROOT / "tests/faults/torchrun.sh", path / "torchrun")
        env |= {"PATH": f"{path}:{os.environ['PATH']}", "PYTHONWARNINGS": "ignore"}
        settings = [f"{name}={value}" for name, value in env.items()]
        words = [script if word == SCRIPT else word for word in words]
        submit = ["sbatch", "--parsable", f"--chdir={folder}", *words]
        self.number = slurm.run("env", *settings, *submit).strip()

    @property
    def output(self):
        path = self.folder / f"slurm-{self.number}.out"
        return path.read_text() if path.exists() else ""

    @property
    def facts(self):
        return self.slurm.job(self.number)

    def wait_until(self, condition, problem):
        try:
            return self.slurm.wait_until(condition, problem)
        except (AssertionError, TimedOut) as error:
            more = f"{error}\n{self.facts}\n{self.output}"
            raise type(error)(more) from None

    def wait_for(self, pattern):
        def seen():
            # First the state: after the end, the output is complete.
            ended = self.facts["JobState"] in ENDED
            found = re.search(pattern, self.output)
            assert found or not ended, f"it has ended without {pattern!r}"
            return found

        return self.wait_until(seen, f"no {pattern!r}")

    def wait_for_requeue(self):
        def requeued():
            facts = self.facts
            again = facts["Restarts"] != "0"
            assert again or facts["JobState"] not in ENDED, "it has ended"
            return again

        self.wait_until(requeued, "not requeued")

    def end(self):
        """What Slurm knows of the job when it has ended."""
        self.wait_until(lambda: self.facts["JobState"] in ENDED, "not at an end")
        return self.facts

    def cancel(self):
        self.slurm.run("scancel", self.number)
        return self.end()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    conf = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}
    conf |= {"KillOnBadExit": 1, "WaitTime": 1}  # what the script has to stand up to
    cluster = slurm_cluster.Slurm(2, folder, gpus=2, partitions=LOW_AND_HIGH, **conf)
    with cluster:
        yield cluster


@pytest.fixture(scope="module")
def near_its_time_limit(slurm, tmp_path_factory):
    """Slurm looks for such jobs twice a minute: it waits while other tests run."""
    words = ["--job-name=late", "--time=1", "--signal=TERM@60", "--nodes=1"]
    folder = tmp_path_factory.mktemp("late")
    return Job(slurm, folder, *words, SCRIPT, 50, 10, stand_in=True)


@pytest.fixture(autouse=True)
def no_job_is_left(slurm):
    """Also after a failure: the next test needs the nodes."""
    yield
    for name in ("multinode", "run7"):
        slurm.run("scancel", f"--name={name}")


@pytest.fixture(scope="module")
def undisturbed(slurm, near_its_time_limit, tmp_path_factory):
    words = ["--gpus-per-node=1", "--job-name=run7", SCRIPT, 5, 2]
    job = Job(slurm, tmp_path_factory.mktemp("undisturbed"), *words)
    facts = job.end()
    assert facts["JobState"] == "COMPLETED", job.output
    return job


def test_one_process_per_gpu_and_one_torchrun_per_node(undisturbed):
    assert "2 x cpu, batch 32 each: effective batch 64" in undisturbed.output
    assert undisturbed.output.count("\nepoch 5/5 ") == 1
    assert undisturbed.facts["Restarts"] == "0"
    assert load(undisturbed.folder / "run7.pt")["EPOCHS_RUN"] == 5


def test_told_to_stop_it_saves_requeues_and_resumes_at_that_step(
    slurm, undisturbed, tmp_path
):
    words = ["--gpus-per-node=1", "--job-name=run7", SCRIPT, 5, 2]
    job = Job(slurm, tmp_path, *words, hooks=["wait_in_step_80"])
    job.wait_for("in step 80(.|\n)*in step 80")
    slurm.run("scancel", "--signal=TERM", job.number)
    job.wait_for_requeue()
    # 80 steps are 2.5 epochs.
    assert "preempted after 1024 samples of the epoch" in job.output
    assert load(tmp_path / "run7.pt")["SAMPLES_RUN"] == 1024
    facts = job.end()
    assert facts["JobState"] == "COMPLETED", job.output
    assert facts["Restarts"] == "1"
    assert "resuming from run7.pt: 2 of 5 epochs are finished" in job.output
    assert not (tmp_path / "run7.pt.preempted").exists()
    mine, other = load(tmp_path / "run7.pt"), load(undisturbed.folder / "run7.pt")
    assert same_bits(mine, other)


def test_a_crash_is_not_requeued(slurm, tmp_path):
    """Without a GPU there are two processes per node."""
    fault = {"hooks": ["in_step_80"], "IN_STEP_80": "raise"}
    no_restarts = ("--max-restarts=3", "--max-restarts=0")
    job = Job(slurm, tmp_path, SCRIPT, 5, 2, changes=[no_restarts], **fault)
    facts = job.end()
    assert "4 x cpu, batch 32 each: effective batch 128" in job.output
    assert "ValueError: planted" in job.output
    assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "1:0")
    assert facts["Restarts"] == "0"
    assert not (tmp_path / "multinode.pt.preempted").exists()


def test_a_site_that_exports_nothing(slurm, tmp_path):
    """The path is then set in the script, and srun hands all on to the tasks."""
    line = "export SNAPSHOT=$SLURM_JOB_NAME.pt\n"
    path = f"export PATH={tmp_path}/bin:$PATH\n"
    words = ["--export=NONE", "--gpus-per-node=1", SCRIPT, 50, 10]
    job = Job(slurm, tmp_path, *words, stand_in=True, changes=[(line, path + line)])
    job.wait_for(rf"--rdzv-id={job.number}\.0 .* --snapshot-path=multinode.pt")
    assert job.cancel()["JobState"] == "CANCELLED"


def test_told_to_stop_before_python_listens_it_is_requeued_and_runs_again(
    slurm, tmp_path
):
    job = Job(slurm, tmp_path, "--gpus-per-node=2", SCRIPT, 50, 10, stand_in=True)
    job.wait_for("torchrun(.|\n)*torchrun")
    lines = [line for line in job.output.splitlines() if "torchrun" in line]
    (flags,) = {line for line in lines if "is_host=1" in line}
    assert flags.startswith("OMP_NUM_THREADS=1 torchrun --nnodes=2 --nproc-per-node=2 ")
    assert f"--rdzv-id={job.number}.0 " in flags
    assert " --rdzv-conf=is_host=1,read_timeout=600 " in flags
    assert flags.endswith("variants.preemptible 50 10 --snapshot-path=multinode.pt")
    slurm.run("scancel", "--signal=TERM", job.number)
    job.wait_for_requeue()
    job.wait_for(rf"--rdzv-id={job.number}\.1 ")
    assert job.cancel()["JobState"] == "CANCELLED"


def test_told_to_stop_before_bash_listens_it_is_requeued(slurm, tmp_path):
    early = ("told() {", "echo started; sleep 600; told() {")
    words = ["--gpus-per-node=2", SCRIPT, 50, 10]
    job = Job(slurm, tmp_path, *words, stand_in=True, changes=[early])
    job.wait_for("started(.|\n)*started")
    slurm.run("scancel", "--signal=TERM", job.number)
    job.wait_for_requeue()
    assert job.cancel()["JobState"] == "CANCELLED"


def is_of_job(pid, number):
    try:
        variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    except OSError:
        return False  # it has ended
    return f"SLURM_JOB_ID={number}" in variables


def test_what_is_told_to_the_first_process_alone_is_handed_on(slurm, tmp_path):
    """As with proctrack/cgroup, which this Slurm does not have."""
    pretend = ("'ProctrackType.*cgroup'", "ProctrackType")
    words = ["--gpus-per-node=2", SCRIPT, 50, 10]
    job = Job(slurm, tmp_path, *words, stand_in=True, changes=[pretend])
    job.wait_for("torchrun(.|\n)*torchrun")
    for node in slurm.nodes:
        lines = node.processes().items()
        tasks = [pid for pid, line in lines if re.match(r"\S*bash -c\s+told", line)]
        # Others may run here, such as the job that is near its time limit.
        (first,) = [pid for pid in tasks if is_of_job(pid, job.number)]
        os.kill(first, signal.SIGTERM)
    job.wait_for_requeue()
    assert job.cancel()["JobState"] == "CANCELLED"


def test_cancelled_it_stays_cancelled(slurm, tmp_path):
    job = Job(slurm, tmp_path, SCRIPT, 50, 10, stand_in=True)
    job.wait_for("torchrun(.|\n)*torchrun")
    facts = job.cancel()
    assert (facts["JobState"], facts["Restarts"]) == ("CANCELLED", "0")


def test_a_second_job_of_the_same_name_waits(slurm, tmp_path):
    """Both would write one snapshot. Slurm holds the second back."""
    first = Job(slurm, tmp_path / "1", SCRIPT, 50, 10, stand_in=True)
    first.wait_for("torchrun(.|\n)*torchrun")
    second = Job(slurm, tmp_path / "2", SCRIPT, 50, 10, stand_in=True)
    second.wait_until(lambda: second.facts["Reason"] == "Dependency", "it runs")
    assert second.facts["JobState"] == "PENDING"
    assert first.cancel()["JobState"] == second.cancel()["JobState"] == "CANCELLED"


def test_a_job_that_matters_more_takes_the_nodes_and_gives_them_back(slurm, tmp_path):
    job = Job(slurm, tmp_path, "--gpus-per-node=2", SCRIPT, 50, 10, stand_in=True)
    job.wait_for("torchrun(.|\n)*torchrun")
    other = ["--partition=high", "--nodes=2", "--gpus-per-node=2", "--wrap=sleep 1"]
    slurm.run("sbatch", f"--chdir={tmp_path}", "--output=other.out", *other)
    job.wait_for_requeue()
    job.wait_for(rf"--rdzv-id={job.number}\.1 ")
    assert job.cancel()["JobState"] == "CANCELLED"


def test_shortly_before_its_time_limit_it_is_requeued(near_its_time_limit):
    near_its_time_limit.wait_for_requeue()
    near_its_time_limit.cancel()  # it is near its limit again, and again


def test_a_node_loses_its_power_and_the_job_goes_on_with_the_other(tmp_path):
    # Defaults: a node is down when it has been silent for 300 s; the processes on the
    # others get SIGKILL 30 s later; two nodes or none.
    short = {"SlurmdTimeout": 10, "MessageTimeout": 10, "KillWait": 2}
    with slurm_cluster.Slurm(2, tmp_path, gpus=1, **short) as slurm:
        words = ["--nodes=1-2", "--gpus-per-node=1", SCRIPT, 10**6, 1]
        job = Job(slurm, tmp_path / "job", *words)
        job.wait_for("epoch 2 saved")
        slurm.nodes[1].unplug()
        job.wait_for_requeue()
        before = int(re.findall(r"epoch (\d+) saved", job.output)[-1])
        job.wait_for(f"resuming from multinode.pt: {before} of")
        assert "1 x cpu, batch 32 each: effective batch 32" in job.output
        job.wait_for(f"epoch {before + 1} saved")
