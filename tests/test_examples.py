"""The scripts of examples/: each trains on two ranks, and does what its first lines promise.

Metrics are compared with a computation in plain PyTorch or NumPy, from the saved weights.
"""

import importlib
import math
import re
import shlex
from pathlib import Path

import harness
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import REPO, Result, assert_same_state
from torch.nn.modules.batchnorm import _BatchNorm

import train_distributed as trainer
from examples import (
    augmentation,
    huggingface,
    huggingface_text,
    image_folder,
    imagenet,
    own_model,
    regression,
    segmentation,
    simclr,
    tar_shards,
)
from train_distributed import Task, UserError, World, parse_config

NAMES = sorted(path.stem for path in (REPO / "examples").glob("[a-z]*.py"))
TRAIN, TEST = 203, 103  # samples: no multiple of any batch or number of ranks here

# All examples with digits use these few.
FEW_DIGITS = f"""if True:
    import train_distributed

    def few(root, part, inner=train_distributed.read_mnist):
        count = {TRAIN} if part == "train" else {TEST}
        return train_distributed.InMemoryDataset(*inner(root, part)[:count])

    train_distributed.read_mnist = few
"""


def digits(part: str) -> tuple[torch.Tensor, torch.Tensor]:
    count = TRAIN if part == "train" else TEST
    return trainer.read_mnist(own_model.DIGITS, part)[:count]


def task_of(name: str) -> trainer.Task:
    module = importlib.import_module(f"examples.{name}")
    classes = [each for each in vars(module).values() if isinstance(each, type)]
    own = [each for each in classes if each.__module__ == module.__name__]
    (task,) = [each() for each in own if issubclass(each, trainer.Task)]
    return task


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Small data for the examples that read files."""
    root = tmp_path_factory.mktemp("data")
    (root / "texts").mkdir()
    text = (REPO / "docs/TROUBLESHOOTING.md").read_bytes()[:9000]
    (root / "texts/guide.txt").write_bytes(text)
    (root / "shards").mkdir()
    images, labels = digits("train")
    tar_shards.write_shard(root / "shards/train-0.tar", images[:100], labels[:100])
    tar_shards.write_shard(root / "shards/train-1.tar", images[100:], labels[100:])
    tar_shards.write_shard(root / "shards/test-0.tar", *digits("test"))
    image_folder.write_sample(root / "images", 28, 24)
    regression.write_sample(root / "rents/table.csv", TRAIN * 5 // 4 + 1)
    huggingface_text.write_sample(root / "reviews", 100, 30)
    return root


DIGIT_BATCH = ["--batch-size=25", "--global-batch-size=100", "--num-workers=0"]
IMAGES = ["--data-dir={data}/images", "--image-size=32", "--num-workers=0", "--batch-size=5"]
IMAGES += ["--global-batch-size=20"]
TEXTS = ["--data-dir={data}/texts", "--batch-size=10", "--global-batch-size=40"]
PAIRS = ["--batch-size=10", "--global-batch-size=20"]  # a micro-batch per rank
OPTIONS = {
    "ema": [*DIGIT_BATCH, "--ema-decay=0.3"],
    "fine_tuning": [*IMAGES, "--lr=0.001"],
    "huggingface": [*DIGIT_BATCH, "--data-dir={data}/parquet"],
    "huggingface_text": ["--data-dir={data}/reviews", "--batch-size=10", "--global-batch-size=20",
                         "--num-workers=0", "--optimizer=adamw", "--lr=0.003"],
    "image_folder": [*IMAGES, "--lr=0.01"],
    "imagenet": IMAGES,
    "language_model": [*TEXTS, "--lr=0.003"],
    "learning_rate": [*DIGIT_BATCH, "--schedule=constant"],
    "muon": [*TEXTS, "--lr=0.01"],
    "regression": ["--data-dir={data}/rents", "--batch-size=10", "--global-batch-size=100",
                   "--optimizer=adamw", "--lr=0.03"],
    "segmentation": ["--batch-size=160", "--global-batch-size=640", "--optimizer=adamw"],
    "simclr": [*PAIRS, "--lr=0.1", "--weight-decay=0"],
    "slow_links": [*PAIRS, "--weight-decay=0"],
    "tar_shards": [*DIGIT_BATCH, "--data-dir={data}/shards"],
}  # fmt: skip


def train(name: str, ranks: int, directory: Path, data: Path, *more: str, before="") -> Result:
    """Every step is saved and recorded."""
    words = [word.format(data=data) for word in OPTIONS.get(name, DIGIT_BATCH)]
    words += ["--log-every-steps=1", "--checkpoint-every-steps=1", "--keep=99", *more]
    task = f"from examples import {name}\ntask = {name}.{type(task_of(name)).__name__}()"
    before = f"{FEW_DIGITS}\n{before}\n{task}"
    return harness.train(directory, ranks, "--warmup-epochs=0", *words, before=before)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data):
    """trained(name): an epoch of a few steps on two ranks. Each example is trained once."""
    results: dict[str, Result] = {}

    def train_once(name: str) -> Result:
        if name == "huggingface" and not (data / "parquet").exists():
            datasets = pytest.importorskip("datasets")
            huggingface.write_sample(datasets, data / "parquet", TRAIN, TEST)
        if name == "huggingface_text":
            pytest.importorskip("transformers")
        if name == "muon" and not hasattr(torch.optim, "Muon"):
            pytest.skip("PyTorch < 2.9")
        if name not in results:
            directory = tmp_path_factory.mktemp(name) / "run"
            results[name] = train(name, 2, directory, data, "--epochs=1")
        return results[name]

    return train_once


def weights(result: Result, step: int) -> dict[str, torch.Tensor]:
    return result.checkpoint(step)["model"]


def final_metrics(result: Result) -> dict[str, float]:
    """The metrics of the test set after the last epoch."""
    record = result.records("epoch")[-1]
    return {name[5:]: value for name, value in record.items() if name.startswith("test_")}


def load(name: str, result: Result) -> torch.nn.Module:
    return trainer.load_model(str(harness.saves_in(result.directory)[-1]), task_of(name))


def check_classifier(result, model, images, labels, prefix="") -> None:
    """The metrics of the test set are those of this model."""
    logits = model(images)
    metrics = final_metrics(result)
    assert metrics[f"{prefix}loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), 1e-4)
    correct = (logits.argmax(1) == labels).sum().item()
    assert metrics[f"{prefix}accuracy"] == correct / len(labels)


# -------------------------------------------------------------------------------- all examples


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_small_and_its_commands_are_right(name):
    text = (REPO / f"examples/{name}.py").read_text()
    lines = [line.strip() for line in text.split('"""', 2)[2].splitlines()]
    assert len([line for line in lines if line and line[0] not in '#"']) <= 80
    task = task_of(name)
    assert f"main({type(task).__name__}())" in text
    commands = re.sub(r"\\\n\s*", "", text.split('"""')[1]).splitlines()
    commands = [shlex.split(line) for line in commands if f"examples/{name}.py" in line]
    first, second = commands
    launcher = ["scripts/ssh/launch_singlenode.sh", "configs/default_config.yaml", "2"]
    assert second[:4] == [f"TRAIN_SCRIPT=examples/{name}.py", *launcher]
    for words in (first[first.index(f"examples/{name}.py") + 1 :], second[4:]):
        cfg = parse_config(words, task)  # UserError if not right
        assert cfg.checkpoint_dir.startswith(f"runs/{name}")


# With a state or data of their own; the others with --long.
RESUMED = ["ema", "tar_shards"]
OTHERS = [name for name in NAMES if name not in [*RESUMED, "sync_batchnorm"]]
OTHERS = [pytest.param(name, marks=pytest.mark.long) for name in OTHERS]


@pytest.mark.parametrize("name", RESUMED + OTHERS)
def test_an_example_resumes_bit_for_bit_on_two_ranks(name, data, trained, tmp_path):
    whole = trained(name)
    more = [f"--resume={whole.directory / 'checkpoint_step_1.pt'}", "--epochs=1"]
    resumed = train(name, 2, tmp_path / "resumed", data, *more)
    assert whole.newest()["step"] > 1
    assert_same_state(resumed.newest(), whole.newest())
    assert final_metrics(resumed) == final_metrics(whole)


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("image_folder", ["--model=mobilenet_v2"], "--model mobilenet_v2 is not a ResNet"),
        ("image_folder", ["--model=resnet19"], "cannot load --model resnet19"),
        ("image_folder", ["--data-dir=absent"], "needs images in absent/train/CLASS/"),
        ("language_model", ["--data-dir=absent"], "has only 0 characters"),
        ("regression", ["--data-dir=absent"], "cannot read absent/table.csv"),
        ("huggingface_text", ["--data-dir=absent"], "cannot read texts and labels in absent/tr"),
        ("tar_shards", ["--data-dir=absent"], "a data set has no samples: is --data-dir right?"),
        ("simclr", ["--reproducible"], "the loss depends on the number of ranks"),
        ("sync_batchnorm", ["--reproducible"], "and no --reproducible"),
    ],
)
def test_a_mistake_is_explained_in_a_sentence(name, words, message, data):
    task = task_of(name)
    with pytest.raises(UserError) as refused:
        cfg = parse_config([f"--data-dir={data / 'images'}", *words], task)
        trainer.open_data(task, cfg)
        task.model(cfg)
    assert message in str(refused.value)


# ---------------------------------------------------------------------------------- one by one


@pytest.mark.parametrize("name", ["own_model", "tar_shards", "huggingface"])
def test_the_metrics_of_digits_are_those_of_the_loaded_model(name, trained):
    result = trained(name)
    assert 2 < result.records("train")[0]["loss"] < 3  # of 10 classes, by chance: ln 10
    check_classifier(result, load(name, result), *digits("test"))


def test_augmentation_shifts_by_up_to_two_pixels_only_in_training(trained, tmp_path, data):
    images = torch.zeros(200, 1, 9, 9, dtype=torch.uint8)
    images[:, 0, 4, 5] = 255
    moved = augmentation.shifted(images)
    assert moved.shape == images.shape and moved.dtype == images.dtype
    assert (moved[:, 0].sum((1, 2)) == 255).all()
    places = {tuple(place) for place in moved[:, 0].nonzero()[:, 1:].tolist()}
    assert places == {(row, column) for row in range(2, 7) for column in range(3, 8)}

    result = trained("augmentation")
    check_classifier(result, load("augmentation", result), *digits("test"))
    first = result.records("train")[0]["loss"]
    one_rank = train("augmentation", 1, tmp_path / "run", data, "--stop-at-step=1")
    assert one_rank.records("train")[0]["loss"] == pytest.approx(first, rel=1e-5)
    assert trained("learning_rate").records("train")[0]["loss"] != pytest.approx(first, rel=1e-4)


def test_ema_averages_the_weights_and_evaluates_them(trained):
    result = trained("ema")
    steps = len(result.records("train"))
    average: dict = {}
    for step in range(1, steps + 1):
        state = result.checkpoint(step)["model"]
        decay = min(0.3, (1 + step) / (10 + step))
        values = {name[6:]: value for name, value in state.items() if name.startswith("model.")}
        averages = {name[8:]: value for name, value in state.items() if name.startswith("average.")}
        assert values.keys() == averages.keys()
        for name, value in values.items() if average else ():
            expected = average[name] * decay + value * (1 - decay)
            torch.testing.assert_close(averages[name], expected)
        average = averages
    model = load("ema", result)
    check_classifier(result, model, *digits("test"), prefix="ema_")
    check_classifier(result, model.model, *digits("test"))
    assert "ema_loss" not in result.records("train")[0]


def test_image_folder_trains_only_the_end_of_a_resnet(trained, data):
    result = trained("image_folder")
    first, last = weights(result, 1), result.newest()["model"]
    for name, value in first.items():  # also the statistics of BatchNorm
        is_trained = name.startswith(("network.layer4.", "network.fc."))
        assert torch.equal(value, last[name]) != is_trained, name
    _, test = imagenet.image_folders(data / "images", 32)
    images, labels = zip(*test)
    model = load("image_folder", result)  # the test is without label smoothing
    check_classifier(result, model, torch.stack(images), torch.tensor(labels))


def test_image_folder_predicts_without_downloading_the_weights(trained, monkeypatch, tmp_path):
    checkpoint = trained("image_folder").newest()
    checkpoint["config"]["weights"] = "DEFAULT"
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    monkeypatch.setattr("torch.hub.load_state_dict_from_url", pytest.fail)
    model = trainer.load_model(str(tmp_path / "checkpoint.pt"), image_folder.FineTuning())
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_fine_tuning_trains_the_backbone_at_a_tenth_of_the_rate(trained):
    head, backbone = trained("fine_tuning").newest()["optimizer"]["param_groups"]
    assert (head["lr"], backbone["lr"]) == (1e-3, pytest.approx(1e-4))
    assert len(head["params"]) == 2 and len(backbone["params"]) == 60
    task = task_of("fine_tuning")
    cfg = parse_config(["--milestones=2,3"], task)
    factors = [task.lr_factor(cfg, step, 50) for step in (0, 19, 20, 29, 30, 49)]
    assert factors == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_learning_rate_schedules(trained):
    rates = [record["lr"] for record in trained("learning_rate").records("train")]
    assert rates == [0.05] * 3
    task = task_of("learning_rate")
    words = ["--epochs=2", "--warmup-epochs=1", "--min-lr-factor=0.4", "--lr-base-batch-size=104"]
    cfg = parse_config([*words, "--global-batch-size=52", "--lr=0.1"], task)
    factors = [task.lr_factor(cfg, step, 1000) for step in (125, 500, 750, 999)]
    assert factors == pytest.approx([0.25, 1, 0.7, 0.4], abs=2e-3)
    (group,) = task.optimizer(cfg, torch.nn.Linear(1, 1)).param_groups
    assert group["lr"] == pytest.approx(0.05)


def test_weight_decay_spares_norms_and_biases(trained):
    groups = trained("weight_decay").newest()["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [1e-4, 0]
    task = task_of("weight_decay")
    cfg = parse_config([], task)
    matrices, vectors = task.optimizer(cfg, task.model(cfg)).param_groups
    assert {p.ndim for p in matrices["params"]} == {2}
    assert {p.ndim for p in vectors["params"]} == {1}


def test_huggingface_text_pads_each_batch_and_ignores_the_padding(trained, data):
    result = trained("huggingface_text")
    model = load("huggingface_text", result)
    task = task_of("huggingface_text")
    train, texts = task.data(parse_config([f"--data-dir={data}/reviews"], task))
    longest = max(train, key=lambda row: len(row[0]))
    assert task.encode([("bad", "bad")])["input_ids"].shape == (1, 64)  # a few lengths only
    assert task.encode([("bad", "bad"), longest])["input_ids"].shape == (2, 128)
    losses, correct = [], 0
    for text, label in texts:  # each alone, without padding: bytes from 3 on, and an end
        tokens = torch.tensor([[byte + 3 for byte in text.encode()] + [1]])
        logits = model(input_ids=tokens).logits
        labels = torch.tensor([("bad", "good").index(label)])
        losses.append(F.cross_entropy(logits, labels).item())
        correct += int(logits.argmax() == labels)
    metrics = final_metrics(result)
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-3)
    assert metrics["accuracy"] == pytest.approx(correct / len(texts))


def test_muon_orthogonalizes_the_updates_of_hidden_matrices(trained):
    result = trained("muon")
    before, after = weights(result, 1), weights(result, 2)
    for name, value in after.items():
        if value.ndim == 2:  # Muon's changes have singular values of about the same size
            change = torch.linalg.svdvals(value - before[name])
            assert (change[0] < 2.5 * change.median()) == name.startswith("blocks."), name


def test_slow_links_exchanges_gradients_as_bfloat16(trained):
    state = trained("slow_links").checkpoint(1)["optimizer"]["state"]
    for values in state.values():
        gradient = values["momentum_buffer"]  # of the first step
        assert gradient.any() and torch.equal(gradient.bfloat16().float(), gradient)


def test_language_model_counts_tokens(trained, data):
    result = trained("language_model")
    text = (data / "texts/guide.txt").read_text(errors="replace")
    kinds = sorted(set(text))
    by_chance = math.log(len(kinds))
    assert result.records("train")[0]["loss"] == pytest.approx(by_chance, rel=0.05)
    numbers = [kinds.index(character) for character in text][len(text) * 9 // 10 :]
    tokens = torch.tensor([numbers[i : i + 65] for i in range(0, len(numbers) - 64, 64)])
    model = load("language_model", result)
    logits = model(tokens[:, :-1]).movedim(-1, 1)  # [b, kinds, 64]
    targets = tokens[:, 1:]
    metrics = final_metrics(result)
    assert metrics["loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-4)
    assert metrics["bits_per_character"] == pytest.approx(metrics["loss"] / math.log(2))
    correct = (logits.argmax(1) == targets).sum().item()
    assert metrics["accuracy"] == correct / targets.numel()
    tokens = tokens[:1, :-1].clone()  # the model does not see the tokens that it should predict
    early = model(tokens)[0, :32]
    tokens[0, 32:] = 0
    torch.testing.assert_close(model(tokens)[0, :32], early)


def test_regression_metrics_and_predictions(trained, data):
    result = trained("regression")
    table = np.loadtxt(data / "rents/table.csv", delimiter=",", skiprows=1)
    train, test = np.delete(table, np.s_[::5], 0), table[::5]
    assert result.newest()["spec"]["mean"] == pytest.approx(train.mean(0), rel=1e-3)
    assert result.newest()["spec"]["std"] == pytest.approx(train.std(0), rel=1e-3)
    inputs = torch.tensor(test[:, :-1], dtype=torch.float32)
    error = load("regression", result)(inputs).numpy() - test[:, -1]
    metrics = final_metrics(result)
    assert metrics["mean_absolute_error"] == pytest.approx(np.abs(error).mean(), rel=1e-4)
    assert metrics["r2"] == pytest.approx(1 - (error**2).mean() / test[:, -1].var(), rel=1e-4)
    assert metrics["loss"] < result.records("train")[0]["loss"]  # it learns


def test_segmentation_ignores_the_edges(trained):
    result = trained("segmentation")
    images, masks = segmentation.draw_shapes(500, seed=1).tensors
    right = masks != segmentation.IGNORED
    assert 0 < (~right).sum() < masks.numel() / 10
    logits = load("segmentation", result)(images).movedim(1, -1)[right]  # [pixels, classes]
    labels = masks[right]
    metrics = final_metrics(result)
    assert metrics["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-4)
    confusion = np.zeros((3, 3), int)
    np.add.at(confusion, (labels.numpy(), logits.argmax(1).numpy()), 1)
    assert metrics["pixel_accuracy"] == confusion.trace() / len(labels)
    either = confusion.sum(0) + confusion.sum(1) - confusion.diagonal()
    ious = confusion.diagonal() / np.maximum(1, either)
    assert metrics["mean_iou"] == pytest.approx(ious.mean())


def test_simclr_compares_the_views_of_all_ranks(trained):
    result = trained("simclr")
    task = simclr.Contrastive()
    cfg = parse_config(PAIRS, task)
    torch.manual_seed(42)
    model = task.model(cfg)
    stream = trainer.SampleStream(Task(), cfg, World(), range(TRAIN))
    rows = []
    for micro in range(2):  # that of rank 0, that of rank 1
        images = digits("train")[0][stream.micro_batch(0, micro, "cpu").indices]
        torch.manual_seed(trainer.derive_seed(42, "dropout", 0, micro))
        views = torch.cat([simclr.random_view(images), simclr.random_view(images)])
        rows.append(F.normalize(model(views)))
    rows = torch.cat(rows)  # [40, features]
    partner = torch.arange(40).view(2, 2, 10).flip(1).flatten()
    similarity = (rows @ rows.T / simclr.TEMPERATURE).fill_diagonal_(-math.inf)
    loss = F.cross_entropy(similarity, partner)
    loss.backward()
    record = result.records("train")[0]
    assert record["loss"] == pytest.approx(loss.item(), rel=1e-4)
    for name, parameter in model.named_parameters():
        expected = parameter - record["lr"] * parameter.grad
        torch.testing.assert_close(weights(result, 1)[name], expected, rtol=1e-3, atol=1e-6)


def test_sync_batchnorm_replaces_each_batch_norm_and_needs_gpus(monkeypatch):
    task = task_of("sync_batchnorm")
    cfg = parse_config(["--global-batch-size=128"], task)
    task.spec = {"classes": ["a", "b"]}
    norms = [m for m in task.model(cfg).modules() if isinstance(m, _BatchNorm)]
    assert {type(norm) for norm in norms} == {torch.nn.SyncBatchNorm} and len(norms) == 20
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UserError, match="SyncBatchNorm needs a GPU for each rank"):
        task.model(cfg)
