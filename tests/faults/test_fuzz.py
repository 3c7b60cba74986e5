"""Random options, environments, config files and run directories: each works, or is refused with
one sentence.

200 cases, the same in each run; with --long, 20,000 others. A case that failed once stays as an
@example.
"""

import json
import math
import os
import shutil
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import fuzz
import guard
import pytest
import report
import torch
from harness import LONG, REPO, load
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

import train_distributed as trainer

supervise = load(REPO / "scripts/supervise.py")
node_check = load(REPO / "scripts/node_check.py")
compare_runs = load(REPO / "scripts/compare_runs.py")

RANK_VARIABLES = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"]
STEP_VARIABLES = ["SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"]
STEP_VARIABLES += ["SLURM_STEP_TASKS_PER_NODE"]
LAUNCH_VARIABLES = RANK_VARIABLES + STEP_VARIABLES + ["MASTER_ADDR"]
TORCHRUN_VARIABLES = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN_VARIABLES |= {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
STEP = dict(zip(STEP_VARIABLES, ("0", "3", "1", "4", "2(x2)")))
CHECKPOINTS = ["checkpoint_epoch_1.pt", "checkpoint_step_50.pt", "checkpoint_epoch_2.pt"]
STEPS = dict(zip(CHECKPOINTS, (26, 50, 52)))
STATUS = {"state": "running", "reason": "", "run_dir": "/nowhere", "start_step": 0, "time": 9.5}
STATUS |= {"global_step": 52, "saved_step": 26, "world_size": 2, "began": 1.5}
FAILURE = {"cause": "exception", "reason": "ValueError: x", "rank": 1, "host": "n01"}
ATTEMPT = {"attempt": "7.1", "start": 1.0, "end": 9.0, "start_step": 0, "end_step": 52, "hosts": []}
ATTEMPT |= {"saved_step": 26, "recomputed": 26, "cause": "killed"}
ATTEMPT |= {"reason": "", "world_size": 2}
BEGUN = {"attempt": "7.1", "start": 1.0, "cause": "running"}
METRIC = {"kind": "train", "step": 20, "time": 3.0, "loss": 0.5, "accuracy": 0.75, "lr": 0.1}
EPOCH = {"kind": "epoch", "step": 26, "time": 4.0, "epoch": 1, "loss": 0.4, "test_accuracy": 0.8}


def cases(share: float):
    """This share of all cases."""
    count = int(share * (20_000 if LONG else 200))
    fixtures = HealthCheck.function_scoped_fixture  # a directory for all cases of a test
    ignored = [HealthCheck.too_slow, HealthCheck.filter_too_much, fixtures]
    return settings(
        max_examples=count,
        derandomize=not LONG,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],  # a failure is printed as it is found
        print_blob=True,
        suppress_health_check=ignored,
    )


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


PARSER = trainer.build_parser(trainer.Task())
NOT_TEXTS = ("", "null", "~", "true", "false")  # in a config file


@cases(0.22)
@given(fuzz.command_lines(PARSER))
@example(words=["--evaluate="])
def test_options(tmp_path, words):
    cfg, refusal = fuzz.outcome(trainer.parse_config, words)
    if refusal or cfg.evaluate or cfg.config:
        return
    values = vars(cfg).values()
    if math.inf in values or any(str(value).lower() in NOT_TEXTS for value in values):
        return
    file = tmp_path / "config.yaml"
    file.write_bytes(fuzz.yaml_of(cfg))  # as in the run directory: the same options again
    again = trainer.parse_config([f"--config={file}"])
    assert vars(again) | {"config": cfg.config} == vars(cfg)


@cases(0.2)
@given(fuzz.config_texts(PARSER))
@example(content=b"{0}: 1")
@example(content=b"epochs: [[1]]")
@example(content=b"epochs: {a: 1}")
@example(content=b"data_dir: [{a: 1}]")
def test_config_files(tmp_path, content):
    file = tmp_path / "options.yaml"
    file.write_bytes(content)
    fuzz.outcome(trainer.parse_config, [f"--config={file}"])


@cases(0.2)
@given(fuzz.environments(LAUNCH_VARIABLES))
@example(env=TORCHRUN_VARIABLES)
@example(env={"LOCAL_WORLD_SIZE": ""})
@example(env=STEP | {"MASTER_ADDR": "n1"})
@example(env=STEP | {"SLURM_STEP_TASKS_PER_NODE": "x"})
@example(env={"SLURM_STEP_NUM_TASKS": "2"})
@example(env={"SLURM_STEP_NUM_TASKS": "x"})
def test_launch_environment(env):
    of_guard, _ = fuzz.outcome(guard.launch_environment, dict(env), env=env)
    of_trainer = dict(env)
    try:
        fuzz.outcome(trainer.use_slurm_variables, of_trainer, env=env)
    except KeyError:  # Slurm sets all of its variables, or none
        return
    is_slurm = "RANK" in of_trainer and not {"RANK", "WORLD_SIZE"} & env.keys()
    if is_slurm and of_guard and of_guard["WORLD_SIZE"] > 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            assert of_guard[name] == int(of_trainer[name])


SETTINGS = ["HANG_TIMEOUT", "RANK_TIMEOUT", "DEADLINE", "SLURM_JOB_END_TIME", "RANK", "PREFLIGHT"]
SETTINGS += ["SLURM_RESTART_COUNT", "MAX_RESTARTS", "STOP_SECONDS", "MAX_DURATION"]


@cases(0.1)
@given(fuzz.environments(SETTINGS))
@example(env={"RANK": "4(x2)"})
def test_settings(tmp_path, env):
    cfg = trainer.parse_config([f"--checkpoint-dir={tmp_path}"])
    with suppress(ValueError):  # of DEADLINE
        fuzz.outcome(trainer.StopRequests, cfg, env=env)
    for name in ("HANG_TIMEOUT", "RANK_TIMEOUT"):
        fuzz.outcome(report.seconds, name, 1.0, env=env)
    fuzz.outcome(node_check.refuse, "something is wrong", env=env)
    for name in supervise.NUMBERS:
        with fuzz.environment(env), suppress(ValueError):  # main() prints it
            assert supervise.number(name) >= 0


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory) -> Path:
    """As a run of two epochs of 26 steps leaves it."""
    path = tmp_path_factory.mktemp("run")
    for name, step in STEPS.items():
        weights = torch.ones(64)
        content = {"state": {"step": step}, "config": {"resume": None, "init": None}}
        content |= {"model": {"w": weights}, "optimizer": {"state": {}}}
        content["digests"] = trainer.digests_in(content)
        torch.save(content, path / name)
    lines = [METRIC, EPOCH, METRIC | {"step": 40}, EPOCH | {"step": 52, "epoch": 2}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "status.json").write_text(json.dumps(STATUS))
    (path / "config.yaml").write_text("epochs: 2\n")
    (path / "attempts.jsonl").write_text(json.dumps(ATTEMPT) + "\n")
    return path


FILES = [*CHECKPOINTS, "metrics.jsonl", "status.json", "config.yaml", "attempts.jsonl"]
FOREIGN = ["checkpoint_best.pt", ".notes.tmp", "checkpoint_epoch_1.pt~"]


@cases(0.1)
@given(
    st.dictionaries(st.sampled_from(FILES), fuzz.damages(), max_size=4),
    st.sampled_from(["", "elsewhere.pt", *CHECKPOINTS]),
)
@example(damaged={"metrics.jsonl": ("directory", 0.0)}, resume="")
@example(damaged={"metrics.jsonl": ("nested", 0.0)}, resume="")
def test_run_directories(tmp_path, run_directory, damaged, resume):
    run = tmp_path / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(run_directory, run)
    for name in FOREIGN:
        (run / name).write_text("mine")
    for name, (kind, position) in damaged.items():
        fuzz.damage(run / name, kind, position)
    if resume in CHECKPOINTS:
        resume = str(run / resume)

    found, refusal = fuzz.outcome(open_run_directory, run, resume)

    for name in FOREIGN:
        assert (run / name).read_text() == "mine"
    intact = [name for name in CHECKPOINTS if name not in damaged]
    if not refusal and intact:
        assert found == run / max(intact, key=STEPS.get)
    fuzz.outcome(compare_runs.compare, run, run_directory)
    for name in CHECKPOINTS:
        fuzz.outcome(compare_runs.compare, run_directory / name, run / name)


def open_run_directory(path: Path, resume: str) -> Path | None:
    """What rank 0 does before the first step."""
    words = [f"--resume={resume}"] if resume else []
    cfg = trainer.parse_config([f"--checkpoint-dir={path}", *words])
    lock = trainer.lock_directory(cfg)
    try:
        found = trainer.find_checkpoint(cfg)
        saver = SimpleNamespace(stream=None, code="train_distributed.py 0", run_id="0")
        metrics = trainer.MetricsWriter(trainer.Task(), cfg, saver)
        metrics.record("train", 53, {"loss": 1.0})
        return found
    finally:
        os.close(lock)


LINES = st.lists(fuzz.records([METRIC, EPOCH]), max_size=5)


@cases(0.1)
@given(
    st.lists(
        st.sampled_from([json.dumps(ATTEMPT), json.dumps(BEGUN), '{"attempt": "7']), max_size=4
    ),
    LINES,
    fuzz.records([STATUS]),
    st.sampled_from([json.dumps(FAILURE), '{"cause": "hang', ""]),
    st.sampled_from([0, 1, 2, -9, 137, -6, 255]),
)
def test_records_of_supervise(tmp_path, attempts, metrics, status, failure, code):
    run = tmp_path / "run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    (run / "attempts.jsonl").write_text("\n".join(attempts) + "\n")
    (run / "metrics.jsonl").write_text("\n".join(metrics))
    (run / "status").write_text(status)
    (run / "failure").write_text(failure)

    def end_of_an_attempt():
        supervisor = supervise.Supervisor(["true"])
        found = supervise.read_status(run / "status")
        supervisor.run_dir = str(run)
        cause, reason = supervisor.cause(code, found, supervise.read_json(run / "failure"))
        attempt = {"attempt": "7.2", "start": 10.0, "end": 12.0, "hosts": ["n01"]}
        attempt |= supervise.steps(found)
        assert supervise.last_recorded_step(run) is not None
        attempt |= {"world_size": found.get("world_size"), "cause": cause, "reason": reason}
        supervisor.record(attempt)
        supervisor.count_crash(attempt)
        supervisor.report(attempt, supervisor.decide(attempt))
        return attempt

    attempt, refusal = fuzz.outcome(end_of_an_attempt)
    assert not refusal
    last = (run / "attempts.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["attempt"] == attempt["attempt"]


@cases(0.03)
@given(LINES, LINES)
@example(lines=['{"kind": "train", "step": true}'], others=['{"kind": [], "step": 1}'])
@example(lines=["[" * 100_000], others=[json.dumps(METRIC)])
@example(lines=[json.dumps(METRIC)], others=[json.dumps(METRIC | {"loss\n": {"a": [0.5]}})])
def test_records_of_compare_runs(tmp_path, lines, others):
    paths = []
    for name, text in (("a", lines), ("b", others)):
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("\n".join(text))

    result, refusal = fuzz.outcome(compare_runs.compare, *paths)

    if not refusal:
        is_equal, printed = result
        assert printed.isprintable()
        assert compare_runs.compare(paths[1], paths[0])[0] == is_equal
