"""What this repository holds, as every tool sees it: rungs, diffs, pages, files.

It imports nothing of ours. CONTRIBUTING.md has the map of all rooms.
"""
