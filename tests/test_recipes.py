"""The patches of docs/recipes: each applies to the trainer, and the patched trainer trains."""

import gzip
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.fsdp
from harness import (
    REPO,
    Result,
    assert_same_state,
    context,
    launch,
    load,
    run_ranks,
    start_fork_server,
)
from torchvision.datasets import MNIST

RECIPES = sorted((REPO / "docs/recipes").glob("*.patch"))
TRAINER = (REPO / "train_distributed.py").read_text()

SLOW_SAVES = """if True:
    import time, torch
    def save(*arguments, save=torch.save):
        time.sleep(2)
        save(*arguments)
    torch.save = save
"""
FULL_DISK = """if True:
    import torch
    def save(*arguments):
        raise OSError(28, "No space left on device")
    torch.save = save
"""


# Prints how many elements of the parameters and of the momentum this rank holds.
PRINT_SIZES = """if True:
    from torch.optim.optimizer import register_optimizer_step_post_hook as hook
    def local(tensor):
        return tensor.to_local().numel() if hasattr(tensor, "to_local") else tensor.numel()
    def show(optimizer, *_):
        momentum = [values["momentum_buffer"] for values in optimizer.state.values()]
        print("elements", *(sum(map(local, part)) for part in (
            optimizer.param_groups[0]["params"], momentum)))
    hook(show)
"""

# PyTorch's kernels for this need a GPU: the same formulas, with a differentiable all_reduce.
SYNC_BATCHNORM_ON_CPU = """if True:
    import torch
    from torch.distributed.nn.functional import all_reduce

    def forward(self, x):
        mean, var = self.running_mean, self.running_var
        if self.training:
            each = [x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), x.new_tensor(x.numel() / len(mean))]
            total, squares, count = all_reduce(torch.stack([v.expand_as(mean) for v in each]))
            mean, var = total / count, squares / count - (total / count) ** 2
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(var * count / (count - 1), self.momentum)
        scale = self.weight * (var + self.eps).rsqrt()
        return x * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]

    torch.nn.SyncBatchNorm.forward = forward
    DDP = torch.nn.parallel.DistributedDataParallel
    DDP._passing_sync_batchnorm_handle = lambda *_: None  # it refuses models on a CPU
"""


@pytest.fixture(scope="module", autouse=True)
def fork_server():
    """Without this, context.Process starts a server that has not imported torch."""
    start_fork_server()


def run_copy(path: str, argv: list[str], log: str, before: str) -> None:
    """A trainer other than the repository's, in a process that has imported torch already."""
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    torch.set_num_threads(1)
    exec(before, {})
    load(Path(path)).main(argv)


def check_shifts(path: str) -> None:
    """shifted() moves a single white pixel by up to 2 pixels each way, and not always alike."""
    images = torch.zeros(200, 1, 9, 9, dtype=torch.uint8)
    images[:, 0, 4, 5] = 255
    moved = load(Path(path)).shifted(images)
    assert moved.shape == images.shape and moved.dtype == images.dtype
    places = moved[:, 0].nonzero()
    assert (moved[:, 0].sum((1, 2)) == 255).all()
    assert {tuple(place) for place in places[:, 1:].tolist()} == {
        (row, column) for row in range(2, 7) for column in range(3, 8)
    }


def patched(directory: Path, *names: str, trainer: str = TRAINER) -> Path:
    """A copy of the trainer with these recipes."""
    copy = directory / "train_distributed.py"
    copy.write_text(trainer)
    (directory / "data").symlink_to(REPO / "data")
    command = ["git", "apply", *(REPO / f"docs/recipes/{name}.patch" for name in names)]
    result = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return copy


def start(copy: Path, run: str, *options: str, before: str = "") -> tuple[int, str]:
    """(exit code, output) of a training in the directory `run` beside the copy."""
    log = copy.with_name(f"{run}.log")
    argv = [f"--checkpoint-dir={copy.with_name(run)}", "--log-every-steps=1", *options]
    process = context.Process(target=run_copy, args=(str(copy), argv, str(log), before))
    process.start()
    process.join(200)
    process.kill()
    return process.exitcode, log.read_text()


def train(copy: Path, *options: str, run: str = "run", before: str = "") -> list[dict]:
    """The records of every step of a training that should succeed."""
    code, output = start(copy, run, *options, before=before)
    assert code == 0, output
    lines = (copy.with_name(run) / "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["kind"] == "train"]


def launch_copy(
    copy: Path, ranks: int, *options: str, run: str = "run", before: str = ""
) -> Result:
    """A training on several ranks, which may fail, in the directory `run` beside the copy."""
    argv = [f"--checkpoint-dir={copy.with_name(run)}", "--log-every-steps=1", *options]
    guard = str(REPO / "scripts/guard.py")  # runs the copy in a process that has imported torch
    return run_ranks(ranks, guard, str(copy), *argv, before=before, directory=copy.with_name(run))


def train_ranks(copy: Path, ranks: int, *options: str, **more) -> Result:
    result = launch_copy(copy, ranks, *options, **more)
    assert result.codes == [0] * ranks, "\n".join(result.out + result.err)
    return result


def weights(copy: Path, step: int, run: str = "run") -> dict[str, torch.Tensor]:
    file = copy.with_name(run) / f"checkpoint_step_{step}.pt"
    return torch.load(file, weights_only=True)["model"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_small_clean_and_in_the_guide(tmp_path, recipe):
    assert len(recipe.read_text().splitlines()) < 60
    assert recipe.name in (REPO / "docs/MAKE_IT_YOURS.md").read_text()
    copy = patched(tmp_path, recipe.stem)
    for command in (["check", "--quiet"], ["format", "--check", "--quiet"]):
        ruff = [sys.executable, "-m", "ruff", *command, f"--config={REPO}/.ruff.toml", copy]
        result = subprocess.run(ruff, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_applies_at_the_same_place_of_a_trainer_that_has_grown(tmp_path, recipe):
    more, end = "# a comment of yours\n" * 40, TRAINER.index("\nimport argparse")
    (tmp_path / "grown").mkdir()
    grown = patched(tmp_path / "grown", recipe.stem, trainer=TRAINER[:end] + more + TRAINER[end:])
    assert grown.read_text().replace(more, "") == patched(tmp_path, recipe.stem).read_text()


def test_own_model(tmp_path):
    copy = patched(tmp_path, "own_model")
    records = train(copy, "--model=mlp", "--batch-size=16", "--stop-at-step=2")
    assert 2 < records[0]["loss"] < 3  # of 10 classes, by chance: ln 10
    assert {name.split(".")[0] for name in weights(copy, 2)} == {"hidden", "norm", "head"}


def test_image_folder_trains_only_the_end_of_a_resnet(tmp_path):
    digits = MNIST(REPO / "data/mnist_sample", train=False)
    for part in ("train", "val"):
        for number in range(24):
            image, label = digits[number]
            path = tmp_path / "images" / part / str(label % 2) / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.convert("RGB").save(path)
    options = ["--dataset=imagefolder", f"--data-dir={tmp_path / 'images'}", "--image-size=32"]
    options += ["--batch-size=8", "--num-workers=1"]
    copy = patched(tmp_path, "image_folder")
    more = ["--model=resnet18", "--checkpoint-every-steps=1", "--epochs=1"]
    records = train(copy, *options, *more)
    assert 0.3 < records[0]["loss"] < 3
    first, second = weights(copy, 1), weights(copy, 2)
    for name in ("conv1.weight", "layer3.1.conv2.weight"):
        assert torch.equal(first[name], second[name])
    for name in ("layer4.0.conv1.weight", "fc.weight"):
        assert not torch.equal(first[name], second[name])
    code, output = start(copy, "other", *options, "--model=mobilenet_v2")
    assert (code, output.count("error:")) == (2, 1) and "fine-tunes ResNets only" in output


def test_language_model_learns_text(tmp_path):
    (tmp_path / "texts").mkdir()
    for page in (REPO / "docs").glob("*.md"):
        (tmp_path / "texts" / f"{page.stem}.txt").write_text(page.read_text())
    copy = patched(tmp_path, "language_model")
    options = ["--dataset=text", "--batch-size=8", "--optimizer=adamw", "--lr=0.01"]
    records = train(copy, *options, f"--data-dir={tmp_path / 'texts'}", "--stop-at-step=30")
    assert 5 < records[0]["loss"] < 6.5  # per byte, of 256, by chance: ln 256 = 5.5
    assert records[0]["accuracy"] < 0.2
    assert records[-1]["loss"] < 4.2  # the pages change; an untrained model stays above 5
    code, output = start(copy, "other", *options, f"--data-dir={tmp_path}")
    assert code == 2 and f"--data-dir {tmp_path} has less than" in output


def test_learning_rate_schedules(tmp_path, tiny):
    copy = patched(tmp_path, "learning_rate")
    options = [*tiny, "--epochs=1", "--batch-size=51", "--lr=0.1", "--warmup-epochs=0.5"]
    records = train(copy, *options, "--lr-base-batch-size=102", "--lr-schedule=constant")
    assert [r["lr"] for r in records] == pytest.approx([0.05 / 3, 0.1 / 3, 0.05, 0.05])
    records = train(copy, *options, "--min-lr=0.04", run="cosine")
    middle = 0.04 + 0.06 * (1 + math.cos(math.pi / 2)) / 2
    assert [r["lr"] for r in records] == pytest.approx([0.1 / 3, 0.2 / 3, 0.1, middle])


def test_augmentation_is_drawn_from_the_seed_of_the_micro_batch(tmp_path):
    copy = patched(tmp_path, "augmentation")
    check = context.Process(target=check_shifts, args=(str(copy),))
    check.start()
    check.join(100)
    assert check.exitcode == 0
    options = ["--batch-size=8", "--global-batch-size=16"]
    whole = train(copy, *options, "--stop-at-step=4")
    train(copy, *options, "--stop-at-step=2", run="parts")
    resumed = train(copy, *options, "--stop-at-step=4", run="parts")
    assert [r["loss"] for r in resumed] == [r["loss"] for r in whole]
    other = tmp_path / "unpatched"
    other.mkdir()
    (other / "data").symlink_to(REPO / "data")
    (other / "train_distributed.py").write_text(TRAINER)
    plain = train(other / "train_distributed.py", *options, "--stop-at-step=4")
    assert plain[0]["loss"] != whole[0]["loss"]


def test_async_checkpoint_writes_the_state_of_its_step_while_training_goes_on(tmp_path):
    copy = patched(tmp_path, "async_checkpoint")
    options = ["--batch-size=8", "--checkpoint-every-steps=1", "--stop-at-step=3"]
    records = train(copy, *options, before=SLOW_SAVES)
    assert records[1]["time"] - records[0]["time"] < 2  # did not wait for the first one
    assert records[2]["time"] - records[0]["time"] > 2  # one at a time
    copy.write_text(TRAINER)
    train(copy, *options, run="plain")
    for step in (1, 2, 3):
        plain = weights(copy, step, "plain")
        for name, value in weights(copy, step).items():
            assert torch.equal(value, plain[name]), f"{name} of step {step}"
    state = torch.load(tmp_path / "run/checkpoint_step_1.pt", weights_only=True)
    assert state["global_step"] == 1
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["saved_step"]) == ("stopped", 3)


def test_async_checkpoint_that_cannot_be_written_ends_the_run(tmp_path):
    copy = patched(tmp_path, "async_checkpoint")
    options = ["--batch-size=8", "--checkpoint-every-steps=1", "--stop-at-step=9"]
    code, output = start(copy, "run", *options, before=FULL_DISK)
    assert code == 2 and "Traceback" not in output
    assert output.count("training continues") == 2 and output.count("error: cannot write") == 1
    assert "step 5" not in output


def test_cuda_graphs_trains_and_refuses_what_it_cannot(tmp_path):
    copy = patched(tmp_path, "cuda_graphs")  # without a GPU: compiled, but no graph
    options = ["--batch-size=8", "--dropout=0", "--stop-at-step=3"]
    compiled = train(copy, *options, "--compile")
    plain = train(copy, *options, run="plain")
    assert [r["loss"] for r in compiled] == pytest.approx([r["loss"] for r in plain], rel=1e-4)
    code, output = start(copy, "other", *options, "--compile", "--reproducible")
    assert code == 2 and "CUDA graphs need a single rank" in output


def test_ema_averages_the_weights_and_resumes_exactly(tmp_path, tiny):
    with_norm = TRAINER.replace(
        "nn.ReLU(), nn.Dropout(dropout))", "nn.ReLU(), nn.BatchNorm1d(128))"
    )
    copy = patched(tmp_path, "ema", trainer=with_norm)
    options = [*tiny, "--batch-size=51", "--global-batch-size=102", "--epochs=2", "--keep=9"]
    options += ["--ema-decay=0.2", "--checkpoint-every-steps=1"]
    whole = train_ranks(copy, 2, *options, run="whole")
    names = "checkpoint_step_1", "checkpoint_epoch_1", "checkpoint_step_3", "checkpoint_epoch_2"
    average = None
    for step, state in enumerate(map(whole.checkpoint, names), 1):
        assert state["ema"].keys() == state["model"].keys()
        decay = min(0.2, (1 + step) / (10 + step))
        for name, value in state["model"].items() if average else ():
            if value.is_floating_point():
                expected = average[name] * decay + value * (1 - decay)
                torch.testing.assert_close(state["ema"][name], expected)
        average = state["ema"]
    file = f"--resume={tmp_path / 'whole/checkpoint_epoch_1.pt'}"
    resumed = train_ranks(copy, 2, *options, file, run="resumed")  # evaluates what rank 0 had saved
    assert_same_state(resumed.newest(), whole.newest())
    for name, value in average.items():
        assert torch.equal(resumed.newest()["ema"][name], value), name
    for ours, theirs in zip(whole.records("epoch"), resumed.records("epoch"), strict=True):
        assert ours["ema_loss"] == pytest.approx(theirs["ema_loss"], abs=1e-6)
        assert ours["ema_accuracy"] == theirs["ema_accuracy"]
        assert ours["ema_loss"] != pytest.approx(ours["test_loss"], abs=1e-4)

    old = tmp_path / "old.pt"  # of the trainer without the recipe
    torch.save({key: value for key, value in state.items() if key != "ema"}, old)
    more = train_ranks(
        copy, 1, *options, f"--resume={old}", "--epochs=3", "--stop-at-step=5", run="more"
    )
    new, weight = more.newest(), "10.weight"
    expected = state["model"][weight] * 0.2 + new["model"][weight] * 0.8
    torch.testing.assert_close(new["ema"][weight], expected)


def test_weight_decay_spares_norms_and_biases(tmp_path, tiny):
    (tmp_path / "plain").mkdir()
    plain = patched(tmp_path / "plain", "own_model")
    copy = patched(tmp_path, "own_model", "weight_decay")
    options = [*tiny, "--model=mlp", "--lr=1", "--checkpoint-every-steps=1", "--stop-at-step=2"]
    train(plain, *options, "--weight-decay=0", run="without")
    train(plain, *options, "--weight-decay=0.3", run="with")
    train(copy, *options, "--weight-decay=0.3")
    for name, value in weights(copy, 1).items():
        same = weights(plain, 1, "without" if value.ndim < 2 else "with")[name]
        other = weights(plain, 1, "with" if value.ndim < 2 else "without")[name]
        assert torch.equal(value, same), name
        assert torch.equal(value, other) == (name == "norm.bias"), name  # it starts at 0
    file = f"--resume={tmp_path / 'run/checkpoint_step_1.pt'}"
    train(copy, *options, "--weight-decay=0.3", file, run="resumed")
    resumed, whole = (
        torch.load(tmp_path / run / "checkpoint_step_2.pt", weights_only=True)
        for run in ("resumed", "run")
    )
    assert_same_state(resumed, whole)
    file = f"--resume={tmp_path / 'plain/with/checkpoint_step_1.pt'}"
    code, output = start(copy, "refused", *options, file)
    assert code == 2 and "Traceback" not in output and "choose another" in output


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch < 2.9")
def test_muon_orthogonalizes_in_bf16_and_resumes_exactly(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/guide.txt").write_text((REPO / "docs/TROUBLESHOOTING.md").read_text())
    copy = patched(tmp_path, "language_model", "muon")
    options = [f"--data-dir={tmp_path / 'texts'}", "--dataset=text", "--batch-size=8"]
    options += ["--optimizer=muon", "--lr=0.02", "--stop-at-step=12", "--checkpoint-every-steps=11"]
    records = train(copy, *options)
    assert records[-1]["loss"] < 4.5
    before, after = weights(copy, 11), weights(copy, 12)
    for name, value in after.items():
        change = torch.linalg.svdvals(value - before[name]) if value.ndim == 2 else None
        if change is not None:  # Muon's changes have singular values of about the same size
            assert (change[0] < 2.5 * change.median()) == name.startswith("blocks."), name
    file = f"--resume={tmp_path / 'run/checkpoint_step_11.pt'}"
    train(copy, *options, file, run="resumed")
    resumed, whole = (
        torch.load(tmp_path / run / "checkpoint_step_12.pt", weights_only=True)
        for run in ("resumed", "run")
    )
    assert_same_state(resumed, whole)
    code, output = start(copy, "other", "--optimizer=muon", "--model=resnet18", "--image-size=32")
    assert code == 2 and "--optimizer muon needs" in output


@pytest.mark.skipif(torch.__version__ < "2.9", reason="PyTorch < 2.9")
def test_fsdp_shards_and_resumes_exactly_and_without_the_recipe(tmp_path, tiny):
    copy = patched(tmp_path, "fsdp")
    options = [*tiny, "--batch-size=17", "--global-batch-size=102", "--epochs=2", "--keep=9"]
    sharded = train_ranks(copy, 2, *options, before=PRINT_SIZES, run="sharded")
    plain = launch(tmp_path / "plain", 2, *options, before=PRINT_SIZES)
    sizes = [list(map(int, r.out[0].split("elements")[1].split()[:2])) for r in (sharded, plain)]
    assert sizes[0][0] == sizes[0][1] < 0.51 * sizes[1][0]
    for kind in ("train", "epoch"):  # 7 test batches: the ranks have different numbers of them
        for ours, theirs in zip(sharded.records(kind), plain.records(kind), strict=True):
            for name in set(ours) - {"kind", "time", "samples_per_second"}:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-3), name
    for name, values in plain.newest()["optimizer"]["state"].items():
        for key, value in values.items():
            ours = sharded.newest()["optimizer"]["state"][name][key]
            torch.testing.assert_close(ours, value, rtol=1e-2, atol=1e-5)

    file = f"--resume={tmp_path / 'sharded/checkpoint_epoch_1.pt'}"
    resumed = train_ranks(copy, 2, *options, file, run="resumed")
    assert_same_state(resumed.newest(), sharded.newest())
    alone = launch(tmp_path / "alone", 1, *options, file)  # the trainer without the recipe
    file = f"--resume={tmp_path / 'plain/checkpoint_epoch_1.pt'}"
    back = train_ranks(copy, 2, *options, file, run="back")
    for name, value in plain.newest()["model"].items():
        for other in (sharded, alone, back):
            torch.testing.assert_close(other.newest()["model"][name], value, rtol=0, atol=1e-6)
    refused = launch_copy(copy, 2, *options, "--global-batch-size=51", run="uneven")
    assert refused.codes[0] == 2 and "equal shares of a step" in refused.err[0]


def test_fsdp_on_one_rank_goes_on_like_the_trainer_without_the_recipe(tmp_path, tiny):
    copy, options = patched(tmp_path, "fsdp"), [*tiny, "--optimizer=adamw", "--epochs=2"]
    whole = launch(tmp_path / "whole", 1, *options)  # AdamW is fused: it depends on the layout
    file = f"--resume={tmp_path / 'whole/checkpoint_epoch_1.pt'}"
    assert_same_state(train_ranks(copy, 1, *options, file).newest(), whole.newest())


def test_sync_batchnorm_computes_the_statistics_of_all_ranks(tmp_path):
    copy = patched(tmp_path, "sync_batchnorm")
    options = ["--dataset=synthetic", "--image-size=32", "--model=resnet18", "--stop-at-step=2"]
    whole = train(copy, *options, "--batch-size=8", run="whole")
    both = [*options, "--batch-size=4", "--global-batch-size=8"]
    for run, more in (("run", []), ("recomputed", ["--activation-checkpointing"])):
        result = train_ranks(copy, 2, *both, *more, run=run, before=SYNC_BATCHNORM_ON_CPU)
        records = result.records("train")
        assert [r["loss"] for r in records] == pytest.approx([r["loss"] for r in whole], rel=1e-3)
        for name, value in weights(copy, 2, "whole").items():  # also the running statistics
            if value.is_floating_point():
                torch.testing.assert_close(weights(copy, 2, run)[name], value, rtol=0.01, atol=0.01)
    copy.write_text(TRAINER)
    plain = train_ranks(copy, 2, *both, run="plain").records("train")
    assert plain[1]["loss"] != pytest.approx(whole[1]["loss"], rel=1e-3)


def test_sync_batchnorm_refuses_what_it_cannot_do(tmp_path):
    copy = patched(tmp_path, "sync_batchnorm")
    options = ["--dataset=synthetic", "--image-size=32", "--model=resnet18", "--batch-size=4"]
    for more, message in (
        (["--reproducible"], "--reproducible does not work"),
        (["--global-batch-size=12"], "the same number of micro-batches on each rank"),
        ([], "SyncBatchNorm cannot train on this device"),  # gloo and a CPU
    ):
        result = launch_copy(copy, 2, *options, *more, run="refused")
        assert result.codes[0] == 2, result.err
        assert message in result.err[0] and "Traceback" not in result.err[0]


def test_profiler_writes_a_trace_of_six_steps_on_each_rank_and_changes_nothing(tmp_path):
    copy = patched(tmp_path, "profiler")
    options = ["--batch-size=8", "--stop-at-step"]
    train_ranks(copy, 2, *options, "17")
    train_ranks(copy, 2, *options, "32")  # resumes: step 27 is its tenth
    for first, rank in ((10, 0), (10, 1), (26 + 1, 0), (26 + 1, 1)):
        path = tmp_path / "run" / f"trace_step_{first + 5}_rank_{rank}.json.gz"
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names = [event["name"] for event in events if event.get("ph") == "X"]
        steps = [name for name in names if name.startswith("step ")]
        assert steps == [f"step {number}" for number in range(first, first + 6)]
        assert names.count("aten::conv2d") == 6 * 2
        assert names.count("autograd::engine::evaluate_function: ConvolutionBackward0") == 6 * 2
        assert names.count("Optimizer.step#SGD.step") == 6
        assert any("all_reduce" in name for name in names)
    assert len(list((tmp_path / "run").glob("trace*"))) == 4
    copy.write_text(TRAINER)
    train_ranks(copy, 2, *options, "32", run="plain")
    for name, value in weights(copy, 32, "plain").items():
        assert torch.equal(weights(copy, 32)[name], value), name


def test_profiler_without_room_for_its_trace_or_with_too_few_steps(tmp_path):
    copy = patched(tmp_path, "profiler")
    assert len(train(copy, "--batch-size=8", "--stop-at-step=12")) == 12
    (tmp_path / "run/trace_step_27_rank_0.json.gz").mkdir()
    code, output = start(copy, "run", "--batch-size=8", "--stop-at-step=29")
    assert code == 0 and output.count("WARNING: cannot write") == 1, output


def test_slow_links_resumes_as_the_run_that_saved_would_go_on(tmp_path):
    copy = patched(tmp_path, "slow_links")
    options = ["--batch-size=8", "--stop-at-step=5", "--checkpoint-every-steps=2"]
    ends, losses = {}, {}
    for way in ("plain", "bf16-gradients", "average-every=3"):
        more = [*options, f"--{way}"] if way != "plain" else options
        result = train_ranks(copy, 2, *more, run=way)
        losses[way] = [record["loss"] for record in result.records("train")]
        ends[way] = weights(copy, 5, way)
        if way != "plain":
            (tmp_path / f"{way}2").mkdir()
            shutil.copy(tmp_path / way / "checkpoint_step_2.pt", tmp_path / f"{way}2")
            train_ranks(copy, 2, *more, run=f"{way}2")
            for name, value in ends[way].items():
                assert torch.equal(weights(copy, 5, f"{way}2")[name], value), name
            assert losses[way] == pytest.approx(losses["plain"], rel=0.05)
            assert any(not torch.equal(value, ends["plain"][n]) for n, value in ends[way].items())


def test_slow_links_refuses_what_it_cannot_do(tmp_path):
    copy = patched(tmp_path, "slow_links")
    for options, message in (
        (["--average-every=2", "--reproducible"], "choose one of --average-every, --bf16-"),
        (["--average-every=2", "--bf16-gradients"], "choose one of --average-every, --bf16-"),
        (["--average-every=2", "--amp=fp16"], "--average-every does not work with --amp fp16"),
    ):
        result = launch_copy(copy, 1, *options, run="refused")
        assert result.codes[0] == 2 and message in result.err[0], result.err


def test_slow_links_that_average_the_weights_in_every_step_train_like_ddp(tmp_path):
    copy = patched(tmp_path, "slow_links")
    options = ["--batch-size=8", "--stop-at-step=3", "--lr=0.5"]
    plain = train_ranks(copy, 2, *options, run="plain").records("train")
    records = train_ranks(copy, 2, *options, "--average-every=1").records("train")
    assert [r["loss"] for r in records] == pytest.approx([r["loss"] for r in plain], rel=1e-4)
    assert records[2]["loss"] != pytest.approx(records[0]["loss"], rel=1e-3)
    for name, value in weights(copy, 3, "plain").items():
        torch.testing.assert_close(weights(copy, 3)[name], value, rtol=1e-3, atol=1e-5)
