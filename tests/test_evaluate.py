"""A trained model: --evaluate prints what the training did, and load_model() predicts the same."""

import re

import pytest
import torch
from harness import launch, train, write_mnist

import train_distributed
from train_distributed import Task, UserError, load_model


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny):
    """With BatchNorm, whose statistics differ between ranks, and weights without torchvision."""
    options = ["--model=resnet18", "--image-size=32", "--batch-size=16", "--epochs=1"]
    return train(tmp_path_factory.mktemp("trained") / "run", 2, *tiny, *options)


def content(directory) -> dict:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluate_prints_the_metrics_of_the_training_and_writes_nothing(
    tmp_path, trained, ranks, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = trained.directory / "checkpoint_epoch_1.pt"
    before = content(trained.directory)
    run = launch(tmp_path / "unused", ranks, f"--evaluate={path}")
    assert run.codes == [0] * ranks, run.err
    metrics = re.search("Test Loss: .* of 103\n", trained.out[0])[0]
    assert run.out[0].endswith(f"\n{path}: {metrics}") and run.err == [""] * ranks
    assert content(trained.directory) == before and list(tmp_path.iterdir()) == []


def test_evaluate_uses_other_data_if_it_is_given(tmp_path, trained):
    path = trained.directory / "checkpoint_epoch_1.pt"
    other = write_mnist(tmp_path / "other", train=50, test=40)
    run = launch(tmp_path / "unused", 1, f"--evaluate={path}", f"--data-dir={other}")
    assert run.codes == [0] and run.out[0].endswith(" of 40\n")


def test_evaluate_refuses_a_file_that_is_not_a_checkpoint(tmp_path):
    for name in ("absent.pt", "empty.pt"):
        if name == "empty.pt":
            (tmp_path / name).touch()
        run = launch(tmp_path / "unused", 1, f"--evaluate={tmp_path / name}")
        assert run.codes == [2] and f"{name} on " in run.err[0] and run.err[0].count("\n") == 1


def test_a_loaded_model_predicts_what_the_evaluation_computed(trained):
    predict = load_model(trained.directory / "checkpoint_epoch_1.pt")
    cfg = train_distributed.parse_config([f"--config={trained.directory}/config.yaml"])
    _, test_set = Task().data(cfg)
    images, labels = test_set.tensors
    logits = predict(images)
    (epoch,) = trained.records("epoch")
    assert (logits.argmax(1) == labels).float().mean() == pytest.approx(epoch["test_accuracy"])
    loss = torch.nn.functional.cross_entropy(logits, labels)
    assert loss.item() == pytest.approx(epoch["test_loss"], rel=1e-5)
    torch.testing.assert_close(predict(images.float() / 255), logits, atol=1e-4, rtol=1e-4)
    assert not predict.training and not logits.requires_grad


def test_a_loaded_model_needs_no_data(tmp_path, trained, monkeypatch):
    monkeypatch.setattr(Task, "data", None)
    monkeypatch.chdir(tmp_path)
    predict = load_model(str(trained.directory / "checkpoint_epoch_1.pt"))
    assert predict(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_a_model_of_another_task_is_refused(trained):
    class Other(Task):
        pass

    path = trained.directory / "checkpoint_epoch_1.pt"
    with pytest.raises(UserError) as refused:
        load_model(path, Other())
    remedy = "use the script that trained it, or load_model(..., task=...)"
    assert str(refused.value) == f"{path} is of the task Task, not Other: {remedy}"


def test_evaluate_does_not_ask_for_the_nodes_of_the_training(tmp_path, tiny):
    run = train(tmp_path / "run", 2, *tiny, "--gpus-per-node=2", "--nodes=1", "--epochs=1")
    run = launch(tmp_path / "unused", 1, f"--evaluate={run.directory}/checkpoint_epoch_1.pt")
    assert run.codes == [0] and run.out[0].endswith(" of 103\n")


NO_ITEMS = """if True:
    from train_distributed import Task

    class WithoutTestItems(Task):
        def losses(self, model, batch):
            values = super().losses(model, batch)
            return values if model.training else dict.fromkeys(values, 0)

    task = WithoutTestItems()
"""


def test_evaluate_of_no_items_divides_nothing(tmp_path, tiny):
    run = train(tmp_path / "run", 1, *tiny, "--epochs=1", before=NO_ITEMS)
    path = run.directory / "checkpoint_epoch_1.pt"
    run = launch(tmp_path / "unused", 1, f"--evaluate={path}", before=NO_ITEMS)
    assert run.codes == [0], run.err
    assert run.out[0].endswith(" of 0\n")
