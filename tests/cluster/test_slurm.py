"""cluster/multinode.sbatch on a real Slurm: two nodes, which are hosts of their own."""

import os
import re
import signal

import pytest

from tests.helpers.checks import assert_same_snapshot
from tests.helpers.needs import needs_slurm
from tests.hooks.faults import raise_error_in_step_80, wait_in_step_80
from tools.run import slurm_cluster
from tools.run.launch import copy_script
from tools.run.processes import PATH

pytestmark = [pytest.mark.waits, needs_slurm]
VARIANT = "variants/preemptible.py"
# Instead of torchrun, where only what Slurm and the job script do matters.
FAKE_TORCHRUN = (
    "        told() {",
    """        torchrun() {
            echo "OMP_NUM_THREADS=$OMP_NUM_THREADS torchrun $*"
            exec sleep 600
        }
        told() {""",
)
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class Job:
    """A job of the script, in a folder of its own, with the variant that it trains.

    options: of sbatch. arguments: of the training. hooks: of the variant. changes: of
    the job script.
    """

    def __init__(self, slurm, folder, options, arguments, hooks=(), changes=()):
        self.slurm = slurm
        self.folder = folder
        copy_script(VARIANT, folder, hooks=hooks)
        script = copy_script("cluster/multinode.sbatch", folder, *changes)
        env = ["env", f"PATH={PATH}", "PYTHONWARNINGS=ignore"]
        sbatch = ["sbatch", "--parsable", f"--chdir={folder}", *options.split()]
        number = slurm.run(*env, *sbatch, script, *arguments.split())
        self.number = number.strip()

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
        finally:
            print(self.facts, self.output)  # pytest shows it after a failure

    def wait_for(self, pattern):
        def seen():
            # First the state: after the end, the output is complete.
            ended = self.facts["JobState"] in ENDED
            found = re.search(pattern, self.output)
            assert found or not ended, f"it has ended without {pattern!r}"
            return found

        self.wait_until(seen, f"no {pattern!r}")

    def wait_for_requeue(self):
        self.wait_until(lambda: self.facts["Restarts"] != "0", "not requeued")

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
    conf = {"KillOnBadExit": 1, "WaitTime": 1}  # what the script has to stand up to
    with slurm_cluster.Slurm(2, folder, gpus=2, **conf) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_job_is_left(slurm):
    """Also after a failure: the next test needs the nodes."""
    yield
    slurm.run("scancel", "--user=root")


def test_told_to_stop_it_saves_requeues_and_resumes_at_that_step(slurm, runs, tmp_path):
    """And ends with the bits of a run that nobody disturbed."""
    options = "--gpus-per-node=1 --job-name=run7"
    job = Job(slurm, tmp_path, options, "5 2", hooks=[wait_in_step_80])
    job.wait_for("in step 80(.|\n)*in step 80")
    slurm.run("scancel", "--signal=TERM", job.number)
    job.wait_for_requeue()
    # 80 steps are 2.5 epochs, and the ranks ask each other every 10 steps of one.
    assert "preempted after 1280 samples of the epoch" in job.output
    facts = job.end()
    assert facts["JobState"] == "COMPLETED", job.output
    assert facts["Restarts"] == "1"
    assert "2 of 5 epochs are finished in run7.pt" in job.output
    # One process per GPU, and one of all prints.
    assert "2 x cpu, batch 32 each: effective batch 64" in job.output
    assert job.output.count("\nepoch 5/5 ") == 1
    assert not (tmp_path / "run7.pt.preempted").exists()
    undisturbed, _ = runs(VARIANT)
    assert_same_snapshot(tmp_path / "run7.pt", undisturbed)


def test_a_crash_is_not_requeued(slurm, tmp_path):
    no_restarts = ("--max-restarts=3", "--max-restarts=0")
    options = "--gpus-per-node=2"
    job = Job(slurm, tmp_path, options, "5 2", [raise_error_in_step_80], [no_restarts])
    facts = job.end()
    assert "4 x cpu, batch 32 each: effective batch 128" in job.output
    assert "ValueError: planted" in job.output
    ended = facts["JobState"], facts["ExitCode"], facts["Restarts"]
    assert ended == ("FAILED", "1:0", "0")


def test_a_job_that_forgot_the_gpus_ends(slurm, tmp_path):
    """Else it would train on the CPUs of a node with GPUs."""
    job = Job(slurm, tmp_path, "", "5 2")
    facts = job.end()
    assert facts["ExitCode"] == "2:0"
    line = "multinode.sbatch: error: the nodes have GPUs: add --gpus-per-node=..."
    assert job.output.strip() == line


def test_told_to_stop_before_python_listens_it_is_requeued_and_runs_again(
    slurm, tmp_path
):
    """The first process alone is told, as with proctrack/cgroup, which is not here.

    And at a site that exports nothing: srun hands all on to the tasks.
    """
    pretend = ("'ProctrackType.*cgroup'", "ProctrackType")
    options = "--export=NONE --gpus-per-node=2"
    job = Job(slurm, tmp_path, options, "50 10", changes=[FAKE_TORCHRUN, pretend])
    job.wait_for("torchrun(.|\n)*torchrun")
    (flags,) = {*re.findall(".*torchrun.*is_host=1.*", job.output)}
    assert flags.startswith("OMP_NUM_THREADS=1 torchrun --nnodes=2 --nproc-per-node=2 ")
    assert f"--rdzv-id={job.number}.0 " in flags
    assert " --rdzv-conf=is_host=1,read_timeout=600 " in flags
    assert flags.endswith("variants.preemptible 50 10 --snapshot-path=multinode.pt")
    for node in slurm.nodes:
        for pid, line in node.processes().items():
            if re.match(r"\S*bash -c\s+torchrun", line):
                os.kill(pid, signal.SIGTERM)
    job.wait_for_requeue()
    job.wait_for(rf"--rdzv-id={job.number}\.1 ")
    assert job.cancel()["JobState"] == "CANCELLED"


def test_a_second_job_of_the_same_name_waits_and_cancelled_they_end(slurm, tmp_path):
    """Both would write one snapshot. Slurm holds the second back."""
    words = "--gpus-per-node=1", "50 10"
    # Its shell outlives the SIGTERM, as if the tasks had ended long before it came.
    late = ("\nsrun ", "\ntrap : TERM\nsrun ")
    first = Job(slurm, tmp_path / "1", *words, changes=[FAKE_TORCHRUN, late])
    first.wait_for("torchrun(.|\n)*torchrun")
    second = Job(slurm, tmp_path / "2", *words, changes=[FAKE_TORCHRUN])
    second.wait_until(lambda: second.facts["Reason"] == "Dependency", "it runs")
    assert second.facts["JobState"] == "PENDING"
    for job in (first, second):  # and cancelled, they stay cancelled
        facts = job.cancel()
        assert facts["JobState"] == "CANCELLED"
        assert facts["Restarts"] == "0"


def test_shortly_before_its_time_limit_it_is_requeued(slurm, tmp_path):
    options = "--time=1 --signal=TERM@60 --nodes=1 --gpus-per-node=1"
    job = Job(slurm, tmp_path, options, "50 10", changes=[FAKE_TORCHRUN])
    job.wait_for_requeue()  # it would be near its limit again, and again
    job.cancel()


def test_a_node_loses_its_power_and_the_job_goes_on_with_the_other(tmp_path):
    # Defaults: a node is down when it has been silent for 300 s; the processes on the
    # others get SIGKILL 30 s later; two nodes or none.
    short = {"SlurmdTimeout": 10, "MessageTimeout": 10, "KillWait": 2}
    with slurm_cluster.Slurm(2, tmp_path, gpus=0, **short) as slurm:
        job = Job(slurm, tmp_path / "job", "--nodes=1-2", "1000000 1")
        job.wait_for("epoch 2 saved")
        slurm.nodes[1].unplug()
        job.wait_for_requeue()
        *_, saved = re.findall(r"epoch (\d+) saved", job.output)
        job.wait_for(f"{saved} of 1000000 epochs are finished")
        # Without a GPU there are two processes per node.
        assert "2 x cpu, batch 32 each: effective batch 64" in job.output
        job.wait_for(f"epoch {int(saved) + 1} saved")
