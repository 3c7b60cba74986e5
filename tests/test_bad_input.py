"""User errors: one sentence with the value and the remedy, exit code 2, nothing overwritten."""

import os
import signal
from pathlib import Path

import pytest
import torch
from harness import NO_LAUNCHER, PLAIN, REPO, launch, run_ranks, train, write_mnist

import train_distributed
from train_distributed import Task, UserError, World, parse_config


def refuse(directory, *options, ranks=1, **more) -> str:
    """The one sentence that a launch ends with."""
    return sentence_of(launch(directory, ranks, *options, **more))


def sentence_of(result) -> str:
    assert result.codes[0] == 2, "\n".join(result.out + result.err)
    assert set(result.codes) <= {2, -signal.SIGTERM}
    return only_error("".join(result.err))


def only_error(text: str) -> str:
    """The sentence, which is the only line of stderr that is no warning."""
    lines = [line for line in text.splitlines() if "WARNING" not in line]
    assert len(lines) == 1, f"not one sentence: {lines}"
    name, sentence = lines[0].split(": error: ", maxsplit=1)
    assert " " not in name
    return sentence


def refuse_here(capfd, directory, *options, task=None) -> str:
    """Like refuse(), in this process, which is faster."""
    with pytest.raises(SystemExit) as ended:
        train_distributed.main(task, [f"--checkpoint-dir={directory}", *options])
    assert ended.value.code == 2
    return only_error(capfd.readouterr().err)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--epoch=3", "--epoch=3, did you mean --epochs?"),
        ("--epochs=three", "--epochs: 'three' is not of type "),
        ("--epochs=0", "--epochs: '0' is not of type "),
        ("--keep=0", "--keep: '0' is not of type "),
        ("--seed=99999999999999999999", "--seed: "),
        ("--hang-timeout=9999999999", "--hang-timeout: "),
        ("--lr=-1", "--lr: '-1' is not of type "),
        ("--dropout=2", "--dropout: '2' is not of type "),
        ("--lr=nan", "--lr: 'nan' is not of type "),
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
            "options.yaml, epochs: argument --epochs: 'three' is not of type ",
        ),
        ("epochs: [3, 4]", "options.yaml, epochs: it takes one value, not list of 2"),
        ("epochs: {a: 3}", "options.yaml, epochs: it takes one value, not dict"),
        ("keep: [3]", "options.yaml, keep: it takes one value, not list of 1"),
        ("epochs: 2024-13-45", "cannot read --config "),
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


@pytest.mark.parametrize(("batch", "ranks"), [(20, 2), (16, 3), (208, 1)])
def test_the_global_batch_must_be_micro_batches_for_all_ranks(batch, ranks):
    cfg = parse_config(["--batch-size=8", f"--global-batch-size={batch}"])
    with pytest.raises(UserError) as refused:
        train_distributed.SampleStream(Task(), cfg, World(0, ranks), range(203))
    message = str(refused.value)
    assert f"a global batch of {batch} samples does not fit" in message
    assert f"multiple of --batch-size 8, from {8 * ranks} (for {ranks} ranks) to 200" in message
    cfg.batch_size = 204
    with pytest.raises(UserError, match="204 is more than the 203 samples"):
        train_distributed.SampleStream(Task(), cfg, World(0, ranks), range(203))


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


def test_what_makes_a_run_this_run_cannot_be_changed_in_a_named_directory_either(
    finished, tiny, capfd
):
    message = refuse_here(capfd, finished, *tiny, *CHANGES, "--lr=0.5")
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


def test_a_checkpoint_of_other_data_of_the_same_kind_is_refused(finished, tmp_path, capfd):
    other = write_mnist(tmp_path / "other", train=99, test=9)
    options = ["--dataset=mnist", f"--data-dir={other}", "--batch-size=8"]
    message = refuse_here(capfd, finished, *options)
    assert "samples 203 -> 99" in message and message.endswith(" cannot change")


class Other(Task):
    def data(self, cfg):
        sets = super().data(cfg)
        self.spec = {"classes": list("abcdefghij")}
        return sets


@pytest.mark.parametrize(
    ("name", "expected"), [("Other", "task Task -> Other"), ("Task", "spec {'classes': ['0', ")]
)
def test_a_checkpoint_of_another_task_or_of_other_classes_is_refused(
    finished, tiny, capfd, name, expected
):
    task = type(name, (Other,), {})()
    assert f"have changed ({expected}" in refuse_here(capfd, finished, *tiny, task=task)


@pytest.mark.parametrize("option", ["--resume", "--init"])
def test_a_directory_with_checkpoints_is_not_given_another_beginning(tmp_path, finished, option):
    """Before, --resume FILE was ignored in silence there."""
    cfg = parse_config([f"{option}={tmp_path}/file.pt", f"--checkpoint-dir={finished}"])
    with pytest.raises(UserError) as refused:
        train_distributed.find_checkpoint(cfg)
    text = f"{option} {tmp_path}/file.pt, but {finished} has a run of its own"
    assert str(refused.value) == f"{text}: set another --checkpoint-dir"


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_a_foreign_checkpoint_is_refused_and_not_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    foreign = tmp_path / "foreign.pt"
    cfg = parse_config([f"--resume={foreign}", f"--checkpoint-dir={tmp_path}"])
    old = {"format": 8, "progress": {"global_step": 3}, "model": {}}
    for content in (None, b"not a checkpoint", Evil(), old):
        if isinstance(content, bytes):
            foreign.write_bytes(content)
        elif content:
            torch.save(content, foreign)
        with pytest.raises(UserError) as refused:
            train_distributed.find_checkpoint(cfg)
        assert str(foreign) in str(refused.value) and not Path("executed").exists()
        is_there = content is not None
        assert ("of another version of the trainer" in str(refused.value)) == is_there


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
    with pytest.raises(UserError, match=f"^cannot read MNIST in {root}: "):
        Task().data(parse_config(["--dataset=mnist", f"--data-dir={root}"]))


TWO_RANKS = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
OF_THE_LAUNCHER = "this launch has 1 x 2 ranks: the launcher sets their number"


@pytest.mark.parametrize(
    ("env", "option", "expected"),
    [
        (TWO_RANKS, "--nodes=2", OF_THE_LAUNCHER),
        (TWO_RANKS, "--gpus-per-node=4", OF_THE_LAUNCHER),
        (TWO_RANKS, "--distributed-backend=nccl", "nccl needs GPUs, and PyTorch finds none"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "--epochs=1", "MASTER_ADDR, MASTER_PORT is not set"),
        ({"WORLD_SIZE": "two"}, "--epochs=1", "WORLD_SIZE is 'two'"),
    ],
)
def test_another_launch_than_asked_for_is_refused(monkeypatch, env, option, expected):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=expected):
        train_distributed.setup_distributed(parse_config([option]))


def test_an_own_script_shows_its_name_and_docstring(tmp_path):
    script = tmp_path / "my_train.py"
    script.write_text('"""Train my network."""\nfrom train_distributed import main\nmain()\n')

    def run(option: str):
        return run_ranks(1, REPO / "scripts/guard.py", script, option, env=lambda _: NO_LAUNCHER)

    (printed,) = run("--help").out
    assert printed.startswith("usage: my_train.py ") and "\nTrain my network.\n" in printed
    (error,) = run("--epochs=0").err
    assert error.startswith("my_train.py: error: argument --epochs: ")
