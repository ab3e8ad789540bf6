"""What makes the proofs and the pages; nothing that a reader copies imports it.

scripts.py  which scripts there are, and which comes from which: read it first
diffs.py    the diffs between them, as hunks
files.py    the files of the repository, and copies of them
cli.py      one line for bad input
size.py     how large everything is
spread.py   carries a change of a script into those that come from it

run/    starts programs, and uses nothing of the two others
prove/  takes lines out, and keeps what has passed
site/   fills in the pages, and builds the site; proves their commands with prove/
"""
