"""For one host's Python: it is 100 s ahead of the clock that all hosts here share.

To be copied to a folder on PYTHONPATH as sitecustomize.py.
"""

import time

real_time = time.time
time.time = lambda: real_time() + 100
