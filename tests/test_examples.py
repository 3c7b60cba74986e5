"""The scripts of examples/: each trains, resumes exactly, and reports metrics that are right.

The metrics are compared with a computation in plain PyTorch or NumPy, from the saved weights.
"""

import ast
import importlib
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from harness import NO_LAUNCHER, REPO, Result, assert_same_state, run_ranks
from PIL import Image

from examples import (
    augmentation,
    huggingface,
    image_folder,
    language_model,
    own_model,
    own_script,
    regression,
    segmentation,
    simclr,
    tar_shards,
)
from train_distributed import (
    Task,
    build_parser,
    derive_seed,
    load_model,
    read_mnist,
    seed_generators,
)

NAMES = sorted(path.stem for path in (REPO / "examples").glob("[a-z]*.py"))
NAMES.remove("own_script")  # not a Task: see test_docs.py
TRAIN, TEST = 203, 103  # samples: no multiple of any batch or number of ranks here

# All examples with digits use these few.
FEW_DIGITS = f"""if True:
    import train_distributed

    def few(directory, part, channels, size, inner=train_distributed.read_mnist):
        digits = inner(directory, part, channels, size)
        count = {TRAIN} if part == "train" else {TEST}
        return train_distributed.InMemoryDataset(*(each[:count] for each in digits.tensors))

    train_distributed.read_mnist = few
"""

# PyTorch's kernels for this need a GPU: the same formulas, with a differentiable all_reduce.
SYNC_BATCHNORM_ON_CPU = """if True:
    import torch
    from torch.distributed.nn.functional import all_reduce

    def forward(self, x):
        mean, var = self.running_mean, self.running_var
        if self.training:
            each = [x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), x.new_tensor(x.numel() / len(mean))]
            total = torch.stack([v.expand_as(mean) for v in each])
            if torch.distributed.is_initialized():
                total = all_reduce(total)
            total, squares, count = total
            mean, var = total / count, squares / count - (total / count) ** 2
            if self.track_running_stats:
                with torch.no_grad():
                    self.running_mean.lerp_(mean, self.momentum)
                    self.running_var.lerp_(var * count / (count - 1), self.momentum)
        scale = self.weight * (var + self.eps).rsqrt()
        return x * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]

    torch.nn.SyncBatchNorm.forward = forward
    accelerator = getattr(torch, "accelerator", torch.cuda)
    accelerator.is_available = torch.distributed.is_initialized  # after the device is chosen
    DDP = torch.nn.parallel.DistributedDataParallel
    DDP._passing_sync_batchnorm_handle = lambda *_: None  # it refuses models on a CPU
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Small data for the examples that read files."""
    root = tmp_path_factory.mktemp("data")
    (root / "texts").mkdir()
    text = (REPO / "docs/TROUBLESHOOTING.md").read_bytes()[:9000]
    (root / "texts/guide.txt").write_bytes(text)
    (root / "shards").mkdir()
    train, test = digits("train"), digits("t10k")
    tar_shards.write_shard(root / "shards/train-0.tar", *(each[:100] for each in train))
    tar_shards.write_shard(root / "shards/train-1.tar", *(each[100:] for each in train))
    tar_shards.write_shard(root / "shards/test-0.tar", *test)
    huggingface.write_sample(datasets, root / "parquet", TRAIN, TEST)
    image_folder.write_sample(root / "images", 28, 24)
    regression.write_sample(root / "rents/table.csv", TRAIN * 5 // 4 + 1)
    return root


def digits(part: str) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = read_mnist(own_model.DIGITS, part, channels=1, size=28).tensors
    count = TRAIN if part == "train" else TEST
    return images[:count], labels[:count]


def options(name: str, data: Path) -> list[str]:
    """Four micro-batches per step, and a last step with fewer than there are ranks."""
    batch = ["--batch-size=25", "--global-batch-size=100", "--num-workers=0", "--warmup-epochs=0"]
    adamw = ["--optimizer=adamw", "--lr=0.003"]
    return {
        "augmentation": batch,
        "ema": [*batch, "--ema-decay=0.3"],
        "fine_tuning": [f"--data-dir={data / 'images'}", "--image-size=32", "--num-workers=0",
                        "--batch-size=5", "--global-batch-size=20", "--lr=0.001"],
        "huggingface": [*batch, *adamw, f"--data-dir={data / 'parquet'}"],
        "image_folder": [f"--data-dir={data / 'images'}", "--image-size=32", "--num-workers=0",
                         "--batch-size=5", "--global-batch-size=20", "--lr=0.01"],
        "language_model": [f"--data-dir={data / 'texts'}", "--batch-size=10",
                           "--global-batch-size=40", *adamw],
        "learning_rate": [*batch, "--schedule=constant"],
        "muon": [f"--data-dir={data / 'texts'}", "--batch-size=10", "--global-batch-size=40",
                 "--lr=0.01"],
        "own_model": batch,
        "regression": [*batch[1:], "--batch-size=10", "--optimizer=adamw", "--lr=0.03",
                       f"--data-dir={data / 'rents'}"],
        "segmentation": ["--batch-size=160", "--global-batch-size=640", *adamw],
        "simclr": ["--batch-size=25", "--global-batch-size=50", "--warmup-epochs=0"],
        "tar_shards": [*batch, *adamw, f"--data-dir={data / 'shards'}"],
        "weight_decay": [*batch, "--lr=0.003", "--weight-decay=0.3"],
    }[name]  # fmt: skip


def start(name: str, ranks: int, directory: Path, *more: str, before: str = "") -> Result:
    """Run the example as a launcher does: guard.py executes the script, in a forked process."""
    script = str(REPO / f"examples/{name}.py")
    words = [str(REPO / "scripts/guard.py"), script, f"--checkpoint-dir={directory}", *more]
    variables = {"GUARD": 0} | (NO_LAUNCHER if ranks == 1 else {})
    before = f"{FEW_DIGITS}\n{before}"
    return run_ranks(ranks, *words, env=lambda rank: variables, before=before, directory=directory)


def train(name: str, ranks: int, directory: Path, *more: str, before: str = "") -> Result:
    """start() for a training that should succeed; every step is saved and recorded."""
    always = ["--log-every-steps=1", "--checkpoint-every-steps=1", "--keep=99"]
    result = start(name, ranks, directory, *always, *more, before=before)
    assert result.codes == [0] * ranks, "\n".join(result.out + result.err)
    return result


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data):
    """trained(name): an epoch on two ranks. Each example is trained once."""
    results: dict[str, Result] = {}

    def train_once(name: str) -> Result:
        if name not in results:
            directory = tmp_path_factory.mktemp(name) / "run"
            results[name] = train(name, 2, directory, *options(name, data), "--epochs=1")
        return results[name]

    return train_once


def weights(result: Result, step: int) -> dict[str, torch.Tensor]:
    return result.checkpoint(f"checkpoint_step_{step}")["model"]


def parameters(state: dict) -> dict[str, torch.Tensor]:
    """Without the statistics of BatchNorm, which each rank computes from its own samples."""
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    return {name: value for name, value in state["model"].items() if not name.endswith(statistics)}


def final_metrics(result: Result) -> dict[str, float]:
    """The metrics of the test set after the last epoch."""
    record = result.records("epoch")[-1]
    return {name[5:]: value for name, value in record.items() if name.startswith("test_")}


def check_classifier(result: Result, model: torch.nn.Module, state: dict, prefix: str = "") -> None:
    """The metrics of the test digits: those of this model with these weights."""
    model.load_state_dict(state)
    images, labels = digits("t10k")
    with torch.no_grad():
        logits = model.eval()((images / 255 - 0.1307) / 0.3081)
    metrics = final_metrics(result)
    assert metrics[f"{prefix}loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), 1e-4)
    correct = (logits.argmax(1) == labels).sum().item()
    assert metrics[f"{prefix}accuracy"] == correct / TEST


# --------------------------------------------------------------------------------- all examples


def code_lines(text: str) -> int:
    """Lines with code: not empty, no comments, no docstrings."""
    lines = {number for number, line in enumerate(text.splitlines(), 1) if line.strip()}
    lines -= {number for number, line in enumerate(text.splitlines(), 1) if line.strip()[:1] == "#"}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_small_and_its_commands_are_right(name):
    text = (REPO / f"examples/{name}.py").read_text()
    assert code_lines(text) <= 80
    module = importlib.import_module(f"examples.{name}")
    classes = [each for each in vars(module).values() if isinstance(each, type)]
    own = [each for each in classes if each.__module__ == module.__name__]
    (task,) = [each() for each in own if issubclass(each, Task)]
    assert f"main({type(task).__name__}())" in text
    commands = re.sub(r"\\\n\s*", "", module.__doc__).splitlines()
    commands = [shlex.split(line) for line in commands if f"examples/{name}.py" in line]
    assert len(commands) == 2
    assert commands[1][:4] == [
        f"TRAIN_SCRIPT=examples/{name}.py",
        "scripts/ssh/launch_singlenode.sh",
        "configs/default_config.yaml",
        "2",
    ]
    for words, begin in ((commands[0], f"examples/{name}.py"), (commands[1], "2")):
        cfg = build_parser(task).parse(words[words.index(begin) + 1 :])  # UserError if not right
        assert cfg.checkpoint_dir.startswith(f"runs/{name}")


def test_an_example_starts_from_any_directory(tmp_path):
    command = [sys.executable, REPO / "examples/muon.py", "--help"]  # imports another example
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0 and "--checkpoint-dir" in result.stdout, result.stderr


# With a state, an optimizer, data or a count of items of their own.
RESUMED = ["ema", "language_model", "muon", "tar_shards"]
NOT_RESUMED = ["sync_batchnorm"]
if not hasattr(torch.optim, "Muon"):  # PyTorch < 2.9
    NOT_RESUMED.append("muon")


def some(names: list[str], most: list[str]) -> list:
    """Parameters: the first names, and the others with --long."""
    others = [pytest.param(name, marks=pytest.mark.long) for name in most if name not in names]
    return [name for name in names + others if name not in NOT_RESUMED]


@pytest.mark.parametrize("name", some(RESUMED, NAMES))
def test_an_example_resumes_bit_for_bit_on_two_ranks(name, data, trained, tmp_path):
    whole = trained(name)
    more = [f"--resume={whole.directory / 'checkpoint_step_1.pt'}", "--epochs=1"]
    resumed = train(name, 2, tmp_path / "resumed", *options(name, data), *more)
    assert_same_state(resumed.newest(), whole.newest())
    assert whole.newest()["global_step"] > 1
    for kind in ("train", "epoch"):
        for ours, theirs in zip(reversed(resumed.records(kind)), reversed(whole.records(kind))):
            for metric in set(ours) - {"time", "samples_per_second", "evaluation_seconds"}:
                assert ours[metric] == theirs[metric], metric


def test_own_script_uses_the_same_samples_in_each_step_on_any_number_of_ranks(monkeypatch):
    data = torch.utils.data.TensorDataset(torch.arange(1000))

    def steps(ranks: int) -> list[set[int]]:
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: ranks)
        batches = []
        for rank in range(ranks):
            monkeypatch.setattr(torch.distributed, "get_rank", lambda *_, rank=rank: rank)
            batches.append(own_script.remaining_batches(own_script.get_loader(data, 96), 13, 2))
        found = []
        for parts in zip(*batches, strict=True):
            assert len({step for step, _ in parts}) == 1
            found.append({int(sample) for _, (samples,) in parts for sample in samples})
        return found

    assert [len(samples) for samples in steps(1)] == [96] * 7  # of 2 epochs of 10 steps
    assert steps(1) == steps(2) == steps(3) == steps(4)


def test_own_script_refuses_checkpoints_of_different_steps(monkeypatch, tmp_path):
    """As with --checkpoint-dir on a disk that the ranks do not share."""

    def gather(found: list[int], own: int) -> None:
        found[:] = [own, 50]

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    with pytest.raises(RuntimeError, match=r"the ranks see steps \[0, 50\]"):
        own_script.load(tmp_path / "absent.pt", None, None, None)


@pytest.mark.parametrize(
    ("present", "variable", "signals", "expected"),
    [
        ("", None, [], False),
        ("", "", [], False),
        ("STOP", None, [], True),
        ("STOP", "", [], True),
        ("other", "other", [], True),
        ("", "other", [], False),
        ("", None, [signal.SIGTERM], True),
    ],
)
def test_own_script_stops_by_a_file_or_a_signal(
    monkeypatch, tmp_path, present, variable, signals, expected
):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda _: None)
    monkeypatch.setattr(own_script, "SIGNALS", signals)
    monkeypatch.delenv("STOP_FILE", raising=False)
    if variable is not None:
        monkeypatch.setenv("STOP_FILE", variable and str(tmp_path / variable))
    if present:
        (tmp_path / present).touch()
    assert own_script.stop_requested(tmp_path, torch.device("cpu")) == expected


# The others have the data, the model and the gradients of one of these.
REPRODUCIBLE = ["augmentation", "ema", "fine_tuning", "huggingface", "language_model", "muon"]
REPRODUCIBLE += ["own_model", "regression", "segmentation", "tar_shards"]


@pytest.mark.parametrize("name", some(["language_model"], REPRODUCIBLE))
def test_an_example_is_reproducible_on_one_two_and_three_ranks(name, data, tmp_path):
    more = [*options(name, data), "--epochs=1", "--reproducible", "--checkpoint-every-steps=99"]
    runs = [train(name, ranks, tmp_path / str(ranks), *more) for ranks in (1, 2, 3)]
    first = parameters(runs[0].newest())
    for result in runs[1:]:
        for parameter, value in parameters(result.newest()).items():
            assert torch.equal(value, first[parameter]), parameter
        for ours, theirs in zip(result.records("train"), runs[0].records("train"), strict=True):
            assert ours["loss"] == theirs["loss"]


@pytest.mark.parametrize("name", ["simclr", "sync_batchnorm"])
def test_a_loss_across_ranks_is_not_reproducible_on_other_numbers_of_ranks(name, tmp_path):
    result = start(name, 1, tmp_path / "run", "--reproducible")
    assert result.codes == [2] and "depends on the number of ranks" in result.err[0]


@pytest.mark.parametrize(
    "name, words, message",
    [
        ("huggingface", [], "no train*.parquet in"),
        ("image_folder", ["--resnet=mobilenet_v2"], "--resnet mobilenet_v2 is not a ResNet"),
        ("image_folder", ["--resnet=resnet19"], "cannot load --resnet resnet19"),
        ("image_folder", ["--data-dir=absent"], "cannot read the images; are they in absent?"),
        ("fine_tuning", ["--milestones=2;3"], "2;3 is not a list of epochs like 2,3"),
        ("language_model", [], "has only 0 bytes"),
        ("regression", [], "table.csv"),
        ("tar_shards", [], "TarShards has no samples: is --data-dir right?"),
    ],
)
def test_a_mistake_is_explained_in_a_sentence(name, words, message, data, tmp_path):
    place = data / "images" if name == "image_folder" else tmp_path
    result = start(name, 1, tmp_path / "run", f"--data-dir={place}", *words)
    assert result.codes == [2] and message in result.err[0], result.err
    assert "Traceback" not in result.err[0]


OPTIONS = f"""if True:
    import sys
    sys.path.insert(0, {str(REPO)!r})
    from examples.own_model import DigitsMlp, main

    class WithOptions(DigitsMlp):
        def add_options(self, parser):
            super().add_options(parser)
            parser.add_argument("--flag", action="store_true")
            parser.add_argument("--sizes", type=int, nargs="+", default=[1])
            parser.set_defaults(lr=0.125)

    main(WithOptions())
"""


def test_options_of_a_task_may_be_of_any_type_and_change_defaults(tmp_path):
    script = tmp_path / "task.py"
    script.write_text(OPTIONS)
    guard, directory = str(REPO / "scripts/guard.py"), tmp_path / "run"
    env = {"GUARD": 0} | NO_LAUNCHER

    def run(*words: str) -> Result:
        command = [guard, str(script), f"--checkpoint-dir={directory}", *words]
        result = run_ranks(1, *command, env=lambda _: env, before=FEW_DIGITS, directory=directory)
        assert result.codes == [0], result.err
        return result

    config = run("--stop-at-step=1", "--sizes", "3", "4").newest()["config"]
    assert (config["flag"], config["sizes"], config["lr"]) == (False, [3, 4], 0.125)
    assert "Test Loss" in run(f"--evaluate={directory / 'checkpoint_step_1.pt'}").out[0]


# --------------------------------------------------------------------------------- one by one


def test_own_model_reports_and_predicts_right(trained):
    result = trained("own_model")
    assert 2 < result.records("train")[0]["loss"] < 3  # of 10 classes, by chance: ln 10
    check_classifier(result, own_model.Mlp(256), result.newest()["model"])
    path = str(max(result.directory.glob("*.pt"), key=os.path.getmtime))
    images, labels = digits("t10k")
    predicted = load_model(path, own_model.DigitsMlp())(images).argmax(1)
    assert (predicted == labels).sum() / TEST == pytest.approx(final_metrics(result)["accuracy"])


def test_regression_metrics_and_predictions(trained, data):
    result = trained("regression")
    table = np.loadtxt(data / "rents/table.csv", delimiter=",", skiprows=1)
    train, test = np.delete(table, np.s_[::5], 0), table[::5]
    assert result.newest()["spec"]["mean"] == pytest.approx(train.mean(0), rel=1e-3)
    assert result.newest()["spec"]["std"] == pytest.approx(train.std(0), rel=1e-3)
    path = str(max(result.directory.glob("*.pt"), key=os.path.getmtime))
    inputs = torch.tensor(test[:, :-1], dtype=torch.float32)
    predicted = load_model(path, regression.Rent())(inputs).numpy()
    error = predicted - test[:, -1]
    metrics = final_metrics(result)
    assert metrics["mean_absolute_error"] == pytest.approx(np.abs(error).mean(), rel=1e-4)
    assert metrics["r2"] == pytest.approx(1 - (error**2).mean() / test[:, -1].var(), rel=1e-4)
    first = result.records("train")[0]["loss"]
    assert metrics["loss"] < first  # it learns
    state = result.newest()["model"]  # the same prediction, in NumPy
    mean, std = (np.array(result.newest()["spec"][name]) for name in ("mean", "std"))
    hidden = (test[:, :-1] - mean[:-1]) / std[:-1] @ state["0.weight"].double().numpy().T
    hidden = np.maximum(hidden + state["0.bias"].numpy(), 0)
    output = hidden @ state["2.weight"].double().numpy().T + state["2.bias"].numpy()
    np.testing.assert_allclose(predicted, output[:, 0] * std[-1] + mean[-1], rtol=1e-3)


def test_language_model_counts_tokens(trained, data):
    result = trained("language_model")
    first = result.records("train")[0]
    assert 5 < first["loss"] < 6.5  # per byte, of 256, by chance: ln 256 = 5.5
    text = (data / "texts/guide.txt").read_bytes()
    pieces = [text[i : i + 65] for i in range(0, len(text) - 64, 64)]
    model = language_model.TinyGpt()
    model.load_state_dict(result.newest()["model"])
    losses, correct = [], 0
    for piece in pieces[len(pieces) * 9 // 10 :]:
        tokens = torch.tensor(list(piece))
        logits = model.eval()(tokens[None, :-1])[0].log_softmax(-1)
        losses += [-logits[i, token].item() for i, token in enumerate(tokens[1:])]
        correct += (logits.argmax(-1) == tokens[1:]).sum().item()
    metrics = final_metrics(result)
    assert metrics["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert metrics["bits_per_byte"] == pytest.approx(metrics["loss"] / math.log(2))
    assert metrics["accuracy"] == correct / len(losses)
    with torch.no_grad():  # the model does not see the tokens that it should predict
        tokens = torch.randint(256, (1, 64))
        early = model(tokens)[0, :32]
        tokens[0, 32:] = 0
        torch.testing.assert_close(model(tokens)[0, :32], early)


def test_segmentation_ignores_the_edges(trained):
    result = trained("segmentation")
    path = str(max(result.directory.glob("*.pt"), key=os.path.getmtime))
    images, masks = segmentation.draw_shapes(500, seed=1).tensors
    assert 0 < (masks == segmentation.IGNORED).sum() < masks.numel() / 10
    logits = load_model(path, segmentation.Segmentation())(images)
    right = masks != segmentation.IGNORED
    chances = logits.softmax(1).movedim(1, -1)[right].numpy()  # [pixels, classes]
    labels = masks[right].numpy()
    metrics = final_metrics(result)
    loss = -np.log(chances[np.arange(len(labels)), labels]).mean()
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    confusion = np.zeros((3, 3), int)
    np.add.at(confusion, (labels, chances.argmax(1)), 1)
    assert metrics["pixel_accuracy"] == confusion.trace() / len(labels)
    either = confusion.sum(0) + confusion.sum(1) - confusion.diagonal()
    assert metrics["mean_iou"] == pytest.approx(
        (confusion.diagonal() / np.maximum(1, either)).mean()
    )


def test_segmentation_gradient_is_the_mean_over_the_valid_pixels_of_a_step(tmp_path):
    more = ["--batch-size=10", "--global-batch-size=40", "--warmup-epochs=0", "--lr=0.5"]
    result = train("segmentation", 2, tmp_path / "run", *more, "--stop-at-step=1")
    torch.manual_seed(42)
    model = segmentation.Segmentation().model(None)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    images, masks = segmentation.draw_shapes(2000, seed=0).tensors
    generator = torch.Generator().manual_seed(derive_seed(42, "order", 0))
    step = torch.randperm(2000, generator=generator)[:40]
    F.cross_entropy(
        model((images[step] / 255 - 0.3) / 0.2), masks[step], ignore_index=255
    ).backward()
    for name, parameter in model.named_parameters():
        expected = before[name] - 0.5 * (parameter.grad + 1e-4 * before[name])
        torch.testing.assert_close(weights(result, 1)[name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["tar_shards", "huggingface"])
def test_files_hold_the_digits_that_they_were_made_of(name, trained):
    module = importlib.import_module(f"examples.{name}")
    result = trained(name)
    check_classifier(result, module.SimpleConvNet(1, 28, 10, 0.25), result.newest()["model"])


def test_tar_shards_are_read_in_workers_as_without_them(trained, data, tmp_path):
    more = [*options("tar_shards", data), "--epochs=1", "--num-workers=2"]
    with_workers = train("tar_shards", 2, tmp_path / "run", *more)
    assert_same_state(with_workers.newest(), trained("tar_shards").newest())
    shards = tar_shards.TarShards(sorted((data / "shards").glob("train-*.tar")))
    images, labels = digits("train")
    assert len(shards) == TRAIN
    for number, (image, label) in enumerate(zip(images, labels)):
        assert torch.equal(shards[number][0], image) and shards[number][1] == label


def test_image_folder_trains_only_the_end_of_a_resnet(trained, data):
    result = trained("image_folder")
    first, last = weights(result, 1), result.newest()["model"]
    for name, value in first.items():
        frozen = not name.startswith(("layer4.", "fc."))
        assert torch.equal(value, last[name]) == frozen, name  # also the statistics of BatchNorm
    model = torchvision.models.resnet18(num_classes=10)
    model.load_state_dict(last)
    files = sorted((data / "images/val").glob("*/*.png"))
    transforms = torchvision.transforms
    transform = transforms.Compose([transforms.Resize(36), transforms.CenterCrop(32)])
    images = [transforms.functional.pil_to_tensor(transform(Image.open(f).convert("RGB")))
              for f in files]  # fmt: skip
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    batch = (torch.stack(images) / 255 - mean[:, None, None]) / std[:, None, None]
    labels = torch.tensor([int(file.parent.name) for file in files])
    with torch.no_grad():
        logits = model.eval()(batch)
    loss = F.cross_entropy(logits, labels).item()  # the test is without label smoothing
    metrics = final_metrics(result)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-3)
    assert metrics["accuracy"] == (logits.argmax(1) == labels).sum().item() / len(files)


def test_image_folder_predicts_without_downloading_the_weights(trained, monkeypatch):
    path = str(max(trained("image_folder").directory.glob("*.pt"), key=os.path.getmtime))
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["config"]["weights"] = "DEFAULT"
    monkeypatch.setattr("train_distributed.load_checkpoint", lambda _: checkpoint)
    monkeypatch.setattr("torch.hub.load_state_dict_from_url", pytest.fail)
    model = load_model(path, image_folder.FineTuning())
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_fine_tuning_trains_the_backbone_at_a_tenth_of_the_rate(trained):
    result = trained("fine_tuning")
    for record in result.records("train"):
        assert (record["lr"], record["lr_1"]) == (1e-3, pytest.approx(1e-4))
    task = importlib.import_module("examples.fine_tuning").SlowBackbone()
    cfg = build_parser(task).parse(["--milestones=2,3"])
    factors = [task.lr_factor(cfg, step, steps_per_epoch=2) for step in range(8)]
    assert factors == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])
    torch.manual_seed(42)
    task.spec = result.newest()["spec"]
    before = task.model(cfg).state_dict()
    after = weights(result, 1)  # AdamW's first step changes each weight by the learning rate
    head = (after["fc.bias"] - before["fc.bias"]).abs()
    backbone = (after["layer1.0.conv1.weight"] - before["layer1.0.conv1.weight"]).abs()
    assert head.median() == pytest.approx(1e-3, rel=0.01)
    assert backbone.median() == pytest.approx(1e-4, rel=0.01)


def test_learning_rate_schedules(tmp_path):
    common = ["--batch-size=26", "--global-batch-size=52", "--lr=0.1", "--warmup-epochs=0.5"]
    common += ["--epochs=1"]
    run = partial(train, "learning_rate", 1)
    constant = run(tmp_path / "a", *common, "--schedule=constant", "--lr-base-batch-size=104")
    rates = [record["lr"] for record in constant.records("train")]
    assert rates == pytest.approx([0.05 / 3, 0.1 / 3, 0.05, 0.05])
    cosine = run(tmp_path / "b", *common, "--min-lr-factor=0.4")
    middle = 0.04 + 0.06 * (1 + math.cos(math.pi / 2)) / 2
    rates = [record["lr"] for record in cosine.records("train")]
    assert rates == pytest.approx([0.1 / 3, 0.2 / 3, 0.1, middle])


def test_weight_decay_spares_norms_and_biases(trained, data, tmp_path):
    more = [*options("weight_decay", data), "--weight-decay=0", "--stop-at-step=1"]
    without = train("weight_decay", 2, tmp_path / "without", *more)
    for name, value in weights(trained("weight_decay"), 1).items():
        assert torch.equal(value, weights(without, 1)[name]) == (value.ndim < 2), name


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch < 2.9")
def test_muon_orthogonalizes_the_updates_of_hidden_matrices(trained):
    result = trained("muon")
    before, after = weights(result, 1), weights(result, 2)
    for name, value in after.items():
        if value.ndim == 2:  # Muon's changes have singular values of about the same size
            change = torch.linalg.svdvals(value - before[name])
            assert (change[0] < 2.5 * change.median()) == name.startswith("blocks."), name


def test_augmentation_shifts_by_up_to_two_pixels(trained, tmp_path, data):
    images = torch.zeros(200, 1, 9, 9, dtype=torch.uint8)
    images[:, 0, 4, 5] = 255
    moved = augmentation.shifted(images)
    assert moved.shape == images.shape and moved.dtype == images.dtype
    places = moved[:, 0].nonzero()
    assert (moved[:, 0].sum((1, 2)) == 255).all()
    assert {tuple(place) for place in places[:, 1:].tolist()} == {
        (row, column) for row in range(2, 7) for column in range(3, 8)
    }
    result = trained("augmentation")  # not in the test
    model = tar_shards.SimpleConvNet(1, 28, 10, 0.25)
    check_classifier(result, model, result.newest()["model"])
    plain = train("learning_rate", 2, tmp_path / "run", *options("augmentation", data),
                  "--stop-at-step=1")  # fmt: skip
    assert plain.records("train")[0]["loss"] != result.records("train")[0]["loss"]


def test_ema_averages_the_weights_and_evaluates_them(trained):
    result = trained("ema")
    steps = len(result.records("train"))
    names = [f"checkpoint_step_{step}" for step in range(1, steps)] + ["checkpoint_epoch_1"]
    average: dict = {}
    for step, name in enumerate(names, 1):
        state = result.checkpoint(name)["model"]
        decay = min(0.3, (1 + step) / (10 + step))
        values = {name[6:]: value for name, value in state.items() if name.startswith("model.")}
        averages = {name[8:]: value for name, value in state.items() if name.startswith("average.")}
        assert values.keys() == averages.keys()
        for name, value in values.items() if average else ():
            expected = average[name] * decay + value * (1 - decay)
            torch.testing.assert_close(averages[name], expected)
        average = averages
    model = tar_shards.SimpleConvNet(1, 28, 10, 0.25)
    check_classifier(result, model, values)
    check_classifier(result, model, average, "ema_")
    metrics = final_metrics(result)
    assert metrics["ema_loss"] != pytest.approx(metrics["loss"], rel=1e-3)
    assert "ema_loss" not in result.records("train")[0]


def test_simclr_compares_the_views_of_all_ranks(tmp_path):
    more = ["--batch-size=10", "--global-batch-size=20", "--warmup-epochs=0", "--weight-decay=0"]
    result = train("simclr", 2, tmp_path / "run", *more, "--lr=0.5", "--stop-at-step=1")
    task = simclr.Contrastive()
    torch.manual_seed(42)
    model = task.model(None)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.Generator().manual_seed(derive_seed(42, "order", 0))
    step = digits("train")[0][torch.randperm(TRAIN, generator=generator)[:20]]
    rows = []
    for micro, images in enumerate(step.split(10)):  # that of rank 0, that of rank 1
        seed_generators(derive_seed(42, "dropout", 0, micro))
        views = torch.cat([simclr.random_view(images), simclr.random_view(images)])
        rows.append(F.normalize(model((views / 255 - 0.1307) / 0.3081)))
    partner = {(m, i): (m, (i + 10) % 20) for m in range(2) for i in range(20)}
    losses, correct = [], 0
    for (m, i), (n, j) in partner.items():
        others = [rows[a][b] for a in range(2) for b in range(20) if (a, b) != (m, i)]
        similarities = torch.stack([rows[m][i] @ other for other in others]) / 0.2
        right = rows[m][i] @ rows[n][j] / 0.2
        losses.append(similarities.logsumexp(0) - right)
        correct += (similarities.max() == right).item()
    loss = torch.stack(losses).mean()
    loss.backward()
    record = result.records("train")[0]
    assert record["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert record["accuracy"] == pytest.approx(correct / 40, abs=0.026)
    for name, parameter in model.named_parameters():
        expected = before[name] - 0.5 * parameter.grad
        torch.testing.assert_close(weights(result, 1)[name], expected, rtol=1e-3, atol=1e-6)


@pytest.mark.long
def test_simclr_has_the_same_test_metrics_in_another_evaluation(trained):
    result = trained("simclr")  # its views are random, also in an evaluation
    more = ["--evaluate", str(result.directory / "checkpoint_epoch_1.pt")]
    evaluated = start("simclr", 2, result.directory, *more)
    assert evaluated.codes == [0, 0], evaluated.err
    assert f"Test Loss: {final_metrics(result)['loss']:.6f}" in evaluated.out[0]


SMALL_RESNET = ["--dataset=synthetic", "--image-size=32", "--model=resnet18", "--stop-at-step=2"]


@pytest.mark.long
def test_sync_batchnorm_computes_the_statistics_of_all_ranks(tmp_path):
    run = partial(train, "sync_batchnorm", before=SYNC_BATCHNORM_ON_CPU)
    whole = run(1, tmp_path / "whole", *SMALL_RESNET, "--batch-size=8")
    both = [*SMALL_RESNET, "--batch-size=4", "--global-batch-size=8"]
    losses = [record["loss"] for record in whole.records("train")]
    # The backward pass then computes the layers again, also collectively.
    result = run(2, tmp_path / "both", *both, "--activation-checkpointing")
    records = result.records("train")
    assert [record["loss"] for record in records] == pytest.approx(losses, rel=1e-3)
    for name, value in weights(whole, 2).items():  # also the running statistics
        if value.is_floating_point():
            torch.testing.assert_close(weights(result, 2)[name], value, rtol=0.01, atol=0.01)


def test_sync_batchnorm_on_a_cpu_is_refused(tmp_path):
    result = start("sync_batchnorm", 2, tmp_path / "run", *SMALL_RESNET, "--batch-size=4")
    assert result.codes[0] == 2 and "Traceback" not in result.err[0], result.err
    assert "SyncBatchNorm needs a GPU for each rank" in result.err[0]
