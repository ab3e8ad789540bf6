"""cluster/multinode.sbatch with programs that answer for Slurm."""

from tools.run.processes import PATH, Program
from tools.scripts import ROOT


def test_a_job_is_requeued_100_times_at_most(tmp_path):
    """srun ends as after a SIGTERM; scontrol says that the job runs, and its words."""
    for name, line in ("srun", "exit 143"), ("scontrol", "echo JobState=RUNNING $*"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    words = ["bash", ROOT / "cluster/multinode.sbatch"]
    env = {"PATH": f"{tmp_path}:{PATH}", "SLURM_JOB_ID": 7}
    for restarts, said in (99, "JobState=RUNNING requeue 7\n"), (100, ""):
        env["SLURM_RESTART_COUNT"] = restarts
        assert Program(words, tmp_path, real=True, **env).finish().stdout == said
