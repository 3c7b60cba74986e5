"""docs/MESSAGES.md has every error, warning and finding of this repository in full, and no others.

Messages are read from the source code, with VALUE for each value: from Python by following the
assignments and branches of each function, from bash as the quoted strings of its commands. An entry
of the page is a code span in the message column of a table, with `...` for each value. Rules for
what is not one text in the code:
- A text that is not always printed ("..." * condition, a plural s) is shown on the page.
- A list is shown with one element.
- A PART is a text that stands where a message has a value: of an exception, or of PARTS below.
"""

import ast
import itertools
import re
from fnmatch import fnmatch
from typing import NamedTuple

import pytest
from harness import REPO

VALUE = "…"
PYTHON = [REPO / "train_distributed.py", *sorted(REPO.glob("scripts/**/*.py"))]
BASH = [*REPO.glob("scripts/**/*.sh"), *REPO.glob("*.sh"), *REPO.glob("*.slurm")]
BASH = sorted(path for path in BASH if not path.is_symlink())

PRINTERS = {"UserError", "trainer.UserError", "fail", "refuse", "preflight.refuse", "say", "log"}
PRINTERS |= {"argparse.ArgumentTypeError", "sys.exit", "SystemExit", "print", "end_now", "explain"}
PRINTERS |= {"self.warn", "sys.stderr.write", "warnings.warn", "advice.append"}
EXCEPTIONS = {"ValueError", "RuntimeError", "OSError"}  # printed by the caller, inside its message
# Functions that return messages, or their parts, which others print.
RETURNED = {
    "guard.py": {"find_problem", "find_differences", "verdict"},
    "supervise.py": {"cause", "cause_of_exit_code", "goodput", "sbatch_command", "qsub_command"},
}
# Functions that print texts of others, so that nothing but values is to be seen here.
PASS_ON = {
    ("train_distributed.py", "explain"),  # an error of a file or a library
    ("train_distributed.py", "main"),  # a UserError
    ("train_distributed.py", "parse_config"),  # a UserError of a config file, after its name
    ("train_distributed.py", "error"),  # of argparse
    ("guard.py", "fail"),
    ("guard.py", "end_now"),
    ("guard.py", "check_ranks"),  # what find_problem() has returned on rank 0
    ("guard.py", "compare_gpus"),  # what check_gpu.py has found
    ("guard.py", "report"),  # what verdict() has returned
    ("preflight.py", "refuse"),
    ("preflight.py", "main"),  # a finding of checks.py
    ("doctor.py", "add"),
    ("supervise.py", "log"),
    ("supervise.py", "keep_alive"),  # what goodput() has returned
    ("supervise.py", "read_events"),  # the text of an event, for example of guard.py
    ("supervise.py", "warn"),
    ("plan.py", "main"),  # a UserError
    ("plot_metrics.py", "main"),  # the same
    ("plot_metrics.py", "error"),  # of argparse
    ("compare_runs.py", "main"),  # a UserError
    ("launch.py", "say"),
    *((path.name, "bash") for path in BASH),  # fail() and report_failure()
}
# Texts that reach their message through a dictionary, a file or the store.
PARTS = {
    "train_distributed.py": [
        "unrecognized arguments: …",  # of argparse
        "… on … is damaged or not a checkpoint (…)",  # in a warning, if another one is used
        *("global_batch_size", "seed"),
    ],
    "guard.py": ["does not answer", "has ended", "is …, … steps done", "at collective … (…)"],
    "supervise.py": ["its GPU has failed", "a rank on it did not answer in … hangs"],
    "checks.py": [
        *("open files", "processes", "locked memory"),
        *("ulimit -n 65536", "ulimit -u 65536", "ulimit -l unlimited"),
    ],
    "doctor.py": ["on … was last seen …", "another program answers there", "the port is in use"],
}
COMMANDS = {"qsub …"}  # returned by qsub_command(): not a message


class Message(NamedTuple):
    file: str
    text: str  # with VALUE for each value
    level: str = ""  # of a finding


# ------------------------------------------------------------------------------ the source code


def either(*alternatives: set[str]) -> set[str]:
    """All of the texts, but not one that is only the start of another, or a word for a value."""
    texts = set().union(*alternatives)
    if VALUE in texts:
        texts = {text for text in texts if " " in text or text == VALUE}
    return {t for t in texts if not any(u != t and u.startswith(t) for u in texts)}


def sequence(nodes, env) -> set[str]:
    return {"".join(parts) for parts in itertools.product(*(texts_of(node, env) for node in nodes))}


def texts_of(node, env: dict[str, set[str]]) -> set[str]:
    """The texts that an expression may be. env: those of the variables."""
    match node:
        case ast.Constant(value=str(text)):
            return {text}
        case ast.Constant(value=bytes(text)):
            return {text.decode()}
        case ast.JoinedStr(values=nodes):
            return sequence(nodes, env)
        case ast.FormattedValue(value=value) | ast.NamedExpr(value=value):
            return texts_of(value, env)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            texts = sequence([left, right], env)
            return {VALUE} if any(map(str.isdigit, texts_of(left, env))) else texts
        case ast.BinOp(left=left, op=ast.Mult()):  # * condition
            return texts_of(left, env)
        case ast.IfExp(body=one, orelse=other):
            return either(texts_of(one, env), texts_of(other, env))
        case ast.BoolOp(op=ast.And(), values=nodes):
            return texts_of(nodes[-1], env)
        case ast.BoolOp(values=nodes) | ast.List(elts=nodes):
            return either(*(texts_of(value, env) for value in nodes))
        case ast.ListComp(elt=element) | ast.GeneratorExp(elt=element):
            bound = {name for part in node.generators for name in names_in(part.target)}
            return texts_of(element, {k: v for k, v in env.items() if k not in bound})
        case ast.Call(func=ast.Attribute(attr="join"), args=[elements]):
            return {text if " " in text else VALUE for text in texts_of(elements, env)}
        case ast.Call(func=ast.Attribute(value=text, attr="split" | "strip" | "encode")):
            return texts_of(text, env)
        case ast.Subscript(value=ast.Call() as call):  # .split(...)[0]
            return texts_of(call, env)
        case ast.Name(id=name):
            return env.get(name, {VALUE})
    return {VALUE}


def names_in(target) -> list[str]:
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]


class PythonReader:
    """Collects `messages`, `parts` and what it cannot read, from the text of a Python file."""

    def __init__(self, file: str, text: str):
        self.file, self.functions = file, [""]
        self.messages: set[Message] = set()
        self.parts: set[str] = set()
        self.unreadable: set[str] = set()
        body = sorted(ast.parse(text).body, key=lambda s: hasattr(s, "body"))  # constants first
        self.block(body, {"PROGRAM": {"preflight.py"}})

    def block(self, statements, env) -> None:
        for statement in statements:
            self.statement(statement, env)

    def statement(self, node, env) -> None:
        children = [c for c in ast.iter_child_nodes(node) if isinstance(c, ast.expr | ast.withitem)]
        if isinstance(node, ast.FunctionDef):
            children = node.decorator_list
        for expression in [e for child in children for e in ast.walk(child)]:
            if isinstance(expression, ast.NamedExpr):
                env[expression.target.id] = texts_of(expression.value, env)
            elif isinstance(expression, ast.Call):
                self.call(expression, env)
            elif isinstance(expression, ast.Dict):
                self.dictionary(expression, env)
            elif isinstance(expression, ast.Yield):
                self.returned(expression.value, env)
        before = dict(env)
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                for target, value in zip(targets, values):
                    self.assign(target, texts_of(value, before), env)
            case ast.Assign(targets=[target], value=ast.Constant(value=int(number))):
                constant = isinstance(target, ast.Name) and target.id.isupper()
                self.assign(target, {str(number) if constant else VALUE}, env)
            case ast.Assign(targets=[target], value=value):
                self.assign(target, texts_of(value, env), env)
            case ast.AugAssign(target=ast.Name(), value=value):
                env[node.target.id] = sequence([node.target, value], env)
            case ast.Return(value=value) if value:
                self.returned(value, env)
            case ast.FunctionDef():
                self.functions.append(node.name)
                arguments = {a.arg: {VALUE} for a in ast.walk(node.args) if isinstance(a, ast.arg)}
                self.block(node.body, env | arguments)
                self.functions.pop()
            case ast.ClassDef():
                self.block(node.body, dict(env))
            case ast.For() | ast.While() | ast.If():
                if isinstance(node, ast.For):
                    self.assign(node.target, {VALUE}, env)
                other = dict(env)
                self.block(node.body, env)
                self.block(node.orelse, other)
                self.merge(env, other, node.body[-1])
            case ast.With():
                self.block(node.body, env)
            case ast.Try():
                self.block(node.body, env)
                for handler in node.handlers:
                    other = dict(env)
                    self.merge(other, before, None)
                    self.block(handler.body, other)
                    self.merge(env, other, None)
                self.block(node.orelse + node.finalbody, env)

    def assign(self, target, texts: set[str], env) -> None:
        for name in set(names_in(target)) - {"PROGRAM"}:  # of preflight.py
            env[name] = texts if isinstance(target, ast.Name) else {VALUE}

    def merge(self, env, other, last) -> None:
        """The variables after an if: of both branches, unless the first one does not go on."""
        if isinstance(last, ast.Return | ast.Raise | ast.Continue | ast.Break):
            env.update(other)
        else:
            env |= {name: either(env.get(name, set()), other[name]) for name in other}

    def call(self, node: ast.Call, env) -> None:
        name, arguments = ast.unparse(node.func), list(node.args)
        if name == "log_on_rank_0":  # its first argument says which rank this is
            name, arguments = "log", arguments[1:]
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if name in ("Finding", "self.add") and len(arguments) > 1:
            self.finding(*(arguments + [ast.Constant("")])[:4], env)
        elif name == "Problem":  # of check_gpu.py
            self.message(arguments[2], env)
        elif name == "threading.Timer" and ast.unparse(arguments[1]) in PRINTERS:
            self.message(arguments[2], env)
        elif name == "os.write" and ast.unparse(arguments[0]) == "2":
            if texts_of(arguments[1], env) != {VALUE}:
                self.message(arguments[1], env)
        elif name in EXCEPTIONS and arguments:
            explained = f"{name}: " * (self.file == "train_distributed.py")  # by explain()
            self.parts |= {explained + text for text in texts_of(arguments[0], env)}
        elif name in PRINTERS and arguments:
            texts = texts_of(arguments[0], env)
            quiet = name == "print" and ast.unparse(keywords.get("file", node)) != "sys.stderr"
            quiet |= name == "log" and self.file == "train_distributed.py"
            if quiet and not any(re.match(rf"{self.file}: |WARNING: ", text) for text in texts):
                return
            if name in ("sys.exit", "SystemExit") and texts == {VALUE}:  # a number
                return
            self.message(arguments[0], env, " (…)" * (name == "explain"))

    def dictionary(self, node: ast.Dict, env) -> None:
        for key, value in zip(node.keys, node.values):
            if isinstance(key, ast.Constant) and key.value == "error":  # of doctor.py
                self.parts |= texts_of(value, env) - {VALUE}

    def returned(self, value, env) -> None:
        if self.functions[-1] in RETURNED.get(self.file, ()):
            for node in value.elts if isinstance(value, ast.Tuple) else [value]:
                for text in texts_of(node, env) - COMMANDS:
                    if " " in text:
                        self.add(text)

    def finding(self, level, check, observed, remedy, env) -> None:
        found = sequence([observed], env), sequence([remedy], env)
        for kind, name, *texts in itertools.product(
            texts_of(level, env), texts_of(check, env), *found
        ):
            if kind != "OK":
                text = ": ".join([name, *filter(None, texts)])
                self.add(text, kind, has_values_only=not any(map(has_words, texts)))

    def message(self, node, env, end: str = "") -> None:
        for text in texts_of(node, env):
            self.add(text + end)

    def add(self, text: str, level: str = "", has_values_only: bool = False) -> None:
        text = normal(text)
        if has_words(text) and not has_values_only:
            self.messages.add(Message(self.file, text, level))
        elif (self.file, self.functions[-1]) not in PASS_ON:
            self.unreadable.add(f"{self.file}, {self.functions[-1]}(): {text!r}")


def read_bash(file: str, text: str) -> set[Message]:
    """The strings after fail, finish and report_failure, and those of echo if it is an error."""
    messages = set()
    constants = dict(re.findall(r'\blocal (\w+)="([^"$`]*)"', text))
    for found in re.finditer(r'\b(fail|finish|report_failure(?: \w+)?|echo)((?= "))', text):
        words, end = [], found.end()
        while gap := re.compile(r'( |\s*\\\n\s*)"').match(text, end):
            word, end = read_string(text, gap.end(), constants)
            words.append(word)
        words = words[found[1].startswith("report_failure") and len(words) > 1 :]
        sentence = " ".join(words)
        if found[1] == "echo" and not re.search("error: |WARNING: |^stopping", sentence):
            continue
        if has_words(normal(sentence)) and not sentence.startswith("PASS"):
            messages.add(Message(file, normal(sentence)))
    return messages


def read_string(text: str, at: int, constants: dict[str, str]) -> tuple[str, int]:
    """(the text of a quoted string that begins there, the place after it)"""
    result = ""
    while text[at] != '"':
        if text[at] == "\\":
            result, at = result + text[at + 1], at + 2
        elif text.startswith(("$(", "${"), at):
            depth, at, result = 1, at + 2, result + VALUE
            while depth:
                if text[at] in "'\"":
                    at = text.index(text[at], at + 1)
                depth += (text[at] in "({") - (text[at] in ")}")
                at += 1
        elif name := re.compile(r"\$(\w+|[*@])").match(text, at):
            result, at = result + constants.get(name[1], VALUE), name.end()
        else:
            result, at = result + text[at], at + 1
    return result, at + 1


def normal(text: str) -> str:
    """Without the name of the program, in one line; values that touch are one."""
    text = text.replace("...", VALUE)
    text = re.sub(r"^[\w.]+\.(py|sh|slurm): ", "", " ".join(text.split()))
    text = re.sub(r"^(error|WARNING): ", "", text)
    text = text.replace(f"({VALUE}: {VALUE})", f"({VALUE})")  # name and text of an exception
    return re.sub(f"{VALUE}+", VALUE, text)


def has_words(text: str) -> bool:
    return bool(re.search(r"[a-zA-Z]{2}", text.replace(VALUE, "")))


def read_code() -> tuple[set[Message], dict[str, set[str]], set[str]]:
    """(messages, parts of each file, what cannot be read)"""
    messages, parts, unreadable = set(), {}, set()
    for path in PYTHON:
        reader = PythonReader(path.name, path.read_text())
        messages |= reader.messages
        parts[path.name] = {normal(t) for t in reader.parts if has_words(t)}
        parts[path.name].update(PARTS.get(path.name, ()))
        unreadable |= reader.unreadable
    for path in [*BASH, REPO / "scripts/ssh/launch.py"]:
        messages |= read_bash(path.name, path.read_text())
        unquoted = r"""(?m)^[^#\n]*?(?:^ *|[;&|{] )((?:fail|finish)(?: [^"\s]| \\).*)"""
        unreadable |= {f"{path.name}: {text}" for text in re.findall(unquoted, path.read_text())}
    harmful = Message("checks.py", "environment: …=… …: unset it", "WARN")  # one for each variable
    messages.remove(harmful)
    (table,) = re.findall(r"(?ms)^HARMFUL = (\{.*?^\})", (REPO / "scripts/checks.py").read_text())
    for name, (_, effect) in ast.literal_eval(table).items():
        messages.add(harmful._replace(text=f"environment: {name}=… {effect}: unset it"))
    return messages, parts, unreadable


# ------------------------------------------------------------------------------------- the page


class Entry(NamedTuple):
    files: tuple[str, ...]  # patterns, from the heading
    text: str
    levels: frozenset[str] = frozenset()


SPAN = re.compile(r"(?<!`)(`+)(?!`) ?(.+?) ?(?<!`)\1(?!`)")


def read_page(text: str) -> list[Entry]:
    """The code spans in the first column of each table, or in the second if the first is the level.

    Only under headings that name a file, or below one that does.
    """
    entries, files, level, rows = [], (), False, False
    for line in text.splitlines():
        if line.startswith("## ") or (line.startswith("### ") and re.search(r"\.\w+", line)):
            files, rows = tuple(re.findall(r"[\w*]+\.(?:py|sh|slurm)\b", line)), False
        elif line.startswith("| ---"):
            rows = True
        elif not line.startswith("|"):
            rows = False
        elif not rows:
            level = line.startswith("| Level")
        elif files:
            cells = re.split(r"(?<!\\)\|", line)
            levels = frozenset(re.findall(r"[A-Z]+", cells[1])) if level else frozenset()
            for _, span in SPAN.findall(cells[1 + level]):
                entries.append(Entry(files, normal(span.replace("...", VALUE)), levels))
    return entries


def matches(message: Message, entry: Entry, parts: dict[str, set[str]]) -> bool:
    """In full; a value of the message may be one of its file's parts in the entry."""
    if not any(fnmatch(message.file, pattern) for pattern in entry.files):
        return False
    value = "|".join(map(re.escape, [VALUE, *sorted(parts.get(message.file, ()))]))
    pattern = f"(?:{value})".join(map(re.escape, message.text.split(VALUE)))
    return bool(re.fullmatch(pattern, entry.text))


def compare(messages, entries, parts) -> list[str]:
    """What is wrong: a message without an entry, an entry or a part without a message, a level."""
    wrong, used = [], set()
    levels: dict[Entry, set[str]] = {}
    for message in sorted(messages):
        found = [entry for entry in entries if matches(message, entry, parts)]
        used.update(found)
        for entry in found:
            levels.setdefault(entry, set()).add(message.level)
        if not found:
            wrong.append(f"not on the page: {message.file}: {message.text}")
    for entry in entries:
        if entry not in used:
            wrong.append(f"printed by nothing: {entry.text}")
        elif levels[entry] - {""} != entry.levels:
            wrong.append(f"printed as {levels[entry]}: {entry.text}")
    for file in parts:
        texts = [e.text for e in entries if any(fnmatch(file, pattern) for pattern in e.files)]
        for part in sorted(parts[file]):
            if not any(part in text for text in texts):
                wrong.append(f"not on the page, as a part: {file}: {part}")
    return wrong


# ------------------------------------------------------------------------------------ the tests

MESSAGES, FILE_PARTS, UNREADABLE = read_code()
PAGE = (REPO / "docs/MESSAGES.md").read_text()
ENTRIES = read_page(PAGE)


def test_the_page_has_every_message_in_full_and_no_others():
    assert compare(MESSAGES, ENTRIES, FILE_PARTS) == []


def test_no_message_is_only_values():
    """Name the function in PASS_ON if others have put its texts together, and these are read."""
    assert UNREADABLE == set()


@pytest.mark.parametrize("file", PARTS)
def test_the_texts_of_a_part_are_in_its_file(file):
    (path,) = (path for path in PYTHON if path.name == file)
    others = {message.text for message in MESSAGES if message.file == file}
    for part in PARTS[file]:
        assert part in others or all(t in path.read_text() for t in part.split(VALUE)), part


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ('fail(f"no port {n}")', {"no port …"}),
        ('fail("ok")', {"ok"}),
        ('raise UserError(f"{a} is {b}, not a number")', {"… is …, not a number"}),
        ('text = f"{a} is old"\nfail(f"{text}: update it")', {"… is old: update it"}),
        ('text = "one"\nif a:\n    text += " or two"\nfail(text)', {"one or two"}),
        ('text = "no a"\nif c:\n    text = "no b"\nfail(text)', {"no a", "no b"}),
        ('t = "no a"\nif x:\n    t = "no b"\n    return\nfail(t)', {"no a"}),
        ("fail(f\"rank{'s' * (n > 1)} {n}\" + ' missing')", {"ranks … missing"}),
        ('print(f"x.py: error: {a} of {b}", file=sys.stderr)', {"… of …"}),
        ('with explain(f"cannot read {f}", OSError):\n    pass', {"cannot read … (…)"}),
        ('Finding("FAIL", "disk", f"{a} is full", "make room")', {"disk: … is full: make room"}),
        ('Finding("OK", "disk", f"{a} is empty")', set()),
    ],
)
def test_messages_are_read_from_python(code, expected):
    reader = PythonReader("x.py", "def main():\n" + re.sub("(?m)^", "    ", code))
    assert {message.text for message in reader.messages} == expected and not reader.unreadable


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ('fail "no $file in ${PWD:-$(pwd)}: set \\`X\\`"', {"no … in …: set `X`"}),
        ('fail "(${n[*]}): use" \\\n    "that"', {"(…): use that"}),
        ('finish "FAIL: $(grep -m 1 \'a)\' "$log") (see $log)"', {"FAIL: … (see …)"}),
        ('report_failure "out of memory" "the kernel did it"', {"the kernel did it"}),
        ('report_failure configuration "$*"', set()),
        ('echo "x.sh: error: $3 failed" >&2', {"… failed"}),
        ('echo "all is well"', set()),
    ],
)
def test_messages_are_read_from_bash(code, expected):
    assert {message.text for message in read_bash("x.sh", code)} == expected


def test_a_message_without_an_entry_is_found():
    for file, code in (
        ("guard.py", 'fail(f"the moon is {phase}: wait for {night}")'),
        ("guard.py", 'fail("moon")'),
        ("guard.py", 'fail(f"ranks {a} of {b} did not start within {c} s: try again")'),  # its end
        ("doctor.py", 'self.add("FAIL", "network", f"{a} cannot send to {b}: {c}", "wait")'),
    ):
        messages = PythonReader(file, f"def main():\n    {code}").messages
        wrong = compare(messages, ENTRIES, {})[0]
        assert wrong.startswith(f"not on the page: {file}: ")
    messages = read_bash("site.sh", 'fail "no moon over $HOST"')
    assert compare(messages, ENTRIES, {})[0] == "not on the page: site.sh: no moon over …"


def test_an_entry_that_nothing_prints_is_found():
    section = "## guard.py: before the script starts\n\n| Message | Meaning | What to do |\n"
    section += "| --- | --- | --- |\n"
    assert PAGE.count(section) == 1
    for text in ("the moon is ...: wait", "moon", "no free port", "submit this script with qsub"):
        entries = read_page(PAGE.replace(section, f"{section}| `{text}` | | |\n"))
        wrong = compare(MESSAGES, entries, FILE_PARTS)
        assert wrong == [f"printed by nothing: {normal(text)}"]


def test_an_entry_with_another_level_is_found():
    row = "| `FAIL` | `doctor: rank"
    assert PAGE.count(row) == 1
    entries = read_page(PAGE.replace(row, row.replace("FAIL", "WARN")))
    (wrong,) = compare(MESSAGES, entries, FILE_PARTS)
    assert wrong.startswith("printed as {'FAIL'}: doctor: rank")


def test_a_change_of_the_last_word_of_any_message_is_found():
    for message in MESSAGES:
        changed = message._replace(text=re.sub(r"(.*)\b([a-zA-Z]{2,})", r"\1\2x", message.text))
        assert changed != message
        assert not any(matches(changed, entry, FILE_PARTS) for entry in ENTRIES), changed


def test_a_change_of_the_last_word_of_any_entry_is_found():
    for entry in ENTRIES:
        changed = entry._replace(text=re.sub(r"(.*)\b([a-zA-Z]{2,})", r"\1\2x", entry.text))
        assert changed != entry
        assert not any(matches(message, changed, FILE_PARTS) for message in MESSAGES), changed
