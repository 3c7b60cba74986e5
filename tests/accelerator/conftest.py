"""Without a C++ compiler, the tests on the simulated accelerator are skipped, with a message."""

import os
from pathlib import Path

import pytest
import simgpu

skipped: list = []


def pytest_collection_modifyitems(config, items):
    reason = simgpu.why_not()
    if not reason:
        return
    if os.environ.get("CLUSTER_TESTS") == "required":
        raise pytest.UsageError(f"the tests on a simulated accelerator need {reason}")
    skipped[:] = [item for item in items if simgpu.HERE in item.path.parents]
    items[:] = [item for item in items if simgpu.HERE not in item.path.parents]
    config.hook.pytest_deselected(items=skipped)


def pytest_terminal_summary(terminalreporter):
    if skipped:  # one line, in red
        line = f"{len(skipped)} TESTS ON A SIMULATED ACCELERATOR SKIPPED"
        terminalreporter.write_line(f"{line}: they need {simgpu.why_not()}", red=True)


@pytest.fixture(scope="session")
def library() -> Path:
    return simgpu.build()
