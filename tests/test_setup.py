"""Launch variables, the first lines of output, and the trainer as a single file."""

import os
import subprocess
import sys

import pytest
import torch
from harness import BF16_PRODUCT, REPO, TORCHRUN, bf16_settings, train

from train_distributed import UserError, launch_environment, parse_config, setup_distributed

# As printed by `env` under Slurm 22.05 with two nodes.
BATCH_SHELL = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "3", "SLURM_NODEID": "0"}
STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
ONE_TASK = STEP | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
TORCHRUN_RANK = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "env, expected",
    [
        ({}, (0, 0, 1, 1)),
        (TORCHRUN_RANK, (5, 1, 8, 4)),
        (STEP, (3, 1, 4, 2)),
        (STEP | TORCHRUN_RANK, (5, 1, 8, 4)),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}, (3, 1, 4, 3)),
        (BATCH_SHELL, (0, 0, 1, 1)),
        (ONE_TASK, (0, 0, 1, 1)),
    ],
    ids=["none", "torchrun", "srun", "torchrun in srun", "uneven", "sbatch", "one task"],
)
def test_ranks_come_from_torchrun_else_from_an_srun_step(env, expected):
    assert launch_environment(dict(env)) == expected


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"RANK": "1"}, "RANK 1, LOCAL_RANK 0, WORLD_SIZE 1 and LOCAL_WORLD_SIZE 1 contradict"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE -1 and LOCAL_WORLD_SIZE 1 contradict each other: start"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE 0 and LOCAL_WORLD_SIZE 1 contradict each other: start"),
        (TORCHRUN_RANK | {"RANK": "8"}, "RANK 8, LOCAL_RANK 1, WORLD_SIZE 8 and "),
        (TORCHRUN_RANK | {"LOCAL_WORLD_SIZE": "0"}, "WORLD_SIZE 8 and LOCAL_WORLD_SIZE 0 contra"),
        (TORCHRUN_RANK | {"LOCAL_WORLD_SIZE": "9"}, "WORLD_SIZE 8 and LOCAL_WORLD_SIZE 9 contra"),
        (TORCHRUN_RANK | {"LOCAL_RANK": "-1"}, "LOCAL_RANK -1, WORLD_SIZE 8 and "),
        ({"RANK": "one"}, "RANK is one, which is not a number: start with torchrun, or unset it"),
        ({"WORLD_SIZE": "2.0"}, "WORLD_SIZE is 2.0, which is not a number: start with torchrun"),
    ],
)
def test_launch_variables_that_contradict_each_other_are_refused(env, expected):
    with pytest.raises(UserError) as refused:
        launch_environment(dict(env))
    assert expected in str(refused.value)


def test_empty_launch_variables_count_as_not_set():
    assert launch_environment(dict.fromkeys(TORCHRUN_RANK, "")) == (0, 0, 1, 1)


def test_ranks_without_a_master_are_refused(monkeypatch):
    for name, value in {**TORCHRUN_RANK, "RANK": "0", "MASTER_ADDR": "", "MASTER_PORT": ""}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as refused:
        setup_distributed(parse_config([]))
    assert str(refused.value) == (
        "MASTER_ADDR or MASTER_PORT is not set, but there are 8 ranks: "
        "start with torchrun, or put scripts/guard.py before the script"
    )


ACCELERATOR = getattr(torch, "accelerator", torch.cuda)


@pytest.fixture
def four_gpus(monkeypatch) -> list:
    """Stand-ins for GPUs, and for what uses them. Returns the calls."""
    try:
        torch.device(0)
    except RuntimeError:
        pytest.skip("without a GPU, this PyTorch refuses to name its device")
    calls = []
    setter = "set_device" if ACCELERATOR is torch.cuda else "set_device_index"
    monkeypatch.setattr(ACCELERATOR, "is_available", lambda: True)
    monkeypatch.setattr(ACCELERATOR, "device_count", lambda: 4)
    monkeypatch.setattr(ACCELERATOR, setter, calls.append)
    monkeypatch.setattr(
        "torch.distributed.init_process_group",
        lambda backend, timeout, device_id: calls.append((backend, device_id)),
    )
    for name, value in (TORCHRUN_RANK | MASTER).items():
        monkeypatch.setenv(name, value)
    return calls


def test_without_a_gpu_nobody_counts_them(monkeypatch):
    def fail():  # what PyTorch 2.7 for CUDA does
        raise RuntimeError("Found no NVIDIA driver on your system.")

    monkeypatch.setattr(ACCELERATOR, "is_available", lambda: False)
    monkeypatch.setattr(ACCELERATOR, "device_count", fail)
    assert setup_distributed(parse_config([])).device == torch.device("cpu")


@pytest.mark.parametrize("local_rank, gpu", [(1, 1), (5, 1)])
def test_a_rank_uses_the_gpu_of_its_local_rank(four_gpus, monkeypatch, local_rank, gpu):
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    device = setup_distributed(parse_config([])).device
    assert device == torch.device("cuda", gpu)
    assert four_gpus == [device, ("nccl", device)]


def test_several_ranks_on_a_mac_use_its_cpu(four_gpus, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert setup_distributed(parse_config([])).device == torch.device("cpu")
    assert four_gpus == [("gloo", None)]


def test_plain_python_in_a_batch_shell_is_a_single_process(tmp_path, tiny):
    result = train(tmp_path / "run", 1, *tiny, "--stop-at-step=1", env=BATCH_SHELL)
    assert "Starting distributed training on 1 process (1 per node)\n" in result.out[0]
    assert "Global batch 8 = 1 micro-batch of 8; " in result.out[0]


def test_rank_0_prints_the_topology_and_the_others_print_nothing(tmp_path, tiny):
    result = train(tmp_path / "run", 3, *tiny, "--stop-at-step=1", "--global-batch-size=32")
    first, second, third, *_ = result.out[0].splitlines()
    assert first == "Starting distributed training on 3 processes (3 per node)"
    assert second.startswith(f"Master node: {os.uname().nodename}; PyTorch 2.")
    assert third == "Global batch 32 = 4 micro-batches of 8; 7 steps per epoch"
    others = [line for out in result.out[1:] for line in out.splitlines()]
    assert not [line for line in others if not line.startswith("[Gloo]")]  # that is torch < 2.11
    assert result.err == [""] * 3


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


def test_a_copy_of_the_trainer_alone_trains_without_torchvision(tmp_path):
    (tmp_path / "torchvision.py").write_text("raise ImportError('not installed')")
    copy = tmp_path / "my_train.py"
    copy.write_bytes((REPO / "train_distributed.py").read_bytes())
    options = ["--dataset=synthetic", "--image-size=16", "--epochs=1"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*TORCHRUN, copy, *options], capture_output=True, text=True, cwd=tmp_path, env=env
    )
    assert result.returncode == 0, result.stderr
    assert "Starting distributed training on 2 processes (2 per node)\n" in result.stdout
    assert (tmp_path / "checkpoints" / "checkpoint_epoch_1.pt").exists()


SIGILL_UNLESS = """if True:
    import os, signal
    if os.environ.get("ONEDNN_MAX_CPU_ISA") != {isa!r}:
        os.kill(os.getpid(), signal.SIGILL)
"""


@pytest.mark.parametrize(
    "isa, expected",
    [
        (None, {}),
        ("AVX512_CORE_BF16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}),
        ("AVX2", None),
    ],
    ids=["works", "works without AMX", "never works"],
)
def test_the_probe_of_bf16_finds_what_a_cpu_needs(monkeypatch, isa, expected):
    """With a stand-in for the matrix product, because few CPUs trap what they advertise."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    stand_in = [sys.executable, "-c", SIGILL_UNLESS.format(isa=isa)]
    assert bf16_settings(stand_in) == expected


def test_the_probe_of_bf16_is_a_matrix_product_in_a_process_of_its_own():
    assert bf16_settings([*BF16_PRODUCT[:2], BF16_PRODUCT[2] + "; print('reached')"]) is not None
