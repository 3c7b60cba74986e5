"""Random options, config files and environments: each is accepted, or refused with one sentence.

200 cases, the same in each run; with --long, 20,000 others. A case that failed once stays as an
@example.
"""

import contextlib
import io
import math
import os
import resource
from pathlib import Path
from unittest import mock

import guard
import pytest
import yaml
from harness import LAUNCH_VARIABLES, LONG
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

import train_distributed as trainer

SPARE_BYTES = 4 << 30  # a case that needs more memory fails

# A value that a variable of a job script, a typing error or a copied line may leave.
ODD_TEXTS = ["", " ", "0", "-1", "1", "2", "3", "nan", "-inf", "1e400", "0x10", "1.5", "1_0", "١"]
ODD_TEXTS += ["true", "off", "null", "~", "[]", "[1, 2]", "{}", "{a: 1}", "a b", "a\nb", "'", '"']
ODD_TEXTS += ["..", "/dev/null", "/nowhere/x", "%s", "{0}", "$HOME", "*", "\x1b[31m", "é", "\udcff"]
ODD_TEXTS += ["-", "--", "-h", "--help", "#", "&x", "*x", "!!python/object:os.system x"]
ODD_TEXTS += ["9" * 30, "9" * 5000]

RANK_VARIABLES = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"]
STEP_VARIABLES = ["SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"]
STEP_VARIABLES += ["SLURM_STEP_TASKS_PER_NODE"]
TORCHRUN_VARIABLES = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN_VARIABLES |= {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
STEP = dict(zip(STEP_VARIABLES, ("0", "3", "1", "4", "2(x2)")))

PARSER = trainer.build_parser(trainer.Task())
NOT_TEXTS = ("", "null", "~", "true", "false")  # in a config file


def odd_texts():
    """Draws a text that few expect, without NUL: no word or variable can contain it."""
    anything = st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8
    )
    return st.sampled_from(ODD_TEXTS) | anything | st.integers().map(str) | st.floats().map(str)


def option_names():
    """Draws the name of an option, or almost one."""
    names = [name for action in PARSER._actions for name in action.option_strings]
    place = st.integers(2, 12)
    nearly = st.builds(lambda name, at: name[:at] + name[at + 1 :], st.sampled_from(names), place)
    return st.sampled_from(names) | st.sampled_from(names) | nearly


def good_values():
    """{option: texts that it accepts}, for cases that come further than the parser."""
    good = {}
    for action in PARSER._actions:
        texts = ["1", "3", "28", "1000000000"]
        if action.nargs == 0:
            texts = [""]
        elif action.choices:
            texts = list(action.choices)
        for name in action.option_strings:
            good[name] = texts
    for name in ("-h", "--help"):
        del good[name]
    return good


def command_lines():
    """Draws the words of a command line."""
    good = good_values()

    def words_for(name: str):
        values = st.sampled_from(good.get(name, [""])) | odd_texts()
        # Before Python 3.13, argparse takes --option=-- for an option without a value.
        joined = values.map(lambda value: [f"{name}={value.removeprefix('--')}"])
        separate = values.map(lambda value: [name, value])
        return st.just([name]) | joined | separate

    def accepted_words(name: str):
        return st.sampled_from(good[name]).map(lambda value: [f"{name}={value}" if value else name])

    accepted = st.sampled_from(sorted(good)).flatmap(accepted_words)
    odd = option_names().flatmap(words_for) | odd_texts().map(lambda text: [text])
    option = accepted | accepted | accepted | odd
    return st.lists(option, max_size=4).map(lambda parts: [word for part in parts for word in part])


def config_texts():
    """Draws the bytes of a config file: lines that look like options, or anything."""
    keys = option_names().map(lambda name: name.strip("-").replace("-", "_"))
    lines = st.builds("{}: {}".format, keys | odd_texts(), odd_texts())
    files = st.lists(lines, max_size=4).map("\n".join)
    return files.map(lambda text: text.encode(errors="surrogateescape")) | st.binary(max_size=40)


def environments():
    """Draws some of the launch variables with odd values."""
    names = st.sampled_from([*RANK_VARIABLES, *STEP_VARIABLES, "MASTER_ADDR"])
    values = st.sampled_from(["0", "1", "2", "4", "4(x2)", "localhost"]) | odd_texts()
    return st.dictionaries(names, values, max_size=6)


def outcome(function, *arguments, env: dict[str, str] | None = None):
    """(result, "") or (None, the sentence). Everything else fails the test: it is a traceback.

    env: the launch variables of this case; the process has no others.
    """
    output = io.StringIO()
    try:
        with limited_memory(), environment(env or {}), contextlib.redirect_stderr(output):
            with contextlib.redirect_stdout(output):
                return function(*arguments), ""
    except Exception as error:
        if type(error).__name__ != "UserError":  # each script has one of its own
            raise
        sentence = str(error)
    except SystemExit as error:
        printed = output.getvalue()
        if error.code in (0, None):  # --help
            return None, printed
        assert error.code == 2, f"exit code {error.code}: {printed}"
        errors = [line for line in printed.split("\n") if ": error: " in line]
        assert len(errors) == 1, printed
        sentence = errors[0]
    assert sentence.strip()
    assert "Traceback" not in sentence
    assert len(sentence) < 20_000
    return None, sentence


def environment(variables: dict[str, str]):
    """A context in which these are the only launch variables."""
    kept = {name: os.environ[name] for name in os.environ if not LAUNCH_VARIABLES.search(name)}
    return mock.patch.dict(os.environ, kept | variables, clear=True)


@contextlib.contextmanager
def limited_memory():
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


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


@cases(0.4)
@given(command_lines())
@example(words=["--evaluate="])
def test_options(tmp_path, words):
    cfg, refusal = outcome(trainer.parse_config, words)
    if refusal or cfg.evaluate or cfg.config:
        return
    values = vars(cfg).values()
    if math.inf in values or any(str(value).lower() in NOT_TEXTS for value in values):
        return
    # As the trainer writes it to config.yaml in the run directory: the same options again.
    options = {name: value for name, value in vars(cfg).items() if name != "config"}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(options))
    again = trainer.parse_config([f"--config={file}"])
    assert vars(again) | {"config": cfg.config} == vars(cfg)


@cases(0.3)
@given(config_texts())
@example(content=b"{0}: 1")
@example(content=b"epochs: [[1]]")
@example(content=b"epochs: {a: 1}")
@example(content=b"data_dir: [{a: 1}]")
def test_config_files(tmp_path, content):
    file = tmp_path / "options.yaml"
    file.write_bytes(content)
    outcome(trainer.parse_config, [f"--config={file}"])


@cases(0.3)
@given(environments())
@example(env=TORCHRUN_VARIABLES)
@example(env={"LOCAL_WORLD_SIZE": ""})
@example(env=STEP | {"MASTER_ADDR": "n1"})
@example(env=STEP | {"SLURM_STEP_TASKS_PER_NODE": "x"})
@example(env={"SLURM_STEP_NUM_TASKS": "2"})
@example(env={"SLURM_STEP_NUM_TASKS": "x"})
def test_launch_environment(env):
    of_guard, _ = outcome(guard.launch_environment, dict(env), env=env)
    of_trainer = dict(env)
    try:
        outcome(trainer.use_slurm_variables, of_trainer, env=env)
    except KeyError:  # Slurm sets all of its variables, or none
        return
    is_slurm = "RANK" in of_trainer and not {"RANK", "WORLD_SIZE"} & env.keys()
    if is_slurm and of_guard and of_guard["WORLD_SIZE"] > 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            assert of_guard[name] == int(of_trainer[name])
