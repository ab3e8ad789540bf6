"""Make proofs: the deletion of lines, many cases, kills at random moments."""
