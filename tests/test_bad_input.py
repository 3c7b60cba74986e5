"""Mistakes: one sentence that names them and the remedy, exit code 2, nothing written over."""

import json
import subprocess
import sys

import pytest
import torch
from harness import REPO, launch, train, write_mnist


def refuse(directory, *options, ranks=1, **more) -> str:
    """The one sentence that a launch ends with."""
    result = launch(directory, ranks, *options, **more)
    assert result.codes == [2] * ranks, "\n".join(result.out + result.err)
    lines = [line for err in result.err for line in err.splitlines() if "WARNING" not in line]
    assert len(lines) == 1, f"not one sentence: {lines}"
    assert lines[0].startswith("train_distributed.py: error: ")
    return lines[0].removeprefix("train_distributed.py: error: ")


def config(tmp_path, text: str) -> str:
    (tmp_path / "my config.yaml").write_text(text)
    return f"--config={tmp_path / 'my config.yaml'}"


def test_unknown_option_is_named_with_the_nearest(tmp_path):
    assert "unknown option --epoch, did you mean --epochs?" in refuse(tmp_path / "r", "--epoch=3")


@pytest.mark.parametrize(
    "option",
    ["--epochs=three", "--epochs=0", "--dropout=1.5", "--amp=int4", "--keep=-1", "--seed=-1"]
    + ["--num-workers=-1", "--lr=-1", "--lr=inf", "--clip-grad-norm=-1", "--init-timeout=1e300"]
    + ["--collective-timeout=0", "--seed=99999999999999999999"],
)
def test_value_of_the_wrong_type_is_named(tmp_path, option):
    name, value = option.split("=")
    message = refuse(tmp_path / "r", option)
    assert name in message and value in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("epoch: 3", "my config.yaml: unknown option --epoch, did you mean --epochs?"),
        ("epochs: three", "--epochs: 'three' is not a whole number from 1 up"),
        ("augment: maybe", "augment: 'maybe' is neither true nor false"),
        ("training: {epochs: 3}", "should hold lines like `epochs: 5`"),
        ("- epochs", "should hold lines like `epochs: 5`"),
        ("epochs: [3", "my config.yaml: while parsing"),
        ("help: true", "help"),
    ],
)
def test_mistake_in_a_config_file_names_file_and_key(tmp_path, text, expected):
    assert expected in refuse(tmp_path / "r", config(tmp_path, text))


def test_missing_config_file(tmp_path):
    assert "cannot read --config absent.yaml: No such file" in refuse(
        tmp_path / "r", "--config=absent.yaml"
    )


def test_yaml_tags_are_not_executed(tmp_path):
    canary = tmp_path / "canary"
    refuse(tmp_path / "r", config(tmp_path, f"seed: !!python/object/apply:os.mkdir ['{canary}']"))
    assert not canary.exists()


def test_batch_equation_must_hold(tmp_path, tiny):
    message = refuse(tmp_path / "r", *tiny, "--global-batch-size=20", ranks=2)
    assert message == "global batch size 20 is no multiple of batch size 8"
    message = refuse(tmp_path / "r", *tiny, "--global-batch-size=16", ranks=3)
    assert "global batch size 16 is 2 micro-batches of 8 for 3 ranks" in message
    message = refuse(tmp_path / "r", *tiny, "--global-batch-size=400", "--drop-last")
    assert "203 training samples do not fill a global batch of 400" in message


def test_unknown_model_and_images_it_cannot_take(tmp_path, tiny):
    assert "did you mean resnet50?" in refuse(tmp_path / "r", *tiny, "--model=resnet_50")
    message = refuse(tmp_path / "r", *tiny, "--model=alexnet")
    small = launch(tmp_path / "r", 1, *tiny, "--image-size=4")
    assert small.codes == [2]
    assert "simple_convnet cannot train on 3 images of 4 pixels" in small.err[0].splitlines()[-1]
    assert "alexnet cannot train on 3 images of 28 pixels" in message and "--image-size" in message


def test_batch_norm_cannot_train_on_one_image(tmp_path, tiny):
    message = refuse(tmp_path / "r", *tiny, "--model=resnet18", "--batch-size=101")
    assert "resnet18 cannot train on 1 image of 28 pixels (Expected more than 1 value" in message
    assert "--drop-last" in message
    train(tmp_path / "r", 1, *tiny, "--model=resnet18", "--batch-size=101", "--drop-last")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu(tmp_path, tiny):
    message = refuse(tmp_path / "r", *tiny, "--distributed-backend=nccl", ranks=2)
    assert "shows no GPU, which nccl needs" in message


def test_fp16_on_a_cpu(tmp_path, tiny):
    assert refuse(tmp_path / "r", *tiny, "--amp=fp16") == "--amp fp16 needs a GPU: use --amp bf16"


def test_run_directory_that_cannot_be_written(tmp_path, tiny):
    (tmp_path / "file").write_text("")
    message = refuse(tmp_path / "file" / "run", *tiny, ranks=2)
    assert message.startswith(f"cannot write to --checkpoint-dir {tmp_path / 'file' / 'run'}: ")


@pytest.fixture
def finished(tmp_path, tiny):
    """A finished run, and a function that tells whether anything in it was touched."""
    run = train(tmp_path / "finished", 1, *tiny, "--epochs=1")

    def content() -> dict:
        return {path.name: path.read_bytes() for path in run.directory.iterdir() if path.is_file()}

    before = content()
    yield run.directory
    assert content() == before, "a refused launch should write over nothing"


def test_checkpoint_of_another_model(finished, tiny):
    message = refuse(finished, *tiny, "--model=resnet18", "--image-size=32", ranks=2)
    assert "was trained with --model simple_convnet, this is resnet18" in message


def test_checkpoint_of_the_same_model_in_another_size(finished, tiny):
    message = refuse(finished, *tiny, "--image-size=32", "--epochs=2")
    assert "the checkpoint is of another simple_convnet: " in message
    assert "size mismatch for fc1.weight" in message


def test_checkpoint_of_other_data(finished, tmp_path, tiny):
    assert "was trained with --dataset mnist" in refuse(finished, "--dataset=mnist_sample")
    other = write_mnist(tmp_path / "other", train=99, test=9)
    message = refuse(finished, "--dataset=mnist", f"--data-dir={other}", "--batch-size=8")
    assert message == "203 samples in the checkpoint, 99 in the data"


def test_checkpoint_of_another_optimizer(finished, tiny):
    assert "was trained with --optimizer sgd" in refuse(finished, *tiny, "--optimizer=adamw")


def test_resume_none_refuses_a_directory_in_use(finished, tiny):
    message = refuse(finished, *tiny, "--resume=none")
    assert message == f"{finished} is not empty: take another, or --overwrite the run in it"


def test_override_within_an_epoch(tmp_path, tiny):
    file = train(tmp_path / "r", 1, *tiny, "--stop-at-step=3").directory / "checkpoint_step_3.pt"
    message = refuse(tmp_path / "s", *tiny, "--override", "--seed=7", f"--resume={file}")
    assert "seed may change between epochs only" in message
    message = refuse(tmp_path / "r", *tiny, "--override", "--seed=7")
    assert message == "--override goes with --resume FILE and another --checkpoint-dir"
    message = refuse(tmp_path / "r", *tiny, "--override", "--seed=7", f"--resume={file}")
    assert message == "with another seed, take another --checkpoint-dir"


def test_steps_of_another_size_do_not_mix_in_a_directory(tmp_path, tiny):
    train(tmp_path / "r", 1, *tiny, "--epochs=1")
    message = refuse(tmp_path / "r", *tiny, "--epochs=2", "--drop-last")
    assert message == "with another steps_per_epoch, take another --checkpoint-dir"


def test_a_run_directory_that_is_a_file(tmp_path, tiny):
    (tmp_path / "r").touch()
    message = refuse(tmp_path / "r", *tiny)
    assert message == f"cannot write to --checkpoint-dir {tmp_path / 'r'}: it is a file"


def test_cuda_graphs_on_two_ranks(tmp_path, tiny):
    message = refuse(tmp_path / "r", *tiny, "--cuda-graphs", ranks=2)
    assert message == "--cuda-graphs is for one rank without --reproducible: use --compile"


@pytest.mark.parametrize("name", ["nobody.invalid", "no..body"])
def test_a_master_that_nobody_knows(tmp_path, tiny, name):
    unknown = {"MASTER_ADDR": name}
    message = refuse(tmp_path / "r", *tiny, "--init-timeout=3", ranks=2, env=unknown)
    assert f"master {name} is unknown on " in message
    assert message.endswith("set MASTER_ADDR to an address of rank 0's host")


def test_missing_checkpoint(tmp_path, tiny):
    message = refuse(tmp_path / "r", *tiny, "--resume=absent.pt", ranks=2)
    assert (
        message == "--resume absent.pt: there is no such file; give a checkpoint_*.pt, auto or none"
    )


@pytest.mark.parametrize("content", ["text", "other dict", "pickle"])
def test_foreign_checkpoint(tmp_path, tiny, content):
    foreign, canary = tmp_path / "foreign.pt", tmp_path / "canary"
    if content == "text":
        foreign.write_text("not a checkpoint")
    elif content == "other dict":
        torch.save({"model": {}}, foreign)
    else:

        class Evil:
            def __reduce__(self):
                import os

                return os.mkdir, (str(canary),)

        torch.save(Evil(), foreign)
    message = refuse(tmp_path / "r", *tiny, f"--resume={foreign}")
    assert message in (
        f"{foreign} is no checkpoint, or damaged (UnpicklingError)",
        f"{foreign} is no checkpoint of this trainer (train_distributed 2)",
    )
    assert not canary.exists()


def test_data_that_is_missing_where_there_is_no_network(tmp_path):
    # Whatever network there is, ask a proxy that nobody runs.
    offline = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    options = ["--dataset=mnist", f"--data-dir={tmp_path / 'nothing'}"]
    message = refuse(tmp_path / "r", *options, ranks=2, env=offline)
    assert f"{tmp_path}/nothing/MNIST cannot be had; where" in message
    assert "copy it to" in message


def test_damaged_data_is_named(tmp_path):
    root = write_mnist(tmp_path / "half", train=203, test=103)
    images = root / "MNIST/raw/train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-100])
    message = refuse(tmp_path / "r", "--dataset=mnist", f"--data-dir={root}", ranks=2)
    assert f"{root}/MNIST is damaged: delete it" in message


def test_missing_package_for_an_option(tmp_path, tiny):
    hide = "import sys; sys.modules['tensorboard'] = sys.modules['wandb'] = None"
    for package in ("tensorboard", "wandb"):
        message = refuse(tmp_path / package, *tiny, f"--{package}", ranks=2, before=hide)
        assert message == f"--{package} needs one more package: pip install {package}"


def test_a_typing_error_through_the_real_command(tmp_path):
    command = [sys.executable, REPO / "train_distributed.py", "--bacth-size=8"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == (
        "train_distributed.py: error: unknown option --bacth-size, did you mean --batch-size? "
        "(--help lists the options)\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", ["checkpoint_epoch_2.pt", "config.yaml"])
def test_a_full_disk_is_named_and_older_checkpoints_stay(tmp_path, tiny, file):
    run = train(tmp_path / "r", 1, *tiny, "--epochs=1").directory
    # A limit on file sizes, because it needs no mount: the errno is another, the way is the same.
    size = {"checkpoint_epoch_2.pt": 1000000, "config.yaml": 800}
    limit = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size[file]}, {size[file]}))"
    )
    message = refuse(run, *tiny, "--epochs=2", before=limit)
    expected = (
        f"cannot write {run / file} ([Errno 27] File too large): older checkpoints are intact"
    )
    assert message == expected
    assert not list(run.glob(".*.tmp"))
    state = json.loads((run / "status.json").read_text())["state"]
    assert state == ("finished" if file == "config.yaml" else "failed")
    assert "Resuming from" in train(run, 1, *tiny, "--epochs=2").out[0]
