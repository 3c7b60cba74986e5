"""User errors: one sentence with the value and the remedy, exit code 2, nothing overwritten."""

import os
import signal
import subprocess

import pytest
import torch
from harness import PLAIN, REPO, TORCHRUN, launch, train, write_mnist


def refuse(directory, *options, ranks=1, **more) -> str:
    """The one sentence that a launch ends with."""
    result = launch(directory, ranks, *options, **more)
    assert result.codes[0] == 2, "\n".join(result.out + result.err)
    assert set(result.codes) <= {2, -signal.SIGTERM}
    lines = [line for err in result.err for line in err.splitlines() if "WARNING" not in line]
    assert len(lines) == 1, f"not one sentence: {lines}"
    assert lines[0].startswith("train_distributed.py: error: ")
    return lines[0].removeprefix("train_distributed.py: error: ")


def config(tmp_path, text: str) -> str:
    (tmp_path / "my config.yaml").write_text(text)
    return f"--config={tmp_path / 'my config.yaml'}"


def test_an_unknown_option_is_named_with_the_nearest(tmp_path):
    expected = "unrecognized arguments: --epoch=3, did you mean --epochs?"
    assert refuse(tmp_path / "r", "--epoch=3") == expected


@pytest.mark.parametrize(
    "option", ["--epochs=three", "--epochs=0", "--amp=int4", "--keep=-1", "--hang-timeout=0"]
)
def test_a_value_of_the_wrong_type_is_named(tmp_path, option):
    name, value = option.split("=")
    message = refuse(tmp_path / "r", option)
    assert name in message and value in message


@pytest.mark.parametrize(
    "text, expected",
    [
        ("epoch: 3", "my config.yaml: unrecognized arguments: --epoch=3, did you mean --epochs?"),
        ("epochs: three", "my config.yaml: argument --epochs: three is not a positive integer"),
        ("compile: maybe", "my config.yaml: argument --compile"),
        ("training: {epochs: 3}", "my config.yaml: unrecognized arguments: --training="),
        ("- epochs", "my config.yaml: it needs lines like `epochs: 5` ("),
        ("epochs: [3", "my config.yaml: it needs lines like `epochs: 5` ("),
    ],
)
def test_a_mistake_in_a_config_file_names_file_and_key(tmp_path, text, expected):
    assert expected in refuse(tmp_path / "r", config(tmp_path, text))


def test_a_missing_config_file_is_named(tmp_path):
    message = refuse(tmp_path / "r", "--config=absent.yaml")
    assert message.startswith("cannot read absent.yaml: ") and "No such file" in message


def test_yaml_tags_are_not_executed(tmp_path):
    canary = tmp_path / "canary"
    refuse(tmp_path / "r", config(tmp_path, f"seed: !!python/object/apply:os.mkdir ['{canary}']"))
    assert not canary.exists()


def test_the_global_batch_must_be_micro_batches_for_all_ranks(tmp_path, tiny):
    message = refuse(tmp_path / "r", *tiny, "--global-batch-size=20", ranks=2)
    remedy = ": set --batch-size or --checkpoint-dir"
    text = "2 ranks cannot share a batch of 20 in micro-batches of 8"
    assert message == text + remedy
    message = refuse(tmp_path / "r", *tiny, "--global-batch-size=16", ranks=3)
    text = "3 ranks cannot share a batch of 16 in micro-batches of 8"
    assert message == text + remedy


def test_an_unknown_model_is_named(tmp_path, tiny):
    message = refuse(tmp_path / "r", *tiny, "--model=resnet_50")
    assert message == "--model resnet_50 is not a classifier in torchvision.models"


def test_a_run_directory_that_cannot_be_written_is_named(tmp_path, tiny):
    (tmp_path / "file").touch()
    for directory, ranks in ((tmp_path / "file" / "run", 2), (tmp_path / "file", 1)):
        message = refuse(directory, *tiny, ranks=ranks)
        assert message.startswith(f"cannot write to or lock --checkpoint-dir {directory} (")


@pytest.fixture(scope="module")
def one_epoch(tmp_path_factory, tiny):
    return train(tmp_path_factory.mktemp("one epoch") / "run", 1, *tiny, "--epochs=1").directory


@pytest.fixture
def finished(one_epoch):
    """A finished run in which nothing may change except the lock, which names its owner."""

    def content() -> dict:
        files = (path for path in one_epoch.iterdir() if path.name != "lock")
        return {path.name: path.read_bytes() for path in files}

    before = content()
    yield one_epoch
    assert content() == before, "a refused launch should overwrite nothing"


def test_a_checkpoint_of_another_model_is_refused(finished, tiny):
    message = refuse(
        finished, *tiny, "--model=resnet18", "--image-size=32", "--batch-size=4", ranks=2
    )
    expected = "the checkpoint is of simple_convnet, sgd, 203 samples of mnist, this is resnet18, "
    assert message.startswith(expected)


def test_a_checkpoint_of_the_same_model_in_another_size_is_refused(finished, tiny):
    message = refuse(finished, *tiny, "--image-size=32", "--epochs=2")
    assert "the checkpoint is from a different model (" in message
    assert "size mismatch for " in message


def test_a_checkpoint_of_other_data_is_refused(finished, tmp_path, tiny):
    message = refuse(finished, "--dataset=mnist_sample", "--batch-size=8")
    assert "203 samples of mnist, this is simple_convnet, sgd, 6000 samples of mnist_s" in message
    other = write_mnist(tmp_path / "other", train=99, test=9)
    message = refuse(finished, "--dataset=mnist", f"--data-dir={other}", "--batch-size=8")
    assert "203 samples of mnist, this is simple_convnet, sgd, 99 samples of mnist" in message


def test_a_checkpoint_of_another_optimizer_is_refused(finished, tiny):
    message = refuse(finished, *tiny, "--optimizer=adamw")
    assert "is of simple_convnet, sgd, " in message and "this is simple_convnet, adamw, " in message


def test_resume_none_refuses_a_directory_with_checkpoints(finished, tiny):
    message = refuse(finished, *tiny, "--resume=none")
    in_the_way = f"{finished}/checkpoint_epoch_1.pt is in the way of --resume none"
    assert message == f"{in_the_way}: delete or move it"


def test_a_missing_checkpoint_is_named(tmp_path, tiny):
    message = refuse(tmp_path / "r", *tiny, "--resume=absent.pt", ranks=2)
    assert message.startswith("absent.pt on ") and "No such file" in message


@pytest.mark.parametrize("content", ["text", "other dict", "pickle", "old format"])
def test_a_foreign_checkpoint_is_refused_and_not_executed(tmp_path, tiny, content):
    foreign, canary = tmp_path / "foreign.pt", tmp_path / "canary"
    if content == "text":
        foreign.write_text("not a checkpoint")
    elif content == "other dict":
        torch.save({"model": {}}, foreign)
    elif content == "old format":
        torch.save({"format": 2, "progress": {"global_step": 3}, "model": {}}, foreign)
    else:

        class Evil:
            def __reduce__(self):
                return os.mkdir, (str(canary),)

        torch.save(Evil(), foreign)
    message = refuse(tmp_path / "r", *tiny, f"--resume={foreign}")
    where = os.uname().nodename
    assert message.startswith(f"{foreign} on {where} is damaged or not a checkpoint (")
    assert not canary.exists()


def test_a_run_directory_of_the_old_format_is_refused(tmp_path, tiny):
    (tmp_path / "r").mkdir()
    old = {"format": 2, "progress": {"global_step": 3}, "model": {}}
    torch.save(old, tmp_path / "r/checkpoint_step_3.pt")
    message = refuse(tmp_path / "r", *tiny)
    assert message == f"no intact checkpoint in {tmp_path}/r: choose another directory"


def test_missing_data_without_a_network_is_named(tmp_path):
    # Use a proxy that does not exist, so that there is no network.
    offline = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    options = ["--dataset=mnist", f"--data-dir={tmp_path / 'nothing'}"]
    message = refuse(tmp_path / "r", *options, ranks=2, env=offline)
    assert message.startswith(f"cannot read --dataset mnist; is it in {tmp_path}/nothing? (")


def test_damaged_data_is_named(tmp_path):
    root = write_mnist(tmp_path / "half", train=203, test=103)
    images = root / "MNIST/raw/train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-100])
    message = refuse(tmp_path / "r", "--dataset=mnist", f"--data-dir={root}", ranks=2)
    assert message.startswith(f"cannot read --dataset mnist; is it in {root}? (")


def test_a_missing_package_for_an_option_is_named(tmp_path, tiny):
    hide = "import sys; sys.modules['tensorboard'] = sys.modules['wandb'] = None"
    for package in ("tensorboard", "wandb"):
        message = refuse(tmp_path / package, *tiny, f"--{package}", ranks=2, before=hide)
        assert package in message


def test_a_deadline_that_is_not_a_time_is_named(tmp_path, tiny):
    message = refuse(tmp_path / "r", *tiny, ranks=2, env={"DEADLINE": "noon"})
    assert "DEADLINE" in message and "noon" in message and "seconds since 1970" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_nccl_without_gpus_is_named(tmp_path, tiny):
    message = refuse(tmp_path / "r", *tiny, "--distributed-backend=nccl", ranks=2)
    assert message.startswith("cannot join the other ranks; is a GPU or MASTER_ADDR missing? (")


def test_another_number_of_nodes_or_ranks_than_asked_for_is_refused(tmp_path, tiny):
    for option in ("--nodes=2", "--gpus-per-node=4"):
        message = refuse(tmp_path / "run", *tiny, option, ranks=2)
        assert message == "--nodes or --gpus-per-node: this launch has 1 x 2 ranks"


@pytest.mark.parametrize("command", [PLAIN, [*TORCHRUN, REPO / "train_distributed.py"]])
def test_a_mistyped_option_is_one_sentence_on_the_command_line(tmp_path, command):
    command = [*command, "--bacth-size=8"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert result.returncode == (2 if len(command) == 3 else 1)  # torchrun makes it 1
    error = "unrecognized arguments: --bacth-size=8, did you mean --batch-size?"
    printed = result.stderr.count(f"train_distributed.py: error: {error}\n")
    assert printed == 1 or (printed == 2 and len(command) > 3)  # rank 1 waits 2 s for rank 0
    assert result.stdout == "" and result.stderr.count("Error: ") <= 1  # torchrun's own
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", ["checkpoint_epoch_2.pt", "config.yaml"])
def test_a_file_that_cannot_be_written_is_named_and_older_checkpoints_stay(tmp_path, tiny, file):
    few_records = [*tiny, "--log-every-steps=1000"]
    run = train(tmp_path / "r", 1, *few_records, "--epochs=1").directory
    # A limit on file sizes needs no mount. The errno differs, but the code path is the same.
    size = {"checkpoint_epoch_2.pt": 1000000, "config.yaml": 500}
    limit = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size[file]}, {size[file]}))"
    )
    message = refuse(run, *few_records, "--epochs=2", before=limit)
    expected = f"cannot write {run / file}; is the disk full? ([Errno 27] File too large)"
    assert message == expected
    assert not list(run.glob(".*.tmp"))
    assert "Resuming from" in train(run, 1, *tiny, "--epochs=2").out[0]
