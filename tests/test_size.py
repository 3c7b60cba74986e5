"""The budgets. To raise one is a commit that says what for.

Python is counted in tokens without comments and docstrings: neither packing nor spreading changes
them. Code that moves into strings, shell, data files or benchmarks counts, too.
"""

import ast
import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest
from harness import REPO

NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
# Environment variables of PyTorch, Python, schedulers, other programs and the system; the last line
# has words that are no variables.
OF_OTHERS = re.compile(
    "(SLURM|PBS|PET|OMPI|NCCL|GLOO|CUDA|CUBLAS|TORCHELASTIC|TORCH_NCCL|TORCH_DISTRIBUTED|OMP)_.*"
    "|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|TORCH_(CPP|ELASTIC)_.*|PYTHON.+"
    "|(TRITON|TORCHINDUCTOR)_CACHE_DIR|GLIBC_TUNABLES|CONDA_(PREFIX|DEFAULT_ENV)|VIRTUAL_ENV"
    "|MODULESHOME|NCPUS|BASH_.*|LINENO|PWD|USER|HOME|PATH|TMPDIR"
    "|STOP|FAIL|FATAL|WARN|NCCL|RUNNING|(SIG)?(INT|TERM|USR1|USR2|HUP|QUIT|KILL)|ENVIRONMENT"
)


def files(*patterns: str) -> list[Path]:
    command = ["git", "ls-files", "-co", "--exclude-standard", *patterns]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    if result.returncode:
        pytest.skip("counts the files of a git repository")
    return [path for name in result.stdout.split() if (path := REPO / name).exists()]


def tokens_by_line(path: Path) -> dict[int, int]:
    """{line: its tokens}, of lines with code."""
    text = path.read_text()
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        has_docstring = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if has_docstring and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines: dict[int, int] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line = token.start[0]
        if token.type not in NO_CODE and line not in docstrings:
            lines[line] = lines.get(line, 0) + 1
    return lines


def tokens(paths: list[Path]) -> int:
    return sum(sum(tokens_by_line(path).values()) for path in paths)


def test_comments_docstrings_and_layout_are_not_counted(tmp_path):
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("def f(a, b):\n    return a\n")
    two.write_text('"""Text."""\n\n\ndef f(\n    a, b\n):  # text\n    """f"""\n\n    return a\n')
    assert tokens([one]) == tokens([two]) == 10


def test_the_trainer_is_small():
    assert tokens([REPO / "train_distributed.py"]) <= 10_200  # it names the samples of a bad loss


def test_what_a_user_of_the_trainer_reads_is_small():
    """Its sections TASK, OPTIONS, TRAINING and DATA."""
    path = REPO / "train_distributed.py"
    lines = path.read_text().splitlines()
    headings = [(n, line.strip("# -")) for n, line in enumerate(lines, 1) if line[:5] == "# ---"]
    assert [name for _, name in headings[:4]] == ["TASK", "OPTIONS", "TRAINING", "DATA"]
    begin, end = headings[0][0], headings[4][0]
    counts = tokens_by_line(path).items()
    assert sum(count for line, count in counts if begin < line < end) <= 6_000


def test_no_function_of_the_trainer_is_long():
    path = REPO / "train_distributed.py"
    code = tokens_by_line(path)
    long = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            lines = [line for line in code if node.lineno <= line <= node.end_lineno]
            if len(lines) > 60:
                long[node.name] = len(lines)
    assert long == {}


def test_the_file_to_copy_is_small():
    path = REPO / "train_minimal.py"
    assert tokens([path]) <= 2_200
    assert len(path.read_text().splitlines()) <= 250


def test_the_scripts_are_small():
    """The launch path, of which 1,000 say what an error means; and all, with check_resume."""
    scripts = files("scripts/*.py")
    launch_path = [path for path in scripts if not path.name.startswith("check_resume")]
    assert tokens(launch_path) <= 27_500
    assert tokens(scripts) <= 31_500


def test_the_pages_are_short():
    assert sum(len(path.read_text().split()) for path in files("*.md")) <= 14_800


def test_the_tests_are_short():
    assert sum(len(path.read_text().splitlines()) for path in files("tests/*.py")) <= 12_000


def own_variables() -> set[str]:
    """Names of environment variables that programs here read, or pass on to another one."""
    names = set()
    for path in files("*.py", "scripts/*.sh", "*.slurm", "slurm_*.sh"):
        if path.relative_to(REPO).parts[0] in ("tests", "benchmarks", "docs", "examples"):
            continue
        text = path.read_text()
        if path.suffix != ".py":
            names.update(re.findall(r"\$\{?([A-Z]\w+)", text))
            continue
        for node in ast.walk(ast.parse(text)):
            for part in keys_of(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    names.add(part.value)
    return {
        n for n in names if re.fullmatch("[A-Z][A-Z0-9_]{2,}", n) and not OF_OTHERS.fullmatch(n)
    }


def keys_of(node: ast.AST) -> list:
    """What may name a variable: env["A"], env.get("A"), seconds("A"), "A" in env, {"A": 1}."""
    if isinstance(node, ast.Subscript):
        return [node.slice]
    if isinstance(node, ast.Call):
        return node.args[:2]
    if isinstance(node, ast.Compare):
        return [node.left]
    if isinstance(node, ast.Dict):
        return node.keys
    return []


def test_there_are_few_variables_of_our_own():
    names = own_variables()
    assert len(names) <= 37, sorted(names)


def test_each_variable_of_our_own_is_documented():
    """In the head of a file, which --help prints, or on a page."""
    text = "".join(page.read_text() for page in files("*.md"))
    for path in files("*.py", "*.sh", "*.slurm"):
        text += re.match(r'(?s)(#.*?\n)*("""(.*?)""")?', path.read_text())[0]
    names = own_variables()
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", text)] == []
