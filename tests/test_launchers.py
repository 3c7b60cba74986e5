"""Signals and host names in the launchers, without a cluster. On real nodes: tests/cluster."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import run_torchrun
from harness import (
    OLD_PYTHONS,
    REPO,
    SLOW_TO_SAVE,
    TORCHRUN,
    copy_repository,
    load,
    processes_with,
    running,
    wait_until,
    write_program,
)

CONFIG = "configs/default_config.yaml"
SSH = "scripts/ssh/launch_torchrun_auto.sh"
HAND = "scripts/ssh/launch_multinode.sh"
HETEROGENEOUS = ["env", "SLURM_JOB_ID=17", "SLURM_HET_SIZE=2", "bash"]


APPTAINER = """import signal, subprocess, sys
child = subprocess.Popen(sys.argv[sys.argv.index("image.sif") + 1 :])
signal.signal(signal.SIGTERM, lambda number, _: child.send_signal(number))
sys.exit(child.wait())
"""


class Node:
    """cluster_train.sh with two ranks that take some seconds to save."""

    def __init__(self, directory, seconds, *before, **env):
        self.script = directory / "slow_to_save.py"
        self.script.write_text(SLOW_TO_SAVE)
        words = ["scripts/cluster_train.sh", "configs/default_config.yaml"]
        more = {"PYTHON": sys.executable, "NPROC_PER_NODE": "2", "LOG_DIR": str(directory)}
        more |= {"SAVE_SECONDS": str(seconds), "TRAIN_SCRIPT": str(self.script)}
        more |= env
        self.output = directory / "output"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [*before, *words, f"--to={directory}"],
                env=os.environ | more,
                cwd=REPO,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, text: str, count: int = 1) -> None:
        wait_until(lambda: self.output.read_text().count(text) >= count, f"no {text!r}")

    def members(self) -> list[int]:
        return [*processes_with("TRAIN_SCRIPT", self.script)]

    def signal_all(self, number) -> None:
        for pid in self.members():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        self.signal_all(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def node(tmp_path):
    """Starts a Node and waits until its ranks handle signals."""
    with ExitStack() as at_end:

        def start(*arguments, **env) -> Node:
            node = Node(tmp_path, *arguments, **env)
            at_end.callback(node.end)
            node.wait_for("ready\n", 2)
            return node

        yield start


def arguments_of(pid: int) -> list[str]:
    with suppress(OSError):  # it has just ended
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return []


def saved(directory) -> list[str]:
    return sorted(path.name for path in directory.glob("saved*"))


# torchrun's own limit is 30 s.
@pytest.mark.parametrize("seconds", [3, pytest.param(35, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGUSR1", marks=pytest.mark.long)])
def test_all_ranks_print_stacks_and_save_when_slurm_signals_all_processes_of_a_node(
    tmp_path, node, name, seconds
):
    """SIGQUIT, as of `scancel --signal=QUIT`; at the end of a job, SIGTERM twice in succession."""
    node = node(seconds)
    node.signal_all(signal.SIGQUIT)
    node.wait_for("most recent call first", 2)  # and they go on
    for number in (getattr(signal, name), signal.SIGCONT, getattr(signal, name)):
        node.signal_all(number)
        time.sleep(0.2)
    node.process.wait(timeout=90)
    assert saved(tmp_path) == ["saved0", "saved1"]


@pytest.mark.parametrize("launcher", ["ours", "torchrun"])
def test_each_rank_gets_the_stop_signal_when_supervise_is_stopped(tmp_path, node, launcher):
    """The script does not look at STOP_FILE."""
    supervise = "scripts/supervise.py"
    before = [supervise]
    if launcher == "torchrun":  # which SIGUSR1 would kill
        script = tmp_path / "slow_to_save.py"
        before += [*TORCHRUN, script, f"--to={tmp_path}"]
        before = ["bash", "-c", '"${@:1:$#-3}"', "bash", *before]  # without cluster_train.sh
    node = node(1, *before, STOP_SIGNAL="USR1", GUARD="0")
    (supervisor,) = [p for p in node.members() if supervise in arguments_of(p)[1:2]]
    os.kill(supervisor, signal.SIGTERM)
    assert node.process.wait(timeout=60) == 0
    assert saved(tmp_path) == ["saved0", "saved1"]
    assert "stopped (SIGTERM)" in node.output.read_text()


def test_a_stop_before_there_are_ranks_is_not_a_crash(tmp_path):
    """As a preemption while torchrun still imports PyTorch."""
    command = [sys.executable, "scripts/run_torchrun.py", tmp_path / "log"]
    command += ["sh", "-c", "echo ready; exec sleep 1000"]
    with running(command, cwd=REPO, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
        process.stdout.close()


def test_ranks_in_a_container_save_when_they_are_stopped(tmp_path, node):
    """A program that starts torchrun as its child stands for Apptainer."""
    (tmp_path / "apptainer.py").write_text(APPTAINER)
    command = f'exec {sys.executable} {tmp_path}/apptainer.py "$@"'
    write_program(tmp_path / "bin/apptainer", command)
    write_program(tmp_path / "bin/python3", f'exec {sys.executable} "$@"')
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    node = node(1, APPTAINER_IMAGE="image.sif", PATH=path, GUARD="0")
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(timeout=60) == 0
    assert saved(tmp_path) == ["saved0", "saved1"]


def run(*words, cwd=REPO, **env: str) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHON": sys.executable} | env
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True)


def test_a_host_name_is_not_executed(tmp_path):
    copy = copy_repository(tmp_path / "repo")
    for host in ("-oProxyCommand=touch canary", "$(touch canary)", "a;touch canary"):
        result = run(SSH, CONFIG, "2", "a", host, cwd=copy)
        assert result.returncode in (2, 255) and "Traceback" not in result.stderr
        assert not list(copy.rglob("canary"))


def test_a_login_host_without_ssh_is_reported(tmp_path):
    for tool in Path("/usr/bin").iterdir():
        if tool.name not in ("ssh", "pdsh"):
            (tmp_path / tool.name).symlink_to(tool)
    for launcher in ("launch_torchrun_auto.sh", "launch_pdsh_multinode.sh"):
        command = [REPO / "scripts/ssh" / launcher, "configs/default_config.yaml", "2", "a", "b"]
        env = {"PATH": str(tmp_path), "LOG_DIR": str(tmp_path / "logs")}
        result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, env=env)
        assert result.returncode == 2 and "is not installed here" in result.stderr, result.stderr
        assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "command",
    [["scripts/quickstart.sh"], ["scripts/cluster_train.sh"], [SSH, CONFIG, "2", "a"]],
)
def test_macos_is_reported_in_one_sentence(tmp_path, command):
    """A stand-in for uname."""
    write_program(tmp_path / "uname", "echo Darwin")
    result = run(*command, PATH=f"{tmp_path}:{os.environ['PATH']}")
    text = "this needs Linux and bash 4.4 or newer, not Darwin and bash 5"
    assert result.returncode == 2 and text in result.stderr and result.stderr.count("\n") == 1


def test_an_old_python_around_a_container_is_reported(tmp_path):
    env = {"APPTAINER_IMAGE": "x.sif", "PYTHON": OLD_PYTHONS[0] if OLD_PYTHONS else "false"}
    result = supervised(LOG_DIR=str(tmp_path), **env)
    text = f"{env['PYTHON']} is not Python 3.8 or newer, which the launchers need outside the"
    assert result.returncode == 2 and text in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("hosts", "rank"),
    [
        ("gpu1.rack1 gpu1.rack2", 1),
        ("gpu2.cluster gpu1.cluster", 1),
        ("gpu1", 0),
        ("gpu1.a gpu1.b", None),
        ("gpu2", None),
    ],
)
def test_a_host_is_found_by_its_whole_name_or_by_the_only_one_like_it(tmp_path, hosts, rank):
    write_program(tmp_path / "bin/hostname", 'test "$1" = -s && echo gpu1 || echo gpu1.rack2')
    nodes = tmp_path / "nodes"
    nodes.write_text(hosts.replace(" ", "\n"))
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PBS_NODEFILE": str(nodes)}
    env |= {"DRY_RUN": "1", "MASTER_PORT": "29400"}
    result = run("scripts/cluster_train.sh", CONFIG, "3", **env)
    expected = f"--node-rank {rank} " if rank is not None else "Give node_rank"
    assert expected in result.stdout + result.stderr


def test_srun_takes_from_sbatch_nothing_that_limits_a_step(tmp_path):
    requested = "GPUS_PER_SOCKET CPUS_PER_GPU MEM_PER_GPU THREADS_PER_CORE HINT NTASKS NO_KILL"
    env = {f"SLURM_{name}": "1" for name in [*requested.split(), "JOB_CPUS_PER_NODE", "JOB_ID"]}
    env["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    write_program(tmp_path / "srun", "env | grep ^SLURM_ | sort")
    result = run("scripts/supervise.py", "srun", "true", **env)
    assert result.stdout == "SLURM_JOB_CPUS_PER_NODE=1\nSLURM_JOB_ID=1\n"


CONDA = """#!/bin/bash
# Stands in for conda, which cannot be installed here: its output has the same form.
echo {base}
"""
CONDA_SH = """
conda() {{
  [[ -d {base}/envs/$2 ]] || {{ printf '\\nEnvironmentNameNotFound: ...\\n\\n' >&2 && return 1; }}
  export CONDA_PREFIX={base}/envs/$2 PATH={base}/envs/$2/bin:$PATH
}}
"""


def dry_run(*words: str, **more: str) -> tuple[int, str]:
    """(exit code, output) with DRY_RUN=1, outside a job."""
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PBS_"))}
    env = outside | {"DRY_RUN": "1", "PYTHON": sys.executable, "MASTER_PORT": "29400"} | more
    result = subprocess.run(
        ["bash", *words], cwd=REPO, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return result.returncode, result.stdout.decode()


SUPERVISED = f"{sys.executable} scripts/supervise.py"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("run_distributed.slurm", f"{SUPERVISED} srun --export=ALL --ntasks-per-node=1 "),
        ("slurm_train_multinode.sh", f"{SUPERVISED} srun --export=ALL --ntasks-per-node=1 "),
        ("slurm_train_single_node.sh", f"{SUPERVISED} srun --export=ALL --ntasks-per-node=1 "),
        ("scripts/pbs/pbs_train.sh", f"{SUPERVISED} {sys.executable} scripts/ssh/launch.py --pbs "),
        ("scripts/cluster_train.sh", f"{sys.executable} -m torch.distributed.run "),
    ],
)
def test_dry_run_prints_the_command_outside_a_job(script, expected):
    code, text = dry_run(script, "--lr=0.1")
    assert code == 0 and text.count("\n") == 1, text
    assert text.startswith(f"$ {expected}") and text.endswith(" --lr=0.1\n"), text
    code, text = dry_run(script, TRAIN_SCRIPT="train_minimal.py")
    assert code == 0 and text.count("train_minimal.py") == 1, text


def test_dry_run_prints_the_command_in_a_container():
    inside = {"APPTAINER_IMAGE": "/my image.sif", "DRY_RUN": "1"}
    text = run("scripts/cluster_train.sh", **inside).stdout
    start = "$ apptainer exec --nv --bind {} /my\\ image.sif python3 -m torch.distributed.run "
    assert text.startswith(start.format(shlex.quote(str(REPO)))), text
    assert "--nproc-per-node gpu" in text


@pytest.fixture
def clone(tmp_path):
    """A copy of the repository, where a dry run of a launcher does not start Python."""
    return copy_repository(tmp_path / "repo")


def dry_run_in(clone, **env) -> str:
    """The command line that launch_singlenode.sh prints there; its error message if it fails."""
    outside = ("SLURM_", "PBS_", "PYTHON", "VIRTUAL_ENV", "CONDA_")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(outside)}
    env = inherited | {"DRY_RUN": "1", "MASTER_PORT": "29400"} | env
    command = ["scripts/ssh/launch_singlenode.sh", CONFIG, "2"]
    result = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True)
    return result.stdout or result.stderr


def test_an_active_environment_comes_after_python_and_before_the_venv_of_the_repository(clone):
    mine, conda, venv = clone / "mine", clone / "conda", clone / ".venv"
    for environment in (mine, conda, venv):
        write_program(environment / "bin/python", "exit 0")
    active = {"CONDA_PREFIX": str(conda)}
    assert dry_run_in(clone).startswith(f"$ {venv}/bin/python -m")
    assert dry_run_in(clone, **active).startswith(f"$ {conda}/bin/python -m")
    assert dry_run_in(clone, **active, CONDA_DEFAULT_ENV="base").startswith(f"$ {venv}/bin/")
    active["VIRTUAL_ENV"] = str(mine)
    assert dry_run_in(clone, **active).startswith(f"$ {mine}/bin/python -m")
    active["PYTHON"] = "/my/python"
    assert dry_run_in(clone, **active).startswith("$ /my/python -m")


def test_jobs_that_start_at_the_same_time_have_a_log_each(tmp_path):
    write_program(tmp_path / "date", "echo 20261126_120000")
    text = f'case "$1" in -c|scripts/run_torchrun.py) exec {sys.executable} "$@";; esac'
    env = {"PYTHON": str(write_program(tmp_path / "python", text)), "LOG_DIR": str(tmp_path)}
    env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NPROC_PER_NODE": "1"}
    command = ["scripts/cluster_train.sh", CONFIG, "1", "0", "localhost", "29400"]
    for job in ({}, {}, {"SLURM_JOB_ID": "17"}, {"SLURM_JOB_ID": "17"}):
        subprocess.run(command, cwd=REPO, env=os.environ | env | job, check=True)
    logs = [path.name for path in tmp_path.rglob("cluster_train_*.log")]
    assert len(logs) == 4


def test_settings_of_a_site_do_not_disturb_the_launch(tmp_path):
    """A Python that prints when it starts, a script elsewhere, what changes bash and Python, and
    Kubeflow's options for torchrun."""
    python = write_program(tmp_path / "python", f'echo loading; exec {sys.executable} "$@"')
    (tmp_path / "sitecustomize.py").write_text("print('welcome')\n")
    (tmp_path / "scripts").mkdir()  # with CDPATH, `cd scripts` would go there
    script = tmp_path / "my_train.py"
    find = "import importlib.util\nassert importlib.util.find_spec('train_distributed')\n"
    script.write_text(f"{find}print('the script ran')\n")
    env = {"PYTHON": str(python), "LOG_DIR": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    env |= dict.fromkeys(("POSIXLY_CORRECT", "PYTHONSAFEPATH", "CDPATH"), str(tmp_path))
    env["LOG_LEVEL"] = "trace"  # of another program: torchrun has no such level
    env |= {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "absent.invalid:1", "PET_NNODES": "2"}
    result = run_cluster_train(env | {"TRAIN_SCRIPT": str(script), "GUARD": "0"})
    assert result.returncode == 0 and "the script ran\n" in result.stdout, result.stdout
    assert "PET_NNODES PET_RDZV_BACKEND PET_RDZV_ENDPOINT: ignored" in result.stdout


ARGPARSE = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr')\n"


@pytest.mark.parametrize("launcher", ["scripts/cluster_train.sh", "slurm_train_multinode.sh"])
def test_after_two_dashes_a_script_or_a_module_gets_its_own_arguments(tmp_path, launcher):
    script = tmp_path / "my_train.py"
    script.write_text(ARGPARSE + "parser.add_argument('--config')\n")
    for name in (str(script), "-m package.train"):
        env = {"TRAIN_SCRIPT": name, "DRY_RUN": "1", "BACKEND": "gloo"}
        printed = run("bash", launcher, "--", "fit", "lr=0.5", **env).stdout
        assert printed.endswith(f" scripts/guard.py {name} fit lr=0.5\n")


@pytest.mark.parametrize(
    ("text", "config"),
    [
        (ARGPARSE, []),
        (ARGPARSE + "parser.add_argument('--config')\n", ["--config", CONFIG]),
        (ARGPARSE + "parser.add_argument(  # (YAML)\n    '--config')", ["--config", CONFIG]),
        ("from train_distributed import (\n    Task,\n    main,\n)\n", ["--config", CONFIG]),
        ("import train_distributed as trainer\ntrainer.main()\n", ["--config", CONFIG]),
        ("from train_distributed import load_model\ndef main():\n    pass\n", []),
        (ARGPARSE + "parser.add_argument('--config-file')\n", []),
        (ARGPARSE + "parser.add_argument('--file', help='not --config')  # no '--config'\n", []),
        (ARGPARSE + "parser.add_argument(\n# '--config',\n'--file')\nprint('--config')", []),
    ],
)
def test_a_script_gets_only_options_that_it_has(tmp_path, text, config):
    script = tmp_path / "my_train.py"
    script.write_text(text)
    command = ["scripts/cluster_train.sh", CONFIG, "--lr", "1"]
    result = run(*command, TRAIN_SCRIPT=str(script), DRY_RUN="1")
    words = shlex.split(result.stdout)
    assert words[words.index(str(script)) + 1 :] == [*config, "--lr", "1"]


def test_the_trainer_gets_the_config():
    assert f" train_distributed.py --config {CONFIG}\n" in dry_run_in(REPO)


def test_a_script_of_the_shell_is_refused_in_one_sentence(tmp_path):
    script = write_program(tmp_path / "train.sh", "python train.py")
    result = run_cluster_train({"TRAIN_SCRIPT": str(script), "PYTHON": sys.executable})
    assert result.returncode == 2 and result.stdout.count("\n") == 1, result.stdout
    assert f"TRAIN_SCRIPT {script} is not a script of Python" in result.stdout


def test_the_node_list_of_a_job_that_has_ended_is_one_error(tmp_path):
    """A shell that was started in a job keeps its variables."""
    write_program(tmp_path / "scontrol", "exit 1")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "gpu[07-08]"}
    result = run_cluster_train(env | {"PYTHON": sys.executable})
    assert result.returncode == 2 and result.stdout.count("\n") == 1, result.stdout
    assert "`scontrol show hostnames gpu[07-08]` failed" in result.stdout


# What a rank of another job, number 16, has in its environment.
OF_ANOTHER_JOB = {"ATTEMPT_ID": "16.1", "DEADLINE": "9", "STATUS_FILE": "/16/s"}
OF_ANOTHER_JOB |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29416", "MASTER_ADDR": "n16"}
OF_ANOTHER_JOB |= {"TORCHELASTIC_RUN_ID": "none", "FAILURE_FILE": "/16/failure"}


@pytest.mark.parametrize(
    "script", ["run_distributed.slurm", "slurm_train_multinode.sh", "scripts/pbs/pbs_train.sh"]
)
def test_a_job_submitted_from_within_a_training_does_not_use_its_variables(tmp_path, script):
    """The job script starts supervise.py, here replaced by a program that prints them."""
    names = "|".join(OF_ANOTHER_JOB)
    python = write_program(tmp_path / "python", f"echo $1; env | grep -E '^({names})=[^ ]'; exit 0")
    (tmp_path / "nodes").write_text("n1\n")
    write_program(tmp_path / "pbsdsh", "exit 1")
    job = {"SLURM_JOB_ID": "17", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n1"}
    if "pbs" in script:
        job = {"PBS_JOBID": "17.server", "PBS_NODEFILE": str(tmp_path / "nodes")}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(python)}
    result = run("bash", script, **path, **job, **OF_ANOTHER_JOB)
    lines = [line for line in result.stdout.splitlines() if not line.startswith("$ ")]
    assert lines == ["scripts/supervise.py"], result.stderr


def test_the_variables_of_the_own_job_are_kept(tmp_path):
    """supervise.py has set them for this attempt."""
    env = {**OF_ANOTHER_JOB, "SLURM_JOB_ID": "16", "DRY_RUN": "1"}
    result = run("scripts/cluster_train.sh", CONFIG, "2", "1", **env)
    assert " --master-addr n16 --master-port 29416 " in result.stdout, result.stderr


@pytest.fixture
def conda(tmp_path) -> dict[str, str]:
    """A PATH with a conda that knows the environment `mine`."""
    for name, text in {"bin/conda": CONDA, "etc/profile.d/conda.sh": CONDA_SH}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text.format(base=tmp_path))
    (tmp_path / "bin/conda").chmod(0o755)
    write_program(tmp_path / "envs/mine/bin/python", f'exec {sys.executable} "$@"')
    return {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "LOG_DIR": str(tmp_path)}


def supervised(**env) -> subprocess.CompletedProcess:
    """cluster_train.sh with one rank of a script that prints its environment."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHON"} | {"GUARD": "0"} | env
    command = [sys.executable, "scripts/supervise.py", "scripts/cluster_train.sh"]
    return subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True)


def test_a_conda_environment_is_activated(tmp_path, conda):
    script = tmp_path / "my_train.py"
    script.write_text("import os\nprint('CONDA_PREFIX is', os.environ['CONDA_PREFIX'])\n")
    result = supervised(CONDA_ENV="mine", TRAIN_SCRIPT=str(script), **conda)
    assert f"CONDA_PREFIX is {tmp_path}/envs/mine\n" in result.stdout, result.stderr
    assert "$ python -m torch.distributed.run" in result.stdout


@pytest.mark.parametrize("name", ["absent", "no conda"])
def test_a_conda_environment_that_does_not_exist_is_named_once(tmp_path, conda, name):
    if name == "no conda":
        (tmp_path / "bin/conda").unlink()
    result = supervised(CONDA_ENV=name, **conda)
    text = "Failed to activate conda environment absent: try `conda activate absent` on this host"
    if name == "no conda":
        text = "CONDA_ENV=no conda, but no conda here: add it to PATH or load its module"
    host = os.uname().nodename
    lines = result.stderr.splitlines()
    assert lines[0] == f"cluster_train.sh: error: {host}: {text}"
    assert lines[1].startswith(f"supervise.py: error: configuration: {host}: {text}. Giving up: ")
    assert len(lines) == 2 and result.returncode == 2


@pytest.mark.parametrize(
    "command", ["module load absent", "test -e /absent", "ulimit -n 9999999999"]
)
def test_a_command_of_site_sh_that_fails_is_named_and_ends_the_launch_if_it_loads_modules(
    clone, command
):
    site = clone / "scripts/site.sh"
    functions = "module() { return 1; }\n"
    site.write_text(functions + site.read_text().replace("# module purge", command))
    line = 1 + site.read_text().split(f"\n{command}")[0].count("\n") + 1
    text = f"{os.uname().nodename}: line {line} of scripts/site.sh failed: {command}\n"
    output = dry_run_in(clone, FAILURE_FILE="/dev/null")
    if command.startswith("module"):
        assert output == f"cluster_train.sh: error: {text}"
    else:
        assert output.startswith("$ ")


def test_the_last_line_after_an_error_is_the_error(tmp_path):
    """torchrun would print about 40 lines after it."""
    script = tmp_path / "my_train.py"
    script.write_text("raise SystemExit(2) from ValueError('no --data-dir')\n")
    env = {"TRAIN_SCRIPT": str(script), "PYTHON": sys.executable, "LOG_DIR": str(tmp_path)}
    result = run_cluster_train(env | {"GUARD": "0", "TMPDIR": str(tmp_path)})
    last = f"cluster_train.sh: error: rank 0 on {os.uname().nodename}: no --data-dir"
    assert result.returncode == 2 and result.stdout.splitlines()[-1] == last
    assert not list(tmp_path.glob("tmp*"))


def test_a_rank_that_was_killed_is_named_with_its_signal_and_time(tmp_path):
    """It cannot report anything itself, and the others only lose it."""
    script = tmp_path / "my_train.py"
    script.write_text(
        "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(60)\n"
    )
    failure = tmp_path / "failure.json"
    env = {"TRAIN_SCRIPT": str(script), "PYTHON": sys.executable, "LOG_DIR": str(tmp_path)}
    env |= {"GUARD": "0", "NPROC_PER_NODE": "2", "FAILURE_FILE": str(failure)}
    began = time.time()
    run_cluster_train(env)
    facts = json.loads(failure.read_text())
    assert (facts["cause"], facts["rank"], facts["host"]) == ("killed", 1, os.uname().nodename)
    assert "SIGKILL" in facts["reason"] and began - 1 < facts["time"] < time.time()


@pytest.mark.parametrize(
    ("nodes", "peers", "missing", "text"),
    [
        (3, {"10.0.0.2"}, ["n3"], "n3"),
        (3, set(), ["n2", "n3"], "n2, n3"),
        (3, {"10.0.0.2", "10.0.0.3"}, [], ""),  # torchrun is about to start the ranks
        (3, {"192.168.7.9"}, [], "1 of 3 hosts"),  # of another network
        (5, {"10.0.0.2"}, [], "3 of 5 hosts"),  # by hand: their names are not known
    ],
)
def test_hosts_that_have_not_connected_are_named_if_that_is_certain(
    monkeypatch, nodes, peers, missing, text
):
    addresses = {"n1": {"10.0.0.1"}, "n2": {"10.0.0.2", "fe80::2"}, "n3": {"10.0.0.3"}}
    monkeypatch.setenv("HOST_LIST", " ".join(addresses))
    monkeypatch.setattr(run_torchrun, "addresses_of", addresses.get)
    monkeypatch.setattr(run_torchrun, "peers_of", lambda port: peers)
    command = ["--nnodes", str(nodes), "--node-rank", "0", "--master-port", "29400"]
    assert run_torchrun.Rendezvous(command).missing() == (missing, text)


@pytest.mark.parametrize(
    ("state", "stopped_by", "is_early"),
    [("", 15, True), ("", 0, False), ("stopped", 0, True), ("finished", 15, False)],
)
def test_a_training_that_was_stopped_before_its_end_is_known(
    tmp_path, monkeypatch, state, stopped_by, is_early
):
    monkeypatch.setenv("STATUS_FILE", str(tmp_path / "status"))
    if state:
        (tmp_path / "status").write_text(json.dumps({"state": state}))
    assert run_torchrun.was_stopped(stopped_by) == is_early


def test_a_process_that_the_kernel_kills_for_its_memory_is_named(tmp_path, memory_cgroup):
    script, failure = tmp_path / "my_train.py", tmp_path / "failure"
    script.write_text("words = []\nwhile True:\n    words.append(b'x' * 10**7)\n")
    (memory_cgroup / "memory.limit_in_bytes").write_text("700M")
    env = {"TRAIN_SCRIPT": script, "FAILURE_FILE": failure, "LOG_DIR": tmp_path, "GUARD": "0"}
    command = f"echo $$ >{memory_cgroup}/tasks; exec scripts/cluster_train.sh"
    result = run("bash", "-c", command, **{name: str(value) for name, value in env.items()})
    assert result.returncode > 0
    assert json.loads(failure.read_text())["cause"] == "out of memory"


def run_cluster_train(env) -> subprocess.CompletedProcess:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = ["scripts/cluster_train.sh", CONFIG]
    return subprocess.run(command, cwd=REPO, env=os.environ | env, **pipes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([SSH, CONFIG, "node01", "node02"], "'node01' is not a number of GPUs"),
        ([SSH, CONFIG, "2"], "the arguments are CONFIG GPUS_PER_NODE HOST ... [options]"),
        ([SSH, CONFIG, "2", "--epochs=3"], "there is no HOST"),
        ([SSH, "--epochs", "2", "node01"], "the arguments are CONFIG "),
        ([SSH, CONFIG, "2", "node01", "node01"], "node01 is named twice"),
        ([SSH, CONFIG, "2", "node01;id"], "'node01;id' is not a host name"),
        ([SSH, CONFIG, "2", "me@node01"], "set another user in ~/.ssh/config"),
        (["scripts/ssh/launch_singlenode.sh", "--epochs", "3"], "the arguments are CONFIG GPUS "),
        (["scripts/ssh/launch_singlenode.sh", CONFIG, "two"], "'two' is not a number of GPUs"),
        (
            ["scripts/ssh/launch_singlenode.sh", CONFIG, "1025"],
            "NPROC_PER_NODE is '1025', not 1 to 999",
        ),
        (["scripts/test_distributed.sh", "two"], "'two' is not a number of processes"),
        ([HAND, CONFIG, "2", "2", "2", "a"], "0 to 1, not 2"),
        ([HAND, CONFIG, "2", "2", "1"], "the arguments are CONFIG "),
        (["scripts/cluster_train.sh", CONFIG, "two", "0"], "num_nodes 'two', node_rank '0'"),
        (["scripts/cluster_train.sh", CONFIG, "2"], "this host is not one of: localhost"),
        (["env", "LOG_DIR=/dev/null/logs", SSH, CONFIG, "2", "a"], "cannot write to /dev/null/l"),
        (["bash", "run_distributed.slurm"], "submit this script with sbatch; "),
        (["env", "DRY_RUN=1", "bash", "run_distributed.slurm", "a.yaml"], "there is no config a.y"),
        (["bash", "slurm_train_multinode.sh"], "submit this script with sbatch; "),
        (["bash", "scripts/pbs/pbs_train.sh"], "submit this script with qsub; "),
        ([*HETEROGENEOUS, "run_distributed.slurm"], "this is a heterogeneous job"),
        ([*HETEROGENEOUS, "slurm_train_multinode.sh"], "this is a heterogeneous job"),
    ],
)
def test_wrong_arguments_are_reported_in_one_line(words, message):
    result = run(*words)
    assert result.returncode == 2 and message in result.stderr, result.stderr
    assert result.stderr.splitlines()[-1].count("error: ") == 1


def test_a_dry_run_prints_a_command_that_can_be_pasted():
    code, text = dry_run(SSH, CONFIG, "2", "a", "b", "--mine", "it's", "$HOME", "")
    command = ["env", "NPROC_PER_NODE=2", "scripts/ssh/launch.py", "a", "b", "--", CONFIG]
    assert code == 0 and text.count("\n") == 1
    assert shlex.split(text) == ["$", *command, "--mine", "it's", "$HOME", ""]


def test_variables_of_the_host_and_the_session_are_not_forwarded(monkeypatch):
    private = ["SLURM_JOB_ID", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR", "BASH_ENV"]
    private += ["TMUX_PANE", "TERM_PROGRAM", "KRB5CCNAME", "HOME", "TMPDIR"]
    private += ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"]
    for name in private:
        monkeypatch.setenv(name, "of the launcher")
    gpus = ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"]
    for name in gpus:
        monkeypatch.setenv(name, "2,3")
    monkeypatch.setenv("MINE", "here")
    node = load(REPO / "scripts/ssh/node.py")
    in_a_job = json.loads(node.request(["train"]))["environment"]
    assert in_a_job["MINE"] == "here" and "of the launcher" not in in_a_job.values()
    assert not in_a_job.keys() & {*gpus}  # those of one host
    monkeypatch.delenv("SLURM_JOB_ID")
    assert json.loads(node.request(["train"]))["environment"].keys() >= {*gpus}


@pytest.mark.parametrize(
    ("backend", "code", "last"),
    [
        ("nccl", 1, r"FAIL: .*error: \S+: 2 ranks for nccl, but 0 visible GPUs"),
        pytest.param("gloo", 0, "PASS: 20 steps and a run resumed at", marks=pytest.mark.long),
    ],
)
def test_the_smoke_test_passes_or_says_why_not(tmp_path, backend, code, last):
    copy = copy_repository(tmp_path / "repo")
    result = run("scripts/test_distributed.sh", "2", cwd=copy, BACKEND=backend)
    assert result.returncode == code
    assert re.match(last, result.stdout.splitlines()[-1]), result.stdout
