"""What makes proofs: launchers, hooks, hosts, kills, and the deletion of lines."""
