"""What the fork server of harness.py imports, once for all ranks."""

import gc
import os

import train_distributed  # noqa: F401

# faults/test_safeguards.py disables a safeguard: here, and in conftest.py for the tests.
exec(os.environ.get("WITHOUT_SAFEGUARD", ""))

os.environ.pop("PYTHONPATH", None)  # of harness.start_fork_server()

# Otherwise the first garbage collection of each rank copies every inherited page: 1 s.
gc.freeze()
