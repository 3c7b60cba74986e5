"""A trained model: --evaluate prints what the training did, and load_model() predicts the same."""

import pytest
import tasks
import torch
from harness import REPO, launch, train, write_mnist

from train_distributed import load_model, parse_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny):
    options = [*tiny, "--batch-size=16", "--epochs=1"]
    directory = tmp_path_factory.mktemp("trained") / "run"
    return train(directory, 2, *options, task=tasks.ResNet)


@pytest.fixture
def path(trained):
    return trained.directory / f"checkpoint_step_{trained.saved()[-1]}.pt"


def content(directory) -> dict:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_evaluate_prints_the_metrics_of_the_training_and_writes_nothing(
    tmp_path, trained, path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    before = content(trained.directory)
    run = launch(tmp_path / "unused", 3, f"--evaluate={path}", task=tasks.ResNet)
    assert run.codes == [0] * 3, run.err
    (epoch,) = trained.records("epoch")
    metrics = f"loss {epoch['test_loss']:.5g}, accuracy {epoch['test_accuracy']:.5g}"
    assert run.out[0].endswith(f"\n{path}: {metrics}\n") and run.err == [""] * 3
    assert content(trained.directory) == before and list(tmp_path.iterdir()) == []


def test_evaluate_uses_other_data_if_it_is_given(tmp_path, path):
    other = write_mnist(tmp_path / "other", train=50, test=4)
    words = [f"--evaluate={path}", f"--data-dir={other}"]
    run = launch(tmp_path / "unused", 2, *words, task=tasks.ResNet)
    assert run.codes == [0, 0]  # although one rank has no sample
    assert float(run.out[0].rpartition("accuracy ")[2]) in (0, 0.25, 0.5, 0.75, 1)


def test_evaluate_keeps_the_options_of_the_checkpoint_if_a_launcher_adds_its_config(path):
    config = f"--config={REPO}/configs/default_config.yaml"
    cfg = parse_config([config, f"--evaluate={path}", "--seed=3"])
    assert (cfg.dataset, cfg.batch_size, cfg.seed) == ("mnist", 16, 3)


def test_a_loaded_model_predicts_what_the_evaluation_computed(trained, path):
    task = tasks.ResNet()
    model = load_model(path, task)
    cfg = parse_config([f"--config={trained.directory}/config.yaml"])
    _, test_set = task.data(cfg)
    images, labels = test_set.tensors
    logits = model(images)
    (epoch,) = trained.records("epoch")
    assert (logits.argmax(1) == labels).float().mean() == pytest.approx(epoch["test_accuracy"])
    loss = torch.nn.functional.cross_entropy(logits, labels)
    assert loss.item() == pytest.approx(epoch["test_loss"], rel=1e-5)
    torch.testing.assert_close(model(images.float() / 255), logits, atol=1e-4, rtol=1e-4)
    assert not model.training and not logits.requires_grad


def test_a_loaded_model_needs_no_data_and_a_new_option_has_its_default(path, monkeypatch):
    class Later(tasks.ResNet):
        def add_options(self, parser):
            super().add_options(parser)
            parser.add_argument("--width", type=int, default=8)

        def model(self, cfg):
            assert (getattr(cfg, "width", 8), cfg.batch_size) == (8, 16)
            return super().model(cfg)

    Later.__name__ = "ResNet"
    monkeypatch.setattr(Later, "data", None)
    task = Later()
    assert load_model(str(path), task)(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    assert task.spec == {"classes": [str(digit) for digit in range(10)]}
