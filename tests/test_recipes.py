"""The patches of docs/recipes: each applies to the trainer, and the patched trainer trains."""

import gzip
import itertools
import json
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

RECIPES = sorted((REPO / "docs/recipes").glob("*.patch"))
TRAINER = (REPO / "train_distributed.py").read_text()

# Each save waits until step 2 is recorded.
SLOW_SAVES = """if True:
    import pathlib, time, torch
    def save(*arguments, save=torch.save):
        while '"step": 2' not in pathlib.Path(METRICS).read_text():
            time.sleep(0.05)
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
    load(Path(path)).main(argv=argv)


def patched(directory: Path, *names: str) -> Path:
    """A copy of the trainer with these recipes."""
    copy = directory / "train_distributed.py"
    copy.write_text(TRAINER)
    (directory / "data").symlink_to(REPO / "data")
    for name in names:
        command = ["git", "apply", REPO / f"docs/recipes/{name}.patch"]
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
def test_a_recipe_applies_and_is_clean(tmp_path, recipe):
    copy = patched(tmp_path, recipe.stem)
    for command in (["check", "--quiet"], ["format", "--check", "--quiet"]):
        ruff = [sys.executable, "-m", "ruff", *command, f"--config={REPO}/.ruff.toml", copy]
        result = subprocess.run(ruff, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout


# Pairs that cannot be used together, and why. All others apply in either order.
EXCLUSIVE = {
    ("cuda_graphs", "fsdp"): "CUDA graphs need a single rank, FSDP has nothing to divide on one",
    ("cuda_graphs", "slow_links"): "CUDA graphs need a single rank, which has no links",
    ("fsdp", "slow_links"): "slow_links changes what DDP exchanges, and FSDP replaces DDP",
}
CORE = ("async_checkpoint", "cuda_graphs", "fsdp", "profiler", "slow_links")
PAIRS = [pair for pair in itertools.combinations(CORE, 2) if pair not in EXCLUSIVE]


@pytest.mark.long
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_two_recipes_apply_in_either_order(tmp_path, pair):
    copies = []
    for number, names in enumerate([pair, reversed(pair)]):
        directory = tmp_path / str(number)
        directory.mkdir()
        copies.append(patched(directory, *names))
    first, second = copies
    assert first.read_text() == second.read_text()
    compile(first.read_text(), str(first), "exec")
    ruff = [sys.executable, "-m", "ruff", "check", "--quiet", f"--config={REPO}/.ruff.toml", first]
    result = subprocess.run(ruff, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_async_checkpoint_writes_the_state_of_its_step_while_training_goes_on(tmp_path):
    copy = patched(tmp_path, "async_checkpoint")
    options = ["--batch-size=8", "--checkpoint-every-steps=1", "--stop-at-step=3"]
    metrics = repr(str(tmp_path / "run/metrics.jsonl"))
    train(copy, *options, before=SLOW_SAVES.replace("METRICS", metrics))
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


@pytest.mark.long
def test_async_checkpoint_that_cannot_be_written_ends_the_run(tmp_path):
    copy = patched(tmp_path, "async_checkpoint")
    options = ["--batch-size=8", "--checkpoint-every-steps=1", "--stop-at-step=9"]
    code, output = start(copy, "run", *options, before=FULL_DISK)
    assert code == 2 and "Traceback" not in output
    assert output.count("training continues") == 2 and output.count("error: cannot write") == 1
    assert "step 5" not in output


@pytest.mark.long
def test_cuda_graphs_trains_and_refuses_what_it_cannot(tmp_path):
    copy = patched(tmp_path, "cuda_graphs")  # without a GPU: compiled, but no graph
    options = ["--batch-size=8", "--dropout=0", "--stop-at-step=3"]
    compiled = train(copy, *options, "--compile")
    plain = train(copy, *options, run="plain")
    assert [r["loss"] for r in compiled] == pytest.approx([r["loss"] for r in plain], rel=1e-4)
    code, output = start(copy, "other", *options, "--compile", "--reproducible")
    assert code == 2 and "CUDA graphs need a single rank" in output


@pytest.mark.long
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
            for name in set(ours) - {"kind", "time", "samples_per_second", "evaluation_seconds"}:
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
    refused = launch_copy(copy, 2, *options, "--reproducible", run="refused")
    assert refused.codes[0] == 2 and "no --reproducible" in refused.err[0]


@pytest.mark.skipif(torch.__version__ < "2.9", reason="PyTorch < 2.9")
def test_fsdp_trains_when_ranks_have_different_numbers_of_micro_batches(tmp_path, tiny):
    copy = patched(tmp_path, "fsdp")
    # Three micro-batches on two ranks, and two in the last step of an epoch.
    options = [*tiny, "--batch-size=20", "--global-batch-size=60", "--epochs=2"]
    sharded = train_ranks(copy, 2, *options, run="sharded")
    plain = launch(tmp_path / "plain", 2, *options)
    for kind in ("train", "epoch"):
        for ours, theirs in zip(sharded.records(kind), plain.records(kind), strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
    for name, value in plain.newest()["model"].items():
        torch.testing.assert_close(sharded.newest()["model"][name], value, rtol=0, atol=1e-6)


@pytest.mark.long
def test_fsdp_on_one_rank_goes_on_like_the_trainer_without_the_recipe(tmp_path, tiny):
    copy, options = patched(tmp_path, "fsdp"), [*tiny, "--optimizer=adamw", "--epochs=2"]
    whole = launch(tmp_path / "whole", 1, *options)  # AdamW is fused: it depends on the layout
    file = f"--resume={tmp_path / 'whole/checkpoint_epoch_1.pt'}"
    assert_same_state(train_ranks(copy, 1, *options, file).newest(), whole.newest())


def test_profiler_writes_a_trace_of_six_steps_on_each_rank(tmp_path):
    copy = patched(tmp_path, "profiler")
    train_ranks(copy, 2, "--batch-size=8", "--stop-at-step=17")
    for rank in (0, 1):
        path = tmp_path / f"run/trace_step_15_rank_{rank}.json.gz"
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names = [event["name"] for event in events if event.get("ph") == "X"]
        steps = [name for name in names if name.startswith("step ")]
        assert steps == [f"step {number}" for number in range(10, 16)]
        assert names.count("aten::conv2d") == 6 * 2
        assert names.count("autograd::engine::evaluate_function: ConvolutionBackward0") == 6 * 2
        assert names.count("Optimizer.step#SGD.step") == 6
        assert any("all_reduce" in name for name in names)


@pytest.mark.long
def test_profiler_without_room_for_its_trace_or_with_too_few_steps(tmp_path):
    copy = patched(tmp_path, "profiler")
    assert len(train(copy, "--batch-size=8", "--stop-at-step=12")) == 12
    (tmp_path / "run/trace_step_27_rank_0.json.gz").mkdir()
    code, output = start(copy, "run", "--batch-size=8", "--stop-at-step=29")
    assert code == 0 and output.count("WARNING: cannot write") == 1, output


@pytest.mark.long
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


@pytest.mark.long
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
