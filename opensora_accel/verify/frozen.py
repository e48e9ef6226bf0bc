"""Imported last by the process that ranks are forked from: what it has loaded by then is never copied for them.

A forked process shares its parent's memory until either writes to it, and Python's collector writes to every object
that it looks at. Frozen ones it lets alone: of a rank that has run a step, 38 MiB are its own then, and 105 without
this and without what `verify` preloads (x86_64, Python 3.11, torch 2.13).
"""

import gc

gc.collect()
gc.freeze()
