"""Start programs: in forks, in new interpreters, on hosts of their own.

launch.py         a script, with changes, hooks and options: read it first
processes.py      any program, `Program`: its output, its end, and what it leaves
pool.py           calls of a function that starts programs, two at a time
warm.py           how a program runs in a fork of a process that has imported torch
results.py        what a run has printed and saved
hosts.py          several machines, which are namespaces of this one
slurm_cluster.py  Slurm's daemons on such hosts
"""
