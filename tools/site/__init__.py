"""The pages' generated parts and the site.

pages.py         a page as `Page`, each of its markers and commands as `Block`: first
build.py         the command line; fills in the blocks, and checks the explanations
commands.py      runs the blocks' commands, two at a time, and compares what they print
extension.py     Sphinx's way in: what the site adds to the pages, for the templates
side_by_side.py  two scripts as rows of HTML, and which chapters explain a change
explain.py       those chapters' words and outputs, as HTML
home.py          what the start page shows
slow_motion.py   records the runs that static/slow_motion.js draws
"""
