"""Make proofs, and keep them.

check.py     all checks of one script, as commands: read it first
mutants.py   what can be taken out of a script: texts, and no process
lines.py     the tool that runs tests on each mutant
verdict.py   the plugin of the pytest that it starts: which test kills the mutant
proof.py     the proof of a line, and what it depends on
record.py    green.txt, a line for each proof
inputs.py    what the proof of a command or of a test depends on
skip_proven.py
             a plugin of pytest that leaves out waiting tests which are proven
cases.py     what the zoo's ranks run: many cases in one launch
"""
