"""What the fork server of harness.py imports, once for all ranks."""

import gc
import os

import pytest  # noqa: F401
import torch
import torchvision  # noqa: F401

import train_distributed  # noqa: F401

# With some versions of PyTorch, the first optimizer imports the compiler: 3 s.
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)

os.environ.pop("PYTHONPATH", None)  # of harness.start_fork_server()

# Otherwise the first garbage collection of each rank copies every inherited page: 1 s.
gc.freeze()
