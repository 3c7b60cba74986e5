import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import tasks  # noqa: E402
from disturbed import OPTIONS  # noqa: E402
from harness import (  # noqa: E402
    BF16_PRODUCT,
    LONG,
    bf16_settings,
    processes_with,
    start_fork_server,
    train,
    wait_until,
    write_images,
    write_mnist,
)

MEMORY_CGROUPS = Path("/sys/fs/cgroup/memory")  # of cgroup v1
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_the_tests(*_):
    """Fixtures then end what they have started. Further signals do not disturb that."""
    for number in INTERRUPTS:
        signal.signal(number, lambda *_: None)
    raise KeyboardInterrupt


# A shell ignores SIGINT and SIGQUIT for processes in the background, and nohup SIGHUP. Children
# would, too.
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
for number in INTERRUPTS:
    signal.signal(number, end_the_tests)
if is_nohup:
    signal.signal(signal.SIGHUP, lambda *_: None)


def refuse_changes_beside_threads(event: str, arguments: tuple) -> None:
    """The environment and the working directory belong to all threads, and to what they start.

    Threads of libraries, such as tqdm's, are daemons.
    """
    if event not in ("os.putenv", "os.unsetenv", "os.chdir"):
        return
    others = [thread for thread in threading.enumerate() if not thread.daemon]
    is_of_pytest = arguments[:1] == (b"PYTEST_CURRENT_TEST",)
    if len(others) > 1 and not is_of_pytest:
        raise RuntimeError(f"{event} while these threads run: {others}")


sys.addaudithook(refuse_changes_beside_threads)

skipped: list = []


def pytest_collection_modifyitems(config, items):
    if not LONG:
        skipped[:] = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=skipped)
    with_bf16 = [item for item in items if "bf16" in item.name]
    if with_bf16 and " amx_" in Path("/proc/cpuinfo").read_text():
        settings = bf16_settings(BF16_PRODUCT)
        os.environ.update(settings or {})
        for item in with_bf16 if settings is None else ():
            item.add_marker(pytest.mark.skip(reason="bf16 matrix products crash on this CPU"))


def pytest_terminal_summary(terminalreporter):
    if skipped:  # one line, in red
        line = f"{len(skipped)} LONG TESTS SKIPPED, and others run on fewer cases"
        terminalreporter.write_line(
            f"{line}. To run everything: tests/run.sh --cluster --long", red=True
        )


@pytest.fixture(autouse=True)
def no_hang_timer():
    """A test that calls functions of the trainer may leave its timer, which ends the process."""
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory):
    """A process that a test kills leaves its temporary files; pytest removes this directory.

    What an interrupted test has left running is killed, if it has inherited TMPDIR.
    """
    directory = str(tmp_path_factory.mktemp("tmp"))
    os.environ["TMPDIR"] = directory
    tempfile.tempdir = directory  # also that of this process, which may have been read before
    start_fork_server()
    yield
    for pid in processes_with("TMPDIR", directory):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> list[str]:
    """Options for 203 training and 103 test digits: no multiple of any batch or world size here."""
    root = write_mnist(tmp_path_factory.mktemp("tiny"), train=203, test=103)
    return ["--dataset=mnist", f"--data-dir={root}", "--batch-size=8", "--log-every-steps=1"]


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """A --data-dir for examples/imagenet.py."""
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, images) -> dict:
    """The final weights of a training of disturbed.py that nothing happens to, nor saves often."""
    options = [*OPTIONS, "--checkpoint-every-steps=100", f"--data-dir={images}"]
    run = train(tmp_path_factory.mktemp("undisturbed") / "run", 2, *options, task=tasks.Photos)
    return run.newest()["model"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own; small_disk(bytes) sets its size."""
    if os.geteuid():
        pytest.skip("only root can mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=30m", "tmpfs", disk], check=True)

    def resize(size: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True)

    resize.path = disk
    yield resize
    subprocess.run(["umount", disk], check=True)


@pytest.fixture
def memory_cgroup() -> Path:
    """A cgroup (v1) for processes whose memory is limited. Removed when the last one has ended."""
    if not os.access(MEMORY_CGROUPS / "tasks", os.W_OK):
        pytest.skip("needs memory cgroups (v1)")
    group = MEMORY_CGROUPS / f"test-{os.getpid()}"
    group.mkdir()
    yield group
    wait_until(lambda: removed(group), f"a process is left in {group}")


def removed(group: Path) -> bool:
    """Remove a cgroup and those in it; it is busy until its last process has ended."""
    with suppress(OSError):
        for inner in [*group.glob("*/*/"), *group.glob("*/"), group]:
            inner.rmdir()
    return not group.exists()
