"""What the fork server of harness.py imports, once for all ranks."""

import gc

import train_distributed  # noqa: F401

# Else the first garbage collection of each rank would copy every page it has inherited: 1 s.
gc.freeze()
