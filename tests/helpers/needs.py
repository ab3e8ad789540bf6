"""What some tests need of the machine, beyond what pip installs."""

import pytest

from tools.run import hosts, slurm_cluster


def needs(what, why_not):
    return pytest.mark.skipif(why_not is not None, reason=f"no {what}: {why_not}")


needs_hosts = needs("hosts", hosts.why_not())
needs_slurm = needs("Slurm", slurm_cluster.why_not())
