"""Who am I among how many: launch variables, and ranks that are missing, strange or too many."""

import os
import subprocess
import sys
import time

import pytest
from harness import REPO, TORCHRUN, launch, train

import train_distributed
from train_distributed import check_cards, read_launch_environment

# As printed by `env` under Slurm 22.05 with two nodes.
BATCH_SHELL = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "3", "SLURM_NODEID": "0"}
INTERACTIVE = BATCH_SHELL | {
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_PTY_PORT": "41555",
}
STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "MASTER_ADDR": "node01",
}


def ranks(env) -> tuple[int, int, int, int]:
    world = read_launch_environment(env)
    return world.rank, world.local_rank, world.world_size, world.local_world_size


def test_torchruns_variables_come_first():
    torchrun = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    assert ranks(STEP | torchrun) == (5, 1, 8, 4)


def test_an_srun_step_gives_its_ranks_a_port_of_its_own_and_a_name():
    assert ranks(STEP) == (3, 1, 4, 2)
    world = read_launch_environment(STEP)
    assert (world.master_addr, world.job) == ("node01", "17.2")
    assert 15000 <= world.master_port < 30000
    assert world.master_port != read_launch_environment(STEP | {"SLURM_STEP_ID": "3"}).master_port
    assert world.master_port != read_launch_environment(STEP | {"SLURM_JOB_ID": "18"}).master_port
    assert read_launch_environment(STEP | {"MASTER_PORT": "29400"}).master_port == 29400


@pytest.mark.parametrize("env", [{}, BATCH_SHELL, INTERACTIVE], ids=["none", "sbatch", "salloc"])
def test_nobody_else_runs_in_a_batch_shell_or_an_interactive_allocation(env):
    assert ranks(env) == (0, 0, 1, 1)


def test_a_shell_of_srun_pty_is_one_process_but_srun_within_it_is_not(monkeypatch):
    shell = STEP | {"SLURM_PTY_PORT": "43587"}
    monkeypatch.setattr(os, "isatty", lambda fd: True)
    assert ranks(shell) == (0, 0, 1, 1)
    monkeypatch.setattr(os, "isatty", lambda fd: False)
    assert ranks(shell) == (3, 1, 4, 2)


def test_plain_python_in_a_batch_shell_trains_alone(tmp_path, tiny):
    result = train(tmp_path / "run", 1, *tiny, "--stop-at-step=1", env=BATCH_SHELL)
    assert "Starting distributed training on 1 process (1 node x 1)" in result.out[0]


def test_the_first_lines_say_who_is_where(tmp_path, tiny):
    out = train(tmp_path / "run", 3, *tiny, "--stop-at-step=1", "--global-batch-size=32").out[0]
    host = os.uname().nodename
    assert out.startswith("Starting distributed training on 3 processes (1 node x 3)\n")
    assert f"Master node: {host}\n  {host}: ranks 0-2 on CPU\nPyTorch " in out
    assert "Global batch 32 = 4 micro-batches of 8, 1 or 2 on each of 3 ranks; 7 steps" in out


def test_only_rank_zero_speaks(tmp_path, tiny):
    result = train(tmp_path / "run", 3, *tiny, "--epochs=1")
    others = [line for out in result.out[1:] for line in out.splitlines()]
    assert not [line for line in others if not line.startswith("[Gloo]")]  # that is torch < 2.11
    assert result.err == [""] * 3


def test_ranks_that_do_not_start_are_named(tmp_path, tiny):
    late = {"WORLD_SIZE": "5"}
    result = launch(tmp_path / "run", 3, *tiny, "--init-timeout=3", env=late)
    assert result.codes == [2] * 3
    assert "ranks 3-4 of 5 did not start within 3 s" in result.err[0]
    assert "(here: 0-2 on" in result.err[0]


def test_a_missing_rank_zero_is_named(tmp_path, tiny):
    began = time.monotonic()
    others = {"WORLD_SIZE": "3"}
    result = launch(
        tmp_path / "run",
        2,
        *tiny,
        "--init-timeout=3",
        env=others,
        rank_env=lambda rank: {"RANK": str(rank + 1)},
    )
    assert result.codes == [2, 2]
    assert "rank 1 on" in result.err[0] and "did rank 0 start" in result.err[0]
    assert time.monotonic() - began < 30


def test_a_process_of_another_job_is_refused(tmp_path, tiny):
    def job(rank):
        stray = {"RUN_NONCE": "stray", "WORLD_SIZE": "3"}
        return stray if rank == 2 else {"RUN_NONCE": "mine", "WORLD_SIZE": "2"}

    result = launch(tmp_path / "run", 3, *tiny, "--stop-at-step=1", rank_env=job)
    assert result.codes == [0, 0, 2]
    assert "job stray dialled 127.0.0.1:" in result.err[2]
    assert "of job mine: set another MASTER_PORT" in result.err[2]


def test_a_rank_zero_missing_under_torchruns_own_store_is_named(tmp_path, tiny):
    from torch.distributed import TCPStore

    agents = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(agents.port)}
    rank_1 = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1"} | rank_1
    result = launch(tmp_path / "run", 1, *tiny, "--init-timeout=2", env=env)
    assert result.codes == [2]
    assert "rank 1 on" in result.err[0] and "rank 0 did not start" in result.err[0]


@pytest.mark.parametrize(
    ("launcher", "bound", "expected"),
    [
        ({"TORCHELASTIC_RUN_ID": "x"}, range(4, 12), 4),  # torchrun within a binding of the node's
        ({}, range(4, 12), 8),  # a launcher that binds each rank
        ({}, range(16), 8),  # one that binds nothing
        ({"TORCHELASTIC_RUN_ID": "x"}, range(1), 1),  # more ranks than cores
    ],
)
def test_cores_are_divided_unless_the_launcher_did_it(monkeypatch, launcher, bound, expected):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(bound))
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    world = train_distributed.World(rank=1, local_rank=1, world_size=2, local_world_size=2)
    assert train_distributed.take_cores(world, pin=False) == expected


def test_ranks_with_other_options_are_refused(tmp_path, tiny):
    before = "import os; argv += ['--lr=0.5'] if os.environ['RANK'] == '1' else []"
    result = launch(tmp_path / "run", 2, *tiny, before=before)
    assert result.codes == [2, 2]
    assert "rank 1 on" in result.err[0] and "has --lr 0.5, rank 0 has 0.05" in result.err[0]


def test_what_was_allocated_must_be_what_was_asked_for(tmp_path, tiny):
    result = launch(tmp_path / "run", 2, *tiny, "--nodes=2")
    assert result.codes == [2, 2] and "--nodes 2, but this job runs on 1: " in result.err[0]
    result = launch(tmp_path / "run", 2, *tiny, "--gpus-per-node=4")
    assert result.codes == [2, 2] and "--gpus-per-node 4, but" in result.err[0]


def test_a_port_in_use_is_named(tmp_path, tiny):
    import socket

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = {"MASTER_PORT": str(taken.getsockname()[1])}
        result = launch(tmp_path / "run", 2, *tiny, "--init-timeout=3", env=port)
    assert result.codes == [2, 2]
    assert "EADDRINUSE" in result.err[0] and "is MASTER_PORT free" in result.err[0]
    assert "127.0.0.1:" in result.err[1] and "is not a store of ours" in result.err[1]


def cards(*gpus: str, host="node01", **changes) -> list[dict]:
    """What ranks on one host report; a stub, because no GPU is here."""
    same = {"torch": "2.15.0", "backend": "nccl"} | changes
    return [{"host": host, "device": "NVIDIA H200", "gpu": gpu, "same": same} for gpu in gpus]


CFG = train_distributed.parse_config([])


def test_duplicate_gpus_are_named_with_host_ranks_and_remedy():
    message = check_cards(cards("A", "B") + cards("A", "B", "B", "B", host="node02"), CFG)
    assert message == (
        "Duplicate GPU detected: on node02, ranks 2-5 share 2 visible GPUs: start 2 processes "
        "there, or ask for 4 GPUs"
    )
    assert check_cards(cards("A", "B") + cards("A", "B", host="node02"), CFG) == ""


def test_two_ranks_may_share_a_gpu_under_gloo():
    assert check_cards(cards("A", "A", backend="gloo"), CFG) == ""


def test_a_node_with_another_torch_is_named():
    message = check_cards(cards("A") + cards("B", host="node02", torch="2.14.0"), CFG)
    assert message == "rank 1 on node02 has torch 2.14.0, rank 0 has 2.15.0"


def test_importing_the_trainer_changes_nothing(tmp_path):
    code = """if True:
        import os, signal, sys, torch
        def state():
            process = [signal.getsignal(n) for n in signal.Signals], dict(os.environ), os.listdir()
            return *process, torch.get_num_threads(), torch.initial_seed()
        before = state()
        sys.path.insert(0, %r)
        import train_distributed
        assert state() == before
    """
    command = [sys.executable, "-c", code % str(REPO)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_a_copy_of_the_trainer_alone_trains(tmp_path):
    copy = tmp_path / "my_train.py"
    copy.write_bytes((REPO / "train_distributed.py").read_bytes())
    options = ["--dataset=synthetic", "--image-size=16", "--epochs=1", "--synthetic-samples=64"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*TORCHRUN, copy, *options], capture_output=True, text=True, cwd=tmp_path, env=env
    )
    assert result.returncode == 0, result.stderr
    assert "Starting distributed training on 2 processes (1 node x 2)" in result.stdout
    assert (tmp_path / "checkpoints" / "checkpoint_epoch_1.pt").exists()


def test_the_last_lines_of_torchrun_repeat_what_is_wrong(tmp_path):
    command = [*TORCHRUN, REPO / "train_distributed.py", "--dropuot=0"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert result.returncode == 1
    error = "unknown option --dropuot, did you mean --dropout? (--help lists the options)"
    lines = result.stderr.splitlines()
    assert lines.count(f"train_distributed.py: error: {error}") == 1
    assert lines[-2].endswith(error)
