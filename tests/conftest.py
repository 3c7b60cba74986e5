import signal
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from harness import write_mnist  # noqa: E402

# Who starts the tests in the background hands on an ignored Ctrl-C, which no child could unignore.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> list[str]:
    """Options for 203 training and 103 test digits: no multiple of any batch or world size here."""
    root = write_mnist(tmp_path_factory.mktemp("tiny"), train=203, test=103)
    return ["--dataset=mnist", f"--data-dir={root}", "--batch-size=8", "--log-every-steps=1"]
