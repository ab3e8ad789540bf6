"""Make proofs, and keep them.

check.py     all checks of one script, as commands: read it first
mutants.py   what can be taken out of a script: texts, and no process
lines.py     runs tests on each mutant; also the plugin of the pytest that it starts
record.py    green.txt, a line for each proof
inputs.py    what a proof depends on
recorded.py  a plugin of pytest that leaves out waiting tests which are proven
cases.py     what the zoo's ranks run: many cases in one launch
"""
