"""User errors: one sentence with the value and the remedy, exit code 2, nothing overwritten."""

import os
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch
from harness import NO_LAUNCHER, REPO, launch, run_ranks, train, write_mnist

import train_distributed as trainer
from train_distributed import Task, UserError, parse_config


def refuse(directory, *options, ranks=1, **more) -> str:
    """The one sentence that a launch ends with."""
    result = launch(directory, ranks, *options, **more)
    assert result.codes[0] == 2, "\n".join(result.out + result.err)
    assert set(result.codes) <= {2, 1, -signal.SIGTERM}
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
    with mock.patch("fcntl.flock"), pytest.raises(SystemExit) as ended:  # held until a process ends
        trainer.main(task, [f"--checkpoint-dir={directory}", *options])
    assert ended.value.code == 2
    return only_error(capfd.readouterr().err)


ON_COMMAND_LINE = ["--epoch=3", "--epochs=three", "--keep=1.5", "--lr=x", "--amp=int4", "word"]


@pytest.mark.parametrize("option", ON_COMMAND_LINE)
def test_an_unknown_option_or_a_wrong_value_is_named(capsys, option):
    with pytest.raises(SystemExit) as ended:
        parse_config([option])
    error = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and option.split("=")[0] in error


# What the file has, and what is named.
IN_FILES = {
    "batch_sise: 3": "--batch-sise",
    "epochs: three": "--epochs",
    "epochs: [3, 4]": "4",
    "compile: maybe": "--compile",
    "- epochs": "options.yaml",
    "lr: 1\n  epochs: 3": "options.yaml",
    "seed: !!python/object/apply:os._exit [x]": "--seed",  # not executed
    None: "options.yaml",
}


@pytest.mark.parametrize(("text", "expected"), IN_FILES.items())
def test_a_mistake_in_a_config_file_is_named(tmp_path, capsys, text, expected):
    file = tmp_path / "options.yaml"
    if text:
        file.write_text(text)
    try:
        with pytest.raises(SystemExit) as ended:
            parse_config([f"--config={file}"])
        error = capsys.readouterr().err.splitlines()[-1]
        assert ended.value.code == 2 and expected in error and str(file) in error
    except UserError as error:
        assert expected in str(error)


@pytest.mark.parametrize(("batch", "ranks"), [(20, 2), (16, 3), (208, 1)])
def test_the_global_batch_must_be_micro_batches_for_all_ranks(batch, ranks):
    cfg = parse_config(["--batch-size=8", f"--global-batch-size={batch}"])
    data = trainer.DataSets(range(203), None, None)
    with pytest.raises(UserError) as refused:
        trainer.settle_options(cfg, trainer.World(0, ranks), data, None)
    assert f"{batch} " in str(refused.value) and f"{8 * ranks} " in str(refused.value)


@pytest.mark.parametrize("length", ["--epochs=0", "--epochs=-1", "--total-steps=-3"])
def test_a_run_has_at_least_one_step(length):
    data = trainer.DataSets(range(203), None, None)
    with pytest.raises(UserError, match="--epochs or --total-steps"):
        trainer.settle_options(parse_config([length]), trainer.World(), data, None)


@pytest.mark.parametrize("directory", ["file/run", "s3://bucket"])
def test_a_run_directory_that_cannot_be_written_is_named(tmp_path, tiny, directory):
    (tmp_path / "file").touch()
    there = directory if "://" in directory else tmp_path / directory
    assert f"--checkpoint-dir {there} " in refuse(there, *tiny, ranks=2)


@pytest.fixture(scope="module")
def one_epoch(tmp_path_factory, tiny):
    return train(tmp_path_factory.mktemp("one epoch") / "run", 1, *tiny, "--epochs=1")


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


def test_what_makes_a_run_this_run_cannot_be_changed(finished, tiny, capfd):
    message = refuse_here(capfd, finished, *tiny, *CHANGES)
    for change in CHANGES.values():
        assert change in message


class Other(Task):
    def data(self, cfg):
        sets = super().data(cfg)
        self.spec = {"classes": list("abcdefghij")}
        return sets


def test_a_checkpoint_of_other_data_or_of_another_task_is_refused(finished, tiny, tmp_path, capfd):
    other = write_mnist(tmp_path / "other", train=99, test=9)
    options = ["--dataset=mnist", f"--data-dir={other}", "--batch-size=8"]
    assert "samples 203 -> 99" in refuse_here(capfd, finished, *options)
    for name, expected in (("Other", "task Task -> Other"), ("Task", "spec {'classes': ['0', ")):
        task = type(name, (Other,), {})()
        assert expected in refuse_here(capfd, finished, *tiny, task=task)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("option", ["--resume", "--evaluate", "--init"])
def test_a_file_that_is_no_checkpoint_is_refused_and_not_executed(tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "foreign.pt"
    for content in (None, b"not a checkpoint", Evil(), {"model": {}, "step": 3}):
        if isinstance(content, bytes):
            file.write_bytes(content)
        elif content:
            torch.save(content, file)
        run = launch(tmp_path / "run", 1, "--batch-size=8", f"{option}={file}")
        assert run.codes == [2] and not run.saved() and not Path("executed").exists()
        assert str(file) in only_error(run.err[0])


def test_damaged_data_is_named(tmp_path):
    root = write_mnist(tmp_path / "half", train=203, test=103)
    images = root / "MNIST/raw/train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-100])
    with pytest.raises(UserError, match=str(root)):
        Task().data(parse_config(["--dataset=mnist", f"--data-dir={root}"]))


@pytest.mark.parametrize("option", ["--nodes=2", "--gpus-per-node=4"])
def test_another_launch_than_asked_for_is_refused(monkeypatch, option):
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="1 x 2 ranks"):
        trainer.setup_distributed(parse_config([option]))


def test_an_own_script_shows_its_name_and_docstring(tmp_path):
    script = tmp_path / "my_train.py"
    script.write_text('"""Train my network."""\nfrom train_distributed import main\nmain()\n')

    def run(option: str):
        return run_ranks(1, REPO / "scripts/guard.py", script, option, env=lambda _: NO_LAUNCHER)

    (printed,) = run("--help").out
    assert printed.startswith("usage: my_train.py ") and "\nTrain my network.\n" in printed
    (error,) = run("--epochs=x").err
    assert "my_train.py: error: argument --epochs: " in error


def test_a_checkpoint_dir_that_the_ranks_do_not_share_is_refused(tmp_path, tiny):
    """Else the next job would begin anew where rank 0 is on another node."""
    (tmp_path / "0").mkdir()
    before = f"import os\nos.chdir({str(tmp_path)!r} + '/0' * (os.environ['RANK'] == '0'))"
    message = refuse("run", *tiny, ranks=2, before=before)
    assert "--checkpoint-dir must be shared" in message and not list(tmp_path.glob("0/run/*.pt"))
