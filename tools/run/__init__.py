"""Start programs: in forks, in new interpreters, on hosts of their own."""
