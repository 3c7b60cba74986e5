"""What the fuzz tests draw: words of a command line, environments, files, records; and the rules.

outcome() runs one case: only a result, or one sentence and exit code 2, are accepted.
"""

import contextlib
import io
import json
import os
import resource
import signal
from pathlib import Path

import yaml
from harness import LAUNCH_VARIABLES
from hypothesis import strategies as st

import train_distributed as trainer

SPARE_BYTES = 4 << 30  # a case that needs more memory fails

# A value that a variable of a job script, a typing error or a copied line may leave.
ODD_TEXTS = ["", " ", "0", "-1", "1", "2", "3", "nan", "-inf", "1e400", "0x10", "1.5", "1_0", "١"]
ODD_TEXTS += ["true", "off", "null", "~", "[]", "[1, 2]", "{}", "{a: 1}", "a b", "a\nb", "'", '"']
ODD_TEXTS += ["..", "/dev/null", "/nowhere/x", "%s", "{0}", "$HOME", "*", "\x1b[31m", "é", "\udcff"]
ODD_TEXTS += ["-", "--", "-h", "--help", "#", "&x", "*x", "!!python/object:os.system x"]
ODD_TEXTS += ["9" * 30, "9" * 5000]


def odd_texts():
    """Draws a text that few expect, without NUL: no word or variable can contain it."""
    anything = st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8
    )
    return st.sampled_from(ODD_TEXTS) | anything | st.integers().map(str) | st.floats().map(str)


def option_names(parser):
    """Draws the name of an option, or almost one."""
    names = [name for action in parser._actions for name in action.option_strings]
    nearly = st.builds(lambda name, at: name[:at] + name[at + 1 :], st.sampled_from(names), SMALL)
    return st.sampled_from(names) | st.sampled_from(names) | nearly


SMALL = st.integers(2, 12)


def good_values(parser):
    """{option: texts that it accepts}, for cases that come further than the parser."""
    good = {}
    for action in parser._actions:
        texts = ["1", "3", "28", "1000000000"]
        if action.nargs == 0:
            texts = [""]
        elif action.choices:
            texts = list(action.choices)
        elif action.type in (trainer.not_negative, trainer.fraction):
            texts = ["0", "0.5", "1"]
        for name in action.option_strings:
            good[name] = texts
    for name in ("-h", "--help"):
        del good[name]
    return good


def command_lines(parser):
    """Draws the words of a command line."""
    good = good_values(parser)

    def words_for(name: str):
        values = st.sampled_from(good.get(name, [""])) | odd_texts()
        # Before Python 3.13, argparse takes --option=-- for an option without a value.
        joined = values.map(lambda value: [f"{name}={value.removeprefix('--')}"])
        separate = values.map(lambda value: [name, value])
        return st.just([name]) | joined | separate

    def accepted_words(name: str):
        return st.sampled_from(good[name]).map(lambda value: [f"{name}={value}" if value else name])

    accepted = st.sampled_from(sorted(good)).flatmap(accepted_words)
    odd = option_names(parser).flatmap(words_for) | odd_texts().map(lambda text: [text])
    option = accepted | accepted | accepted | odd
    return st.lists(option, max_size=4).map(lambda parts: [word for part in parts for word in part])


def config_texts(parser):
    """Draws the bytes of a config file: lines that look like options, or anything."""
    keys = option_names(parser).map(lambda name: name.strip("-").replace("-", "_"))
    lines = st.builds("{}: {}".format, keys | odd_texts(), odd_texts())
    files = st.lists(lines, max_size=4).map("\n".join)
    return files.map(lambda text: text.encode(errors="surrogateescape")) | st.binary(max_size=40)


def environments(names):
    """Draws some of these variables with odd values."""
    values = st.sampled_from(["0", "1", "2", "4", "4(x2)", "localhost"]) | odd_texts()
    return st.dictionaries(st.sampled_from(names), values, max_size=6)


def json_values():
    """Draws what another program may have written."""
    simple = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)

    def several(inner):
        return st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)

    return st.recursive(simple, several, max_leaves=5)


def records(good: list[dict]):
    """Draws lines of JSON: these records, some with one value replaced or missing, or others'."""

    def changed(record: dict):
        def change(key, value, is_dropped):
            rest = {name: record[name] for name in record if name != key}
            return rest if is_dropped else rest | {key: value}

        keys = st.sampled_from(sorted(record))
        return st.builds(change, keys, json_values(), st.booleans())

    ours = st.sampled_from(good)
    objects = ours | ours.flatmap(changed) | json_values()
    return objects.map(json.dumps) | st.sampled_from(["", "\0\0", "{", '{"step": ', "text"])


def damages():
    """Draws what happens to a file: (kind, position from 0 to 1)."""
    kinds = ["truncated", "empty", "text", "nested", "gone", "directory", "dangling link"]
    return st.tuples(st.sampled_from(kinds), st.floats(0, 1, exclude_max=True))


def damage(path: Path, kind: str, position: float) -> None:
    content = path.read_bytes()
    at = int(position * len(content))
    path.unlink()
    if kind == "truncated":
        path.write_bytes(content[:at])
    elif kind == "empty":
        path.touch()
    elif kind == "text":
        path.write_text("not what was here\n" * 9)
    elif kind == "nested":
        path.write_text("[" * 100_000)
    elif kind == "directory":
        path.mkdir()
    elif kind == "dangling link":
        path.symlink_to(path.with_name("no such file"))


def outcome(function, *arguments, env: dict[str, str] | None = None):
    """(result, "") or (None, the sentence). Everything else fails the test: it is a traceback.

    env: the launch variables of this case; the process has no others.
    """
    output = io.StringIO()
    try:
        with limits(), environment(env or {}), contextlib.redirect_stderr(output):
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


@contextlib.contextmanager
def environment(variables: dict[str, str]):
    before = dict(os.environ)
    for name in before:
        if LAUNCH_VARIABLES.search(name) or name.startswith(("STOP_", "DEADLINE", "ATTEMPT")):
            del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def limits():
    """Limited memory. Signal handlers stay as they were."""
    handlers = [(name, signal.getsignal(name)) for name in trainer.STOP_SIGNALS]
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        for name, handler in handlers:
            signal.signal(name, handler)


def yaml_of(cfg) -> bytes:
    """As the trainer writes it to config.yaml."""
    options = {name: value for name, value in vars(cfg).items() if name != "config"}
    return yaml.safe_dump(options).encode()
