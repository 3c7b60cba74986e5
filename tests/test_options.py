"""Every option does what it says, in real processes (gloo); what needs a GPU is skipped aloud."""

import json
import subprocess
import sys

import pytest
import torch
import yaml
from harness import REPO, assert_same_state, launch, train

import train_distributed

gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: fp16 and NCCL cannot run here"
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory, tiny):
    return train(tmp_path_factory.mktemp("plain") / "run", 2, *tiny, "--epochs=1")


def first_loss(run) -> float:
    return run.records("train")[0]["loss"]


@pytest.mark.parametrize(
    "options",
    [
        ["--optimizer=adamw", "--lr=0.001"],
        ["--amp=bf16"],
        ["--activation-checkpointing"],
        ["--no-channels-last"],
        ["--deterministic"],
        ["--clip-grad-norm=0.5"],
        ["--lr-schedule=constant", "--warmup-epochs=0"],
        ["--num-workers=2"],
        ["--drop-last"],
        ["--distributed-backend=gloo", "--nodes=1", "--gpus-per-node=2"],
        ["--collective-timeout=60", "--init-timeout=60"],
    ],
    ids=lambda options: options[0],
)
def test_option_trains_and_resumes_bitwise(tmp_path, tiny, options):
    options = [*tiny, "--epochs=1", *options]
    untouched = train(tmp_path / "untouched", 2, *options)
    train(tmp_path / "run", 2, *options, "--stop-at-step=5")
    resumed = train(tmp_path / "run", 2, *options)
    end = "checkpoint_epoch_1"
    assert_same_state(resumed.checkpoint(end), untouched.checkpoint(end))
    assert untouched.records("epoch")[0]["test_accuracy"] > 0.11


@pytest.mark.long
def test_compile_resumes_bitwise(tmp_path):
    # Steps of 20, 20 and 10: the last shape must not change what is computed for the first.
    options = ["--dataset=synthetic", "--synthetic-samples=50", "--image-size=32", "--compile"]
    options += ["--batch-size=20", "--model=resnet18", "--epochs=2"]
    untouched = train(tmp_path / "untouched", 1, *options, timeout=300)
    train(tmp_path / "run", 1, *options, "--stop-at-step=2", timeout=300)
    resumed = train(tmp_path / "run", 1, *options, timeout=300)
    end = "checkpoint_epoch_2"
    assert_same_state(resumed.checkpoint(end), untouched.checkpoint(end))


@pytest.mark.long
def test_every_speed_option_at_once_resumes_bitwise(tmp_path, tiny):
    options = [*tiny, "--epochs=1", "--compile", "--amp=bf16", "--async-checkpoint"]
    options += ["--activation-checkpointing", "--num-workers=2", "--optimizer=adamw", "--lr=0.001"]
    untouched = train(tmp_path / "untouched", 2, *options, timeout=400)
    train(tmp_path / "run", 2, *options, "--stop-at-step=5", timeout=400)
    resumed = train(tmp_path / "run", 2, *options, timeout=400)
    end = "checkpoint_epoch_1"
    assert_same_state(resumed.checkpoint(end), untouched.checkpoint(end))


def test_compile(tmp_path, tiny, plain):
    run = train(tmp_path / "run", 2, *tiny, "--epochs=1", "--compile", "--dropout=0", timeout=400)
    eager = train(tmp_path / "eager", 2, *tiny, "--epochs=1", "--dropout=0")
    assert first_loss(run) == pytest.approx(first_loss(eager), abs=1e-4)
    assert (
        run.checkpoint("checkpoint_epoch_1")["model"].keys()
        == plain.checkpoint("checkpoint_epoch_1")["model"].keys()
    )


@pytest.mark.long
def test_cuda_graphs_add_up_gradients_as_compile_does(tmp_path, tiny):
    """On a CPU there are no graphs, but gradients that stay, and are added to."""
    options = [*tiny, "--epochs=1", "--global-batch-size=16"]
    compiled, graphs = (
        train(tmp_path / name, 1, *options, f"--{name}", timeout=400)
        for name in ("compile", "cuda-graphs")
    )
    end = "checkpoint_epoch_1"
    assert_same_state(graphs.checkpoint(end), compiled.checkpoint(end))


def test_cuda_graphs_have_gradients_of_their_own_from_the_start():
    parameters = list(place("--cuda-graphs").parameters())
    assert all(p.grad is not None and not p.grad.any() for p in parameters)
    assert all(p.grad is None for p in place("--compile").parameters())


def test_activation_checkpointing_changes_nothing_but_memory(tmp_path, tiny, plain):
    run = train(tmp_path / "run", 2, *tiny, "--epochs=1", "--activation-checkpointing")
    end = "checkpoint_epoch_1"
    assert_same_state(run.checkpoint(end), plain.checkpoint(end))


def place(*options):
    cfg = train_distributed.parse_config(list(options))
    spec = train_distributed.DataSpec(3, 64, 10, (0.5,), (0.5,))
    return train_distributed.place_model(cfg, train_distributed.World(), spec, smallest=2)


def test_activation_checkpointing_keeps_fewer_bytes_for_the_backward_pass():
    def kept(*options) -> int:
        sizes = []
        hooks = lambda tensor: sizes.append(tensor.nbytes), lambda _: None  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            place("--model=resnet18", *options).train()(torch.zeros(2, 3, 64, 64))
        return sum(sizes)

    assert kept("--activation-checkpointing") < 0.6 * kept()


def test_recomputed_batch_norm_counts_each_batch_once():
    images, statistics = torch.rand(4, 3, 64, 64), []
    for options in ((), ("--activation-checkpointing",)):
        model = place("--model=resnet18", *options).train()
        model(images).sum().backward()
        statistics.append(dict(model.named_buffers()))
    for name, ours in statistics[1].items():
        if "running" in name:
            torch.testing.assert_close(ours, statistics[0][name], msg=name)


def test_compile_and_channels_last_reach_the_model():
    layouts = {
        "--channels-last": torch.channels_last,
        "--no-channels-last": torch.contiguous_format,
    }
    for option, layout in layouts.items():
        assert place(option).conv2.weight.is_contiguous(memory_format=layout)
    assert place("--compile")._compiled_call_impl and not place()._compiled_call_impl


def test_bf16_really_computes_in_bf16(tmp_path, tiny, plain):
    run = train(tmp_path / "run", 2, *tiny, "--epochs=1", "--amp=bf16")
    assert first_loss(run) != first_loss(plain)
    assert first_loss(run) == pytest.approx(first_loss(plain), abs=0.05)
    dtypes = {tensor.dtype for tensor in run.checkpoint("checkpoint_epoch_1")["model"].values()}
    assert dtypes == {torch.float32}


def test_no_augment_and_no_dropout_repeat_the_same_images(tmp_path, tiny):
    options = [*tiny, "--batch-size=203", "--lr=0", "--epochs=2"]

    def losses(name, *more):
        return [r["loss"] for r in train(tmp_path / name, 1, *options, *more).records("train")]

    still = losses("still", "--no-augment", "--dropout=0")
    assert still[0] == pytest.approx(still[1], abs=1e-6)
    moving = losses("moving", "--dropout=0")
    assert abs(moving[0] - moving[1]) > 1e-4


def test_clip_grad_norm_bounds_the_gradient_of_all_ranks(tmp_path, tiny):
    def gradient_norm(name, *more):
        options = [*tiny, "--weight-decay=0", "--stop-at-step=1", *more]
        run = train(tmp_path / name, 2, *options)
        # SGD's momentum after one step is the gradient itself.
        state = run.checkpoint("checkpoint_step_1")["optimizer"]["state"]
        return sum(s["momentum_buffer"].square().sum().item() for s in state.values()) ** 0.5

    assert gradient_norm("free") > 0.1
    assert gradient_norm("clipped", "--clip-grad-norm=0.1") == pytest.approx(0.1, rel=1e-4)


def test_weight_decay_and_momentum_are_those_of_the_command_also_after_a_resume(tmp_path, tiny):
    decay = ["--weight-decay=0.5", "--momentum=0.5"]
    ends = {}
    for name, more in (("as before", []), ("changed", decay)):
        train(tmp_path / name, 1, *tiny, "--epochs=1", "--stop-at-step=20")
        run = train(tmp_path / name, 1, *tiny, "--epochs=1", *more)
        ends[name] = run.checkpoint("checkpoint_epoch_1")
    group = ends["changed"]["optimizer"]["param_groups"][0]
    assert (group["weight_decay"], group["momentum"]) == (0.5, 0.5)
    norms = [ends[name]["model"]["fc1.weight"].norm() for name in ("changed", "as before")]
    assert norms[0] < 0.99 * norms[1]


def test_drop_last_leaves_out_the_short_step(tmp_path, tiny):
    run = train(tmp_path / "run", 1, *tiny, "--epochs=1", "--drop-last", record=True)
    sizes = [sum(len(ids) for ids in micro.values()) for micro in run.samples().values()]
    assert sizes == [8] * 25


def test_log_every_steps_and_checkpoint_every_steps_and_keep(tmp_path, tiny):
    options = [*tiny, "--epochs=1", "--log-every-steps=10", "--checkpoint-every-steps=4"]
    run = train(tmp_path / "run", 1, *options, "--keep=2")
    assert [record["step"] for record in run.records("train")] == [10, 20, 26]
    names = sorted(path.name for path in run.directory.glob("checkpoint_*"))
    assert names == [f"checkpoint_{n}.{e}" for n in ("epoch_1", "step_24") for e in ("json", "pt")]
    everything = train(tmp_path / "all", 1, *options, "--keep=0")
    assert len(list(everything.directory.glob("checkpoint_*.pt"))) == 7


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--warmup-epochs=0", "--lr-schedule=constant"], [0.5, 0.5, 0.5, 0.5]),
        (["--warmup-epochs=1", "--lr-schedule=constant"], [0.1, 0.2, 0.3, 0.4, 0.5, 0.5]),
        (["--warmup-epochs=0", "--min-lr=0.1"], [0.5, 0.4847759, 0.4414214, 0.3765367, 0.3]),
        (["--lr-base-batch-size=32", "--warmup-epochs=0", "--lr-schedule=constant"], [1.0, 1.0]),
    ],
)
def test_learning_rate_is_this_function_of_the_step(options, expected):
    cfg = train_distributed.parse_config(["--lr=0.5", "--epochs=2", *options])
    cfg.global_batch_size = 64
    rates = [train_distributed.learning_rate(cfg, step, 4) for step in range(len(expected))]
    assert rates == pytest.approx(expected)


def test_the_test_figures_are_those_of_the_saved_model_with_batch_norm_too(tmp_path, tiny):
    options = [*tiny, "--model=resnet18", "--global-batch-size=32", "--epochs=1"]
    told = train(tmp_path / "run", 3, *options).records("epoch")[0]
    cfg = train_distributed.parse_config([*options, f"--checkpoint-dir={tmp_path / 'run'}"])
    world = train_distributed.World()
    claim, stop = train_distributed.Claim(cfg, world), train_distributed.StopWishes(cfg, world)
    run = train_distributed.build_run(cfg, world, claim, stop)
    checkpoint = tmp_path / "run" / "checkpoint_epoch_1.pt"
    state = train_distributed.load_checkpoint(str(checkpoint), cfg, run.world)
    progress = train_distributed.Progress()
    train_distributed.restore(state, run, str(checkpoint), progress)
    totals, _ = train_distributed.evaluate(run, progress)
    values = train_distributed.means(totals)
    assert told["test_loss"] == pytest.approx(values["loss"], rel=1e-5)
    assert told["test_accuracy"] == values["accuracy"]


def test_deterministic_asks_torch_for_repeatable_kernels():
    code = """if True:
        import torch, train_distributed as trainer
        trainer.tune(trainer.parse_config(["--deterministic"]), trainer.World())
        assert torch.are_deterministic_algorithms_enabled()
    """
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO)


def test_image_size_resizes(tmp_path, tiny):
    run = train(tmp_path / "run", 1, *tiny, "--image-size=20", "--stop-at-step=1")
    weight = run.checkpoint("checkpoint_step_1")["model"]["fc1.weight"]
    assert weight.shape == (128, 64 * 8 * 8)


def test_tensorboard_and_wandb_offline(tmp_path, tiny):
    options = [*tiny, "--epochs=1", "--tensorboard", "--wandb"]
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    run = train(tmp_path / "run", 2, *options, env=offline)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.directory / "tensorboard"))
    events.Reload()
    recorded = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert recorded == [(r["step"], pytest.approx(r["loss"])) for r in run.records("train")]
    assert len(list(run.directory.glob("wandb/offline-run-*/*.wandb"))) == 1


def test_print_config_prints_what_a_config_file_may_hold(tmp_path):
    command = [sys.executable, REPO / "train_distributed.py", "--epochs=7", "--amp=bf16"]
    printed = subprocess.run(
        [*command, "--print-config"], capture_output=True, text=True, check=True, cwd=tmp_path
    ).stdout
    (tmp_path / "again.yaml").write_text(printed)
    again = train_distributed.parse_config([f"--config={tmp_path / 'again.yaml'}"])
    once = train_distributed.parse_config(["--epochs=7", "--amp=bf16"])
    assert vars(again) | {"config": None} == vars(once)
    assert list(tmp_path.iterdir()) == [tmp_path / "again.yaml"]


def test_command_line_wins_over_file_and_file_over_default(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("epochs: 3\nbatch_size: 16\nlr: 1e-3\namp: off\naugment: false\nnodes: null\n")
    cfg = train_distributed.parse_config([f"--config={file}", "--epochs", "4", "--augment"])
    assert (cfg.epochs, cfg.batch_size, cfg.lr, cfg.seed) == (4, 16, 0.001, 42)
    assert (cfg.amp, cfg.augment, cfg.nodes) == ("off", True, None)


def test_save_dir_is_another_name_for_checkpoint_dir(tmp_path):
    assert train_distributed.parse_config(["--save-dir=x"]).checkpoint_dir == "x"
    (tmp_path / "c.yaml").write_text("save_dir: y\n")
    assert train_distributed.parse_config([f"--config={tmp_path}/c.yaml"]).checkpoint_dir == "y"


def test_default_config_documents_every_key_and_changes_nothing():
    text = (REPO / "configs/default_config.yaml").read_text()
    keys = yaml.safe_load(text).keys()
    cfg = train_distributed.parse_config(["--config=" + str(REPO / "configs/default_config.yaml")])
    hidden = {"config", "print_config", "plan", "local_rank"}
    assert keys == vars(cfg).keys() - hidden
    assert vars(cfg) | {"config": None} == vars(train_distributed.parse_config([]))
    for line in text.splitlines():
        assert not line or line.startswith("#") or "  # " in line, f"undocumented: {line}"


def test_run_directory_holds_the_resolved_options_and_the_end(plain, tiny):
    resolved = yaml.safe_load((plain.directory / "config.yaml").read_text())
    assert (resolved["epochs"], resolved["batch_size"], resolved["global_batch_size"]) == (1, 8, 16)
    status = json.loads((plain.directory / "status.json").read_text())
    assert (status["state"], status["global_step"]) == ("finished", 13)


def test_a_finished_run_says_so_and_more_epochs_extend_it(tmp_path, tiny):
    status = train(tmp_path / "run", 2, *tiny, "--epochs=1").directory / "status.json"
    status.write_text('{"state": "failed"}')
    again = train(tmp_path / "run", 2, *tiny, "--epochs=1")
    assert json.loads(status.read_text())["state"] == "finished"
    assert "Nothing to do" in again.out[0] and "--epochs" in again.out[0]
    more = train(tmp_path / "run", 2, *tiny, "--epochs=2")
    assert [record["epoch"] for record in more.records("epoch")] == [1, 2]


def test_overwrite_starts_anew(tmp_path, tiny):
    train(tmp_path / "run", 1, *tiny, "--epochs=2")
    run = train(tmp_path / "run", 1, *tiny, "--epochs=1", "--resume=none", "--overwrite")
    assert [record["epoch"] for record in run.records("epoch")] == [1]
    assert not (tmp_path / "run/checkpoint_epoch_2.pt").exists()


def test_resume_from_a_file_into_another_directory(tmp_path, tiny):
    first = train(tmp_path / "first", 1, *tiny, "--epochs=1")
    file = first.directory / "checkpoint_epoch_1.pt"
    copy = train(tmp_path / "copy", 1, *tiny, "--epochs=1", f"--resume={file}")
    assert (copy.directory / "checkpoint_epoch_1.pt").exists() and copy.records("epoch")
    second = train(tmp_path / "second", 1, *tiny, "--epochs=2", f"--resume={file}")
    straight = train(tmp_path / "first", 1, *tiny, "--epochs=2")
    end = "checkpoint_epoch_2"
    assert_same_state(second.checkpoint(end), straight.checkpoint(end))


def test_resuming_from_an_older_checkpoint_needs_overwrite(tmp_path, tiny):
    train(tmp_path / "run", 1, *tiny, "--epochs=2")
    older = f"--resume={tmp_path}/run/checkpoint_epoch_1.pt"
    refused = launch(tmp_path / "run", 1, *tiny, "--epochs=2", older)
    assert refused.codes == [2] and "checkpoint_epoch_2.pt is in the way" in refused.err[0]
    run = train(tmp_path / "run", 1, *tiny, "--epochs=2", older, "--overwrite")
    assert "at step 26" in run.out[0]


@gpu
@pytest.mark.parametrize(
    "options", [["--amp=fp16"], ["--amp=bf16"], ["--deterministic"], ["--cuda-graphs"]]
)
def test_gpu_trains_and_resumes(tmp_path, tiny, options):
    options = [*tiny, "--epochs=1", "--deterministic", *options]
    untouched = train(tmp_path / "untouched", 1, *options)
    train(tmp_path / "run", 1, *options, "--stop-at-step=5")
    end = "checkpoint_epoch_1"
    assert_same_state(
        train(tmp_path / "run", 1, *options).checkpoint(end), untouched.checkpoint(end)
    )


@gpu
def test_two_ranks_on_one_gpu_are_refused_under_nccl(tmp_path, tiny):
    one = {"CUDA_VISIBLE_DEVICES": "0"}
    result = launch(tmp_path / "run", 2, *tiny, env=one)
    assert result.codes == [2, 2] and "Duplicate GPU detected" in result.err[0]
