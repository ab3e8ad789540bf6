"""What makes proofs: launchers, hooks, hosts, kills, and the deletion of lines.

Nobody who trains needs it. It imports `ladder` and, in the processes that it starts,
the rungs. CONTRIBUTING.md has the map of all rooms.
"""
