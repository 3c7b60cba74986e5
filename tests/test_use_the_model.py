"""The code of "Use the model" in docs/MAKE_IT_YOURS.md runs, and predicts what was evaluated."""

import re

import pytest
from harness import NO_LAUNCHER, PLAIN, REPO, run_ranks, train
from pages import blocks, section

PAGE = section((REPO / "docs/MAKE_IT_YOURS.md").read_text(), "Use the model")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A directory with the page's run, which ended early."""
    directory = tmp_path_factory.mktemp("work")
    train(directory / "runs/one", 1, "--epochs=1", "--total-steps=30")
    return directory


def run(work, *words: str, code: str = "") -> str:
    """What the trainer prints there, or this code in its place."""
    before = f"import os; os.chdir({str(work)!r})\n{code}"
    if code:
        before += "\nraise SystemExit"
    result = run_ranks(1, PLAIN[1], *words, env=lambda _: NO_LAUNCHER, before=before)
    assert result.codes == [0], result.err
    return result.out[0]


def test_the_code_of_the_page_runs_in_order(work):
    pytest.importorskip("onnxruntime", reason="tests/run.sh installs it")
    python = [text for kind, text in blocks(PAGE) if kind == "python"]
    code = "\n".join(text for text in python if "photo.jpg" not in text)
    out = run(work, code=code)
    rows = [line.split(",") for line in (work / "predictions.csv").read_text().splitlines()]
    correct = [guess == label for guess, probability, label in rows]
    assert float(re.search(r"largest difference: (\S+)", out)[1]) < 1e-4
    record = (work / "runs/one/metrics.jsonl").read_text().splitlines()[-1]
    accuracy = float(re.search(r'"test_accuracy": ([\d.]+)', record)[1])
    assert sum(correct) / len(correct) == pytest.approx(accuracy, abs=1e-6)


@pytest.mark.long
def test_an_image_file_is_prepared_as_for_the_evaluation(work, images):
    options = [f"--data-dir={images}", "--model=squeezenet1_1", "--epochs=1"]
    before = "from examples.imagenet import Images; task = Images()"
    train(work / "runs/photos", 1, *options, "--batch-size=16", before=before)
    (photo,) = (images / "val/a").glob("0.jpg")
    (work / "photo.jpg").write_bytes(photo.read_bytes())
    (code,) = [text for _, text in blocks(PAGE) if "photo.jpg" in text]
    before = "import torch\nfrom train_distributed import load_model, parse_config\n"
    check = f"_, test_set = Images().data(parse_config({options}, Images()))\n"
    check += "print(logits.shape, torch.equal(image, test_set[0][0]))\n"
    out = run(work, code=before + code + check)
    assert out == "torch.Size([1, 3]) True\n"


def test_the_command_that_evaluates_prints_the_metrics_of_the_training(work):
    (command,) = [text for kind, text in blocks(PAGE) if kind == "bash"]
    before = sorted(path.stat().st_mtime_ns for path in work.rglob("*"))
    program, *words = command.removeprefix("python ").split()
    assert program == "train_distributed.py"
    out = run(work, *words)
    record = (work / "runs/one/metrics.jsonl").read_text().splitlines()[-1]
    loss = float(re.search(r'"test_loss": ([\d.]+)', record)[1])
    assert out.startswith("Starting distributed") and f"best.pt: loss {loss:.5g}, accuracy " in out
    assert before == sorted(path.stat().st_mtime_ns for path in work.rglob("*"))
