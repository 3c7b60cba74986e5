"""Every option does what it says, in real processes (gloo)."""

import math
import re
from pathlib import Path

import pytest
import tasks
import torch
import yaml
from harness import REPO, assert_same_state, train

import train_distributed
from examples.imagenet import Images
from train_distributed import Task, UserError, parse_config


@pytest.fixture(scope="module")
def plain(tmp_path_factory, tiny):
    return train(tmp_path_factory.mktemp("plain") / "run", 2, *tiny, "--epochs=1")


def first_loss(run) -> float:
    return run.records("train")[0]["loss"]


def assert_trains_and_resumes_bitwise(tmp_path, ranks, *options, **more):
    untouched = train(tmp_path / "untouched", ranks, *options, **more)
    train(tmp_path / "run", ranks, *options, "--stop-at-step=5", **more)
    resumed = train(tmp_path / "run", ranks, *options, **more)
    assert_same_state(resumed.newest(), untouched.newest())
    return untouched


@pytest.mark.parametrize(
    "options",
    [
        ["--optimizer=adamw", "--lr=0.001", "--deterministic", "--clip-grad-norm=0.5"],
        ["--amp=bf16", "--distributed-backend=gloo", "--nodes=1", "--gpus-per-node=2"],
    ],
    ids=lambda options: options[0],
)
def test_options_train_and_resume_bitwise(tmp_path, tiny, plain, options):
    run = assert_trains_and_resumes_bitwise(tmp_path, 2, *tiny, "--epochs=1", *options)
    assert run.records("epoch")[0]["test_accuracy"] > 0.11
    if "--amp=bf16" in options:  # it really computes in bf16
        assert first_loss(run) != first_loss(plain)
        assert first_loss(run) == pytest.approx(first_loss(plain), abs=0.05)
        assert {tensor.dtype for tensor in run.newest()["model"].values()} == {torch.float32}
        of_the_launch = {"nodes", "gpus_per_node"}  # another one may use the options of the run
        assert not of_the_launch & run.newest()["config"].keys()
        assert (
            not of_the_launch & yaml.safe_load((run.directory / "config.yaml").read_text()).keys()
        )


EAGER = """
import functools, torch
torch.nn.Module.compile = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "before", [EAGER, pytest.param("", marks=pytest.mark.long)], ids=["eager", "compiled"]
)
def test_compile_changes_neither_the_loss_nor_the_names_in_a_checkpoint(tmp_path, before):
    """Without --long, no kernels are compiled."""
    options = [*tasks.QUICK, "--log-every-steps=1", "--stop-at-step=2"]
    eager = train(tmp_path / "eager", 1, *options, **tasks.small())
    before += tasks.small()["before"]
    compiled = train(tmp_path / "run", 1, *options, "--compile", timeout=400, before=before)
    assert first_loss(compiled) == pytest.approx(first_loss(eager), abs=1e-4)
    assert compiled.newest()["model"].keys() == eager.newest()["model"].keys()


def build(*options) -> torch.nn.Module:
    """The model as a run of one process trains it."""
    task = Images()
    cfg = parse_config(["--synthetic", "--image-size=64", "--model=resnet18", *options], task)
    task.data(cfg)
    return train_distributed.build_state(task, cfg, train_distributed.World()).model.train()


def test_activation_checkpointing_changes_memory_but_no_gradient():
    images, kept, ends = torch.rand(4, 3, 64, 64), [0, 0], []
    for number, options in enumerate([(), ("--activation-checkpointing",)]):

        def keep(tensor, number=number):
            kept[number] += tensor.nbytes
            return tensor

        model = build(*options)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(images).square().sum()
        loss.backward()
        ends.append({name: p.grad for name, p in model.named_parameters()})
    assert kept[1] < 0.6 * kept[0]
    for name, theirs in ends[0].items():
        torch.testing.assert_close(ends[1][name], theirs, msg=name)


def test_clip_grad_norm_bounds_the_gradient_of_all_ranks(tmp_path, tiny):
    def gradient_norm(name, *more):
        options = [*tiny, "--weight-decay=0", "--stop-at-step=1", *more]
        run = train(tmp_path / name, 2, *options)
        assert run.records("train")[0]["gradient_norm"] > 0.1  # before it is clipped
        # SGD's momentum after one step is the gradient itself.
        state = run.newest()["optimizer"]["state"]
        return sum(s["momentum_buffer"].square().sum().item() for s in state.values()) ** 0.5

    free = gradient_norm("free")
    assert free > 0.1
    for mode in ("--amp=off", "--reproducible"):
        clipped = gradient_norm(mode, "--clip-grad-norm=0.1", mode)
        assert clipped == pytest.approx(0.1, rel=1e-4)
    assert gradient_norm("negative", "--clip-grad-norm=-1") == free  # torch would turn it round


class Counting(torch.optim.SGD):
    """As in Prodigy: a value that it learns is in the parameter group."""

    def step(self, closure=None, **more):
        for group in self.param_groups:
            group["steps"] += 1
        super().step(closure)


class TwoGroups(Task):
    def optimizer(self, cfg, model):
        parameters = list(model.parameters())
        groups = [
            {"params": parameters[:-2], "lr": cfg.lr, "steps": 0},
            {"params": parameters[-2:], "lr": 10 * cfg.lr, "steps": 0},
        ]
        return Counting(groups, weight_decay=cfg.weight_decay)


def test_a_change_in_a_named_directory_is_taken_with_one_line(tmp_path, tiny):
    """Also by parameter groups with learning rates, and learned values, of their own."""
    options = [*tiny, "--epochs=1"]
    train(tmp_path / "run", 1, *options, "--stop-at-step=9", task=TwoGroups)
    changed = ["--lr=0.02", "--weight-decay=0.5"]
    run = train(tmp_path / "run", 1, *options, *changed, task=TwoGroups)
    assert "lr 0.05 -> 0.02, " in run.out[0] and "weight_decay 0.0001 -> 0.5" in run.out[0]
    cfg = parse_config([*options, *changed])
    factor = Task().lr_factor(cfg, 25, 26)
    for group, peak in zip(run.newest()["optimizer"]["param_groups"], (0.02, 0.2), strict=True):
        assert (group["steps"], group["weight_decay"]) == (26, 0.5)
        assert group["lr"] == pytest.approx(peak * factor)
    assert run.records("train")[-1]["lr"] == pytest.approx(0.02 * factor)


def test_a_changed_precision_gets_its_own_loss_scale(tmp_path, tiny):
    train(tmp_path / "run", 1, *tiny, "--stop-at-step=2")
    run = train(tmp_path / "run", 1, *tiny, "--amp=fp16", "--stop-at-step=4")
    assert run.newest()["scaler"]["scale"] == 65536


def test_log_every_steps_and_checkpoint_every_steps_and_keep(tmp_path, tiny):
    options = [*tiny, "--epochs=1", "--log-every-steps=10", "--checkpoint-every-steps=4"]
    run = train(tmp_path / "run", 1, *options, "--keep=2")
    assert [record["step"] for record in run.records("train")] == [10, 20, 26]
    assert run.saved() == [24, 26]


@pytest.mark.parametrize(
    ("warmup", "expected"),
    [
        (0, {0: 1, 250: 0.8535534, 500: 0.5, 750: 0.1464466, 999: 0}),
        (1, {0: 0, 125: 0.25, 250: 0.5, 500: 1, 750: 0.5, 999: 0}),
    ],
)
def test_the_learning_rate_is_this_function_of_the_step(warmup, expected):
    cfg = parse_config(["--epochs=2", f"--warmup-epochs={warmup}"])
    factors = {step: Task().lr_factor(cfg, step, 1000) for step in expected}
    assert factors == pytest.approx(expected, abs=2e-3)


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


OUTAGES = {
    "init": "def init(**_): raise OSError('no server')\nwandb.init = init",
    "log": "class Run:\n def log(*_): raise OSError('no server')\nwandb.init = lambda **_: Run()",
}


@pytest.mark.parametrize("where", OUTAGES)
def test_an_outage_of_wandb_is_a_warning(tmp_path, tiny, where):
    before = f"import wandb\n{OUTAGES[where]}"
    run = train(tmp_path / "run", 1, *tiny, "--stop-at-step=2", "--wandb", before=before)
    lines = [line for line in run.out[0].splitlines() if line.startswith("WARNING: ")]
    assert all("no server" in line for line in lines) and lines
    assert len(run.records("train")) == 2 and run.saved() == [2]


def test_the_command_line_overrides_the_file_and_the_file_the_defaults(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("epochs: 3\nbatch_size: 16\nlr: 1e-3\namp: off\ncompile: true\nnodes: null\n")
    words = [f"--config={file}", "--epochs", "4"]
    cfg = parse_config(words)
    assert (cfg.epochs, cfg.batch_size, cfg.lr, cfg.seed) == (4, 16, 0.001, 42)
    assert (cfg.amp, cfg.compile, cfg.nodes) == ("off", True, 0)
    assert not parse_config([*words, "--no-compile"]).compile
    file.write_text("total_steps: 7\n")  # as a run with --total-steps has written it
    assert parse_config(words[:1]).total_steps == 7 and parse_config(words).total_steps == 0


class Own(Task):
    def add_options(self, parser):
        parser.add_argument("--width", type=int, required=True)
        parser.add_argument("--sizes", type=int, nargs="+", default=[1])
        parser.add_argument("--fast", action="store_true")
        parser.add_argument("--lr", choices=["low", "high"], default="low")  # another one than ours
        parser.set_defaults(seed=7)


def test_a_config_file_sets_the_options_of_a_task(tmp_path):
    """One that has other options than the task of train_distributed.py."""
    file = tmp_path / "c.yaml"
    for value in ("true", "false"):
        file.write_text(f"epochs: 3\nwidth: 16\nsizes: [3, 4]\nfast: {value}\ncompile: {value}\n")
        cfg = parse_config([f"--config={file}"], Own())
        assert (cfg.epochs, cfg.width, cfg.sizes) == (3, 16, [3, 4])
        assert cfg.fast == cfg.compile == (value == "true")
        assert (cfg.lr, cfg.seed) == ("low", 7) and not hasattr(cfg, "dropout")


def test_home_and_variables_are_replaced_in_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/jane")
    monkeypatch.setenv("SCRATCH", "/scratch")
    file = tmp_path / "options.yaml"
    file.write_text("data_dir: $SCRATCH/data\ncheckpoint_dir: ~/runs\n")
    cfg = parse_config([f"--config={file}", "--init=~/one.pt"])
    paths = (cfg.data_dir, cfg.checkpoint_dir, cfg.init)
    assert paths == ("/scratch/data", "/home/jane/runs", "/home/jane/one.pt")


def test_default_config_documents_every_key_and_changes_nothing(tmp_path):
    text = (REPO / "configs/default_config.yaml").read_text()
    of_the_task = re.findall(r"^# (\w+: .*)", text, re.MULTILINE)
    assert len(of_the_task) == 2, "others are not commented out: any task has them"
    file = tmp_path / "all.yaml"
    file.write_text(text + "\n".join(of_the_task))
    keys = yaml.safe_load(file.read_text()).keys()
    cfg = parse_config([f"--config={file}"])
    assert keys == vars(cfg).keys() - {"config", "evaluate"}
    assert vars(cfg) | {"config": ""} == vars(parse_config([]))
    for line in text.splitlines():
        assert not line or line.startswith("#") or "  # " in line, f"undocumented: {line}"
    parse_config([f"--config={REPO}/configs/default_config.yaml"], WithoutThem())


class WithoutThem(Task):
    def add_options(self, parser):
        pass


def test_the_run_directory_holds_the_options_and_how_the_run_ended(tmp_path, tiny, plain):
    options = yaml.safe_load((plain.directory / "config.yaml").read_text())
    assert (options["epochs"], options["batch_size"], options["global_batch_size"]) == (1, 8, 16)
    status = plain.status()
    assert (status["state"], status["global_step"], status["saved_step"]) == ("finished", 13, 13)
    assert status["run_dir"] == str(plain.directory) and status["world_size"] == 2
    again = train(tmp_path / "again", 2, f"--config={plain.directory}/config.yaml")
    assert_same_state(again.newest(), plain.newest())


def test_a_finished_run_stays_finished_and_more_epochs_extend_it(tmp_path, tiny):
    train(tmp_path / "run", 2, *tiny, "--epochs=1")
    again = train(tmp_path / "run", 2, *tiny, "--epochs=1")
    assert again.status()["state"] == "finished" and again.saved() == [13]
    more = train(tmp_path / "run", 2, *tiny, "--epochs=2")
    epochs = {record["epoch"]: record["step"] for record in more.records("epoch")}
    assert epochs == {1: 13, 2: math.ceil(2 * 203 / 16)}


def test_resume_from_a_file_into_another_directory(tmp_path, tiny):
    """The same command again continues the new run. Best is that of the new directory."""
    first = train(tmp_path / "first", 1, *tiny, "--epochs=1")
    from_file = f"--resume={first.directory}/checkpoint_step_26.pt"
    options = [*tiny, "--epochs=2", from_file]
    train(tmp_path / "second", 1, *options, "--stop-at-step=30")
    second = train(tmp_path / "second", 1, *options)
    assert second.status()["start_step"] == 30
    assert second.checkpoint("best")["step"] == 51
    straight = train(tmp_path / "first", 1, *tiny, "--epochs=2")
    assert_same_state(second.newest(), straight.newest())


class Counted(torch.nn.Linear):
    def get_extra_state(self):
        return {"calls": 0}

    def set_extra_state(self, state):
        pass


class Head(Task):
    def model(self, cfg):
        model = super().model(cfg)
        model.network.fc2 = Counted(128, 12)
        return model


def test_init_takes_the_weights_that_fit_and_names_the_others(tmp_path, tiny, plain):
    file = plain.directory / "checkpoint_step_13.pt"
    still = [*tiny, "--lr=0", f"--init={file}"]
    run = train(tmp_path / "run", 2, *still, "--stop-at-step=2", task=Head)
    assert "6 of 8 taken" in run.out[0] and "network.fc2.weight" in run.out[0]
    ours, theirs = run.newest(), plain.newest()
    assert ours["step"] == 2, "a run of its own"
    assert torch.equal(ours["model"]["network.fc1.weight"], theirs["model"]["network.fc1.weight"])
    again = train(tmp_path / "run", 2, *still, "--stop-at-step=3", task=Head)
    assert again.status()["start_step"] == 2


def load_initial(model: torch.nn.Module, weights: dict, file: Path) -> None:
    torch.save(weights, file)
    train_distributed.load_initial_weights(str(file), model)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "network.", "module.network."])
def test_initial_weights_may_be_a_plain_state_dict(tmp_path, prefix):
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
    model = train_distributed.Normalized(network, mean=[0.0], std=[1.0])
    weights = {f"{prefix}1.weight": torch.full((2, 64), 0.25), f"{prefix}1.bias": torch.zeros(2)}
    old = {"model": "resnet", "state_dict": weights}  # as others save it
    load_initial(model, weights if prefix else old, tmp_path / "weights.pt")
    assert (network[1].weight == 0.25).all()
    with pytest.raises(UserError, match="other.weight"):
        load_initial(model, {"other.weight": torch.ones(2, 64)}, tmp_path / "other.pt")


def test_initial_weights_go_to_what_is_trained_and_not_to_its_average(tmp_path):
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    weights = {name: torch.full_like(value, 3) for name, value in network.state_dict().items()}
    average = torch.optim.swa_utils.AveragedModel(network).requires_grad_(False)
    wrapped = train_distributed.Normalized(network, mean=[0.0], std=[1.0])
    for parts in ({"a": average, "b": network}, {"a": average, "b": wrapped}, {"a": average}):
        model = torch.nn.ModuleDict(parts)
        load_initial(model, weights, tmp_path / "weights.pt")
        filled = average.module if len(parts) == 1 else network
        assert all((value == 3).all() for value in filled.state_dict().values())
        for value in model.parameters():
            value.data.zero_()


def test_initial_weights_may_be_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"weight": torch.full((1, 4), 0.25)}, tmp_path / "w.safetensors")
    model = torch.nn.Linear(4, 1)
    train_distributed.load_initial_weights(f"{tmp_path}/w.safetensors", model)
    assert (model.weight == 0.25).all()
