"""User errors: one sentence with the value and the remedy, exit code 2, nothing overwritten."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from harness import PLAIN, REPO, TORCHRUN, launch, run_ranks, train, write_mnist

from train_distributed import UserError, parse_config


def refuse(directory, *options, ranks=1, **more) -> str:
    """The one sentence that a launch ends with."""
    return sentence_of(launch(directory, ranks, *options, **more))


def sentence_of(result) -> str:
    assert result.codes[0] == 2, "\n".join(result.out + result.err)
    assert set(result.codes) <= {2, -signal.SIGTERM}
    lines = [line for err in result.err for line in err.splitlines() if "WARNING" not in line]
    assert len(lines) == 1, f"not one sentence: {lines}"
    assert lines[0].startswith("train_distributed.py: error: ")
    return lines[0].removeprefix("train_distributed.py: error: ")


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--epoch=3", "--epoch=3, did you mean --epochs?"),
        ("--epochs=three", "--epochs: invalid positive value: 'three'"),
        ("--epochs=0", "--epochs: invalid positive value: '0'"),
        ("--keep=0", "--keep: invalid positive_int value: '0'"),
        ("--seed=99999999999999999999", "--seed: invalid integer value: "),
        ("--hang-timeout=9999999999", "--hang-timeout: invalid positive_int value: "),
        ("--lr=-1", "--lr: invalid not_negative value: '-1'"),
        ("--dropout=2", "--dropout: invalid fraction value: '2'"),
        ("--lr=nan", "--lr: invalid not_negative value: 'nan'"),
        ("--amp=int4", "--amp: invalid choice: 'int4'"),
    ],
)
def test_an_unknown_option_or_a_wrong_value_is_named(option, expected):
    with pytest.raises(UserError) as refused:
        parse_config([option])
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "batch_sise: 3",
            "options.yaml, batch_sise: there is no such option, did you mean batch_size?",
        ),
        (
            "epochs: three",
            "options.yaml, epochs: argument --epochs: invalid positive value: 'three'",
        ),
        ("epochs: [3, 4]", "options.yaml, epochs: argument --epochs: invalid positive value: "),
        ("training: {epochs: 3}", "options.yaml, training: there is no such option"),
        ("compile: maybe", "--no-compile: ignored explicit argument 'maybe'"),
        ("- epochs", "options.yaml: it needs lines like `epochs: 5`"),
        ("lr: 1\n  epochs: 3", "cannot read --config "),
        ("seed: !!python/object/apply:os._exit [x]", "cannot read --config "),  # not executed
        (None, "No such file or directory"),
    ],
)
def test_a_mistake_in_a_config_file_is_named(tmp_path, text, expected):
    file = tmp_path / "options.yaml"
    if text:
        file.write_text(text)
    with pytest.raises(UserError) as refused:
        parse_config([f"--config={file}"])
    assert expected in str(refused.value)


@pytest.mark.parametrize(("batch", "ranks"), [(20, 2), (16, 3)])
def test_the_global_batch_must_be_micro_batches_for_all_ranks(tmp_path, tiny, batch, ranks):
    message = refuse(tmp_path / "r", *tiny, f"--global-batch-size={batch}", ranks=ranks)
    assert f"a global batch of {batch} samples does not fit" in message
    assert f"multiple of --batch-size 8, from {8 * ranks} (for {ranks} ranks) to 200" in message


def test_a_global_batch_of_more_samples_than_there_are_is_refused(tmp_path, tiny):
    message = refuse(tmp_path / "r", *tiny, "--batch-size=204")
    assert "a global batch of 204 samples does not fit" in message


def test_a_run_directory_that_cannot_be_written_is_named(tmp_path, tiny):
    (tmp_path / "file").touch()
    directory = tmp_path / "file" / "run"
    message = refuse(directory, *tiny, ranks=2)
    assert message.startswith("cannot write to ") and f"--checkpoint-dir {directory} (" in message


def test_a_disk_that_is_full_at_the_start_is_named(tmp_path, tiny):
    before = "import errno\nfrom pathlib import Path\ndef full(*_):\n"
    before += "    raise OSError(errno.ENOSPC, 'No space left')\nPath.write_text = full\n"
    message = refuse(tmp_path / "run", *tiny, before=before)
    assert message.startswith("cannot write to ") and "No space left" in message


@pytest.fixture(scope="module")
def one_epoch(tmp_path_factory, tiny):
    return train(tmp_path_factory.mktemp("one epoch") / "checkpoints", 1, *tiny, "--epochs=1")


@pytest.fixture
def finished(one_epoch):
    """A finished run in which nothing may change except the lock, which names its owner."""

    def content() -> dict:
        files = (path for path in one_epoch.directory.iterdir() if path.name != "lock")
        return {path.name: path.read_bytes() for path in files}

    before = content()
    yield one_epoch.directory
    assert content() == before, "a refused launch should overwrite nothing"


CHANGES = {
    "--seed=7": "seed 42 -> 7",
    "--batch-size=4": "batch_size 8 -> 4",
    "--global-batch-size=16": "global_batch_size 8 -> 16",
    "--optimizer=adamw": "optimizer sgd -> adamw",
    "--dataset=mnist_sample": "dataset mnist -> mnist_sample",
}


def test_what_makes_a_run_this_run_cannot_be_changed_in_a_named_directory_either(finished, tiny):
    message = refuse(finished, *tiny, *CHANGES, "--lr=0.5")
    assert message.startswith("the options of this run have changed (")
    for change in [*CHANGES.values(), "lr 0.05 -> 0.5"]:
        assert change in message
    assert message.endswith(", seed, spec, task cannot change")


def in_default_directory(finished, *options):
    """A launch without --checkpoint-dir, where the default one has a run."""
    there = f"import os; os.chdir({str(finished.parent)!r})"
    env = {"RANK": None, "WORLD_SIZE": None}
    return run_ranks(1, PLAIN[1], *options, before=there, env=lambda _: env, directory=finished)


def test_a_second_experiment_without_a_directory_of_its_own_is_refused(finished, tiny):
    message = sentence_of(in_default_directory(finished, *tiny, "--epochs=1", "--lr=0.5"))
    assert "(lr 0.05 -> 0.5): set another --checkpoint-dir for a new one, or " in message


def test_the_same_command_without_a_directory_continues_its_run(one_epoch, tiny):
    more = ["--epochs=1", "--log-every-steps=3", "--keep=9"]  # may change at any time
    again = in_default_directory(one_epoch.directory, *tiny, *more)
    assert again.codes == [0] and "Finished at step 26 of 26" in again.out[0]


def test_a_checkpoint_of_other_data_of_the_same_kind_is_refused(finished, tmp_path):
    other = write_mnist(tmp_path / "other", train=99, test=9)
    message = refuse(finished, "--dataset=mnist", f"--data-dir={other}", "--batch-size=8")
    assert "samples 203 -> 99" in message and message.endswith(" cannot change")


OTHER_TASK = """if True:
    import train_distributed as trainer

    class Other(trainer.Task):
        def data(self, cfg):
            sets = super().data(cfg)
            self.spec = {"classes": list("abcdefghij")}
            return sets

    Other.__name__ = {name!r}
    task = Other()
"""


@pytest.mark.parametrize(
    ("name", "expected"), [("Other", "task Task -> Other"), ("Task", "spec {'classes': ['0', ")]
)
def test_a_checkpoint_of_another_task_or_of_other_classes_is_refused(
    finished, tiny, name, expected
):
    before = OTHER_TASK.replace("{name!r}", repr(name))
    message = refuse(finished, *tiny, before=before)
    assert f"have changed ({expected}" in message


@pytest.mark.parametrize("option", ["--resume={}", "--init={}"])
def test_a_directory_with_checkpoints_is_not_given_another_beginning(
    tmp_path, finished, tiny, option
):
    """Before, --resume FILE was ignored in silence there."""
    file = tmp_path / "checkpoint_epoch_1.pt"
    file.write_bytes((finished / "checkpoint_epoch_1.pt").read_bytes())
    option = option.format(file)
    message = refuse(finished, *tiny, option)
    text = f"{option.replace('=', ' ')}, but {finished} has a run of its own"
    assert message == f"{text}: set another --checkpoint-dir"


@pytest.mark.parametrize("content", ["missing", "text", "pickle", "old version"])
def test_a_foreign_checkpoint_is_refused_and_not_executed(tmp_path, tiny, content):
    foreign, canary = tmp_path / "foreign.pt", tmp_path / "canary"
    if content == "text":
        foreign.write_text("not a checkpoint")
    elif content == "old version":
        torch.save({"format": 8, "progress": {"global_step": 3}, "model": {}}, foreign)
    elif content == "pickle":

        class Evil:
            def __reduce__(self):
                return os.mkdir, (str(canary),)

        torch.save(Evil(), foreign)
    message = refuse(tmp_path / "r", *tiny, f"--resume={foreign}")
    assert str(foreign) in message and not canary.exists()
    assert ("of another version of the trainer" in message) == (content != "missing")


def test_missing_data_without_a_network_is_named(tmp_path):
    # Use a proxy that does not exist, so that there is no network.
    offline = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    options = ["--dataset=mnist", f"--data-dir={tmp_path / 'nothing'}"]
    message = refuse(tmp_path / "r", *options, ranks=2, env=offline)
    assert message.startswith(f"cannot read MNIST in {tmp_path}/nothing: is --data-dir right? (")


def test_damaged_data_is_named(tmp_path):
    root = write_mnist(tmp_path / "half", train=203, test=103)
    images = root / "MNIST/raw/train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-100])
    message = refuse(tmp_path / "r", "--dataset=mnist", f"--data-dir={root}")
    assert message.startswith(f"cannot read MNIST in {root}: ")


def test_another_launch_than_asked_for_is_refused(tmp_path, tiny):
    for option in ("--nodes=2", "--gpus-per-node=4"):
        message = refuse(tmp_path / "run", *tiny, option, ranks=2)
        text = "--nodes or --gpus-per-node: this launch has 1 x 2 ranks: the launcher sets "
        assert message == text + "their number (torchrun: --nproc-per-node)"
    if not torch.cuda.is_available():
        message = refuse(tmp_path / "run", *tiny, "--distributed-backend=nccl", ranks=2)
        expected = "--distributed-backend nccl needs GPUs, and PyTorch finds none: use gloo"
        assert message == expected


def test_a_mistyped_option_is_one_sentence_on_the_command_line(tmp_path):
    command = [*TORCHRUN, REPO / "train_distributed.py", "--bacth-size=8"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert result.returncode == 1  # torchrun's
    error = "unrecognized arguments: --bacth-size=8, did you mean --batch-size?"
    printed = result.stderr.count(f"train_distributed.py: error: {error}\n")
    assert printed in (1, 2)  # rank 1 waits some seconds for rank 0
    assert result.stdout == "" and result.stderr.count("Error: ") <= 1  # torchrun's own
    assert list(tmp_path.iterdir()) == []


def test_an_own_script_shows_its_name_and_docstring(tmp_path):
    script = tmp_path / "my_train.py"
    script.write_text('"""Train my network."""\nfrom train_distributed import main\nmain()\n')
    env = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}

    def run(option: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(REPO / "scripts/guard.py"), str(script), option]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)

    printed = run("--help").stdout
    assert printed.startswith("usage: my_train.py ") and "\nTrain my network.\n" in printed
    assert run("--epochs=0").stderr.startswith("my_train.py: error: argument --epochs: ")
