"""User errors: one sentence with the value and the remedy, exit code 2, nothing overwritten."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import REPO, TORCHRUN, launch, train, write_mnist

import train_distributed


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
        (
            "epochs: three",
            "my config.yaml: argument --epochs: three is not a whole number from 1 to 1e+09",
        ),
        ("compile: maybe", "my config.yaml: argument --compile"),
        ("training: {epochs: 3}", "my config.yaml: training should have a single value; it needs"),
        ("epochs: [3, 4]", "my config.yaml: unrecognized arguments: 4"),
        ("epochs: 3\nlr: 1\nepochs: 4", "my config.yaml: epochs is there twice"),
        ("- epochs", "my config.yaml: it needs lines like `epochs: 5`"),
        (
            "lr: 1\n  epochs: 3",
            "my config.yaml: line 2: it needs lines like `epochs: 5` (mapping values are not",
        ),
    ],
)
def test_a_mistake_in_a_config_file_names_file_and_key(tmp_path, text, expected):
    assert expected in refuse(tmp_path / "r", config(tmp_path, text))


def test_a_missing_config_file_is_named(tmp_path):
    message = refuse(tmp_path / "r", "--config=absent.yaml")
    assert message == f"absent.yaml: there is no file {Path.cwd()}/absent.yaml"


def test_a_directory_is_no_config_file(tmp_path):
    message = refuse(tmp_path / "r", f"--config={tmp_path}")
    assert message == f"{tmp_path}: it is not a file"


def test_yaml_tags_are_not_executed(tmp_path):
    canary = tmp_path / "canary"
    refuse(tmp_path / "r", config(tmp_path, f"seed: !!python/object/apply:os.mkdir ['{canary}']"))
    assert not canary.exists()


@pytest.mark.parametrize(
    ("batch", "ranks", "remedy"),
    [
        (20, 2, "set --batch-size to 5"),
        (16, 3, "set --batch-size to 4"),
        (2, 3, "use at most 2 ranks"),
    ],
)
def test_the_global_batch_must_be_micro_batches_for_all_ranks(tmp_path, tiny, batch, ranks, remedy):
    message = refuse(tmp_path / "r", *tiny, f"--global-batch-size={batch}", ranks=ranks)
    assert message == (
        f"a batch of {batch} cannot be divided into micro-batches of 8, at least one per rank "
        f"(ranks: {ranks}): {remedy}, or choose another --checkpoint-dir for another global batch"
    )


def test_an_unknown_model_is_named(tmp_path, tiny):
    message = refuse(tmp_path / "r", *tiny, "--model=resnet_50")
    expected = "--model resnet_50 is not a classifier in torchvision.models"
    assert message == f"{expected}, did you mean resnet50?"


def test_a_run_directory_that_cannot_be_written_is_named(tmp_path, tiny):
    (tmp_path / "file").touch()
    for directory, ranks in ((tmp_path / "file" / "run", 2), (tmp_path / "file", 1)):
        message = refuse(directory, *tiny, ranks=ranks)
        assert message.startswith(
            f"cannot write to or lock --checkpoint-dir {directory}: choose another one ("
        )


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


REMEDY = ": choose another --checkpoint-dir"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--model=resnet18", "--image-size=32"],
            "the checkpoint is of another model: its bn1.bias is absent, here [64]",
        ),
        (
            ["--image-size=32", "--epochs=2"],
            "the checkpoint is of another model: its fc1.weight is [128, 9216], here [128, 12544]",
        ),
        (["--optimizer=adamw"], "the checkpoint has optimizer_class 'SGD', this run has 'AdamW'"),
        (["--dataset=mnist_sample"], "the checkpoint has samples 203, this run has 6000"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_checkpoint_of_another_run_is_refused_with_both_values(finished, tiny, options, expected):
    assert refuse(finished, *tiny, *options) == expected + REMEDY


IDENTITIES = {
    "task": ("Other", "task 'Other', this run has 'Task'"),
    "spec": ({"classes": ["cat"]}, "spec {'classes': ['cat']}, this run has {'classes': ['dog']}"),
    "model_shapes": None,  # in a test of its own
    "samples": (99, "samples 99, this run has 203"),
    "optimizer_class": ("Adam", "optimizer_class 'Adam', this run has 'SGD'"),
    "optimizer_groups": ([1, 1], "optimizer_groups [1, 1], this run has [2]"),
}


@pytest.mark.parametrize("what", [what for what in IDENTITIES if what != "model_shapes"])
def test_each_part_of_the_identity_of_a_run_is_compared(what):
    identity = identity_of(torch.nn.Linear(2, 2))
    train_distributed.check_identity(identity, identity)  # its own is accepted
    theirs, expected = IDENTITIES[what]
    with pytest.raises(train_distributed.UserError) as refused:
        train_distributed.check_identity(identity | {what: theirs}, identity)
    assert str(refused.value) == f"the checkpoint has {expected}{REMEDY}"
    assert IDENTITIES.keys() == identity.keys()


def identity_of(model: torch.nn.Module) -> dict:
    task = train_distributed.Task()
    task.spec = {"classes": ["dog"]}
    optimizer = torch.optim.SGD(model.parameters())
    learner = train_distributed.Learner(model, optimizer, None, model, [])
    return train_distributed.describe_run(task, 203, learner)


def test_a_checkpoint_of_other_parameters_is_refused():
    """Also if it has another number of them: the model is named, not the optimizer's groups."""
    ours = identity_of(torch.nn.Linear(2, 3))
    for theirs, expected in (
        (torch.nn.Linear(2, 4), "its bias is [4], here [3]"),
        (torch.nn.Linear(2, 3, bias=False), "its bias is absent, here [3]"),
        (torch.nn.Sequential(torch.nn.Linear(2, 3)), "its 0.bias is [3], here absent"),
    ):
        with pytest.raises(train_distributed.UserError) as refused:
            train_distributed.check_identity(identity_of(theirs), ours)
        assert str(refused.value) == f"the checkpoint is of another model: {expected}{REMEDY}"


def test_a_checkpoint_of_other_data_of_the_same_kind_is_refused(finished, tmp_path):
    other = write_mnist(tmp_path / "other", train=99, test=9)
    message = refuse(finished, "--dataset=mnist", f"--data-dir={other}", "--batch-size=8")
    assert message == f"the checkpoint has samples 203, this run has 99{REMEDY}"


def test_resume_none_refuses_a_directory_with_checkpoints(finished, tiny):
    message = refuse(finished, *tiny, "--resume=none")
    in_the_way = f"{finished}/checkpoint_epoch_1.pt is in the way of --resume none"
    assert message == f"{in_the_way}: delete or move it"


def test_a_missing_checkpoint_is_named(tmp_path, tiny):
    message = refuse(tmp_path / "r", *tiny, "--resume=absent.pt", ranks=2)
    assert message.startswith("cannot read absent.pt on ")
    assert message.endswith(" (No such file or directory)")


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


def test_out_of_memory_while_loading_is_not_called_damaged(finished, tiny):
    for error in ("MemoryError()", "RuntimeError('DefaultCPUAllocator: can\\'t allocate memory')"):
        full = f"""if True:
            import train_distributed as trainer

            def load(path, mmap=False, inner=trainer.torch.load, **options):
                if not mmap:  # step_of() reads only the step
                    raise {error}
                return inner(path, mmap=mmap, **options)

            trainer.torch.load = load
        """
        message = refuse(finished, *tiny, before=full)
        path = f"{finished}/checkpoint_epoch_1.pt on {os.uname().nodename}"
        assert message.startswith(f"not enough memory to load {path} ({error[:11]}")


WRONG_LOSSES = """if True:
    import train_distributed as trainer

    class Wrong(trainer.Task):
        def losses(self, model, batch):
            values = super().losses(model, batch)
            return {}

    task = Wrong()
"""


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("values['loss']", "returned Tensor, but Task.sums names loss, count, correct"),
        ("{'loss': values['loss']}", "returned loss, but Task.sums names loss, count, correct"),
        (
            "values | {'loss': values['loss'].repeat(8)}",
            "returned loss with the shape [8]: return its sum",
        ),
        (
            "values | {'count': int(batch[1].sum())}",
            "counted ",  # 33 items in 8 samples
        ),
    ],
)
def test_losses_that_return_something_else_are_refused(tmp_path, tiny, returned, expected):
    before = WRONG_LOSSES.replace("{}", returned)
    message = refuse(tmp_path / "r", *tiny, before=before)
    assert message.startswith(f"losses() {expected}")
    if expected == "counted ":
        assert message.endswith(" before: always return the count as a tensor if it varies")


SOMETIMES_A_TENSOR = """if True:
    import torch
    import train_distributed as trainer

    class Mixed(trainer.Task):
        calls = 0

        def losses(self, model, batch):
            values = super().losses(model, batch)
            self.calls += 1
            if self.calls > 3:
                values["count"] = torch.tensor(8)
            return values

    task = Mixed()
"""


def test_a_count_that_is_only_sometimes_a_tensor_is_refused(tmp_path, tiny):
    message = refuse(tmp_path / "r", *tiny, before=SOMETIMES_A_TENSOR)
    expected = "losses() counted varying items per sample, 1.0 before: always return the count as a"
    assert message == f"{expected} tensor if it varies"


def test_an_image_size_that_is_too_small_is_named(tmp_path, tiny):
    message = refuse(tmp_path / "r", *tiny, "--image-size=5")
    assert message == "--image-size 5 is too small for simple_convnet: at least 6"


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
    expected = "--distributed-backend nccl needs GPUs, and PyTorch finds none: use gloo"
    assert message == expected


def test_another_number_of_nodes_or_ranks_than_asked_for_is_refused(tmp_path, tiny):
    for option in ("--nodes=2", "--gpus-per-node=4"):
        message = refuse(tmp_path / "run", *tiny, option, ranks=2)
        assert message == "--nodes or --gpus-per-node: this launch has 1 x 2 ranks"


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
    assert run("--epochs=0").stderr.startswith("my_train.py: error: argument --epochs: 0 is not")


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


def test_an_error_of_the_disk_is_not_called_damaged(tmp_path, monkeypatch):
    """The next restart would otherwise go on from an older checkpoint."""
    path = tmp_path / "checkpoint_epoch_1.pt"
    torch.save({"name": "x"}, path)

    def fail(self):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("zipfile.ZipFile.testzip", fail)
    with pytest.raises(train_distributed.UserError, match="^cannot read ") as refused:
        train_distributed.load_checkpoint(path)
    assert refused.value.cause == "disk"


def test_sync_batchnorm_needs_a_task_with_equal_shares():
    class Synced(train_distributed.Task):
        spec = {"classes": ["a", "b"]}

        def model(self, cfg):
            return torch.nn.SyncBatchNorm(2)

    cfg = train_distributed.parse_config([])
    two_ranks = train_distributed.World(0, 2)
    with pytest.raises(train_distributed.UserError, match="set across_ranks = True in your task"):
        train_distributed.build_learner(Synced(), cfg, two_ranks)
    Synced.across_ranks = True
    train_distributed.build_learner(Synced(), cfg, two_ranks)


DATA_FAILS_ON_RANK_0 = """if True:
    import os, time
    from multiprocessing.util import Finalize
    import train_distributed as trainer

    class Failing(trainer.Task):
        def data(self, cfg):
            if os.environ["RANK"] == "0":
                # This process ends later than rank 1, which is told, and does not see it.
                Finalize(None, time.sleep, [5], exitpriority=0)
                raise KeyError("no such column")
            return super().data(cfg)

    task = Failing()
"""


@pytest.mark.long
def test_an_exception_on_rank_0_alone_ends_the_other_ranks_too(tmp_path, tiny):
    run = launch(tmp_path / "run", 2, *tiny, before=DATA_FAILS_ON_RANK_0)
    assert (run.codes[1], run.err[1]) == (2, "")
