"""Launch variables, the first lines of output, and the trainer as a single file."""

import os
import subprocess
import sys

import pytest
import torch
from harness import BATCH_SHELL, PLAIN, REPO, SRUN_STEP, run_ranks, train

from train_distributed import parse_config, setup_distributed, use_slurm_variables

ONE_TASK = SRUN_STEP | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
RANK_OF_TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN_IN_A_STEP = SRUN_STEP | RANK_OF_TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}
MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, [None] * 4),
        (SRUN_STEP, ["3", "1", "4", "2"]),
        (SRUN_STEP | RANK_OF_TORCHRUN, ["3", "1", "4", "2"]),  # stale ones, of a shell
        (TORCHRUN_IN_A_STEP, ["5", "1", "8", "4"]),
        (SRUN_STEP | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}, ["3", "1", "4", "3"]),
        (BATCH_SHELL, [None] * 4),
        (ONE_TASK, [None] * 4),
    ],
    ids=["none", "srun", "stale", "torchrun in srun", "uneven", "sbatch", "one task"],
)
def test_the_variables_of_a_slurm_step_of_several_tasks_win(env, expected):
    env = dict(env)
    use_slurm_variables(env)
    assert [env.get(name) for name in RANK_OF_TORCHRUN] == expected


def test_a_slurm_step_trains_in_spite_of_stale_variables(tmp_path, tiny):
    def env(rank):
        step = {"SLURM_STEP_NUM_TASKS": 3, "SLURM_STEP_TASKS_PER_NODE": "3"}
        step |= {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        step |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": 17}
        return RANK_OF_TORCHRUN | {"RANK": 0, "WORLD_SIZE": 1} | step

    command = [PLAIN[1], f"--checkpoint-dir={tmp_path}/run", *tiny, "--stop-at-step=2"]
    run = run_ranks(3, *command, "--global-batch-size=32", env=env, directory=tmp_path / "run")
    assert run.codes == [0, 0, 0], run.err
    assert run.out[0].startswith("Starting distributed training on 3 x cpu (3 per node)\n")
    assert run.status()["world_size"] == 3
    others = [line for out in run.out[1:] for line in out.splitlines()]
    assert not [line for line in others if not line.startswith("[Gloo]")]  # that is torch < 2.11
    assert run.err == [""] * 3


def test_a_machine_without_the_gpus_that_were_asked_for_is_one_warning(tmp_path, tiny):
    for options, warnings in ([], 0), (["--gpus-per-node=1"], 1):
        run = train(tmp_path / "run", 1, *tiny, "--stop-at-step=1", *options)
        assert run.out[0].count("WARNING: PyTorch finds no GPU") == warnings


@pytest.mark.parametrize(("local_rank", "gpu"), [(1, 1), (5, 1)])
def test_a_rank_uses_the_gpu_of_its_local_rank(monkeypatch, local_rank, gpu):
    """With stand-ins for four GPUs, and for what uses them."""
    calls: list = []

    def init_process_group(backend, timeout, device_id):
        calls.append((backend, device_id))

    monkeypatch.setattr("torch.accelerator.device_count", lambda: 4)
    monkeypatch.setattr("torch.accelerator.set_device_index", calls.append)
    monkeypatch.setattr("torch.distributed.init_process_group", init_process_group)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 5)
    for name, value in (RANK_OF_TORCHRUN | MASTER | {"LOCAL_RANK": str(local_rank)}).items():
        monkeypatch.setenv(name, value)
    device = setup_distributed(parse_config([])).device
    assert device == torch.device("cuda", gpu)
    assert calls == [gpu, ("nccl", device)]


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


NOISE = """
import torch
from my_train import InMemoryDataset, Task, main

class Noise(Task):
    def data(self, cfg):
        self.spec = {"classes": ["a", "b"]}
        images = torch.randint(256, (256, 1, 28, 28), dtype=torch.uint8)
        return InMemoryDataset(images, torch.randint(2, (256,))), None

main(Noise())
"""


def test_a_copy_of_the_trainer_alone_trains_without_torchvision(tmp_path):
    (tmp_path / "torchvision.py").write_text("raise ImportError('not installed')")
    (tmp_path / "my_train.py").write_bytes((REPO / "train_distributed.py").read_bytes())
    (tmp_path / "noise.py").write_text(NOISE)
    command = [sys.executable, "noise.py", "--epochs=1", "--eval-every-steps=1"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "checkpoints" / "checkpoint_step_4.pt").exists()
    metrics = (tmp_path / "checkpoints" / "metrics.jsonl").read_text()
    assert "evaluation" not in metrics  # there is no test set
