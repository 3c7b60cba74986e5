"""Every option does what it says, in real processes (gloo)."""

import subprocess
import sys

import pytest
import torch
import yaml
from harness import REPO, assert_same_state, launch, train

import train_distributed


@pytest.fixture(scope="module")
def plain(tmp_path_factory, tiny):
    return train(tmp_path_factory.mktemp("plain") / "run", 2, *tiny, "--epochs=1")


def first_loss(run) -> float:
    return run.records("train")[0]["loss"]


def assert_trains_and_resumes_bitwise(tmp_path, ranks, *options, **more):
    untouched = train(tmp_path / "untouched", ranks, *options, **more)
    train(tmp_path / "run", ranks, *options, "--stop-at-step=5", **more)
    resumed = train(tmp_path / "run", ranks, *options, **more)
    end = f"checkpoint_epoch_{len(untouched.records('epoch'))}"
    assert_same_state(resumed.checkpoint(end), untouched.checkpoint(end))
    return untouched


@pytest.mark.parametrize(
    "options",
    [
        ["--optimizer=adamw", "--lr=0.001", "--deterministic", "--clip-grad-norm=0.5"],
        ["--amp=bf16", "--distributed-backend=gloo", "--nodes=1", "--gpus-per-node=2"],
    ],
    ids=lambda options: options[0],
)
def test_options_train_and_resume_bitwise(tmp_path, tiny, options):
    run = assert_trains_and_resumes_bitwise(tmp_path, 2, *tiny, "--epochs=1", *options)
    assert run.records("epoch")[0]["test_accuracy"] > 0.11


@pytest.mark.long
def test_compile_resumes_bitwise(tmp_path, tiny):
    # Steps of 80, 80 and 43: the last shape must not change what is computed for the first.
    options = ["--batch-size=80", "--image-size=32", "--model=resnet18", "--epochs=3", "--compile"]
    assert_trains_and_resumes_bitwise(tmp_path, 1, *tiny, *options, timeout=3000)


@pytest.mark.long
def test_every_speed_option_at_once_with_bf16_resumes_bitwise(tmp_path, tiny):
    options = [*tiny, "--epochs=1", "--compile", "--amp=bf16", "--activation-checkpointing"]
    options += ["--model=resnet18", "--optimizer=adamw", "--lr=0.001"]
    assert_trains_and_resumes_bitwise(tmp_path, 2, *options, timeout=3000)


def test_compile_changes_neither_the_loss_nor_the_names_in_a_checkpoint(tmp_path, tiny):
    options = [*tiny, "--epochs=1", "--stop-at-step=2", "--dropout=0"]
    eager = train(tmp_path / "eager", 1, *options)
    compiled = train(tmp_path / "compiled", 1, *options, "--compile")
    assert first_loss(compiled) == pytest.approx(first_loss(eager), abs=1e-4)
    assert compiled.newest()["model"].keys() == eager.newest()["model"].keys()


def build(*options) -> torch.nn.Module:
    """The model as a run of one process trains it."""
    small = ["--dataset=synthetic", "--image-size=64", "--model=resnet18", *options]
    cfg = train_distributed.parse_config(small)
    task = train_distributed.Task()
    task.data(cfg)
    return train_distributed.build_learner(task, cfg, train_distributed.World()).model.train()


def test_activation_checkpointing_changes_nothing_but_memory():
    images, kept, ends = torch.rand(4, 3, 64, 64), [0, 0], []
    for number, options in enumerate([(), ("--activation-checkpointing",)]):

        def keep(tensor, number=number):
            kept[number] += tensor.nbytes
            return tensor

        model = build(*options)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(images).square().sum()
        loss.backward()
        grads = {f"{name}.grad": p.grad for name, p in model.named_parameters()}
        ends.append(grads | dict(model.named_buffers()))
    assert kept[1] < 0.6 * kept[0]
    for name, theirs in ends[0].items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(ends[1][name], theirs, msg=name)


def test_bf16_really_computes_in_bf16(tmp_path, tiny, plain):
    run = train(tmp_path / "run", 2, *tiny, "--epochs=1", "--amp=bf16", "--stop-at-step=1")
    assert first_loss(run) != first_loss(plain)
    assert first_loss(run) == pytest.approx(first_loss(plain), abs=0.05)
    dtypes = {tensor.dtype for tensor in run.checkpoint("checkpoint_step_1")["model"].values()}
    assert dtypes == {torch.float32}


def test_dropout_differs_between_epochs_and_can_be_switched_off(tmp_path, tiny):
    options = [*tiny, "--batch-size=203", "--lr=0", "--epochs=2"]

    def losses(name, *more):
        return [r["loss"] for r in train(tmp_path / name, 1, *options, *more).records("train")]

    still = losses("still", "--dropout=0")
    assert still[0] == pytest.approx(still[1], abs=1e-6)
    moving = losses("moving")
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
    exact = gradient_norm("reproducible", "--clip-grad-norm=0.1", "--reproducible")
    assert exact == pytest.approx(0.1, rel=1e-4)


def test_weight_decay_of_the_command_line_applies_after_a_resume(tmp_path, tiny):
    ends = {}
    for name, more in (("as before", []), ("changed", ["--weight-decay=0.5"])):
        train(tmp_path / name, 1, *tiny, "--epochs=1", "--stop-at-step=20")
        run = train(tmp_path / name, 1, *tiny, "--epochs=1", *more)
        ends[name] = run.checkpoint("checkpoint_epoch_1")
    assert ends["changed"]["optimizer"]["param_groups"][0]["weight_decay"] == 0.5
    norms = [
        sum(tensor.norm() for tensor in ends[name]["model"].values())
        for name in ("changed", "as before")
    ]
    assert norms[0] < 0.99 * norms[1]


TWO_GROUPS = """if True:
    import torch, train_distributed as trainer

    class Groups(trainer.Task):
        def optimizer(self, cfg, model):
            head, rest = list(model.fc2.parameters()), list(model.parameters())[:-2]
            return torch.optim.SGD([{"params": rest, "lr": 0.01}, {"params": head, "lr": 0.1}])

    task = Groups()
"""


def test_parameter_groups_keep_their_own_learning_rates(tmp_path, tiny):
    options = [*tiny, "--epochs=1"]
    train(tmp_path / "run", 1, *options, "--stop-at-step=9", before=TWO_GROUPS)
    run = train(tmp_path / "run", 1, *options, before=TWO_GROUPS)
    cfg = train_distributed.parse_config(options)
    for record in run.records("train"):
        factor = train_distributed.Task().lr_factor(cfg, record["step"] - 1, 26)
        assert (record["lr"], record["lr_1"]) == pytest.approx((0.01 * factor, 0.1 * factor))
    assert len(run.records("train")) == 26


def test_log_every_steps_and_checkpoint_every_steps_and_keep(tmp_path, tiny):
    options = [*tiny, "--epochs=1", "--log-every-steps=10", "--checkpoint-every-steps=4"]
    run = train(tmp_path / "run", 1, *options, "--keep=2")
    assert [record["step"] for record in run.records("train")] == [10, 20, 26]
    assert run.checkpoints() == {"checkpoint_step_24", "checkpoint_epoch_1"}
    everything = train(tmp_path / "all", 1, *options, "--keep=100")
    assert len(everything.checkpoints()) == 7


@pytest.mark.parametrize(
    "options, expected",
    [
        (["--warmup-epochs=0"], [0.5, 0.4809699, 0.4267767, 0.3456709, 0.25]),
        (["--warmup-epochs=1"], [0.1, 0.2, 0.3, 0.4, 0.5, 0.4267767, 0.25, 0.0732233]),
    ],
)
def test_learning_rate_is_this_function_of_the_step(options, expected):
    cfg = train_distributed.parse_config(["--lr=0.5", "--epochs=2", *options])
    factors = [train_distributed.Task().lr_factor(cfg, step, 4) for step in range(len(expected))]
    assert [cfg.lr * factor for factor in factors] == pytest.approx(expected)


def test_test_metrics_are_those_of_the_saved_model_with_batch_norm_too(tmp_path, tiny):
    options = [*tiny, "--model=resnet18", "--global-batch-size=32", "--epochs=1"]
    three = train(tmp_path / "three", 3, *options)
    saved = three.directory / "checkpoint_epoch_1.pt"
    one = train(tmp_path / "one", 1, *options, f"--resume={saved}")  # only evaluates
    ours, theirs = (run.records("epoch")[0] for run in (three, one))
    assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-5)
    assert ours["test_accuracy"] == theirs["test_accuracy"]


def test_deterministic_asks_torch_for_repeatable_kernels(tmp_path, tiny):
    code = "import atexit, torch; from torch import are_deterministic_algorithms_enabled as f\n"
    code += "import train_distributed as t; inner = t.evaluate\n"
    code += "t.evaluate = lambda *a: print('deterministic', f(), flush=True) or inner(*a)"
    for option, expected in (("--deterministic", True), ("--no-deterministic", False)):
        options = [*tiny, "--batch-size=203", "--epochs=1", option]
        run = train(tmp_path / option, 1, *options, before=code)
        assert f"deterministic {expected}\n" in run.out[0]


def test_image_size_resizes(tmp_path, tiny):
    run = train(tmp_path / "run", 1, *tiny, "--image-size=20", "--stop-at-step=1")
    shapes = {
        tuple(tensor.shape) for tensor in run.checkpoint("checkpoint_step_1")["model"].values()
    }
    assert (128, 64 * 8 * 8) in shapes


def test_a_resumed_run_may_change_its_precision_and_gets_its_own_loss_scale(tmp_path, tiny):
    options = [*tiny, "--epochs=1"]
    train(tmp_path / "run", 1, *options, "--stop-at-step=2")
    run = train(tmp_path / "run", 1, *options, "--amp=fp16", "--stop-at-step=4")
    assert run.newest()["scaler"]["scale"] == 65536


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


def test_the_command_line_overrides_the_file_and_the_file_the_defaults(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("epochs: 3\nbatch_size: 16\nlr: 1e-3\namp: off\ncompile: true\nnodes: null\n")
    words = [f"--config={file}", "--epochs", "4"]
    cfg = train_distributed.parse_config(words)
    assert (cfg.epochs, cfg.batch_size, cfg.lr, cfg.seed) == (4, 16, 0.001, 42)
    assert (cfg.amp, cfg.compile, cfg.nodes) == ("off", True, None)
    assert not train_distributed.parse_config([*words, "--no-compile"]).compile
    file.write_text("resume: none\nglobal_batch_size: null\n")
    cfg = train_distributed.parse_config(words)
    assert (cfg.resume, cfg.global_batch_size) == ("none", None)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--dropout=2", "2 is not a number from 0 to 1"),
        ("--lr=-1", "-1 is not a number from 0 to 1e+30"),
        ("--lr=nan", "nan is not a number from 0 to 1e+30"),
        ("--clip-grad-norm=inf", "inf is not a number from 0 to 1e+30"),
        ("--seed=99999999999999999999", "is not a whole number from 0 to 1e+18"),
        ("--seed=-1", "is not a whole number from 0 to 1e+18"),
        ("--hang-timeout=9999999999", "9999999999 is not a whole number from 1 to 1e+09"),
        ("--batch-size=1.5", "1.5 is not a whole number from 1 to 1e+09"),
        ("--num-workers=-1", "-1 is not a whole number from 0 to 1e+18"),
    ],
)
def test_a_value_out_of_range_is_named_with_the_range(option, expected):
    with pytest.raises(train_distributed.UserError) as refused:
        train_distributed.parse_config([option])
    name = option.split("=")[0]
    assert str(refused.value).startswith(f"argument {name}: ") and expected in str(refused.value)


def test_the_ends_of_a_range_are_allowed():
    words = ["--dropout=1", "--lr=0", "--num-workers=0", f"--seed={10**18 - 1}"]
    cfg = train_distributed.parse_config(words)
    assert (cfg.dropout, cfg.lr, cfg.num_workers, cfg.seed) == (1, 0, 0, 10**18 - 1)


def test_options_that_changed_since_the_checkpoint_are_printed(tmp_path, tiny):
    train(tmp_path / "run", 1, *tiny, "--epochs=1", "--stop-at-step=2")
    same = train(tmp_path / "run", 1, *tiny, "--epochs=1", "--stop-at-step=3")
    assert "Changed" not in same.out[0]
    more = ["--epochs=2", "--lr=0.01", "--stop-at-step=4", "--seed=7"]
    changed = train(tmp_path / "run", 1, *tiny, *more)
    lines = changed.out[0].splitlines()
    assert "Changed since the checkpoint: epochs 1 -> 2, lr 0.05 -> 0.01" in lines


def test_a_config_file_for_a_task_with_other_options_is_read(tmp_path, capsys):
    class Other(train_distributed.Task):
        def add_options(self, parser):
            parser.add_argument("--width", type=int, default=8)

    (tmp_path / "c.yaml").write_text("epochs: 3\nwidth: 16\nmodel: resnet18\n")
    parser = train_distributed.build_parser(Other())
    cfg = train_distributed.parse_config([f"--config={tmp_path}/c.yaml"], parser)
    assert (cfg.epochs, cfg.width) == (3, 16) and not hasattr(cfg, "model")
    warning = f"WARNING: {tmp_path}/c.yaml: your task has no option model: ignored\n"
    assert capsys.readouterr().err == warning


def test_save_dir_is_another_name_for_checkpoint_dir(tmp_path):
    assert train_distributed.parse_config(["--save-dir=x"]).checkpoint_dir == "x"
    (tmp_path / "c.yaml").write_text("save_dir: y\n")
    assert train_distributed.parse_config([f"--config={tmp_path}/c.yaml"]).checkpoint_dir == "y"


def test_default_config_documents_every_key_and_changes_nothing():
    text = (REPO / "configs/default_config.yaml").read_text()
    keys = yaml.safe_load(text).keys()
    cfg = train_distributed.parse_config(["--config=" + str(REPO / "configs/default_config.yaml")])
    assert keys == vars(cfg).keys() - {"config", "evaluate"}
    assert vars(cfg) | {"config": None} == vars(train_distributed.parse_config([]))
    for line in text.splitlines():
        assert not line or line.startswith("#") or "  # " in line, f"undocumented: {line}"


def test_the_run_directory_holds_the_resolved_options_and_how_the_run_ended(plain):
    resolved = yaml.safe_load((plain.directory / "config.yaml").read_text())
    assert (resolved["epochs"], resolved["batch_size"], resolved["global_batch_size"]) == (1, 8, 16)
    status = plain.status()
    assert (status["state"], status["global_step"], status["saved_step"]) == ("finished", 13, 13)
    assert status["run_dir"] == str(plain.directory) and status["world_size"] == 2
    assert "Starting a new run\n" in plain.out[0]


def test_a_config_of_a_run_trains_the_same_run_elsewhere(tmp_path, tiny, plain):
    end = "checkpoint_epoch_1"
    again = train(tmp_path / "again", 2, f"--config={plain.directory}/config.yaml")
    assert_same_state(again.checkpoint(end), plain.checkpoint(end))


def test_a_finished_run_says_so_and_more_epochs_extend_it(tmp_path, tiny):
    run = train(tmp_path / "run", 2, *tiny, "--epochs=1")
    (run.directory / "status.json").write_text('{"state": "running"}')
    again = train(tmp_path / "run", 2, *tiny, "--epochs=1")
    assert again.status()["state"] == "finished"
    assert "\nNothing to train: step 13 is the end of --epochs 1\n" in again.out[0]
    assert f"Finished at step 13 of 13, saved in {run.directory}\n" in again.out[0]
    assert again.checkpoints() == {"checkpoint_epoch_1"}
    more = train(tmp_path / "run", 2, *tiny, "--epochs=2")
    assert [record["epoch"] for record in more.records("epoch")] == [1, 2]
    fewer = train(tmp_path / "run", 2, *tiny, "--epochs=1")
    assert "\nNothing to train: step 26 is after the end of --epochs 1\n" in fewer.out[0]
    assert f"Finished at step 26, saved in {run.directory}\n" in fewer.out[0]


def test_resume_from_a_file_into_another_directory(tmp_path, tiny):
    first = train(tmp_path / "first", 1, *tiny, "--epochs=1")
    file = first.directory / "checkpoint_epoch_1.pt"
    second = train(tmp_path / "second", 1, *tiny, "--epochs=2", f"--resume={file}")
    straight = train(tmp_path / "first", 1, *tiny, "--epochs=2")
    end = "checkpoint_epoch_2"
    assert_same_state(second.checkpoint(end), straight.checkpoint(end))
    again = train(tmp_path / "second", 1, *tiny, "--epochs=3", f"--resume={file}")
    assert "checkpoint_epoch_2.pt at step 52" in again.out[0], "the same command should resume"


def test_resuming_from_an_older_checkpoint_of_the_run_is_refused(tmp_path, tiny, monkeypatch):
    run = train(tmp_path / "run", 1, *tiny, "--epochs=2").directory
    for older in (run / "checkpoint_epoch_1.pt", run / "../run/checkpoint_epoch_1.pt"):
        refused = launch(run, 1, *tiny, "--epochs=2", f"--resume={older}")
        assert refused.codes == [2]
        assert "checkpoint_epoch_2.pt is in the way" in refused.err[0]
    (run / "checkpoint_epoch_2.pt").unlink()
    assert "at step 26" in train(run, 1, *tiny, "--epochs=2", f"--resume={older}").out[0]


def test_a_required_option_may_be_in_the_config_file(tmp_path):
    class Other(train_distributed.Task):
        def add_options(self, parser):
            parser.add_argument("--train-file", required=True, help="the table")

    def parse(*words):
        return train_distributed.parse_config(list(words), train_distributed.build_parser(Other()))

    (tmp_path / "c.yaml").write_text("train_file: a.csv\n")
    assert parse(f"--config={tmp_path}/c.yaml").train_file == "a.csv"
    (tmp_path / "c.yaml").write_text("epochs: 3\n")
    with pytest.raises(train_distributed.UserError, match="--train-file is required: the table"):
        parse(f"--config={tmp_path}/c.yaml")


def test_the_seed_0_is_not_silently_replaced_by_the_seed_of_the_run(tmp_path, tiny):
    train(tmp_path / "run", 1, *tiny, "--stop-at-step=2")
    run = train(tmp_path / "run", 1, *tiny, "--stop-at-step=3", "--seed=0")
    assert run.err[0] == "WARNING: the seed of this run is 42, not 0\n"


COUNTING = """if True:
    import torch
    import train_distributed as trainer

    class Counting(torch.optim.SGD):
        # As in Prodigy: a value that it learns is in the parameter group.
        def step(self, closure=None, **more):
            for group in self.param_groups:
                group["steps"] += 1
                group["lr"] /= group["steps"]
            super().step(closure)

    class CountingTask(trainer.Task):
        def optimizer(self, cfg, model):
            optimizer = Counting(model.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay)
            optimizer.param_groups[0]["steps"] = 0
            return optimizer

    task = CountingTask()
"""


def test_what_an_optimizer_learns_in_its_parameter_groups_is_resumed(tmp_path, tiny):
    options = [*tiny, "--epochs=1"]
    straight = train(tmp_path / "straight", 1, *options, before=COUNTING)
    train(tmp_path / "run", 1, *options, "--stop-at-step=9", before=COUNTING)
    run = train(tmp_path / "run", 1, *options, before=COUNTING)
    ends = [result.checkpoint("checkpoint_epoch_1") for result in (run, straight)]
    assert_same_state(*ends)
    assert ends[0]["optimizer"]["param_groups"][0]["steps"] == 26
    train(tmp_path / "run", 1, *options, "--epochs=2", "--stop-at-step=28", before=COUNTING)
    more = ["--epochs=2", "--weight-decay=0.3"]
    run = train(tmp_path / "run", 1, *options, *more, before=COUNTING)
    group = run.checkpoint("checkpoint_epoch_2")["optimizer"]["param_groups"][0]
    assert (group["weight_decay"], group["steps"]) == (0.3, 52)


PARTLY_OPTIMIZED = """if True:
    import torch
    import train_distributed as trainer

    class Head(trainer.Task):
        def optimizer(self, cfg, model):
            model.conv1.requires_grad_({trained})
            return torch.optim.SGD(list(model.fc2.parameters()), lr=cfg.lr)

    task = Head()
"""


@pytest.mark.parametrize("mode", ["--amp=off", "--reproducible"])
def test_parameters_that_are_not_optimized_do_not_count_when_gradients_are_clipped(
    tmp_path, tiny, mode
):
    options = [*tiny, "--stop-at-step=6", "--clip-grad-norm=0.1", mode]
    runs = []
    for trained in (False, True):
        before = PARTLY_OPTIMIZED.format(trained=trained)
        runs.append(train(tmp_path / str(trained), 1, *options, before=before))
    assert_same_state(*(run.checkpoint("checkpoint_step_6") for run in runs))


@pytest.mark.long
def test_code_after_main_may_take_longer_than_the_hang_timeout(tmp_path, tiny):
    words = [*tiny, f"--checkpoint-dir={tmp_path}/run", "--stop-at-step=2", "--hang-timeout=20"]
    script = f"import time, train_distributed as t; t.main(argv={words!r}); time.sleep(25)"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_a_config_file_sets_switches_of_a_group_and_names_with_dashes(tmp_path):
    class Grouped(train_distributed.Task):
        def add_options(self, parser):
            group = parser.add_argument_group("mine")
            group.add_argument("--flag", action="store_true")
            group.add_argument("--name")

    file = tmp_path / "options.yaml"
    file.write_text("flag: true\nactivation-checkpointing: true\nname: 'true'\n")
    parser = train_distributed.build_parser(Grouped())
    cfg = train_distributed.parse_config([f"--config={file}"], parser)
    assert (cfg.flag, cfg.activation_checkpointing, cfg.name) == (True, True, "true")
